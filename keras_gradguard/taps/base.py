"""The protocol between a backend and the rest of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from keras_gradguard.records import Row, Sample, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a tap looks and how much it can hold between two reads.

    Args:
        sample_every: Full statistics every so many optimizer steps.
        ring: Sentinel rows kept on the device; at least the steps between two reads.
        dense: Number of steps at the start that are all sampled.
        skip_non_finite: Steps whose gradients hold a NaN or Inf are left out by the guard.
        jit_compile: The step is compiled by XLA, which needs equal shapes on both
            branches of a condition.
    """

    sample_every: int = 50
    ring: int = 16
    dense: int = 10
    jit_compile: bool = False
    skip_non_finite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one read of a channel brought.

    Args:
        rows: Sentinel rows that were not read before, oldest first.
        samples: Samples that were not read before, oldest first.
        lost: Number of rows overwritten before they were read.
    """

    rows: tuple[Row, ...] = ()
    samples: tuple[Sample, ...] = ()
    lost: int = 0


class Channel(Protocol):
    """One optimizer's (or one hand-delivered) stream of gradients over one list of variables."""

    optimizer: Any

    @property
    def table(self) -> Table:
        """The columns."""

    def read(self) -> Reading:
        """Fetch what is new. The only transfer from the device."""

    def sample_next(self, steps: int) -> None:
        """Sample each of the next ``steps`` steps, to look closer at a suspicion."""
