"""From a finding to the same finding with its causes, and the last word on its severity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_gradguard.diagnosis.context import Context
from keras_gradguard.diagnosis.explain_none import none_gradient
from keras_gradguard.diagnosis.explain_numbers import (
    bad_contract,
    exploding,
    non_finite,
    vanishing,
    zero_update,
)
from keras_gradguard.diagnosis.explain_zero import asked_names, zero_gradient
from keras_gradguard.diagnosis.facts import Facts, outside_graphs
from keras_gradguard.diagnosis.trace import Depth
from keras_gradguard.diagnosis.work import Work
from keras_gradguard.findings import Finding
from keras_gradguard.taps.names import automatic_prefixes, path_of


def explain(finding: Finding, context: Context) -> Finding:
    """Say why, where and what to change; confirm or soften the severity.

    Args:
        finding: What a rule found.
        context: What may be looked at. Nothing in it is changed.

    Returns:
        The finding with ranked causes. Never raises: what could not be looked at is said in
        its notes.
    """

    def work() -> Finding:
        try:
            return explain_with(finding, _fitting(finding, _turned(context, finding)))
        except Exception as error:  # the finding must get out whatever a model does
            note = f"The diagnosis failed ({type(error).__name__}: {str(error)[:160]})."
            return finding.replace(notes=(*finding.notes, note))

    # A finding of a step that is being traced comes from inside its graph.
    return outside_graphs(work)


def _turned(context: Context, finding: Finding) -> Context:
    """Return the context with the model in front that the finding is about."""

    def knows(model: Any) -> int:
        names = automatic_prefixes([model])
        paths_ = {path_of(v, names) for v in getattr(model, "trainable_variables", ())}
        return sum(w in paths_ for w in finding.where)

    if not context.partners or context.model is None:
        return context
    models = (context.model, *context.partners)
    best = max(models, key=knows)
    if best is context.model or knows(best) == knows(context.model):
        return context
    others = tuple(m for m in models if m is not best)
    # The batch was an input of the first model; it is not known to be one of this model's.
    return dataclasses.replace(context, model=best, partners=others, batch=None)


def _fitting(finding: Finding, context: Context) -> Facts:
    """Return measurements of the step that shows what was found.

    A generator's output may go through its discriminator on the way to the loss, or straight
    into it: the way on which the gradients are 0 is the one that was trained.
    """
    depth: Depth = "values" if finding.symptom == "zero_gradient" else "step"
    plain = Facts(context, depth=depth)
    if context.mode == "fit" or not context.partners or finding.symptom != "zero_gradient":
        return plain
    for facts in (*(Facts(context, p, depth=depth) for p in context.partners), plain):
        if facts.trace is None:
            continue
        asked = [facts.gradients.get(n) for n in asked_names(facts, finding)]
        if asked and all(g is not None and not np.any(g) for g in asked):
            return facts
    return plain


def explain_with(finding: Finding, facts: Facts) -> Finding:
    """Explain a finding with measurements that may be shared between several."""
    work = Work(finding, facts)
    if facts.is_symbolic and finding.symptom in _NEEDS_VALUES:
        return finding
    _BY_SYMPTOM[finding.symptom](work)
    if facts.synthetic is not None and finding.symptom != "zero_update":
        work.notes.append(
            f"{facts.synthetic} could not be seen here; it was made up for this look at the last "
            "inputs of the model."
        )
    return work.result()


_NEEDS_VALUES = frozenset({"zero_gradient", "non_finite", "vanishing", "exploding"})


_BY_SYMPTOM: dict[str, Callable[[Work], None]] = {
    "zero_gradient": zero_gradient,
    "none_gradient": none_gradient,
    "zero_update": zero_update,
    "non_finite": non_finite,
    "vanishing": vanishing,
    "exploding": exploding,
    "bad_contract": bad_contract,
}
