"""Updates that are lost: the gradient is there, the weights stay."""

from __future__ import annotations

import numpy as np

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import History
from keras_gradguard.records import Sample
from keras_gradguard.rules import common

# A gradient this far below its own peak, or below the others, may vanish in the weights'
# spacing without harm: a converged model, a bias before a normalisation.
_NEGLIGIBLE = 1e-2
# Of a loss at its minimum rounding leaves about 1e-7 an example; a gradient below this share
# of the loss is what a model that was loaded at its optimum shows.
_CONVERGED = 1e-5


def zero_update(history: History, policy: Policy) -> tuple[Finding, ...]:
    """Find weights that do not change although their gradient is not zero.

    Judged on the sampled steps, where the real change ``w_after - w_before`` is known, and
    only on those at which an update was due. A learning rate of 0 that is about to rise is
    a warm-up and counts as nothing.

    Args:
        history: What was recorded.
        policy: ``patience``.

    Returns:
        At most one finding.
    """
    mask = common.judged(history, policy)
    if not _stood_still(history, mask):
        return ()
    rows = {int(s): i for i, s in enumerate(history.step)}
    usable = [
        (s, rows[s.step], i >= len(history.samples) - history.new_samples)
        for i, s in enumerate(history.samples)
        if s.step in rows and history.due[rows[s.step]] and not np.isnan(s.update[mask]).all()
    ]
    run: list[tuple[Sample, int]] = []
    still_for = np.zeros(len(mask), np.int64)
    for sample, row, is_new in usable:
        norm = history.norm[row]
        with np.errstate(invalid="ignore"):
            still = mask & (sample.update == 0) & (norm > 0) & np.isfinite(norm)
            moved = mask & (sample.update > 0)
        if sample.learning_rate == 0 and history.rate_rises:
            continue
        material = still & _material(history, row, mask)
        if sample.learning_rate == 0 and still.any() and not moved.any():
            material = still
        run.append((sample, row))
        still_for = np.where(material, still_for + 1, 0)
        stuck = still_for >= policy.patience
        if stuck.any() and is_new:
            return (_finding(history, run[-int(still_for[stuck].min()) :], stuck, mask),)
    return ()


def _stood_still(history: History, mask: np.ndarray) -> bool:
    """Return False when every weight moved in every new sample: no streak can end there."""
    latest = history.samples[len(history.samples) - history.new_samples :]
    return any(bool((mask & (s.update == 0)).any()) for s in latest)


def _material(history: History, row: int, mask: np.ndarray) -> np.ndarray:
    """Return ``[V]`` bool: gradients large enough that their update ought to be seen."""
    norm = history.norm[row]
    judged = norm[mask]
    others = float(np.max(judged[np.isfinite(judged)], initial=0.0))
    loss = abs(float(history.loss[row])) if history.loss_known[row] else 0.0
    if others <= _CONVERGED * loss or common.loss_at_floor(history)[row]:
        return np.zeros_like(mask)
    with np.errstate(invalid="ignore"):
        large: np.ndarray = norm >= _NEGLIGIBLE * history.peak
        strong: np.ndarray = large & (norm >= _NEGLIGIBLE**2 * others)
    return strong


def _finding(
    history: History, run: list[tuple[Sample, int]], stuck: np.ndarray, mask: np.ndarray
) -> Finding:
    sample, row = run[-1]
    columns = [int(i) for i in np.flatnonzero(stuck)]
    everything = not ((sample.update > 0) & mask).any()
    strongest = max(columns, key=lambda i: history.norm[row, i])
    info = history.table.variables[strongest]
    evidence = [
        Evidence(
            name="zero_updates",
            value=len(run),
            text=f"{len(run)} sampled updates in a row changed not one entry of "
            f"{len(columns)} variable{'s' if len(columns) != 1 else ''}",
        ),
        Evidence(
            name="gradient_norm",
            value=float(history.norm[row, strongest]),
            text=f"yet the gradient of {info.path} has norm {history.norm[row, strongest]:.3g}",
        ),
        *common.loss_evidence(history, row),
    ]
    causes: tuple[Cause, ...] = ()
    where: tuple[str, ...] = common.paths(history, columns)
    if all(s.learning_rate == 0 for s, _ in run):
        first = run[0][0].step
        causes = (
            Cause(
                name="learning_rate_zero",
                score=0.97,
                where=("optimizer",),
                evidence=(
                    Evidence(
                        name="learning_rate",
                        value=0.0,
                        text=f"the learning rate is 0.0 from step {first} on and does not rise "
                        "in the 1000 steps ahead",
                    ),
                ),
                fix="Give the schedule as many steps as the training has (epochs x steps per "
                "epoch, not epochs), or a final rate above 0.",
            ),
        )
        where = ("optimizer", *where)
    summary = (
        "No weight of the model changes, although the gradients are not zero."
        if everything
        else f"{', '.join(common.paths(history, columns[:4]))} does not change, although "
        "its gradient is not zero."
    )
    return Finding(
        symptom="zero_update",
        summary=summary,
        where=where,
        step=sample.step,
        first_step=run[0][0].step,
        severity="raise",
        causes=causes,
        evidence=tuple(evidence),
        optimizer=history.table.optimizer,
    )
