"""The gradient norms of a whole run in a bounded table, for pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.records import Row


class Flow:
    """Norms of a run in at most ``columns`` columns: when they are full, each two become one.

    Args:
        variables: Number of variables.
        columns: Most columns kept, an even number. Defaults to 512.

    Example:
    >>> import numpy as np
    >>> flow = Flow(1, columns=2)
    >>> flow.add([Row(step=i, norm=np.array([i], np.float32)) for i in range(4)])
    >>> flow.steps.tolist(), flow.norms.tolist()
    ([0, 2], [[1.0], [3.0]])
    """

    def __init__(self, variables: int, columns: int = 512) -> None:
        self._steps = np.zeros(columns, np.int64)
        self._norms = np.zeros((columns, variables), np.float32)
        self._used = 0
        self._stride = 1
        self._in_last = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Add consecutive steps. Those that loss scaling threw away say nothing of the training."""
        for row in rows:
            if row.skipped:
                continue
            if self._used and self._in_last < self._stride:
                cell = self._norms[self._used - 1]
                np.maximum(cell, row.norm, out=cell)
                self._in_last += 1
                continue
            if self._used == len(self._steps):
                self._halve()
            self._steps[self._used] = row.step
            self._norms[self._used] = row.norm
            self._used += 1
            self._in_last = 1

    def _halve(self) -> None:
        half = len(self._steps) // 2
        self._norms[:half] = np.maximum(self._norms[0::2], self._norms[1::2])
        self._steps[:half] = self._steps[0::2]
        self._used = half
        self._stride *= 2

    @property
    def steps(self) -> NDArray[np.int64]:
        """``[T]``, the first optimizer step of each column."""
        return self._steps[: self._used].copy()

    @property
    def norms(self) -> NDArray[np.float32]:
        """``[T, V]``, the largest norm of each column's steps; NaN wins."""
        return self._norms[: self._used].copy()
