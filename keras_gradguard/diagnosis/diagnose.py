"""Look at a model, its loss and one batch without training: what would go wrong, and why."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_gradguard.diagnosis import activations, blame, contract, data, optimizer
from keras_gradguard.diagnosis.context import Batch, Context
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.explain import Work, explain_with
from keras_gradguard.diagnosis.facts import Facts, outside_graphs
from keras_gradguard.diagnosis.sandbox import is_stock_train_step
from keras_gradguard.diagnosis.untracked import untracked
from keras_gradguard.diagnosis.zeros import batch_of_one
from keras_gradguard.findings import Cause, Evidence, Finding, GradientSize, Report, Severity

logger = logging.getLogger("keras_gradguard")

_LOSS_FLOOR = 1e-6
_TRIAL_STEPS = 4
_TRIAL_ELEMENTS = 5_000_000

# What the contract's causes deserve before a step was seen to fail. "raise": training cannot do
# what the user means; "warn": it may still learn something.
_SEVERITY: dict[str, Severity] = {
    "double_activation": "warn",
    "missing_activation": "warn",
    "softmax_over_one_unit": "warn",
    "wrong_loss_for_labels": "warn",
    "loss_arguments_swapped": "raise",
    "loss_broadcast": "raise",
    "label_out_of_range": "warn",
    "labels_all_zero": "warn",
    "batchnorm_batch_one": "warn",
    "zero_sample_weight": "warn",
    "zero_input": "warn",
    "nan_input": "warn",
}

_WORDS = {
    "double_activation": "The output activation is applied twice.",
    "missing_activation": "The loss expects probabilities, but the model does not give any.",
    "softmax_over_one_unit": "The output is 1 for every input.",
    "wrong_loss_for_labels": "The loss does not fit the output and the labels.",
    "loss_arguments_swapped": "The loss gets its arguments the wrong way round.",
    "loss_broadcast": "Labels and outputs of different shapes are broadcast in the loss.",
    "label_out_of_range": "Some targets cannot be reached by the output.",
    "labels_all_zero": "Some one-hot labels hold no class.",
    "batchnorm_batch_one": "A normalisation averages over a single value.",
    "zero_sample_weight": "No example of this batch counts in the loss.",
    "zero_input": "The inputs of this batch are all zero.",
    "nan_input": "The data hold NaN or Inf.",
    "no_loss": "There is no loss to train on.",
}


def preflight(
    model: Any, optimizer_: Any = None, loss: Any = None, batch: Batch | None = None
) -> tuple[Finding, ...]:
    """Say what is wrong with model, loss and data by themselves, before anything is trained.

    Args:
        model: A Keras model.
        optimizer_: Its optimizer, or None.
        loss: The loss of a custom loop; None for the compiled one.
        batch: One batch, or None to look at the model only.

    Returns:
        Findings, the worst first; empty for a healthy set-up. Never raises.
    """
    fit = loss is None and bool(getattr(model, "compiled", False))
    context = Context(
        model=model, optimizer=optimizer_, loss=loss, batch=batch, mode="fit" if fit else "loop"
    )

    def work() -> tuple[Finding, ...]:
        try:
            return _preflight(Facts(context))
        except Exception as error:  # a look ahead must not stop a run
            logger.warning("Preflight could not look at the model: %s", error)
            return ()

    return outside_graphs(work)


def _preflight(facts: Facts) -> tuple[Finding, ...]:
    work = Work(Finding(symptom="bad_contract", summary=""), facts)
    found: list[Finding] = []
    model = facts.context.model
    flag = work.attempt("trainable flags", lambda: optimizer.trainable_flag(model), None)
    if flag is not None:
        found.append(_nothing_trainable(model, flag))
    traced = work.attempt("the training step", lambda: facts.trace, None) is not None
    if (no_loss := _no_loss(facts)) is not None:
        found.append(no_loss)
    elif traced:
        work.add("model against loss", lambda: contract.causes(facts))
        work.add("normalisation", lambda: _normalisation(facts))
        found += work.attempt("untracked weights", lambda: _untracked(facts), [])
        found += _rescued(facts)
    stats = facts.data
    work.add("the data", lambda: data.nan_input(stats))
    work.add("the inputs", lambda: _whole_input_zero(facts))
    work.add("the weights", lambda: data.zero_sample_weight(stats))
    for cause in sorted(work.causes, key=lambda c: -c.score):
        made = _contract_finding(cause, facts)
        if made is not None:
            found.append(made)
    order = {"raise": 0, "warn": 1, "info": 2}
    return tuple(sorted(found, key=lambda f: order[f.severity]))


def _normalisation(facts: Facts) -> Cause | None:
    return batch_of_one(facts)


def _whole_input_zero(facts: Facts) -> Cause | None:
    cause = data.zero_input(facts.data)
    return cause if cause is not None and cause.score > 0.9 else None


def _contract_finding(cause: Cause, facts: Facts) -> Finding | None:
    severity = _SEVERITY.get(cause.name, "info")
    symptom = "bad_contract"
    summary = _WORDS.get(cause.name, "Model, loss and data do not fit together.")
    if cause.name == "softmax_over_one_unit" and _softmax_on_the_way(facts):
        symptom, severity = "zero_gradient", "raise"
        summary = "The output is 1 for every input, so every gradient behind it is 0."
    elif (cause.name == "label_out_of_range" and cause.score > 0.9) or (
        cause.name == "missing_activation" and "LogitsOutput" in cause.evidence[0].text
    ):
        severity = "raise"
    elif cause.name == "labels_all_zero":
        share = cause.evidence[0].value
        empty = float(share) if isinstance(share, int | float) else 0.0
        severity = "raise" if empty == 1.0 else "warn" if empty >= 0.5 else "info"
    return Finding(
        symptom=symptom,
        summary=summary,
        where=cause.where,
        step=facts.context.step,
        severity=severity,
        causes=(cause,),
        source=cause.source,
    )


def _scale_finding(cause: Cause) -> Finding:
    return Finding(
        symptom="bad_contract",
        summary="The inputs are far from unit size, which makes training slow and fragile.",
        where=cause.where,
        severity="info",
        causes=(cause,),
    )


def _rescued(facts: Facts) -> list[Finding]:
    """Tell about from_logits=True on a sigmoid or softmax output, which Keras puts right."""
    loss = facts.context.loss
    loss = getattr(facts.context.model, "loss", None) if loss is None else loss
    if getattr(loss, "from_logits", False) is not True or not contract.rescued(facts):
        return []
    view = facts.view
    op = blame.through(facts.outputs[0])
    place = view.place(op) if view is not None and op is not None else "output"
    cause = Cause(
        name="double_activation",
        score=0.5,
        where=("loss", place),
        evidence=(
            Evidence(
                name="rescued",
                value=True,
                text=f"the loss says from_logits=True although '{place}' ends in an activation; "
                "Keras takes the logits behind it, so this training is right",
            ),
        ),
        fix=f"Set from_logits=False, or drop the activation of '{place}': the same pair with a "
        "tf.nn loss or behind a Reshape applies the activation twice.",
    )
    return [
        Finding(
            symptom="bad_contract",
            summary="from_logits=True on an output with an activation; Keras puts it right.",
            where=cause.where,
            severity="info",
            causes=(cause,),
        )
    ]


def _softmax_on_the_way(facts: Facts) -> bool:
    return any(o in facts.reach for o in facts.outputs) and facts.is_own_loss


def _nothing_trainable(model: Any, cause: Cause) -> Finding:
    stock = not hasattr(model, "train_step") or is_stock_train_step(model)
    return Finding(
        symptom="zero_update",
        summary=f"Nothing in '{model.name}' is trainable: no weight can change.",
        where=cause.where,
        severity="raise" if stock else "warn",
        causes=(cause,),
    )


def _untracked(facts: Facts) -> list[Finding]:
    trace = facts.trace
    if trace is None:
        return []
    return [
        Finding(
            symptom="zero_update",
            summary="A weight that the loss depends on is not listed by the model, so no "
            "optimizer changes it.",
            where=cause.where,
            severity="raise" if cause.score >= 0.9 else "warn",
            causes=(cause,),
            source=cause.source,
        )
        for cause in untracked(trace)
    ]


def _no_loss(facts: Facts) -> Finding | None:
    model = facts.context.model
    has_loss = facts.context.loss is not None or getattr(model, "loss", None) is not None
    if has_loss or not getattr(model, "compiled", False) or facts.context.mode != "fit":
        return None
    trace = facts.trace
    if facts.is_own_loss and trace is not None and any(g is not None for g in trace.gradients):
        return None
    if facts.custom_step or (trace is not None and facts.context.model.losses):
        return None
    cause = Cause(
        name="no_loss",
        score=0.97,
        where=("compile",),
        evidence=(
            Evidence(
                name="loss",
                value=None,
                text=f"'{model.name}' was compiled without a loss and no layer adds one",
            ),
        ),
        fix="Give compile() a loss, e.g. model.compile(optimizer, loss='mse'), or call "
        "self.add_loss(...) in a layer.",
    )
    return Finding(
        symptom="bad_contract",
        summary=_WORDS["no_loss"],
        where=("compile",),
        severity="raise",
        causes=(cause,),
    )


# ---- one batch, measured -------------------------------------------------------------


def diagnose(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    sample_weight: Any = None,
    optimizer: Any = None,
) -> Report:
    """Look at one batch without training: what would go wrong in a step, why, and the fix.

    The step is traced and computed on the batch; weights, optimizer, moving statistics,
    metrics and random seeds are afterwards what they were.

    Args:
        model: A Keras model.
        x: Inputs: an array, or a list or dictionary of arrays. More examples tell more; the
            first 512 are looked at.
        y: Targets in the same forms, or None.
        loss: A callable of ``(y_true, y_pred)``, the name of a Keras loss, a list or
            dictionary of these. Defaults to the compiled one.
        sample_weight: Weights in the same forms, or None.
        optimizer: A Keras optimizer. Defaults to the compiled one.

    Returns:
        A :class:`~keras_gradguard.findings.Report`; ``report.ok`` is True when nothing
        deserves a warning.

    Raises:
        TypeError: ``model`` is not a Keras layer or model.

    Example:
    >>> import keras, numpy as np
    >>> m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="softmax")])
    >>> report = diagnose(m, np.ones((8, 2)), np.zeros((8, 1)), loss="mse")
    >>> report.findings[0].cause
    'softmax_over_one_unit'
    """
    if not hasattr(model, "trainable_variables") or not callable(model):
        raise TypeError(
            f"`model` must be a Keras model or layer. Received: {model!r} of type "
            f"{type(model).__name__}"
        )
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    fit = loss is None and bool(getattr(model, "compiled", False))
    context = Context(
        model=model,
        optimizer=optimizer,
        loss=loss,
        batch=Batch(x=x, y=y, sample_weight=sample_weight),
        mode="fit" if fit else "check",
    )
    facts = Facts(context)
    findings = list(_preflight(facts))
    notes: list[str] = []
    if facts.trace is None:
        if facts.trace_error is not None:
            findings += _untraceable(facts, bool(findings))
        return Report(findings=tuple(findings), title=_title(facts), notes=tuple(notes))
    work = Work(Finding(symptom="bad_contract", summary=""), facts)
    if not facts.is_own_loss:
        findings += _untraceable(facts, bool(findings))
        return Report(findings=tuple(findings), title=_title(facts), notes=tuple(facts.notes))
    nothing: list[Finding] = []
    measured = work.attempt("the step", lambda: _measured(facts), nothing)
    findings = _joined(findings, measured)
    scale = work.attempt("the scale of the inputs", lambda: data.input_scale(facts.data), None)
    if scale is not None and not any(c.name == "input_scale" for f in findings for c in f.causes):
        findings.append(_scale_finding(scale))
    return Report(
        findings=tuple(findings),
        title=_title(facts),
        notes=(*facts.notes, *work.notes),
        gradients=_sizes(facts),
    )


def _sizes(facts: Facts) -> tuple[GradientSize, ...]:
    return tuple(
        GradientSize(
            name=n,
            norm=None if g is None else float(np.linalg.norm(np.ravel(g).astype(np.float64))),
        )
        for n, g in facts.gradients.items()
    )


def _title(facts: Facts) -> str:
    model = facts.context.model
    count = len(model.trainable_variables)
    return f"GradGuard: one batch through '{model.name}' ({count} trainable variables)"


def _untraceable(facts: Facts, explained: bool) -> list[Finding]:
    error = facts.trace_error
    if error is None or explained:
        return []
    shape = error.kind in ("ValueError", "InvalidArgumentError") and "shape" in str(error).lower()
    evidence = (Evidence(name="error", value=error.kind, text=f"the step fails: {error}"),)
    causes: tuple[Cause, ...] = ()
    if shape:
        causes = (
            Cause(
                name="wrong_loss_for_labels",
                score=0.7,
                where=("loss", "data"),
                evidence=evidence,
                fix="Class numbers (n,) go with sparse_categorical_crossentropy, one-hot rows "
                "(n, classes) with categorical_crossentropy, (n, 1) with binary_crossentropy.",
            ),
        )
    return [
        Finding(
            symptom="bad_contract",
            summary="The training step cannot be run on this batch.",
            where=("train_step",),
            severity="raise",
            causes=causes,
            evidence=() if causes else evidence,
            source=error.frames[-1].short if error.frames else None,
        )
    ]


def _joined(contract_findings: Sequence[Finding], measured: Sequence[Finding]) -> list[Finding]:
    """Leave out what the measurement says better: the same cause under a contract's heading."""
    told = {f.cause for f in measured if f.severity == "raise"}
    symptoms = {f.symptom for f in measured}
    kept = [
        f
        for f in contract_findings
        if f.cause not in told and not (f.symptom in symptoms and f.symptom == "zero_gradient")
    ]
    return [*measured, *kept]


def _measured(facts: Facts) -> list[Finding]:
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
    rate = optimizer.learning_rate_at(opt)
    if rate == 0:
        return [explain_with(_update_finding(list(facts.variables)), facts)]
    if not live:
        return []
    causes = optimizer.explain_frozen(
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
    cause = optimizer.learning_rate_too_high((), opt, losses)
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
    return optimizer.walk(
        opt,
        [v for v, _ in pairs],
        lambda: [np.asarray(a) for a in run(trace, [trace.loss, *_dense(trace, pairs)])],
        steps,
    )


def _dense(trace: Any, pairs: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    with trace.graph.as_default():
        return [tf.convert_to_tensor(g) for _, g in pairs]
