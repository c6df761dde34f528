"""The gradient norms of a whole run in a bounded table, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.records import Row


class Pool:
    """Lines of any number in a table of fixed size: when it is full, each two become one.

    A column holds the largest of its lines, entry by entry.

    Args:
        table: ``[columns, n]``, what the lines are kept in; an even number of columns.
    """

    def __init__(self, table: NDArray[Any]) -> None:
        self._table = table
        self._used = 0
        self._in_last = 0
        self.stride = 1  # lines in a full column

    def put(self, line: NDArray[Any]) -> bool:
        """Add a line ``[n]``; return True when it begins a column."""
        table = self._table
        if self._used and self._in_last < self.stride:
            cell = table[self._used - 1]
            np.maximum(cell, line, out=cell)
            self._in_last += 1
            return False
        if self._used == len(table):
            self._used //= 2
            table[: self._used] = np.maximum(table[0::2], table[1::2])
            self.stride *= 2
        table[self._used] = line
        self._used += 1
        self._in_last = 1
        return True

    @property
    def cells(self) -> NDArray[Any]:
        """``[T, n]``, the columns in use: a view of the table."""
        return self._table[: self._used]


class Flow:
    """Norms of a run in at most ``columns`` columns.

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
        self._pool = Pool(np.zeros((columns, variables), np.float32))
        self._steps: list[int] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Add consecutive steps. Those that loss scaling threw away say nothing of the training."""
        for row in rows:
            if row.skipped:
                continue
            stride = self._pool.stride
            begins = self._pool.put(row.norm)
            if self._pool.stride != stride:
                self._steps = self._steps[::2]
            if begins:
                self._steps.append(row.step)

    @property
    def steps(self) -> NDArray[np.int64]:
        """``[T]``, the first optimizer step of each column."""
        return np.array(self._steps, np.int64)

    @property
    def norms(self) -> NDArray[np.float32]:
        """``[T, V]``, the largest norm of each column's steps; NaN wins."""
        norms: NDArray[np.float32] = self._pool.cells.copy()
        return norms
