"""What a guard costs once: its import, the first step of a ``fit``, the start of the next one.

    python benchmarks/first_step.py [--workloads deep] [--rounds 3]

The first step traces; the look at model, loss and data before the second one is part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

IMPORT = """
import time, sys, keras
began = time.perf_counter()
import keras_gradguard
print(time.perf_counter() - began, "tensorboard" in sys.modules)
"""


def imports(rounds: int) -> dict[str, Any]:
    """Time the import after Keras', in fresh processes."""
    taken, loaded = [], False
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
        )
        seconds, tensorboard = done.stdout.split()
        taken.append(float(seconds))
        loaded |= tensorboard == "True"
    return {
        "benchmark": "import",
        "milliseconds": round(1e3 * statistics.median(taken), 1),
        "lowest": round(1e3 * min(taken), 1),
        "imports_tensorboard": loaded,
    }


def first_fit(name: str, contestant: str, log_dir: str) -> tuple[float, float]:
    """Return wall and CPU seconds of a ``fit`` of two steps, the model made anew."""
    from _contestants import contestants
    from _workloads import WORKLOADS

    workload = WORKLOADS[name](2).compiled()
    callbacks = contestants(workload, log_dir)[contestant]()
    wall, cpu = time.perf_counter(), time.process_time()
    workload.model.fit(
        workload.x, workload.y, batch_size=workload.batch, verbose=0, callbacks=callbacks
    )
    return time.perf_counter() - wall, time.process_time() - cpu


def tracing(name: str, rounds: int) -> dict[str, Any]:
    """Compare the first step with and without a guard."""
    with tempfile.TemporaryDirectory() as log_dir:
        first_fit("mlp", "guard", log_dir)  # imports of TensorFlow and Keras that come late
        pairs = [
            [
                first_fit(name, contestant, f"{log_dir}/{number}")
                for contestant in ("plain", "guard")
            ]
            for number in range(rounds)
        ]
    return {
        "benchmark": "first_step",
        "workload": name,
        "plain_seconds": round(min(p[0] for p, _ in pairs), 3),
        "guard_seconds": round(min(g[0] for _, g in pairs), 3),
        "wall_ratio": round(statistics.median(g[0] / p[0] for p, g in pairs), 3),
        "cpu_ratio": round(statistics.median(g[1] / p[1] for p, g in pairs), 3),
        "rounds": rounds,
    }


def main() -> None:
    from _workloads import WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=["mlp", "deep"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(imports(options.rounds)), flush=True)
    for name in options.workloads:
        print(json.dumps(tracing(name, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
