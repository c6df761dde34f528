"""Why weights do not change, and why numbers overflow, vanish or explode."""

from __future__ import annotations

import numpy as np

from keras_gradguard.diagnosis import (
    activations,
    data,
    frozen_update,
    labels,
    learning_rate,
    nonfinite,
    optimizer,
)
from keras_gradguard.diagnosis.explain_zero import scale_hint, structural
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.ranking import confirmed
from keras_gradguard.diagnosis.untracked import untracked
from keras_gradguard.diagnosis.work import Work
from keras_gradguard.findings import Cause


def zero_update(work: Work) -> None:
    """Explain weights that do not change."""
    facts, context = work.facts, work.facts.context
    opt = context.optimizer
    work.add("trainable flags", lambda: optimizer.trainable_flag(context.model))
    applied = context.applied
    said = any("apply" in e.name or "apply" in e.text for e in work.finding.evidence) or (
        "apply" in work.finding.summary
    )
    if applied is None and said:
        applied = False
    trace = work.attempt("the training step", lambda: facts.trace, None)
    if trace is not None and trace.custom_step and not trace.applies:
        applied = False
    work.add("apply", lambda: optimizer.apply_missing(opt, applied, facts.custom_step))
    if facts.custom_step:
        work.add("train_step", lambda: optimizer.frozen_condition(context.model, applied))
    if opt is not None:
        work.add(
            "the optimizer's variables", lambda: optimizer.frozen_after_build(context.model, opt)
        )
        warm = work.attempt("the schedule", lambda: learning_rate.warms_up(opt), None)
        if warm is not None and applied is not False:
            work.severity = "info"
            work.notes.append(
                f"This looks healthy: a warm-up from learning rate 0, which rises in {warm} steps."
            )
            return
        work.add(
            "the learning rate", lambda: learning_rate.learning_rate_zero(opt, context.samples)
        )
        if not confirmed(work.causes) and trace is not None:
            work.add("the update", lambda: _frozen(facts))
    if trace is not None:
        work.add("untracked weights", lambda: untracked(trace))


def _frozen(facts: Facts) -> list[Cause]:
    live = [n for n, g in facts.gradients.items() if g is not None]
    return frozen_update.explain_frozen(
        facts.context.optimizer,
        [facts.variables[n] for n in live],
        [facts.gradients[n] for n in live],
        live,
    )


def non_finite(work: Work) -> None:
    """Explain NaN and Inf."""
    facts, context = work.facts, work.facts.context
    work.add("the data", lambda: data.nan_input(facts.data))
    trace = work.attempt("the training step", lambda: facts.trace, None)
    if trace is not None:
        work.add("non-finite values", lambda: nonfinite.non_finite(trace))
        work.add("labels", lambda: [
            c for c in labels.labels(facts)
            if c.name == "label_out_of_range" and c.score > 0.9
        ])  # fmt: skip
    elif facts.trace_error is not None:
        work.notes.append(f"The step could not be traced: {facts.trace_error}")
    at_once = bool(context.rows) and not np.isfinite(context.rows[0].norm).all()
    if at_once:
        # Before the first update no learning rate has done anything yet.
        work.causes = [c for c in work.causes if c.name != "learning_rate_too_high"]
    else:
        work.add(
            "the history",
            lambda: learning_rate.learning_rate_too_high(context.rows, context.optimizer),
        )
    if context.optimizer is not None:
        work.add(
            "the loss scale", lambda: optimizer.loss_scale_stuck(context.optimizer, context.rows)
        )
    if not work.causes:
        work.add("the recurrent layers", lambda: activations.recurrent_explosion(facts))
    work.add("the scale of the inputs", lambda: data.input_scale(facts.data))


def vanishing(work: Work) -> None:
    """Explain a gradient that vanishes."""
    facts = work.facts

    def by_depth() -> Cause | None:
        norms = activations.kernel_norms(facts) if facts.trace is not None else []
        cause = activations.vanishing_depth(norms, activations.layer_statistics(facts))
        return cause or activations.vanishing_depth(_norms_of_history(facts))

    work.add("gradients by depth", by_depth)
    if not work.causes:
        work.add("layer outputs", lambda: activations.from_statistics(
            activations.layer_statistics(facts), (), facts.data))  # fmt: skip
    structural(work)
    work.add("the scale of the inputs", lambda: scale_hint(work))


def _norms_of_history(facts: Facts) -> list[tuple[str, float]]:
    context = facts.context
    if context.table is None or not context.rows:
        return []
    found: dict[str, tuple[int, float]] = {}
    row = next((r for r in reversed(context.rows) if not r.skipped), context.rows[-1])
    for info, norm in zip(context.table.variables, row.norm, strict=True):
        if info.layer not in found or info.size > found[info.layer][0]:
            found[info.layer] = (info.size, float(norm))
    return [(layer, norm) for layer, (_, norm) in found.items()]


def exploding(work: Work) -> None:
    """Explain a gradient or loss that explodes."""
    facts, context = work.facts, work.facts.context
    work.add("the recurrent layers", lambda: activations.recurrent_explosion(facts))
    work.add(
        "the history", lambda: learning_rate.learning_rate_too_high(context.rows, context.optimizer)
    )
    work.add("the data", lambda: data.nan_input(facts.data))
    work.add("the scale of the inputs", lambda: data.input_scale(facts.data))


def bad_contract(work: Work) -> None:
    """Explain model, loss and labels that do not fit together."""
    structural(work)
    work.add("the data", lambda: data.nan_input(work.facts.data))
