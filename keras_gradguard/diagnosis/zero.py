"""Gradients that are exactly 0 by the way the step is built, and clips that cut every entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.diagnosis import probe
from keras_gradguard.diagnosis.cuts import Way, open_values, starts_of, way
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.explainer import Explainer
from keras_gradguard.diagnosis.opgraph import Op, Value
from keras_gradguard.diagnosis.oracle import ZERO_INPUTS, Oracle
from keras_gradguard.diagnosis.trace import Trace, backend_variable
from keras_gradguard.diagnosis.view import StepView, VariableSeen, view_of_trace
from keras_gradguard.diagnosis.wording import listed, op_words, shape_words, unique
from keras_gradguard.findings import Cause, Evidence

_CLIPS = frozenset({"ClipByValue", "Minimum", "Maximum", "Relu6"})
_CLIP_CALLS = frozenset({"clip", "minimum", "maximum", "relu6", "hard_sigmoid", "hard_tanh"})


def zero_gradient(trace: Trace, *, variables: Sequence[Any] | None = None) -> tuple[Cause, ...]:
    """Explain gradients that are exactly 0.

    Args:
        trace: A traced step.
        variables: Variables whose gradient is 0. Defaults to those whose gradient is 0 on
            the trace's batch.

    Returns:
        Causes, best first: ``zero_gradient_op`` and ``second_derivative_of_relu`` are
        judged from the graph alone; ``clip_in_forward`` by running it on the batch: the
        gradient is not 0 behind the clip and 0 before it, in every entry.
    """
    view = view_of_trace(trace)
    keys = None if variables is None else {id(backend_variable(v)) for v in variables}
    asked = [
        v
        for v, zero in zip(view.variables, _are_zero(trace, keys), strict=True)
        if not v.none and (zero if keys is None else v.key in keys)
    ]
    if not asked:
        return ()
    causes = [*_by_structure(view, asked), *_by_clipping(trace, view, asked)]
    return tuple(sorted(causes, key=lambda c: -c.score))


def _are_zero(trace: Trace, keys: set[int] | None) -> list[bool]:
    """Return for each variable whether its gradient is exactly 0 (not asked when given)."""
    if keys is not None or not trace.gradients:
        return [False] * len(trace.variables)
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in trace.gradients]
    with trace.graph.as_default():
        sizes = [
            tf.reduce_sum(tf.cast(tf.not_equal(g, 0), tf.int32)) for g in dense if g is not None
        ]
    counts = iter(run(trace, sizes))
    return [g is not None and int(next(counts)) == 0 for g in dense]


# ---- structure -------------------------------------------------------------------------


def _by_structure(view: StepView, asked: Sequence[VariableSeen]) -> list[Cause]:
    oracle = Oracle()
    groups: dict[Op, list[VariableSeen]] = {}
    cut: list[VariableSeen] = []
    passing = open_values(view.ops, oracle, view.loss)
    moving = open_values(view.ops, oracle, view.loss, zeros_cut=True)
    for variable in asked:
        _, starts = starts_of(view.ops, variable.key)
        if passing.isdisjoint(starts):
            # TensorFlow gives zeros in place of None for what a while loop carries, and
            # for one branch of a cond.
            cut.append(variable)
            continue
        if not moving.isdisjoint(starts):
            continue
        for met in way(view.ops, oracle, starts, view.loss, zeros_cut=True).cuts:
            index = ZERO_INPUTS.get(met.op.type)
            if index is not None and met.op.inputs[index] is met.value:
                groups.setdefault(met.op, []).append(variable)
                break
    causes = list(Explainer(view).explain(cut)) if cut else []
    for op, variables in groups.items():
        names = [v.name for v in variables]
        place = view.place(op)
        line = op.frames[-1] if op.frames else None
        second = op.type != "Sign" or _is_derivative(op)
        what = "a derivative of a ReLU or of abs" if second else op_words(op)
        text = (
            f"{what} in {place!r} ({shape_words(op.inputs[0])}) has the derivative 0 everywhere"
            + (f" ({line})" if line else "")
            + f"; every way from {listed(names)} to the loss goes through it"
        )
        causes.append(
            Cause(
                name="second_derivative_of_relu" if second else "zero_gradient_op",
                score=0.95,
                where=unique((place,), [v.layer for v in variables], names),
                evidence=(Evidence(name="operation", value=op.type, text=text),),
                fix="Use a smooth activation (softplus, gelu, swish, tanh) where the loss holds "
                "a derivative of the model."
                if second
                else f"Wrap `{op_words(op)}` in keras_gradguard.layers.StraightThrough, or use "
                "tanh(k * x) while training.",
                source=line.short if line else None,
            )
        )
    return causes


def _is_derivative(op: Op) -> bool:
    return "gradient_tape/" in op.name or op.name.startswith("gradients/")


# ---- clips -----------------------------------------------------------------------------


def _by_clipping(trace: Trace, view: StepView, asked: Sequence[VariableSeen]) -> list[Cause]:
    candidates = _own_clips(trace)
    if not candidates:
        return []
    oracle = Oracle()  # one for all: it remembers what it asked TensorFlow about operations
    ways = {v.key: _way(view, v, oracle) for v in asked}
    passed = {op for w in ways.values() for op in w.passed}
    clips = [op for op in candidates if op in passed]
    if not clips:
        return []
    handles = [op.handle for op in clips]
    tensors = [_through(op).tensor for op in clips] + [h.outputs[0] for h in handles]
    gradients = probe.gradients_of(trace, tensors)
    known = [g for g in gradients if g is not None]
    with trace.graph.as_default():
        sizes = [tf.reduce_max(tf.abs(tf.cast(g, tf.float32))) for g in known]
    numbers = iter(run(trace, [*sizes, *(_through(op).tensor for op in clips)]))
    largest = [None if g is None else float(next(numbers)) for g in gradients]
    values = list(numbers)
    before, after = largest[: len(clips)], largest[len(clips) :]
    causes = []
    for op, value, low, high in zip(clips, values, before, after, strict=True):
        if low == 0 and high is not None and high > 0:
            causes.append(_clip_cause(view, op, op, value, asked, ways))
    if not causes:
        # min and max of one clip share the work: half the entries stop at either.
        by_output = {o.outputs[0]: i for i, o in enumerate(clips)}
        for i, op in enumerate(clips):
            j = by_output.get(_through(op))
            if j is not None and before[j] == 0 and (after[i] or 0) > 0 and after[j]:
                causes.append(_clip_cause(view, clips[j], op, values[j], asked, ways))
    return causes[:2]


def _way(view: StepView, variable: VariableSeen, oracle: Oracle) -> Way:
    _, starts = starts_of(view.ops, variable.key)
    return way(view.ops, oracle, starts, view.loss)


def _own_clips(trace: Trace) -> list[Op]:
    """Return the user's own clips in the top graph."""
    return [
        op
        for op in trace.ops.ops
        if op.type in _CLIPS
        and op.handle is not None
        and op.handle.graph is trace.graph
        and (op.frames or op.api)
        and (op.api is None or op.api in _CLIP_CALLS)
    ]


def _through(op: Op) -> Value:
    """Return the input that the clip is about: the one of the output's shape."""
    shape = op.outputs[0].shape
    for value in op.inputs:
        if value.is_float and value.shape == shape and not _is_constant(value):
            return value
    return op.inputs[0]


def _is_constant(value: Value) -> bool:
    return value.op is not None and value.op.type == "Const"


def _clip_cause(
    view: StepView,
    first: Op,
    last: Op,
    value: Any,
    asked: Sequence[VariableSeen],
    ways: dict[int, Way],
) -> Cause:
    place = view.place(first)
    line = first.frames[-1] if first.frames else None
    behind = [v for v in asked if first in ways[v.key].passed]
    array = np.asarray(value, dtype=np.float64)
    name = "clip" if first is not last else op_words(first)
    text = (
        f"{name} in {place!r} cuts off all {array.size} entries: they run from "
        f"{array.min():.4g} to {array.max():.4g}"
        + (f" ({line})" if line else "")
        + "; the gradient is not 0 behind it and exactly 0 before it"
    )
    return Cause(
        name="clip_in_forward",
        score=0.93,
        where=unique((place,), [v.layer for v in behind], [v.name for v in behind]),
        evidence=(
            Evidence(name="clipped_fraction", value=1.0, text=text),
            Evidence(
                name="clipped_range",
                value=f"{array.min():.4g}..{array.max():.4g}",
                text=f"no gradient passes for {listed(v.name for v in behind)}",
            ),
        ),
        fix="Take the clip out of the forward pass and the loss (a loss with from_logits=True "
        "needs none), scale what goes in, or clip gradients instead (clipnorm).",
        source=line.short if line else None,
    )
