"""The protocol between a backend and the rest of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from keras_gradguard.records import Float, Row, Sample, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a tap looks and how much it can hold between two reads.

    Args:
        sample_every: Full statistics every so many optimizer steps.
        ring: Sentinel rows kept on the device; at least the steps between two reads.
        slots: Samples kept on the device; as many as rows when None.
        dense: Number of steps at the start that are all sampled.
        skip_non_finite: Steps whose gradients hold a NaN or Inf are left out by the guard.
        jit_compile: The step is compiled by XLA, which needs equal shapes on both
            branches of a condition.
    """

    sample_every: int = 50
    ring: int = 16
    slots: int | None = None
    dense: int = 10
    jit_compile: bool = False
    skip_non_finite: bool = False

    def slots_within(self, limit: int, sample: int) -> int:
        """Return the number of samples to hold: what ``limit`` bytes allow, ``sample`` each."""
        wanted = self.ring if self.slots is None else self.slots
        return max(1, min(wanted, limit // sample))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """New sentinel rows as they lie on the device, where they stay. ``n`` rows.

    Args:
        half_squares: ``[n, V]`` float32, half the sums of squares of the (scaled) gradients.
        loss: ``[n]`` float32, NaN where ``loss_known`` is False and the loss could not be seen.
        loss_known: The losses are those of the batches.
        waiting: Rows that were not read yet, these among them.
    """

    half_squares: Float
    loss: Float
    loss_known: bool
    waiting: int


class Channel(Protocol):
    """One optimizer's (or one hand-delivered) stream of gradients over one list of variables."""

    optimizer: Any

    @property
    def table(self) -> Table:
        """The columns."""

    def glance(self) -> Glance | None:
        """Look at new rows without taking them; None when they have to be read now."""

    def read(self) -> Reading:
        """Fetch what is new. With :meth:`glance` the only transfer from the device."""

    def sample_next(self, steps: int) -> None:
        """Sample each of the next ``steps`` steps, to look closer at a suspicion."""
