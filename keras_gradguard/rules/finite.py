"""NaN and Inf in gradients, weights and the loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import History
from keras_gradguard.rules import common


def with_bad_entries(history: History, row: int) -> NDArray[np.bool_]:
    """Return which variables (a mask) hold a NaN or Inf in their gradient at a row.

    A norm is Inf, too, where only the sum of squares left float32. The sample of that step
    knows: its histogram counts real NaN and Inf entries. Without one a norm of Inf is believed.
    """
    norm = history.norm[row]
    bad: NDArray[np.bool_] = history.present & ~np.isfinite(norm)
    for sample in history.samples:
        if sample.step == int(history.step[row]):
            counted = sample.histogram[:, 255] + sample.histogram[:, 511]
            bad &= np.isnan(norm) | (counted > 0)
    return bad


def overflowed(history: History, row: int) -> bool:
    """Return True when norms are Inf only because the sum of squares left float32."""
    return not bool(with_bad_entries(history, row).any())


def non_finite(history: History, policy: Policy) -> tuple[Finding, ...]:
    """Find NaN or Inf at once; under loss scaling only when skipping persists.

    Args:
        history: What was recorded.
        policy: ``scale_patience`` for skipped steps in a row.

    Returns:
        At most one finding.
    """
    mask = common.judged(history, policy)
    persistent = _skipping(history, policy)
    if persistent is not None:
        return (persistent,)
    for row in _odd(history, mask):
        if history.skipped[row]:
            if history.table.skips and not np.isfinite(history.norm[row][mask]).all():
                return (_left_out(history, row, mask),)
            continue
        bad = mask & with_bad_entries(history, row)
        loss_bad = history.loss_known[row] and not np.isfinite(history.loss[row])
        if bad.any():
            return (_gradient(history, row, bad, bool(loss_bad)),)
        if loss_bad:
            return (_loss(history, row),)
    for sample in history.samples[len(history.samples) - history.new_samples :]:
        broken = mask & ~np.isfinite(sample.weight) & ~np.isnan(sample.update)
        if broken.any():
            return (_weights(history, sample.step, broken),)
    return ()


def _odd(history: History, mask: np.ndarray) -> list[int]:
    """Return the new rows that were skipped or hold a NaN or Inf."""
    start = len(history.step) - history.new
    bad = ~np.isfinite(history.norm[start:]).all(axis=1, where=mask)
    loss_bad = history.loss_known[start:] & ~np.isfinite(history.loss[start:])
    return (start + np.flatnonzero(bad | loss_bad | history.skipped[start:])).tolist()


def _left_out(history: History, row: int, mask: np.ndarray) -> Finding:
    """Report the first step that the guard left out; what follows is only counted."""
    bad = mask & ~np.isfinite(history.norm[row])
    loss_bad = history.loss_known[row] and not np.isfinite(history.loss[row])
    finding = _gradient(history, row, bad, bool(loss_bad))
    names = _few(history, [int(i) for i in np.flatnonzero(bad)])
    return finding.replace(
        severity="warn",
        summary=f"NaN or Inf in the gradient of {names} at step "
        f"{int(history.step[row])}. The step was left out (skip_non_finite): weights and "
        "optimizer are as they were.",
    )


def _gradient(history: History, row: int, bad: np.ndarray, loss_bad: bool) -> Finding:
    columns = [int(i) for i in np.flatnonzero(bad)]
    step = int(history.step[row])
    total = int(history.present.sum())
    evidence = [
        Evidence(
            name="non_finite_gradients",
            value=len(columns),
            text=f"{len(columns)} of {total} gradients hold NaN or Inf at step {step}",
        )
    ]
    for sample in history.samples:
        if sample.step == step:
            counts = sample.histogram[:, 255] + sample.histogram[:, 511]
            sizes = sample.histogram.sum(axis=1)
            worst = max(columns, key=lambda i: counts[i] / max(int(sizes[i]), 1))
            evidence.append(
                Evidence(
                    name="non_finite_entries",
                    value=int(counts[worst]),
                    text=f"{int(counts[worst])} of {int(sizes[worst])} entries in the gradient "
                    f"of {history.table.variables[worst].path}",
                )
            )
            break
    if history.loss_known[row]:
        told = "too" if loss_bad else "still finite"
        evidence.append(
            Evidence(
                name="loss",
                value=float(history.loss[row]),
                text=f"the loss is {history.loss[row]:.6g}, {told}",
            )
        )
    return Finding(
        symptom="non_finite",
        summary=f"NaN or Inf in the gradient of {_few(history, columns)} at step {step}. One "
        "update with it and the weights are lost.",
        where=common.paths(history, columns),
        step=step,
        first_step=step,
        severity="raise",
        evidence=tuple(evidence),
        optimizer=history.table.optimizer,
    )


def _few(history: History, columns: list[int]) -> str:
    names = common.paths(history, columns)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _loss(history: History, row: int) -> Finding:
    step = int(history.step[row])
    return Finding(
        symptom="non_finite",
        summary=f"The loss is {history.loss[row]} at step {step}, although the gradients are "
        "still finite.",
        where=("loss",),
        step=step,
        first_step=step,
        severity="raise",
        evidence=common.loss_evidence(history, row),
        optimizer=history.table.optimizer,
    )


def _weights(history: History, step: int, broken: np.ndarray) -> Finding:
    columns = [int(i) for i in np.flatnonzero(broken)]
    return Finding(
        symptom="non_finite",
        summary=f"The weights {_few(history, columns)} hold NaN or Inf at step {step}.",
        where=common.paths(history, columns),
        step=step,
        first_step=step,
        severity="raise",
        evidence=(
            Evidence(
                name="non_finite_weights",
                value=len(columns),
                text=f"{len(columns)} variables hold NaN or Inf",
            ),
        ),
        optimizer=history.table.optimizer,
    )


def _skipping(history: History, policy: Policy) -> Finding | None:
    """Report a loss scale that never finds its level: every step skipped for too long."""
    applied = np.flatnonzero(~history.skipped)
    run = len(history.skipped) - (int(applied[-1]) + 1 if applied.size else 0)
    if run < policy.scale_patience:
        return None
    row = len(history.step) - 1
    mask = history.present & ~np.isfinite(history.norm[row])
    columns = [int(i) for i in np.flatnonzero(mask)]
    scale = float(history.scale[row])
    if history.table.skips:
        return _gradient(history, row, mask, False).replace(
            first_step=int(history.step[row - run + 1]),
            summary=f"The last {run} steps were all left out (skip_non_finite), for NaN or Inf in "
            "the gradients. Nothing is being learned.",
        )
    return Finding(
        symptom="non_finite",
        summary=f"The loss-scale optimizer skipped the last {run} steps: the gradients hold NaN "
        f"or Inf even with the scale down at {scale:g}. Nothing is being learned.",
        where=common.paths(history, columns),
        step=int(history.step[row]),
        first_step=int(history.step[row - run + 1]),
        severity="raise",
        causes=(
            Cause(
                name="float16_overflow",
                score=0.5,
                where=common.paths(history, columns[:1]),
                evidence=(
                    Evidence(
                        name="loss_scale",
                        value=scale,
                        text=f"the loss scale fell to {scale:g} without an applied step",
                    ),
                ),
                fix="Scale the inputs, keep the layer that overflows in float32 (dtype='float32') "
                "or use the 'mixed_bfloat16' policy.",
            ),
        ),
        evidence=(Evidence(name="skipped", value=run, text=f"{run} steps in a row were skipped"),),
        optimizer=history.table.optimizer,
    )
