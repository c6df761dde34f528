"""The flight recorder: rows and samples in, one history for the rules out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.records import Row, Sample, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the rules see: the last rows of one channel, as arrays. ``T`` rows, ``V`` variables.

    Args:
        table: The columns.
        step: ``[T]`` int64, optimizer step of each row.
        norm: ``[T, V]`` float32, gradient norms; NaN where the gradient is None.
        loss: ``[T]`` float64, NaN where unknown or NaN (see ``loss_known``).
        loss_known: ``[T]`` bool.
        due: ``[T]`` bool, a weight update was due.
        skipped: ``[T]`` bool, skipped by a loss-scale optimizer.
        scale: ``[T]`` float64, loss scale.
        new: Number of rows at the end that were not judged before.
        samples: The last samples, oldest first.
        first_loss: First known finite loss of the run, or None.
        ever_nonzero: ``[V]`` bool, a non-zero finite gradient was seen in this run.
        peak: ``[V]`` float32, largest finite norm of the run.
        complete: The rows reach back to the first step of the run.
        new_samples: Number of samples at the end that were not judged before. In eager mode a
            sample comes one row late: its update is known when the step is over.
        rate_rises: The learning rate will be above 0 within the steps to come, or None
            when that was not looked up.
    """

    table: Table
    step: NDArray[np.int64]
    norm: NDArray[np.float32]
    loss: NDArray[np.float64]
    loss_known: NDArray[np.bool_]
    due: NDArray[np.bool_]
    skipped: NDArray[np.bool_]
    scale: NDArray[np.float64]
    new: int
    samples: tuple[Sample, ...]
    first_loss: float | None
    ever_nonzero: NDArray[np.bool_]
    peak: NDArray[np.float32]
    complete: bool = True
    new_samples: int = 0
    rate_rises: bool | None = None

    @property
    def present(self) -> NDArray[np.bool_]:
        """``[V]`` bool, the columns that have a gradient."""
        mask = np.ones(len(self.table.variables), bool)
        mask[list(self.table.none)] = False
        return mask


@dataclass
class Recorder:
    """Keeps the last rows and samples of one channel for one run.

    Args:
        table: The columns.
        keep_rows: Rows kept for the rules.
        keep_samples: Samples kept for the rules and the diagnosis.
    """

    table: Table
    keep_rows: int = 128
    keep_samples: int = 32
    seen: int = 0
    lost: int = 0
    skipped: int = 0
    first_loss: float | None = None
    _rows: list[Row] = field(default_factory=list)
    _samples: list[Sample] = field(default_factory=list)
    _new: int = 0
    _new_samples: int = 0

    def __post_init__(self) -> None:
        size = len(self.table.variables)
        self._ever = np.zeros(size, bool)
        self._peak = np.zeros(size, np.float32)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows kept, oldest first."""
        return tuple(self._rows)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples kept, oldest first."""
        return tuple(self._samples)

    def add(
        self,
        rows: Sequence[Row],
        samples: Sequence[Sample] = (),
        *,
        lost: int = 0,
        table: Table | None = None,
    ) -> None:
        """Append what a reading brought.

        Args:
            rows: New rows, oldest first.
            samples: New samples, oldest first.
            lost: Rows that were overwritten before they could be read.
            table: The columns as they are now (which gradients are None may change).
        """
        if table is not None:
            self.table = table
        self.seen += len(rows) + lost
        self.lost += lost
        self.skipped += sum(r.skipped for r in rows)
        if rows:
            norms = np.stack([r.norm for r in rows])
            finite = np.where(np.isfinite(norms), norms, np.float32(0))
            self._peak = np.maximum(self._peak, finite.max(axis=0))
            self._ever |= self._peak > 0
            if self.first_loss is None:
                known = [r.loss for r in rows if r.loss is not None and np.isfinite(r.loss)]
                self.first_loss = known[0] if known else None
        self._rows = [*self._rows, *rows][-self.keep_rows :]
        self._samples = [*self._samples, *samples][-self.keep_samples :]
        self._new += len(rows)
        self._new_samples += len(samples)

    def history(self, *, rate_rises: bool | None = None) -> History:
        """Return everything the rules need; rows count as judged afterwards."""
        rows = self._rows
        size = len(self.table.variables)
        norm = np.stack([r.norm for r in rows]) if rows else np.zeros((0, size), np.float32)
        known = np.array([r.loss is not None for r in rows], bool)
        history = History(
            table=self.table,
            step=np.array([r.step for r in rows], np.int64),
            norm=norm,
            loss=np.array([np.nan if r.loss is None else r.loss for r in rows], np.float64),
            loss_known=known,
            due=np.array([r.update_due for r in rows], bool),
            skipped=np.array([r.skipped for r in rows], bool),
            scale=np.array([r.scale for r in rows], np.float64),
            new=min(self._new, len(rows)),
            samples=tuple(self._samples),
            first_loss=self.first_loss,
            ever_nonzero=self._ever.copy(),
            peak=self._peak.copy(),
            complete=self.seen == len(rows),
            new_samples=min(self._new_samples, len(self._samples)),
            rate_rises=rate_rises,
        )
        self._new = self._new_samples = 0
        return history
