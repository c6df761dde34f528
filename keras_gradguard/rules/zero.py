"""Gradients that are exactly zero, of the whole model or of a layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.findings import Evidence, Finding
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import History
from keras_gradguard.rules import common


def zero_gradient(history: History, policy: Policy) -> tuple[Finding, ...]:
    """Find gradients whose every entry is exactly 0 for many real updates in a row.

    Steps at which the loss is as good as 0 count neither way (a gradient of 0 is right
    there), nor do steps skipped by loss scaling. Steps without an update due are looked at
    but not counted.

    Args:
        history: What was recorded.
        policy: ``patience`` for the model, ``layer_patience`` for a layer.

    Returns:
        At most one finding. Severity ``"raise"``, except for a layer in the middle of layers
        that do train: that may be an expert without a token, a branch that a loss weight
        switches off, so it is ``"info"`` until the diagnosis finds it dead.
    """
    mask = common.judged(history, policy)
    if not mask.any():
        return ()
    if history.norm[-history.new :][:, mask].min() > 0:
        return _rounding(history, policy, mask)
    return _model(history, policy, mask) or _layers(history, policy, mask)


def _streak(
    zero: NDArray[np.bool_], neutral: NDArray[np.bool_], counted: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the length of the run of zero rows ending at each row, and where it began.

    Args:
        zero: ``[T]`` bool.
        neutral: ``[T]`` bool, rows that neither count nor end a run.
        counted: ``[T]`` bool, rows that count.
    """
    length = np.zeros(len(zero), np.int64)
    begin = np.full(len(zero), -1, np.int64)
    count, first = 0, -1
    for t in range(len(zero)):
        if not neutral[t]:
            if zero[t]:
                first = t if first < 0 else first
                count += int(counted[t])
            else:
                count, first = 0, -1
        length[t], begin[t] = count, first
    return length, begin


def _fired(length: NDArray[np.int64], patience: int, new: int) -> int | None:
    """Return the first new row at which a run is as long as ``patience``, or None."""
    late = np.flatnonzero(length >= patience)
    late = late[late >= len(length) - new]
    return int(late[0]) if late.size else None


def _model(history: History, policy: Policy, mask: NDArray[np.bool_]) -> tuple[Finding, ...]:
    zero = (history.norm[:, mask] == 0).all(axis=1)
    floor = common.loss_at_floor(history)
    counted = history.due & ~history.skipped
    # A loss that was 0 from the first step on, with a gradient that never was anything but 0,
    # was not learned: nothing ever entered it.
    never = not history.ever_nonzero[mask].any() and bool(floor[zero].all()) and bool(zero.all())
    neutral = history.skipped | (floor if not never else np.zeros_like(floor))
    patience = policy.layer_patience if never else policy.patience
    length, begin = _streak(zero, neutral, counted)
    at = _fired(length, patience, history.new)
    if at is None:
        return ()
    known = bool(history.loss_known[begin[at] : at + 1].any())
    columns = np.flatnonzero(mask)
    evidence = [
        Evidence(
            name="zero_updates",
            value=int(length[at]),
            text=f"{int(length[at])} updates in a row with every entry of {len(columns)} "
            "gradients exactly 0",
        ),
        *common.loss_evidence(history, at),
    ]
    if never:
        evidence.append(
            Evidence(
                name="loss_zero_from_start",
                value=True,
                text="the loss was 0 from the first step on, before anything could be learned",
            )
        )
    stays = ""
    if known and not never:
        stays = f" while the loss is {history.loss[at]:.6g}"
    return (
        Finding(
            symptom="zero_gradient",
            summary=f"Every gradient of the model is exactly 0{stays}. No weight can change "
            "any more.",
            where=common.paths(history, columns),
            step=int(history.step[at]),
            first_step=int(history.step[begin[at]]),
            severity="raise" if known else "warn",
            evidence=tuple(evidence),
            optimizer=history.table.optimizer,
        ),
    )


def _rounding(history: History, policy: Policy, mask: NDArray[np.bool_]) -> tuple[Finding, ...]:
    """Find gradients that are nothing but rounding noise from the first step on.

    A softmax over one unit is 1 up to the last bit, so its gradient is 0 up to the last bit.
    A model loaded at its optimum looks the same: severity ``"info"``, for the diagnosis to
    raise when it finds why.
    """
    if not history.complete:
        return ()
    known = history.loss_known & np.isfinite(history.loss)
    counted = history.due & ~history.skipped & known
    if int(counted.sum()) < policy.patience:
        return ()
    peak = float(np.sqrt(np.square(history.peak[mask].astype(np.float64)).sum()))
    typical = float(np.median(np.abs(history.loss[counted])))
    if not 0 < peak <= common.ROUNDING * typical:
        return ()
    at = int(np.flatnonzero(counted)[policy.patience - 1])
    columns = np.flatnonzero(mask)
    return (
        Finding(
            symptom="zero_gradient",
            summary="Every gradient of the model is 0 up to rounding, from the first step on, "
            f"while the loss is {history.loss[at]:.6g}.",
            where=common.paths(history, columns),
            step=int(history.step[at]),
            first_step=int(history.step[0]),
            severity="info",
            evidence=(
                Evidence(
                    name="peak_gradient_norm",
                    value=peak,
                    text=f"the norm of the whole gradient never exceeded {peak:.1e}, less than a "
                    f"millionth of the loss",
                ),
                *common.loss_evidence(history, at),
            ),
            optimizer=history.table.optimizer,
        ),
    )


def _lately(history: History) -> NDArray[np.bool_]:
    """Return ``[V]`` bool: the gradient was 0 in one of the new rows."""
    zero: NDArray[np.bool_] = (history.norm[-history.new :] == 0).any(axis=0)
    return zero


def _layers(history: History, policy: Policy, mask: NDArray[np.bool_]) -> tuple[Finding, ...]:
    floor = common.loss_at_floor(history)
    neutral = history.skipped | floor
    counted = history.due & ~history.skipped
    groups = {
        name: columns
        for name, columns in common.layers_of(history, mask).items()
        # Rows of a table that were not looked up have no gradient, and that is right.
        if not any(history.table.variables[i].sparse for i in columns)
        and all(history.table.variables[i].size != 0 for i in columns)
    }
    runs = {}
    lately = _lately(history)
    for name, columns in groups.items():
        if not lately[columns].all():
            continue
        zero = (history.norm[:, columns] == 0).all(axis=1)
        if zero[-1] or zero[-history.new :].any():
            runs[name] = _streak(zero, neutral, counted)
    fired = {n: _fired(r[0], policy.layer_patience, history.new) for n, r in runs.items()}
    times = [t for t in fired.values() if t is not None]
    if not times:
        return ()
    at = min(times)
    dead = [n for n in groups if n in runs and runs[n][0][at] >= policy.layer_patience]
    order = list(groups)
    upstream = order[: len(dead)] == dead and len(dead) < len(order)
    columns = [i for n in dead for i in groups[n]]
    also = [
        int(i)
        for i in np.flatnonzero(mask)
        if i not in columns and (history.norm[-policy.layer_patience :, i] == 0).all()
    ]
    begin = min(int(runs[n][1][at]) for n in dead)
    rest = len(order) - len(dead)
    evidence = [
        Evidence(
            name="zero_updates",
            value=int(min(runs[n][0][at] for n in dead)),
            text=f"{int(min(runs[n][0][at] for n in dead))} updates in a row with a gradient of "
            f"exactly 0 in {', '.join(dead[:4])}, while {rest} other "
            f"layer{'s' if rest != 1 else ''} had some",
        ),
        *common.loss_evidence(history, at),
    ]
    if also:
        evidence.append(
            Evidence(
                name="also_zero",
                value=len(also),
                text=f"also exactly 0: {', '.join(common.paths(history, also))}",
            )
        )
    several = "s" if len(dead) != 1 else ""
    return (
        Finding(
            symptom="zero_gradient",
            summary=f"The gradient of layer{several} {', '.join(map(repr, dead[:6]))} is exactly "
            "0: nothing comes back from the loss that far, so it no longer learns.",
            where=(*dead, *common.paths(history, [*columns, *also])),
            step=int(history.step[at]),
            first_step=int(history.step[begin]),
            severity="raise" if upstream else "info",
            evidence=tuple(evidence),
            optimizer=history.table.optimizer,
        ),
    )
