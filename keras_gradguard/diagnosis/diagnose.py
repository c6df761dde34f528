"""Look at a model, its loss and one batch without training: what would go wrong, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_gradguard.diagnosis import data
from keras_gradguard.diagnosis.context import Batch, Context
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.measured import measured_findings
from keras_gradguard.diagnosis.preflight import preflight_of, scale_finding
from keras_gradguard.diagnosis.work import Work
from keras_gradguard.findings import Cause, Evidence, Finding, GradientSize, Report


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
    facts = Facts(context, depth="values")
    findings = list(preflight_of(facts))
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
    measured = work.attempt("the step", lambda: measured_findings(facts), nothing)
    findings = _joined(findings, measured)
    scale = work.attempt("the scale of the inputs", lambda: data.input_scale(facts.data), None)
    if scale is not None and not any(c.name == "input_scale" for f in findings for c in f.causes):
        findings.append(scale_finding(scale))
    unmeasured: tuple[GradientSize, ...] = ()
    ran = "gradients" in vars(facts)  # the step could be computed on this batch
    sizes = work.attempt("gradient sizes", lambda: _sizes(facts), unmeasured) if ran else unmeasured
    return Report(
        findings=tuple(findings),
        title=_title(facts),
        notes=(*facts.notes, *work.notes),
        gradients=sizes,
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
