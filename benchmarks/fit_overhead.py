"""What a guard costs a step: ratios to plain training, alternating, in one process.

    python benchmarks/fit_overhead.py [--quick] [--workloads mlp conv] [--mode graph]

One line of JSON a workload: median and quartiles over the rounds of (guarded / plain), of wall
seconds and of CPU seconds. Tracing and what happens once a ``fit`` are not part of it; see
``first_step.py`` for these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import tensorflow as tf
from _contestants import contestants, names
from _fits import PausedFit
from _loops import Loop
from _measure import ratios, seconds
from _workloads import FIRST, WORKLOADS

from keras_gradguard import GradientGuard

MODES = ("graph", "xla", "mirrored", "loop")
# Twice the steps at the start that are all sampled, and the first regular sample after them.
WARM_UP = 60
QUICK_SECONDS = 35.0  # of measuring a workload; building and warming up come on top


def entered(name: str, mode: str, log_dir: str, wanted: list[str]) -> dict[str, Any]:
    """Return the contestants of one workload, traced and warm."""
    found: dict[str, Any] = {}
    if mode == "loop":
        found["plain"] = Loop(WORKLOADS[name]())
        found["guard"] = Loop(WORKLOADS[name](), GradientGuard(log_dir=f"{log_dir}/loop"))
    else:
        cpus = [d.name for d in tf.config.list_logical_devices("CPU")]
        strategy = tf.distribute.MirroredStrategy(cpus) if mode == "mirrored" else None
        for label in [n for n in names() if not wanted or n in wanted]:
            with tf.distribute.get_strategy().scope() if strategy is None else strategy.scope():
                workload = WORKLOADS[name]().compiled(jit_compile=mode == "xla")
                callbacks = contestants(workload, log_dir)[label]()
            found[label] = PausedFit(workload, callbacks)
            found[label].warm_up(1)  # one after another: each traces alone
    for contestant in found.values():
        contestant.warm_up(WARM_UP)
    return found


def measure(
    name: str, mode: str, rounds: int, wanted: list[str], limit: float | None = None
) -> list[dict[str, Any]]:
    """Return one row a contestant."""
    with tempfile.TemporaryDirectory() as log_dir:
        found = entered(name, mode, log_dir, wanted)
        steps = found["plain"].steps
        rows = ratios(seconds(found, rounds, limit), steps)
        for contestant in found.values():
            contestant.close()
    place = {"benchmark": "fit_overhead", "workload": name, "mode": mode}
    return [{**place, "steps_a_block": steps, **row} for row in rows]


def quick(rounds: int) -> None:
    """Print one line for each of the first three workloads."""
    for name in FIRST:
        plain, guard = measure(name, "graph", rounds, ["plain", "guard"], QUICK_SECONDS)
        line = {
            "workload": name,
            "ratio": guard["wall"]["median"],
            "ratio_low": guard["wall"]["low"],
            "ratio_high": guard["wall"]["high"],
            "cpu_ratio": guard["cpu"]["median"],
            "cpu_ratio_low": guard["cpu"]["low"],
            "cpu_ratio_high": guard["cpu"]["high"],
            "plain_ms_a_step": plain["ms_a_step"],
            "rounds": guard["rounds"],
            "steps_a_block": plain["steps_a_block"],
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the guard on three workloads only")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--mode", choices=MODES, default="graph")
    parser.add_argument("--contestants", nargs="*", default=[], help="names; all without it")
    parser.add_argument("--rounds", type=int, default=None)
    options = parser.parse_args()
    if options.quick:
        quick(options.rounds or 40)
        return
    if options.mode == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
        tf.config.set_logical_device_configuration(cpu, two)
    for name in options.workloads:
        for row in measure(name, options.mode, options.rounds or 15, options.contestants):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
