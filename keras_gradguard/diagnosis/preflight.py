"""What is wrong with model, loss and data by themselves, before any number is looked at."""

from __future__ import annotations

import logging
from typing import Any

from keras_gradguard.diagnosis import blame, contract, data, logits, optimizer
from keras_gradguard.diagnosis.context import Batch, Context
from keras_gradguard.diagnosis.facts import Facts, outside_graphs
from keras_gradguard.diagnosis.normalisation import batch_of_one
from keras_gradguard.diagnosis.sandbox import is_stock_train_step
from keras_gradguard.diagnosis.untracked import untracked
from keras_gradguard.diagnosis.work import Work
from keras_gradguard.findings import Cause, Evidence, Finding, Severity

logger = logging.getLogger("keras_gradguard")

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
            # Without a loss, whether anything has a gradient all the same is the question.
            there = loss is not None or getattr(model, "loss", None) is not None
            return preflight_of(Facts(context, depth="forward" if there else "step"))
        except Exception as error:  # a look ahead must not stop a run
            logger.warning("Preflight could not look at the model: %s", error)
            return ()

    return outside_graphs(work)


def preflight_of(facts: Facts) -> tuple[Finding, ...]:
    """Return what is wrong by itself in measurements that may be shared."""
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


def scale_finding(cause: Cause) -> Finding:
    """Return the finding for inputs of a scale far from 1."""
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
    if getattr(loss, "from_logits", False) is not True or not logits.rescued(facts):
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
