"""Seconds of CPU and peak memory of a whole training process, one process a contestant.

    python benchmarks/whole_process.py [--workloads mlp conv] [--epochs 4]

For what changes the whole process, too: ``tf.debugging.enable_check_numerics()`` and the dump of
TensorBoard's Debugger V2. The time of a step is the median over the epochs after the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SWITCHES = ("check_numerics", "Debugger V2 dump")
# Steps an epoch: a second or so each.
STEPS = {"mlp": 100, "conv": 30, "transformer": 20, "wide_mlp": 8}
COMPARED = (
    "plain",
    "guard",
    "guard, sample_every=1",
    "guard, activations=True",
    "Keras TensorBoard(histogram_freq=1)",
    "home-made, every step",
    *SWITCHES,
)


def train(name: str, contestant: str, epochs: int) -> dict[str, Any]:
    """Train in this process and return what it took."""
    import keras
    import tensorflow as tf
    from _contestants import contestants
    from _workloads import WORKLOADS

    class Times(keras.callbacks.Callback):
        async_safe = True
        ends: list[float] = []  # noqa: RUF012

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter() - self.began)

    with tempfile.TemporaryDirectory() as log_dir:
        if contestant == "check_numerics":
            tf.debugging.enable_check_numerics()
        if contestant == "Debugger V2 dump":
            tf.debugging.experimental.enable_dump_debug_info(
                log_dir, tensor_debug_mode="FULL_HEALTH", circular_buffer_size=-1
            )
        workload = WORKLOADS[name](STEPS[name]).compiled()
        callbacks = [] if contestant in SWITCHES else contestants(workload, log_dir)[contestant]()
        times = Times()
        workload.model.fit(
            workload.x,
            workload.y,
            batch_size=workload.batch,
            epochs=epochs,
            verbose=0,
            callbacks=[*callbacks, times],
        )
        written = sum(p.stat().st_size for p in Path(log_dir).rglob("*") if p.is_file())
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms_a_step": 1e3 * statistics.median(times.ends[1:]) / workload.steps,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        # Linux counts it in KiB, macOS in bytes.
        "peak_mb": used.ru_maxrss / (1024.0 if sys.platform != "darwin" else 1024.0**2),
        "written_mb": written / 2**20,
    }


def measure(name: str, contestant: str, epochs: int) -> dict[str, Any]:
    """Train in a process of its own."""
    command = [sys.executable, __file__, "--train", name, contestant, "--epochs", str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name}, {contestant}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--contestants", nargs="*", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--train", nargs=2, metavar=("WORKLOAD", "CONTESTANT"))
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(*options.train, options.epochs)))
        return
    from _contestants import takes_activations

    for name in options.workloads:
        plain = None
        for contestant in options.contestants:
            if contestant == "guard, activations=True" and not takes_activations():
                continue
            found = measure(name, contestant, options.epochs)
            plain = plain or found
            row = {
                "benchmark": "whole_process",
                "workload": name,
                "contestant": contestant,
                **{key: round(value, 3) for key, value in found.items()},
                "wall_ratio": round(found["ms_a_step"] / plain["ms_a_step"], 4),
                "cpu_ratio": round(found["cpu_seconds"] / plain["cpu_seconds"], 4),
                "extra_mb": round(found["peak_mb"] - plain["peak_mb"], 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
