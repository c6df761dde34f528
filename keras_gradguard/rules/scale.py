"""Gradient scale over time (exploding) and over depth (vanishing)."""

from __future__ import annotations

import numpy as np

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import History
from keras_gradguard.rules import common
from keras_gradguard.rules.finite import overflowed

# Growth over the run that no healthy training shows in both the gradient and the loss.
DIVERGED = 1e4
SMALLEST = float(np.finfo(np.float32).tiny)
_JUMP = 0.9  # share of the growth that one single step may have made
_RISING = 5  # rows over which the growth has to be going on
# Largest |log10| slope of float32 gradients that still trains: below this share of the top
# layer's, the bottom of the network does not move within any reasonable training.
_VANISHED = 1e-5
_VANISHED_ROWS = 5
_DEPTH = 5  # kernels


def exploding(history: History, policy: Policy) -> tuple[Finding, ...]:
    """Find a run whose gradient and loss both grow without bound.

    Args:
        history: What was recorded.
        policy: What to leave alone.

    Returns:
        At most one finding: severity ``"raise"`` when gradient and loss have grown ten
        thousandfold over where they began and are still rising, or when a gradient's norm
        left float32 although every entry is finite.
    """
    mask = common.judged(history, policy)
    candidates = _candidates(history, mask)
    if not candidates:
        return ()
    total = _global_norm(history.norm, mask)
    start = np.flatnonzero(~history.skipped & np.isfinite(total) & (total > 0))
    for row in candidates:
        if np.isinf(total[row]) and overflowed(history, row):
            return (_diverging(history, mask, total, row),)
        if not start.size or row < _RISING:
            continue
        recent = slice(row - _RISING + 1, row + 1)
        loss, norm = history.loss[recent], total[recent]
        if not (np.isfinite(loss).all() and np.isfinite(norm).all()):
            continue
        first_norm = float(np.median(total[start[:3]]))
        first_loss = abs(history.first_loss) if history.first_loss is not None else np.inf
        # Judged from end to end with each half higher than the one before: batches differ in
        # size and difficulty, so growth need not be monotonic row by row.
        rising = norm[-2:].min() > norm[:2].max() and loss[-2:].min() > loss[:2].max()
        if (
            rising
            and norm[-1] > DIVERGED * first_norm
            and loss[-1] > DIVERGED * max(first_loss, SMALLEST)
            and not _jumped(norm, first_norm)
        ):
            return (_diverging(history, mask, total, row),)
    return ()


def _jumped(norm: np.ndarray, first: float) -> bool:
    """Return True when one step made nearly all of the growth: other data, no divergence."""
    steps = np.diff(np.log10(np.maximum(norm, SMALLEST)))
    return bool(steps.max() > _JUMP * np.log10(norm[-1] / first))


def _candidates(history: History, mask: np.ndarray) -> list[int]:
    """Return the new rows whose norm is Inf or whose loss is as large as a divergence needs.

    Everything else about a divergence takes long to look up, and healthy rows need none of it.
    """
    start = max(len(history.step) - history.new, 1)
    first = np.inf if history.first_loss is None else abs(history.first_loss)
    with np.errstate(invalid="ignore"):
        high = history.loss[start:] > DIVERGED * max(first, SMALLEST)
    infinite = np.isinf(_global_norm(history.norm[start:], mask))
    found = np.flatnonzero((high | infinite) & ~history.skipped[start:])
    rows: list[int] = (start + found).tolist()
    return rows


def _global_norm(norms: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        norm: np.ndarray = np.sqrt(np.square(norms[:, mask].astype(np.float64)).sum(axis=1))
    return norm


def _diverging(history: History, mask: np.ndarray, total: np.ndarray, row: int) -> Finding:
    finite = np.flatnonzero(np.isfinite(total[: row + 1]) & (total[: row + 1] > 0))
    first = int(finite[0]) if finite.size else row
    last_finite = int(finite[-1]) if finite.size else row
    growth = total[last_finite] / total[first] if finite.size else np.inf
    steps = max(1, int(history.step[last_finite] - history.step[first]))
    factor = growth ** (1.0 / steps) if np.isfinite(growth) else np.inf
    columns = np.flatnonzero(mask)
    strongest = max(columns, key=lambda i: np.nan_to_num(history.norm[last_finite, i]))
    return Finding(
        symptom="exploding",
        summary=f"The gradient norm grew from {total[first]:.3g} to {total[last_finite]:.3g} in "
        f"{steps} steps (x{factor:.1f} a step), and the loss with it: training diverges.",
        where=("optimizer", history.table.variables[int(strongest)].path),
        step=int(history.step[row]),
        first_step=int(history.step[first]),
        severity="raise",
        causes=(
            Cause(
                name="learning_rate_too_high",
                score=0.7,
                where=("optimizer",),
                evidence=(
                    Evidence(
                        name="growth",
                        value=float(factor),
                        text=f"each step multiplies the gradient by {factor:.1f} on average: every "
                        "update overshoots",
                    ),
                ),
                fix="Lower the learning rate, scale the inputs to about unit size "
                "(keras.layers.Normalization or Rescaling), or set `clipnorm=1.0`.",
            ),
        ),
        evidence=(
            Evidence(
                name="gradient_norm",
                value=float(total[last_finite]),
                text=f"gradient norm {total[first]:.3g} at step {int(history.step[first])}, "
                f"{total[last_finite]:.3g} at step {int(history.step[last_finite])}",
            ),
            *common.loss_evidence(history, row),
        ),
        optimizer=history.table.optimizer,
    )


def _near(norm: np.ndarray, rows: np.ndarray, size: np.ndarray, first: int, last: int) -> bool:
    """Return False when the ends of a stack are nowhere near as far apart as it takes."""
    low, high = (norm[rows, i].astype(np.float64) / size[i] for i in (first, last))
    return bool((low < 10 * _VANISHED * high).all())


def vanishing(history: History, policy: Policy) -> tuple[Finding, ...]:
    """Find gradients that shrink layer by layer towards the input.

    Args:
        history: What was recorded.
        policy: What to leave alone.

    Returns:
        At most one finding of severity ``"warn"``: in a stack of at least five kernels the
        root mean square of the gradient falls steadily from the last to the first by more
        than five decades, for five steps in a row.
    """
    mask = common.judged(history, policy)
    kernels = list(history.table.kernels)
    if not mask.all():
        kernels = [i for i in kernels if mask[i]]
    rows = np.flatnonzero(history.due & ~history.skipped)[-_VANISHED_ROWS:]
    if len(kernels) < _DEPTH or len(rows) < _VANISHED_ROWS:
        return ()
    size = np.sqrt(history.table.sizes)
    if not _near(history.norm, rows, size, kernels[0], kernels[-1]):
        return ()
    rms = history.norm[rows][:, kernels].astype(np.float64) / size[kernels]
    if not np.isfinite(rms).all() or (rms <= 0).any():
        return ()
    logs = np.log10(rms)
    typical = np.median(logs, axis=0)
    drop = typical[0] - typical[-1]
    # One layer may stand out of the slope; a stack that merely has one tiny layer may not.
    steady = np.mean(np.diff(typical) > 0) >= 0.75
    if not (steady and np.all(logs[:, 0] - logs[:, -1] < np.log10(_VANISHED)) and drop < 0):
        return ()
    row = int(rows[-1])
    weak = [int(k) for k, value in zip(kernels, typical, strict=True) if value - typical[-1] < -3]
    per_layer = 10 ** (drop / (len(kernels) - 1))
    first = history.table.variables[kernels[0]]
    last = history.table.variables[kernels[-1]]
    return (
        Finding(
            symptom="vanishing",
            summary=f"The gradient shrinks from layer to layer: at {first.path} it is "
            f"{10**drop:.1e} of that at {last.path}, so the lower layers hardly move.",
            where=common.paths(history, weak),
            step=int(history.step[row]),
            first_step=int(history.step[rows[0]]),
            severity="warn",
            causes=(
                Cause(
                    name="vanishing_depth",
                    score=0.8,
                    where=common.paths(history, weak),
                    evidence=(
                        Evidence(
                            name="ratio_per_layer",
                            value=float(per_layer),
                            text=f"over {len(kernels)} kernels it shrinks by a factor of about "
                            f"{per_layer:.2g} a layer",
                        ),
                    ),
                    fix="Use relu or gelu with kernel_initializer='he_normal' instead of "
                    "sigmoid/tanh, add BatchNormalization or LayerNormalization, or residual "
                    "connections.",
                ),
            ),
            evidence=(
                Evidence(
                    name="gradient_ratio",
                    value=float(10**drop),
                    text=f"root mean square {10 ** typical[0]:.1e} at {first.path}, "
                    f"{10 ** typical[-1]:.1e} at {last.path}",
                ),
            ),
            optimizer=history.table.optimizer,
        ),
    )
