"""Model against loss against labels, judged on the operations that are really computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.clips import divides_by_own_sum, probability_clips
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.labels import ELEMENTWISE, labels
from keras_gradguard.diagnosis.logits import (
    double_activation,
    logistic_argument,
    logits_behind,
    logits_output_mismatch,
    sites_of,
)
from keras_gradguard.diagnosis.opgraph import Op, Value
from keras_gradguard.diagnosis.zero_causes import (
    missing_activation,
    one_column_crossentropy,
    one_unit_softmax,
)
from keras_gradguard.findings import Cause, Evidence


def missing(facts: Facts) -> Cause | None:
    """Return ``missing_activation`` when outputs outside [0, 1] go to a loss on probabilities."""
    if not probability_clips(facts):
        return None
    for stats in facts.predictions:
        if stats.min < -1e-3 or stats.max > 1 + 1e-3:
            maker = blame.through(facts.outputs[0]) if facts.outputs else None
            return missing_activation(facts, stats.min, stats.max, maker)
    return None


def softmax_over_one_unit(facts: Facts) -> Cause | None:
    """Return ``softmax_over_one_unit`` when an output is a softmax over an axis of size one."""
    view = facts.view
    for output in facts.outputs:
        op = blame.through(output)
        if op is None or op.type != "Softmax":
            continue
        shape = op.outputs[0].shape
        if shape and shape[-1] == 1:
            place = view.place(op) if view is not None else "output"
            return one_unit_softmax(place, op.source)
    return None


def one_column(facts: Facts) -> Cause | None:
    """Return ``wrong_loss_for_labels`` for a categorical cross-entropy on a single column."""
    view = facts.view
    if view is None:
        return None
    after = view.ops.descendants([*facts.outputs, *logits_behind(facts.outputs)])
    for op in view.ops.ops:
        if not any(o in facts.reach for o in op.outputs) or op.layers:
            continue
        if op.type.endswith("SoftmaxCrossEntropyWithLogits") or divides_by_own_sum(op):
            value = op.inputs[0]
        else:
            continue
        if value in after and value.shape and value.shape[-1] == 1 and len(value.shape) > 1:
            place = next((o.layer for o in view.ops.producers(value, 60) if o.layer), "output")
            return one_column_crossentropy(place, op.source)
    return None


def swapped(facts: Facts) -> Cause | None:
    """Return ``loss_arguments_swapped`` when the loss treats the labels as the prediction."""
    view, targets = facts.view, facts.target_values()
    if view is None or not targets or not facts.outputs:
        return None
    from_y = view.ops.descendants(targets)
    sources = [*facts.outputs, *logits_behind(facts.outputs)]
    from_model = view.ops.descendants(sources)
    on_y, on_model = [], False
    for op in view.ops.ops:
        if op.layers or not op.inputs:
            continue
        value = op.inputs[0]
        labels_first = op.type.endswith("SoftmaxCrossEntropyWithLogits")
        is_log = op.type in ("Log", "LogSoftmax") or _logistic_of(op) is not None or labels_first
        if not is_log:
            continue
        if _logistic_of(op) is not None:
            value = _logistic_of(op) or value
        if value in from_model:
            on_model = True
        elif value in from_y:
            partners = op.inputs[1:] if labels_first else _multiplied_with(op)
            if any(v in from_model for v in partners):
                on_y.append(op)
    if not on_y or on_model:
        return None
    return Cause(
        name="loss_arguments_swapped",
        score=0.95,
        where=("loss",),
        evidence=(
            Evidence(
                name="logarithm_of_labels",
                value=len(on_y),
                text="the loss takes the logarithm of the labels and weights it with the "
                "prediction: y_true and y_pred are exchanged",
            ),
        ),
        fix="Keras losses are called loss(y_true, y_pred): labels first.",
        source=on_y[0].source,
    )


def _logistic_of(op: Op) -> Value | None:
    return logistic_argument(op) if op.type == "Log1p" else None


def _multiplied_with(op: Op) -> list[Value]:
    found: list[Value] = []
    todo, seen = list(op.outputs), set(op.outputs)
    for _ in range(40):
        if not todo:
            break
        value = todo.pop()
        for user in value.uses:
            if user.type in ("Mul", "MulNoNan", "Xlogy"):
                found += [v for v in user.inputs if v is not value]
            elif user.type in (*blame.PASSES, "Neg", "Sub", "AddV2"):
                found += [v for v in user.inputs if v is not value and v not in seen]
                new = [o for o in user.outputs if o not in seen]
                seen.update(new)
                todo += new
    return found


def broadcast(facts: Facts) -> Cause | None:
    """Return ``loss_broadcast`` when labels (n,) and outputs (n, 1) make an (n, n) table."""
    view, targets = facts.view, facts.target_values()
    if view is None or not targets or not facts.outputs:
        return None
    from_y = view.ops.descendants(targets)
    from_model = view.ops.descendants(facts.outputs)
    for op in view.ops.ops:
        if op.type not in ELEMENTWISE or op.layers or len(op.inputs) != 2:
            continue
        if not any(o in facts.reach for o in op.outputs):
            continue
        a, b = op.inputs
        if not _opposed(a, b, from_y, from_model):
            continue
        shapes = [v.shape for v in (a, b, op.outputs[0])]
        if any(s is None or None in s for s in shapes):
            continue
        sizes = [int(np.prod(s)) for s in shapes]  # type: ignore[arg-type]
        if min(sizes[:2]) > 1 and sizes[2] > max(sizes[:2]):
            y, p = (a, b) if a in from_y else (b, a)
            return _broadcast_cause(op, y.shape or (), p.shape or (), op.outputs[0].shape or ())
    return None


def _opposed(a: Value, b: Value, from_y: set[Value], from_model: set[Value]) -> bool:
    def side(v: Value) -> str:
        if v in from_model:
            return "both" if v in from_y else "model"
        return "y" if v in from_y else ""

    return {side(a), side(b)} == {"y", "model"}


def _broadcast_cause(op: Op, y: Any, p: Any, out: Any) -> Cause:
    def told(shape: Any) -> str:
        return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"

    column = len(p) > len(y)
    return Cause(
        name="loss_broadcast",
        score=0.95,
        where=("loss", "data"),
        evidence=(
            Evidence(
                name="broadcast_shape",
                value=told(out),
                text=f"labels of shape {told(y)} against outputs of shape {told(p)} broadcast to "
                f"{told(out)} inside the loss: every label is compared with every prediction",
            ),
        ),
        fix="Make the shapes equal: y = y[:, None], or squeeze the output "
        "(keras.ops.squeeze(y_pred, -1))."
        if column
        else "Make the shapes equal before the loss: reshape the labels to the shape of the "
        "output.",
        source=op.source,
    )


def causes(facts: Facts) -> list[Cause]:
    """Return everything that is wrong between model, loss and labels, best first."""
    sites = sites_of(facts)
    found: list[Cause | None] = [
        softmax_over_one_unit(facts),
        double_activation(facts, sites) if facts.is_own_loss else None,
        logits_output_mismatch(facts) or (missing(facts) if facts.is_own_loss else None),
        one_column(facts) if facts.is_own_loss else None,
        swapped(facts),
        broadcast(facts),
        *labels(facts),
    ]
    return sorted((c for c in found if c is not None), key=lambda c: -c.score)
