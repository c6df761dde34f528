"""Which values of a step are finite: one run over the top graph, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.diagnosis.cuts import starts_of
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.opgraph import Op, Value
from keras_gradguard.diagnosis.trace import Trace
from keras_gradguard.diagnosis.view import owners_of

_MOST = 6000
_CONCISE_HEALTH = 3
_FIRST_LOOK = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One operation of the top graph, in the order of creation.

    Args:
        handle: The backend's operation.
        ops: The flat operations it stands for: itself, or the body of a call.
        bad_inputs: Names of its inputs that hold a NaN or Inf.
        bad_outputs: Names of its outputs that hold one.
        bad_entries: How many entries of the outputs are NaN or Inf.
    """

    handle: Any
    ops: tuple[Op, ...]
    bad_inputs: tuple[str, ...] = ()
    bad_outputs: tuple[str, ...] = ()
    bad_entries: int = 0


def float_tensors(handles: Iterable[Any]) -> list[Any]:
    """Return the float outputs of operations."""
    return [t for h in handles for t in h.outputs if t.dtype.is_floating]


def count_bad(
    trace: Trace, tensors: Sequence[Any], instead: Mapping[int, Any] | None = None
) -> dict[str, int]:
    """Count NaN and Inf entries.

    Args:
        trace: The step.
        tensors: Float tensors of the top graph; at most a few thousand are looked at.
        instead: Values to use in place of variables, see ``execute.run``.

    Returns:
        Tensor name -> number of entries that are NaN or Inf.
    """
    chosen = list(tensors)[:_MOST]
    if not chosen:
        return {}
    with trace.graph.as_default(), tf.name_scope("gradguard_probe"):
        # One operation a tensor: number, size, -Inf, +Inf, NaN.
        health = [
            tf.raw_ops.DebugNumericSummaryV2(
                input=t, output_dtype=tf.float32, tensor_debug_mode=_CONCISE_HEALTH
            )
            for t in chosen
        ]
        table = tf.stack(health)
    (values,) = run(trace, [table], instead=instead)
    return {t.name: int(v) for t, v in zip(chosen, values[:, 2:].sum(axis=1), strict=True)}


def forward_handles(trace: Trace) -> list[Any]:
    """Return the operations of the top graph that the loss is computed with, in order."""
    if trace.loss is None:
        return []
    target = trace.scaled_loss if trace.scaled_loss is not None else trace.loss
    seen: set[str] = set()
    todo = [target.op]
    while todo:
        handle = todo.pop()
        if handle.name in seen:
            continue
        seen.add(handle.name)
        todo += [t.op for t in handle.inputs]
    return [h for h in trace.graph.get_operations() if h.name in seen]


def flat_ops(trace: Trace, handle: Any) -> tuple[Op, ...]:
    """Return the flat operations behind one operation of the top graph."""
    for call in trace.ops.calls:
        if call.handle is handle:
            return tuple(trace.ops.ops[call.first : call.last])
    return tuple(op for op in trace.ops.ops if op.handle is handle)


def first_bad_forward(trace: Trace, bad: Mapping[str, int], handles: Sequence[Any]) -> list[Step]:
    """Return the operations that made a NaN or Inf out of finite inputs, in order."""
    found = []
    for handle in handles:
        outputs = [t.name for t in handle.outputs if bad.get(t.name)]
        if not outputs or any(bad.get(t.name) for t in handle.inputs):
            continue
        found.append(
            Step(
                handle=handle,
                ops=flat_ops(trace, handle),
                bad_outputs=tuple(outputs),
                bad_entries=sum(bad[n] for n in outputs),
            )
        )
    return found


def gradients_of(trace: Trace, tensors: Sequence[Any], *, scaled: bool = True) -> list[Any]:
    """Return ``d loss / d tensor`` for tensors of the top graph (dense, or None).

    Args:
        trace: The step.
        tensors: What to differentiate with respect to.
        scaled: Take the loss as it is differentiated in training, loss scale included.
    """
    target = trace.scaled_loss if scaled and trace.scaled_loss is not None else trace.loss
    with trace.graph.as_default():
        found = tf.gradients(target, list(tensors))
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in found]


def first_bad_backward(
    trace: Trace,
    handles: Sequence[Any],
    instead: Mapping[int, Any] | None = None,
    *,
    scaled: bool = True,
) -> tuple[list[Step], dict[str, Any]]:
    """Return the operations whose gradient is finite at the output and not at an input.

    Args:
        trace: The step; its loss must be finite.
        handles: The operations of the forward pass, in order.
        instead: Values to use in place of variables.
        scaled: Whether the loss scale is in.

    Returns:
        The operations, the last of the forward pass first (where the backward pass meets
        trouble first), and tensor name -> its gradient tensor.
    """
    moving = _moving(trace)
    within = [h for h in handles if any(t.name in moving for t in h.outputs)]
    size = _FIRST_LOOK
    while True:
        # Differentiating with respect to what is near the loss is cheap, and trouble
        # mostly starts there.
        part = within[-size:]
        found, known = _bad_backward(trace, part, moving, instead, scaled)
        if found or size >= min(len(within), _MOST):
            return found, known
        size *= 8


def _bad_backward(
    trace: Trace,
    handles: Sequence[Any],
    moving: set[str],
    instead: Mapping[int, Any] | None,
    scaled: bool,
) -> tuple[list[Step], dict[str, Any]]:
    near = {t.name: t for h in handles for t in (*h.inputs, *h.outputs)}
    tensors = [t for t in near.values() if t.dtype.is_floating and t.name in moving]
    gradients = gradients_of(trace, tensors, scaled=scaled)
    known = {t.name: g for t, g in zip(tensors, gradients, strict=True) if g is not None}
    counted = count_bad(trace, list(known.values()), instead)
    bad = {n: counted.get(g.name, 0) for n, g in known.items()}
    found = []
    for handle in reversed(handles):
        inputs = [t.name for t in handle.inputs if bad.get(t.name)]
        if not inputs or any(bad.get(t.name) for t in handle.outputs):
            continue
        if not any(t.name in known for t in handle.outputs):
            continue
        found.append(
            Step(
                handle=handle,
                ops=flat_ops(trace, handle),
                bad_inputs=tuple(inputs),
                bad_entries=sum(bad[n] for n in inputs),
            )
        )
    return found, known


def _moving(trace: Trace) -> set[str]:
    """Return the names of the top graph's tensors that depend on a trainable variable."""
    reads = [o for v in trace.variables for o in starts_of(trace.ops, trace.key(v))[1]]
    return {v.tensor.name for v in trace.ops.descendants(reads) if _is_top(trace, v)}


def _is_top(trace: Trace, value: Value) -> bool:
    return value.tensor is not None and value.tensor.graph is trace.graph


def fresh_values(trace: Trace, keys: Iterable[int]) -> dict[int, Any]:
    """Return the values that variables which hold NaN or Inf by now had at the beginning.

    The layer's own initializer is asked again, which gives the very same numbers when it
    was made with (or drew for itself) an integer seed; otherwise numbers of a usual size
    are drawn. The user's random generators are not touched.

    Args:
        trace: The step.
        keys: ``id(tf_variable)`` of the variables.
    """
    rng = np.random.default_rng(0)
    by_key = {id(v): v for v in trace.captured.values()}
    owners = owners_of(trace.model)
    found = {}
    for key in keys:
        variable = by_key.get(key)
        if variable is None:
            continue
        shape = tuple(variable.shape)
        short = str(variable.name).removesuffix(":0").rsplit("/", 1)[-1]
        initializer = getattr(owners.get(key), f"{short}_initializer", None)
        if callable(initializer) and isinstance(getattr(initializer, "seed", 0), (int, type(None))):
            value = tf.cast(initializer(shape, dtype="float32"), variable.dtype)
        elif len(shape) >= 2:
            fan = float(np.prod(shape[:-1])) + float(shape[-1])
            value = tf.cast(rng.uniform(-1.0, 1.0, shape) * np.sqrt(6.0 / fan), variable.dtype)
        elif "gamma" in short or "variance" in short:
            value = tf.ones(shape, variable.dtype)
        else:
            value = tf.zeros(shape, variable.dtype)
        found[key] = value
    return found


def bad_variables(trace: Trace) -> dict[int, Any]:
    """Return the captured float variables that hold a NaN or Inf now, by ``id``."""
    found = {}
    for variable in trace.captured.values():
        if variable.dtype.is_floating and not bool(
            tf.reduce_all(tf.math.is_finite(variable.read_value()))
        ):
            found[id(variable)] = variable
    return found
