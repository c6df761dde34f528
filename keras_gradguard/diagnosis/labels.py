"""Labels against the number of units and the range that the output can reach."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.clips import divides_by_own_sum, probability_clips
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.logits import logits_behind, sites_of
from keras_gradguard.diagnosis.opgraph import Op, OpGraph, Value
from keras_gradguard.findings import Cause, Evidence

ELEMENTWISE = frozenset(
    {"Sub", "SquaredDifference", "AddV2", "Mul", "RealDiv", "Maximum", "Minimum", "Equal"}
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
        site.op.type == "Log1p" and site.logits in logits_behind([output])
        for site in sites_of(facts)
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
         or (op.type == "RealDiv" and divides_by_own_sum(op)))
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
