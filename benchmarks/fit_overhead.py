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
QUICK_SECONDS = 15.0  # of measuring a workload; building and warming up come on top


def made(label: str, name: str, mode: str, log_dir: str) -> Any:
    """Return one contestant of a workload, traced."""
    if mode == "loop":
        guard = None if label == "plain" else GradientGuard(log_dir=f"{log_dir}/loop")
        return Loop(WORKLOADS[name](), guard)
    cpus = [d.name for d in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(cpus) if mode == "mirrored" else None
    with tf.distribute.get_strategy().scope() if strategy is None else strategy.scope():
        workload = WORKLOADS[name]().compiled(jit_compile=mode == "xla")
        callbacks = contestants(workload, log_dir)[label]()
    fit = PausedFit(workload, callbacks)
    fit.warm_up(1)
    return fit


def measure(
    name: str, mode: str, rounds: int, wanted: list[str], limit: float | None = None
) -> list[dict[str, Any]]:
    """Return one row a contestant.

    Each is there alone with the plain training, and gone before the next comes: eight models
    taking turns would find nothing of theirs in the caches.
    """
    labels = ["plain", "guard"] if mode == "loop" else names()
    labels = [n for n in labels[1:] if not wanted or n in wanted]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as log_dir:
        plain = made("plain", name, mode, log_dir)
        for label in labels:
            other = made(label, name, mode, log_dir)
            for contestant in (plain, other):
                contestant.warm_up(WARM_UP)
            pair = ratios(seconds({"plain": plain, label: other}, rounds, limit), plain.steps)
            rows += pair if not rows else pair[1:]
            other.close()
        plain.close()
    place = {"benchmark": "fit_overhead", "workload": name, "mode": mode}
    return [{**place, "steps_a_block": plain.steps, **row} for row in rows]


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
