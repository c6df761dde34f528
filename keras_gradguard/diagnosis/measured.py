"""What the numbers of one step on one batch show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_gradguard.diagnosis import (
    activations,
    frozen_update,
    learning_rate,
    optimizer,
    trial_walk,
)
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.explain import explain_with
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.findings import Evidence, Finding

_LOSS_FLOOR = 1e-6


_TRIAL_STEPS = 4


_TRIAL_ELEMENTS = 5_000_000


def measured_findings(facts: Facts) -> list[Finding]:
    """Return what the gradients, the loss and a trial update on the batch show."""
    found: list[Finding] = []
    gradients = facts.gradients
    none = [n for n, g in gradients.items() if g is None]
    there = {n: g for n, g in gradients.items() if g is not None and g.size}
    loss = facts.loss
    bad = [n for n, g in there.items() if not np.all(np.isfinite(g))]
    zero = [n for n, g in there.items() if not np.any(g)]
    whole = bool(there) and len(zero) == len(there)
    if whole:
        found.append(explain_with(_all_zero_finding(zero, loss), facts))
    if none:
        found.append(explain_with(_none_finding(none, len(gradients)), facts))
    if bad or (loss is not None and not math.isfinite(loss)):
        found.append(explain_with(_bad_finding(bad, loss), facts))
        return found
    if whole:
        return [*found, *_update_findings(facts, {})]
    layers = _zero_layers(facts, there)
    if layers:
        found.append(explain_with(_layer_finding(layers, there, facts), facts))
    found += _update_findings(facts, {n: g for n, g in there.items() if n not in zero})
    norms = activations.kernel_norms(facts)
    deep = activations.vanishing_depth(norms, activations.layer_statistics(facts))
    if deep is not None:
        finding = Finding(
            symptom="vanishing",
            summary="The gradient shrinks from layer to layer on its way to the input.",
            where=deep.where,
            severity="warn",
        )
        found.append(explain_with(finding, facts))
    found += _trial(facts)
    return found


def _none_finding(none: Sequence[str], total: int) -> Finding:
    everything = len(none) == total
    return Finding(
        symptom="none_gradient",
        summary="No variable gets a gradient."
        if everything
        else f"{len(none)} of {total} trainable variables get no gradient.",
        where=tuple(none),
        severity="raise",
    )


def _bad_finding(bad: Sequence[str], loss: float | None) -> Finding:
    return Finding(
        symptom="non_finite",
        summary=f"{len(bad)} gradients hold NaN or Inf (loss {loss})."
        if bad
        else f"The loss is {loss}.",
        where=tuple(bad) or ("loss",),
        severity="raise",
    )


def _all_zero_finding(zero: Sequence[str], loss: float | None) -> Finding:
    at_floor = loss is not None and abs(loss) <= _LOSS_FLOOR
    evidence = (
        Evidence(name="loss", value=loss, text=f"the loss of this batch is {loss:.6g}"),
        Evidence(
            name="loss_zero_from_start", value=True, text="a loss of 0 may mean that all is learned"
        ),
    )
    return Finding(
        symptom="zero_gradient",
        summary="Every gradient of the model is exactly 0 on this batch.",
        where=tuple(zero),
        severity="info" if at_floor else "raise",
        evidence=() if loss is None else evidence if at_floor else evidence[:1],
    )


def _zero_layers(facts: Facts, there: dict[str, Any]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name in there:
        groups.setdefault(name.rsplit("/", 1)[0], []).append(name)
    sparse = {
        facts.name(v)
        for v, g in zip(facts.trace.variables, facts.trace.gradients, strict=True)
        if type(g).__name__ == "IndexedSlices"
    } if facts.trace is not None else set()  # fmt: skip
    return [
        layer
        for layer, names in groups.items()
        if not any(np.any(there[n]) for n in names) and not any(n in sparse for n in names)
    ]


def _layer_finding(layers: Sequence[str], there: dict[str, Any], facts: Facts) -> Finding:
    names = [n for n in there if n.rsplit("/", 1)[0] in layers]
    several = "s" if len(layers) > 1 else ""
    return Finding(
        symptom="zero_gradient",
        summary=f"The gradient of layer{several} {', '.join(map(repr, layers[:6]))} is exactly 0 "
        "on this batch.",
        where=(*layers, *names),
        severity="info",
        evidence=()
        if facts.loss is None
        else (
            Evidence(
                name="loss", value=facts.loss, text=f"the loss of this batch is {facts.loss:.6g}"
            ),
        ),
    )


def _update_findings(facts: Facts, live: dict[str, Any]) -> list[Finding]:
    context = facts.context
    opt = context.optimizer
    trace = facts.trace
    if trace is not None and trace.custom_step and not trace.applies and trace.variables:
        return [explain_with(_update_finding(list(facts.variables)), facts)]
    if opt is None:
        return []
    rate = learning_rate.learning_rate_at(opt)
    if rate == 0:
        return [explain_with(_update_finding(list(facts.variables)), facts)]
    if not live:
        return []
    causes = frozen_update.explain_frozen(
        opt, [facts.variables[n] for n in live], list(live.values()), list(live)
    )
    lost = optimizer.frozen_after_build(context.model, opt)
    if lost is not None and lost.name == "optimizer_built_for_other_variables":
        causes.append(lost)
    stuck = tuple(dict.fromkeys(n for c in causes for n in c.where if n in live))
    if not causes or not _matters(facts, stuck, live):
        return []
    return [explain_with(_update_finding(list(stuck) or list(live)), facts)]


def _matters(facts: Facts, stuck: Sequence[str], live: dict[str, Any]) -> bool:
    """Leave out gradients that are rounding noise beside the others."""
    norms = {n: float(np.linalg.norm(g.astype(np.float64))) for n, g in live.items()}
    largest = max(norms.values(), default=0.0)
    floor = max(1e-4 * largest, 1e-6 * abs(facts.loss or 0.0))
    return not stuck or max(norms[n] for n in stuck) > floor


def _update_finding(names: Sequence[str]) -> Finding:
    return Finding(
        symptom="zero_update",
        summary="An update would not change "
        + ("the weights." if len(names) != 1 else f"'{names[0]}'."),
        where=tuple(names),
        severity="raise",
    )


def _trial(facts: Facts) -> list[Finding]:
    """Try a few steps on the same batch: a loss that rises every time diverges."""
    opt, trace = facts.context.optimizer, facts.trace
    if opt is None or trace is None or not facts.is_own_loss or trace.custom_step:
        return []
    if trace.scaled_loss is not trace.loss:
        return []  # these gradients are scaled, and may overflow while the scale is searched
    losses = trial_losses(facts, _TRIAL_STEPS)
    cause = learning_rate.learning_rate_too_high((), opt, losses)
    if cause is None:
        return []
    finding = Finding(
        symptom="exploding",
        summary="Every step on this batch makes its loss much larger.",
        where=("optimizer",),
        severity="raise",
        causes=(cause,),
    )
    return [explain_with(finding, facts)]


def trial_losses(facts: Facts, steps: int) -> list[float]:
    """Return the loss of the batch before and after each of some trial steps.

    The weights are put back bit for bit; the optimizer is a copy.

    Args:
        facts: Measurements with a traced step.
        steps: How many steps to try.
    """
    trace, opt = facts.trace, facts.context.optimizer
    if trace is None or opt is None:
        return []
    pairs = [
        (v, g) for v, g in zip(trace.variables, trace.gradients, strict=False) if g is not None
    ]
    if not pairs or sum(int(np.prod(v.shape)) for v, _ in pairs) > _TRIAL_ELEMENTS:
        return []
    return trial_walk.walk(
        opt,
        [v for v, _ in pairs],
        lambda: [np.asarray(a) for a in run(trace, [trace.loss, *_dense(trace, pairs)])],
        steps,
    )


def _dense(trace: Any, pairs: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    with trace.graph.as_default():
        return [tf.convert_to_tensor(g) for _, g in pairs]
