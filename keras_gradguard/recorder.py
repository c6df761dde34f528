"""The flight recorder: rows and samples in, one history for the rules out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.flow import Flow
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
        return self.table.present


class _Rolling:
    """The last rows as arrays, appended to in place.

    Views handed out stay as they are: when the arrays are full the last rows move to new ones,
    and what was written is never written again.

    Args:
        keep: Rows that :meth:`last` has to reach back to.
        size: Number of variables.
    """

    def __init__(self, keep: int, size: int) -> None:
        self._keep = keep
        self._end = 0
        self._new(size, 0)

    def _new(self, size: int, more: int) -> None:
        length = 4 * self._keep + more
        self.step = np.zeros(length, np.int64)
        self.norm = np.zeros((length, size), np.float32)
        self.loss = np.zeros(length, np.float64)
        self.known = np.zeros(length, bool)
        self.due = np.zeros(length, bool)
        self.skipped = np.zeros(length, bool)
        self.scale = np.zeros(length, np.float64)

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return (
            self.step,
            self.norm,
            self.loss,
            self.known,
            self.due,
            self.skipped,
            self.scale,
        )

    def append(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Append rows and return their norms, ``[len(rows), V]``."""
        if self._end + len(rows) > len(self.step):
            old = self.last(self._keep)
            self._new(self.norm.shape[1], len(rows))
            for array, values in zip(self._arrays(), old, strict=True):
                array[: len(values)] = values
            self._end = len(old[0])
        at = slice(self._end, self._end + len(rows))
        self._end += len(rows)
        self.step[at] = [r.step for r in rows]
        self.norm[at] = [r.norm for r in rows]
        self.loss[at] = [np.nan if r.loss is None else r.loss for r in rows]
        self.known[at] = [r.loss is not None for r in rows]
        self.due[at] = [r.update_due for r in rows]
        self.skipped[at] = [r.skipped for r in rows]
        self.scale[at] = [r.scale for r in rows]
        return self.norm[at]

    def last(self, rows: int) -> tuple[NDArray[Any], ...]:
        """Return read-only views of the last rows of every column."""
        views = tuple(a[max(0, self._end - rows) : self._end] for a in self._arrays())
        for view in views:
            view.flags.writeable = False
        return views


@dataclass
class Recorder:
    """Keeps the last rows and samples of one channel for one run.

    Args:
        table: The columns.
        keep_rows: Rows kept for the rules.
        keep_samples: Samples kept for the rules and the diagnosis.
        waiting: Rows that were seen to be ordinary and are still on the device.
        read_at: When the channel was read last, by the monotonic clock.
    """

    table: Table
    keep_rows: int = 128
    keep_samples: int = 32
    seen: int = 0
    lost: int = 0
    skipped: int = 0
    waiting: int = 0
    read_at: float = 0.0
    first_loss: float | None = None
    _new: int = 0
    _new_samples: int = 0

    def __post_init__(self) -> None:
        size = len(self.table.variables)
        self._ever = np.zeros(size, bool)
        self._peak = np.zeros(size, np.float32)
        self._rows: deque[Row] = deque(maxlen=self.keep_rows)
        self._samples: deque[Sample] = deque(maxlen=self.keep_samples)
        self._rolling = _Rolling(self.keep_rows, size)
        self.flow = Flow(size)

    @property
    def settled(self) -> bool:
        """True when the first rows of the run are no longer among those kept."""
        return self.seen > self.keep_rows

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
        self.waiting = 0
        self.lost += lost
        self.skipped += sum(r.skipped for r in rows)
        if rows:
            self.flow.add(rows)
            norms = self._rolling.append(rows)
            finite = np.where(np.isfinite(norms), norms, np.float32(0))
            self._peak = np.maximum(self._peak, finite.max(axis=0))
            self._ever |= self._peak > 0
            if self.first_loss is None:
                known = [r.loss for r in rows if r.loss is not None and np.isfinite(r.loss)]
                self.first_loss = known[0] if known else None
        self._rows.extend(rows)
        self._samples.extend(samples)
        self._new += len(rows)
        self._new_samples += len(samples)

    def history(self, *, rate_rises: bool | None = None) -> History:
        """Return everything the rules need; rows count as judged afterwards."""
        step, norm, loss, known, due, skipped, scale = self._rolling.last(self.keep_rows)
        history = History(
            table=self.table,
            step=step,
            norm=norm,
            loss=loss,
            loss_known=known,
            due=due,
            skipped=skipped,
            scale=scale,
            new=min(self._new, len(step)),
            samples=tuple(self._samples),
            first_loss=self.first_loss,
            ever_nonzero=self._ever.copy(),
            peak=self._peak.copy(),
            complete=self.seen == len(step),
            new_samples=min(self._new_samples, len(self._samples)),
            rate_rises=rate_rises,
        )
        self._new = self._new_samples = 0
        return history
