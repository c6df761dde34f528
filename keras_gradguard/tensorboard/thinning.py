"""How a run of any length stays within a number of bytes: fewer and fewer of its steps are kept."""

from __future__ import annotations

from typing import Final

_SHARE: Final = 4
SMALLEST: Final = 1 << 20
"""Fewer bytes than this would not hold the description of a model and its first samples."""


class Thinning:
    """Decides which of the numbers offered for writing are kept.

    At first all are. Whenever a quarter of the room that was left has been used, every second
    one that would have been kept is left out from then on. So a run never grows past its limit,
    and every halving lasts for one and a half times as many steps as the one before: the limit
    is reached by no number of steps.

    Args:
        limit: Bytes that the run may take, or None for no limit.

    Example:

    >>> thinning = Thinning(1 << 20)
    >>> thinning.every
    1
    >>> thinning.used(1 << 18)  # a quarter
    >>> thinning.every
    2
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.every = 1
        self._mark = 0 if limit is None else limit // _SHARE

    def used(self, size: int) -> None:
        """Say how many bytes the run takes by now."""
        if self.limit is None:
            return
        # A single large write may pass several marks; what is left is what decides.
        while size >= self._mark and self._mark < self.limit:
            self.every *= 2
            self._mark += max(1, (self.limit - self._mark) // _SHARE)

    def keeps(self, number: int) -> bool:
        """Return True when the ``number``-th of a kind (from 0) is to be written."""
        return number % self.every == 0
