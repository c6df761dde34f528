"""One cheap look at what is new, which spares healthy steps all the others."""

from __future__ import annotations

import numpy as np

from keras_gradguard.recorder import History
from keras_gradguard.rules.scale import DIVERGED, SMALLEST

_LARGE = 1e30  # below, the square of a norm is far from where float32 ends


def _small(loss: np.ndarray, first_loss: float | None) -> bool:
    """Return True when every loss is finite and not huge against the first. NaN fails."""
    first = np.inf if first_loss is None else abs(first_loss)
    top = min(DIVERGED * max(first, SMALLEST), np.finfo(np.float64).max)
    return not loss.size or bool(loss.min() > -np.inf and loss.max() <= top)


def ordinary(half_squares: np.ndarray, loss: np.ndarray | None, first_loss: float | None) -> bool:
    """Return True when rows as they lie on the device cannot be part of a finding.

    What they hold would be :func:`unremarkable`, unless a sample of these steps says otherwise.

    Args:
        half_squares: ``[n, V]`` float32, half the sums of squares of gradients that are not None.
        loss: ``[n]``, or None where no loss can be seen.
        first_loss: First known finite loss of the run, or None.

    Example:
    >>> one = np.ones((2, 3), np.float32)
    >>> ordinary(one, np.array([0.5, 0.4]), 0.6), ordinary(0 * one, None, None)
    (True, False)
    """
    # NaN fails every comparison.
    if half_squares.size and not (half_squares.min() > 0 and half_squares.max() < _LARGE):
        return False
    return loss is None or _small(loss, first_loss)


def unremarkable(history: History) -> bool:
    """Return True when nothing new can be part of a finding, vanishing gradients aside.

    Every new gradient is finite and not 0, no step was skipped, every loss is finite and not
    huge, and every new sample shows finite weights that all moved. The first rows of a run get
    the close look always: some faults show in them alone.

    Args:
        history: What was recorded.
    """
    if history.complete:
        return False
    norm = history.norm[-history.new :]
    if history.table.none:
        norm = norm[:, history.present]
    # NaN fails every comparison.
    if not norm.size or not (norm.min() > 0 and norm.max() < np.inf):
        return False
    if history.skipped[-history.new :].any():
        return False
    loss = history.loss[-history.new :]
    if not history.loss_known[-history.new :].all():
        loss = loss[history.loss_known[-history.new :]]
    if not _small(loss, history.first_loss):
        return False
    latest = history.samples[len(history.samples) - history.new_samples :]
    present = history.present
    return all(
        bool((s.update > 0).all(where=present) and np.isfinite(s.weight).all(where=present))
        for s in latest
    )
