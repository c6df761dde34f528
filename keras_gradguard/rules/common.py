"""What several rules share: columns that are judged, their layers, when a loss is 0."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.findings import Evidence
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import History

# Keras clips probabilities at 1e-7, so a perfectly learned cross-entropy rests at 1.2e-7 with
# a gradient of exactly 0; in half precision a saturated output rests near 3e-4.
LOSS_FLOOR = 1e-6
LOSS_FLOOR_HALF = 1e-3
# A gradient below this share of the loss is what float32 rounding leaves of an exact zero.
ROUNDING = 1e-6


def judged(history: History, policy: Policy) -> NDArray[np.bool_]:
    """Return ``[V]`` bool: columns that have a gradient and are not ignored by the policy."""
    if not policy.ignore:
        return history.present
    mask = history.present.copy()
    for i, v in enumerate(history.table.variables):
        if policy.ignored(v.path, v.layer):
            mask[i] = False
    return mask


def layers_of(history: History, mask: NDArray[np.bool_]) -> dict[str, list[int]]:
    """Group judged columns by layer, in the order of the table."""
    groups: dict[str, list[int]] = {}
    for i in np.flatnonzero(mask):
        groups.setdefault(history.table.variables[i].layer, []).append(int(i))
    return groups


def paths(history: History, columns: Iterable[int]) -> tuple[str, ...]:
    """Return the variable paths of some columns."""
    return tuple(history.table.variables[i].path for i in columns)


def loss_at_floor(history: History) -> NDArray[np.bool_]:
    """Return ``[T]`` bool: the loss is known and as good as 0, so a zero gradient is right."""
    half = bool(np.any(history.scale != 1.0)) or history.table.half
    floor = LOSS_FLOOR_HALF if half else LOSS_FLOOR
    return history.loss_known & (np.abs(history.loss) <= floor)


def loss_evidence(history: History, upto: int) -> tuple[Evidence, ...]:
    """Return what the loss did, up to row ``upto``, as evidence."""
    known = np.flatnonzero(history.loss_known[: upto + 1])
    if not known.size:
        return ()
    values = history.loss[known]
    first, last = float(values[0]), float(values[-1])
    same = bool((values == first).all()) and known.size > 1
    told = f"stayed at {last:.6g}" if same else f"went from {first:.6g} to {last:.6g}"
    return (
        Evidence(
            name="loss",
            value=last,
            text=f"the loss {told} over the last {known.size} steps recorded",
        ),
    )
