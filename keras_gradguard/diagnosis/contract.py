"""Model against loss against labels, judged on the operations that are really computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import Op, OpGraph, Value
from keras_gradguard.diagnosis.zeros import (
    missing_activation,
    one_column_crossentropy,
    one_unit_softmax,
)
from keras_gradguard.findings import Cause, Evidence

_SCALED = frozenset({"Mul", "RealDiv", "Neg"})
_ELEMENTWISE = frozenset(
    {"Sub", "SquaredDifference", "AddV2", "Mul", "RealDiv", "Maximum", "Minimum", "Equal"}
)


@dataclass(frozen=True, slots=True, eq=False)
class LogitSite:
    """A place that takes logits: where a sigmoid or softmax is (about to be) applied.

    Args:
        op: The operation.
        logits: The value it takes as logits.
        name: How a user would call it.
    """

    op: Op
    logits: Value
    name: str


def logit_sites(ops: Iterable[Op]) -> list[LogitSite]:
    """Find every operation that applies a sigmoid or softmax, explicitly or inside a loss."""
    found = []
    for op in ops:
        if not op.inputs:
            continue
        if op.type == "SparseSoftmaxCrossEntropyWithLogits":
            found.append(LogitSite(op, op.inputs[0], "sparse softmax cross-entropy (logits)"))
        elif op.type == "SoftmaxCrossEntropyWithLogits":
            found.append(LogitSite(op, op.inputs[0], "softmax cross-entropy (logits)"))
        elif op.type in ("LogSoftmax", "Softmax", "Sigmoid"):
            found.append(LogitSite(op, op.inputs[0], op.type.lower()))
        elif op.type == "Softplus":
            found.append(LogitSite(op, op.inputs[0], "softplus (sigmoid cross-entropy)"))
        elif op.type == "Log1p":
            logits = _logistic_argument(op)
            if logits is not None:
                found.append(LogitSite(op, logits, "sigmoid cross-entropy (logits)"))
    return found


def _logistic_argument(op: Op) -> Value | None:
    """Return x of log1p(exp(-|x|)), the core of every stable sigmoid cross-entropy."""
    inner = op.inputs[0].op
    if inner is None or inner.type != "Exp":
        return None
    made = inner.inputs[0].op
    if made is None:
        return None
    if made.type == "Neg":
        absolute = made.inputs[0].op
        return absolute.inputs[0] if absolute is not None and absolute.type == "Abs" else None
    if made.type in ("Select", "SelectV2") and len(made.inputs) == 3:
        negated, plain = made.inputs[1], made.inputs[2]
        if negated.op is not None and negated.op.type == "Neg" and negated.op.inputs[0] is plain:
            return plain
    return None


def squasher_behind(value: Value) -> Op | None:
    """Return the sigmoid or softmax that made a value, through reshapes and constant factors."""
    for _ in range(12):
        op = blame.through(value)
        if op is None:
            return None
        if op.type in blame.SQUASHERS:
            return op
        if op.type not in _SCALED:
            return None
        others = [v for v in op.inputs if blame.constant(v) is None]
        if len(others) != 1:
            return None
        value = others[0]
    return None


def double_activation(facts: Facts, sites: Sequence[LogitSite] | None = None) -> Cause | None:
    """Return ``double_activation`` when a sigmoid/softmax output meets another one on its way.

    Only operations that the loss is computed from count: Keras losses take the logits behind
    a sigmoid or softmax output where they can, and then the activation is not on the way.
    """
    for site in sites if sites is not None else _sites(facts):
        if site.op.type == "Softplus" and site.op.layers:
            continue
        inner = squasher_behind(site.logits)
        if inner is None or inner is site.op:
            continue
        if site.op.layers and inner.layers and not _near_output(site.op, facts):
            continue
        return _double(site, inner, facts)
    return None


def _near_output(op: Op, facts: Facts) -> bool:
    """Return True when only parameter-free operations stand between ``op`` and the loss."""
    todo, seen = list(op.outputs), set(op.outputs)
    while todo:
        value = todo.pop()
        for user in value.uses:
            if user.type in ("MatMul", "Conv2D", "Einsum", "BatchMatMulV2", "BatchMatMulV3"):
                return False
            new = [o for o in user.outputs if o in facts.reach and o not in seen]
            seen.update(new)
            todo += new
    return True


def _double(site: LogitSite, inner: Op, facts: Facts) -> Cause:
    view = facts.view
    place = view.place(inner) if view is not None else (inner.layer or "output")
    kind = inner.type.lower()
    binary = kind == "sigmoid"
    floor = ""
    if binary:
        floor = (
            "; as a logit a value in [0, 1] can only mean probabilities from 0.5 to 0.73, so "
            "where the labels are 0 the loss cannot fall below ln 2 = 0.693"
        )
    outer = view.place(site.op) if view is not None else "loss"
    loss = "BinaryCrossentropy" if binary else "CategoricalCrossentropy"
    return Cause(
        name="double_activation",
        score=0.96,
        where=tuple(dict.fromkeys(("loss" if outer == "loss" else outer, place))),
        evidence=(
            Evidence(
                name="activations_in_a_row",
                value=2,
                text=f"'{place}' already ends in {kind}, and {site.name} in the {outer} takes its "
                f"output for logits and applies one more{floor}",
            ),
        ),
        fix=f"Drop activation='{kind}' on '{place}' (keep the loss on logits; "
        f"keras_gradguard.layers.LogitsOutput does both), or keep it and use a loss on "
        f"probabilities: keras.losses.{loss}(from_logits=False).",
        source=site.op.source,
    )


def _sites(facts: Facts) -> list[LogitSite]:
    view = facts.view
    if view is None:
        return []
    reach = facts.reach
    return logit_sites(op for op in view.ops.ops if any(o in reach for o in op.outputs))


def rescued(facts: Facts) -> bool:
    """Return True when the loss takes the logits behind a sigmoid or softmax output."""
    for output in facts.outputs:
        op = blame.through(output)
        if op is not None and op.type in blame.SQUASHERS and output not in facts.reach:
            return True
    return False


def rescued_output(output: Value, facts: Facts) -> bool:
    """Return True when the loss takes the logits behind this sigmoid or softmax output."""
    op = blame.through(output)
    return op is not None and op.type in blame.SQUASHERS and op.inputs[0] in facts.reach


def declared_unused(model: Any, loss: Any = None) -> bool:
    """Return True when compile() says itself that some output has no loss.

    Args:
        model: A compiled model, or one trained in a loop.
        loss: The loss if it is not the compiled one: None entries in a list or dictionary,
            and outputs left out of a dictionary, are meant.
    """
    chosen = loss if loss is not None else getattr(model, "loss", None)
    names = list(getattr(model, "output_names", None) or ())
    if isinstance(chosen, dict):
        return any(v is None for v in chosen.values()) or len(chosen) < len(names)
    if isinstance(chosen, list | tuple):
        return any(v is None for v in chosen)
    return False


def probability_clips(facts: Facts) -> list[Op]:
    """Return the clips to just inside [0, 1] that outputs of the model go through."""
    view = facts.view
    if view is None or not facts.outputs:
        return []
    after = view.ops.descendants(facts.outputs)
    return [
        op
        for op in view.ops.ops
        if op.type in blame.CLIPS
        and any(v in after for v in op.inputs)
        and any(o in facts.reach for o in op.outputs)
        and blame.is_probability_clip(op)
    ]


def missing(facts: Facts) -> Cause | None:
    """Return ``missing_activation`` when outputs outside [0, 1] go to a loss on probabilities."""
    if not probability_clips(facts):
        return None
    for stats in facts.predictions:
        if stats.min < -1e-3 or stats.max > 1 + 1e-3:
            maker = blame.through(facts.outputs[0]) if facts.outputs else None
            return missing_activation(facts, stats.min, stats.max, maker)
    return None


def logits_output_mismatch(facts: Facts) -> Cause | None:
    """Return ``missing_activation`` when a LogitsOutput feeds a loss on probabilities."""
    trace = facts.trace
    if trace is None or not probability_clips(facts):
        return None
    outputs = {v.tensor.name for v in facts.outputs if v.tensor is not None}
    for call in trace.layers:
        if type(call.layer).__name__ == "LogitsOutput" and any(
            t.name in outputs for t in call.outputs
        ):
            return Cause(
                name="missing_activation",
                score=0.97,
                where=("loss", call.name),
                evidence=(
                    Evidence(
                        name="from_logits",
                        value=False,
                        text=f"'{call.name}' is a LogitsOutput and gives logits, but the loss "
                        "takes them for probabilities",
                    ),
                ),
                fix=f"Compile with loss=model.get_layer('{call.name}').loss() (or any Keras loss "
                "with from_logits=True).",
            )
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
    after = view.ops.descendants([*facts.outputs, *_logits_behind(facts.outputs)])
    for op in view.ops.ops:
        if not any(o in facts.reach for o in op.outputs) or op.layers:
            continue
        if op.type.endswith("SoftmaxCrossEntropyWithLogits") or _divides_by_own_sum(op):
            value = op.inputs[0]
        else:
            continue
        if value in after and value.shape and value.shape[-1] == 1 and len(value.shape) > 1:
            place = next((o.layer for o in view.ops.producers(value, 60) if o.layer), "output")
            return one_column_crossentropy(place, op.source)
    return None


def _logits_behind(outputs: Sequence[Value]) -> list[Value]:
    found = []
    for output in outputs:
        op = blame.through(output)
        if op is not None and op.type in blame.SQUASHERS:
            found.append(op.inputs[0])
    return found


def _divides_by_own_sum(op: Op) -> bool:
    if op.type != "RealDiv":
        return False
    under = op.inputs[1].op
    return under is not None and under.type == "Sum" and under.inputs[0] is op.inputs[0]


def swapped(facts: Facts) -> Cause | None:
    """Return ``loss_arguments_swapped`` when the loss treats the labels as the prediction."""
    view, targets = facts.view, facts.target_values()
    if view is None or not targets or not facts.outputs:
        return None
    from_y = view.ops.descendants(targets)
    sources = [*facts.outputs, *_logits_behind(facts.outputs)]
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
    return _logistic_argument(op) if op.type == "Log1p" else None


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
        if op.type not in _ELEMENTWISE or op.layers or len(op.inputs) != 2:
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


def labels(facts: Facts) -> list[Cause]:
    """Return what is wrong with the labels themselves: out of range, no class, wrong format."""
    view = facts.view
    if view is None:
        return []
    causes: list[Cause] = []
    arrays = facts.target_arrays()
    if not arrays or not facts.outputs:
        return causes
    targets = facts.target_values()
    if len(targets) != len(arrays):
        return causes
    for array, target, output in zip(arrays, targets, facts.outputs, strict=False):
        if target not in facts.reach:
            continue
        shape = output.shape or ()
        units = shape[-1] if shape else None
        sparse = _sparse_site(facts)
        if sparse is not None and array.size:
            cause = _class_range(array, sparse, _ignored_class(facts))
            if cause is not None:
                causes.append(cause)
            continue
        reach = _reachable(output)
        if reach is not None and array.size and _compared(target, output, facts):
            cause = _outside(array, reach, output, facts)
            if cause is not None:
                causes.append(cause)
        if units is not None and units > 1 and _needs_one_hot(view.ops, facts):
            from keras_gradguard.diagnosis.data import labels_all_zero

            empty = labels_all_zero(array, units)
            if empty is not None:
                causes.append(empty)
    return causes


def _compared(target: Value, output: Value, facts: Facts) -> bool:
    """Return True when the loss takes targets and outputs for the same kind of number."""
    view = facts.view
    if view is None:
        return False
    wide, narrow = output.shape or (), target.shape or ()
    if wide and narrow and len(narrow) < len(wide) and wide[-1] != 1:
        return False
    for op in view.ops.ops:
        if op.type not in ("Sub", "SquaredDifference") or op.layers or len(op.inputs) != 2:
            continue
        roots = {_root(v) for v in op.inputs}
        if roots == {target, output}:
            return True
    return bool(probability_clips(facts)) or any(
        site.op.type == "Log1p" and site.logits in _logits_behind([output])
        for site in _sites(facts)
    )


def compared_directly(facts: Facts) -> bool:
    """Return True when the loss takes the difference of an output and its target."""
    return any(_compared(t, o, facts) for t in facts.target_values() for o in facts.outputs)


def _root(value: Value) -> Value:
    for _ in range(20):
        if value.op is None or value.op.type not in blame.PASSES or not value.op.inputs:
            break
        value = value.op.inputs[0]
    return value


def _sparse_site(facts: Facts) -> Op | None:
    view = facts.view
    if view is None:
        return None
    for op in view.ops.ops:
        if op.type == "SparseSoftmaxCrossEntropyWithLogits" and any(
            o in facts.reach for o in op.outputs
        ):
            return op
    return None


def _needs_one_hot(ops: OpGraph | None, facts: Facts) -> bool:
    if ops is None:
        return False
    return any(
        (op.type == "SoftmaxCrossEntropyWithLogits"
         or (op.type == "RealDiv" and _divides_by_own_sum(op)))
        and not op.layers
        and any(o in facts.reach for o in op.outputs)
        for op in ops.ops
    )  # fmt: skip


def _ignored_class(facts: Facts) -> int | None:
    loss = facts.context.loss
    if loss is None:
        loss = getattr(facts.context.model, "loss", None)
    ignored = getattr(loss, "ignore_class", None)
    return int(ignored) if ignored is not None else None


def _class_range(array: NDArray[Any], op: Op, ignored: int | None) -> Cause | None:
    shape = op.inputs[0].shape or ()
    units = shape[-1] if shape else None
    if units is None:
        return None
    values = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    bad = values[(values < 0) | (values >= units)]
    if ignored is not None:
        bad = bad[bad != ignored]
    if not bad.size:
        return None
    worst = bad.max() if bad.max() >= units else bad.min()
    off = bool(values.min() == 1 and values.max() == units)
    return Cause(
        name="label_out_of_range",
        score=0.97,
        where=("data", "y"),
        evidence=(
            Evidence(
                name="label",
                value=float(worst),
                text=f"{bad.size} of {values.size} labels have no output unit: the output has "
                f"{units} units (labels 0 to {units - 1}), y holds {worst:g}",
            ),
        ),
        fix="Labels must count from 0: y - 1."
        if off
        else f"Give the output {int(values.max()) + 1} units, or map the labels to 0..{units - 1} "
        "(ignore_class=-1 leaves out examples without a class).",
    )


def _reachable(output: Value) -> tuple[float, float, str] | None:
    op = blame.through(output)
    if op is None:
        return None
    return {
        "Sigmoid": (0.0, 1.0, "sigmoid"),
        "Softmax": (0.0, 1.0, "softmax"),
        "Tanh": (-1.0, 1.0, "tanh"),
        "Relu": (0.0, float("inf"), "relu"),
    }.get(op.type)


def _outside(
    array: NDArray[Any], reach: tuple[float, float, str], output: Value, facts: Facts
) -> Cause | None:
    low, high, kind = reach
    values = array.astype(np.float64).ravel()
    values = values[np.isfinite(values)]
    slack = 0.05 if kind != "relu" else 1e-6
    out = (values < low - slack) | (values > high + slack)
    share = float(out.mean()) if values.size else 0.0
    if share < 0.05:
        return None
    op = blame.through(output)
    place = (op.layer if op is not None else None) or "output"
    bound = f"[{low:g}, {high:g}]" if np.isfinite(high) else f"[{low:g}, inf)"
    return Cause(
        name="label_out_of_range",
        score=0.6 + 0.3 * share,
        where=("data", "y", place),
        evidence=(
            Evidence(
                name="targets_out_of_reach",
                value=share,
                text=f"{100 * share:.0f} % of the targets lie outside {bound}, the range of the "
                f"{kind} of '{place}' (y runs from {values.min():.4g} to {values.max():.4g})",
            ),
        ),
        fix=f"Use no activation on '{place}' for such targets, or scale y into {bound}.",
    )


def causes(facts: Facts) -> list[Cause]:
    """Return everything that is wrong between model, loss and labels, best first."""
    sites = _sites(facts)
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
