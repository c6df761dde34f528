"""Alternating measurement: contestants take turns in short blocks, ratios are taken round by round.

A busy machine slows all of a round, so the ratio of a round stays; the median over the rounds
leaves out those in which something came in between. Seconds of CPU, of all threads, are taken too:
they hardly depend on what else runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Contestant(Protocol):
    """Something that can train for a while, again and again."""

    def block(self, run: Any = None) -> None:
        """Train one block, as long as that of every other contestant."""

    def close(self) -> None:
        """Let go of everything."""


class Clock:
    """Wall and CPU seconds between :meth:`start` and :meth:`stop`."""

    def start(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        wall = time.perf_counter()
        self.wall, self.cpu = wall - self.wall, time.process_time() - self.cpu


def seconds(
    contestants: Mapping[str, Any], rounds: int, limit: float | None = None
) -> dict[str, np.ndarray]:
    """Run all contestants in turn.

    Args:
        contestants: By name; ``block(clock)`` starts and stops the clock around the training.
        rounds: How often each has its turn, at most.
        limit: Begin no further round after so many seconds; three are run in any case.

    Returns:
        ``[rounds, 2]`` each, wall and CPU seconds of a block.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    order = list(contestants)
    gc.collect()
    began = time.monotonic()
    for number in range(rounds):
        if limit is not None and number >= 3 and time.monotonic() - began > limit:
            break
        # Back and forth: the place in the round favours nobody.
        for name in order if number % 2 == 0 else reversed(order):
            clock = Clock()
            contestants[name].block(clock)
            found[name].append((clock.wall, clock.cpu))
    return {name: np.array(values) for name, values in found.items()}


def spread(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles, as numbers that JSON takes."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def ratios(found: Mapping[str, np.ndarray], steps: int) -> list[dict[str, Any]]:
    """Return one row a contestant, against the first one.

    Args:
        found: What :func:`seconds` returned.
        steps: Training steps a block.
    """
    plain = next(iter(found.values()))
    return [
        {
            "contestant": name,
            "wall": spread(values[:, 0] / plain[:, 0]),
            "cpu": spread(values[:, 1] / plain[:, 1]),
            "ms_a_step": round(1e3 * float(np.median(values[:, 0])) / steps, 3),
            "cpu_ms_a_step": round(1e3 * float(np.median(values[:, 1])) / steps, 3),
            "rounds": len(values),
        }
        for name, values in found.items()
    ]
