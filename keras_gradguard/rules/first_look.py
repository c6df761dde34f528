"""One cheap look at what is new, which spares healthy steps all the others."""

from __future__ import annotations

import numpy as np

from keras_gradguard.recorder import History
from keras_gradguard.rules.scale import DIVERGED, SMALLEST


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
    first = np.inf if history.first_loss is None else abs(history.first_loss)
    if loss.size and not (loss.min() > -np.inf and loss.max() <= DIVERGED * max(first, SMALLEST)):
        return False
    if loss.size and not loss.max() < np.inf:
        return False
    latest = history.samples[len(history.samples) - history.new_samples :]
    present = history.present
    return all(
        bool((s.update > 0).all(where=present) and np.isfinite(s.weight).all(where=present))
        for s in latest
    )
