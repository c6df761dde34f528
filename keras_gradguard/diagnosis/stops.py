"""Gradients of what lies behind a ``stop_gradient``, where no tape goes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops

from keras_gradguard.diagnosis.opgraph import Op, Value
from keras_gradguard.diagnosis.trace import Trace

# Their gradients change the operation itself.
_CALLS = frozenset({"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"})


class _UnknownError(Exception):
    """The gradient cannot be told."""


def behind_stops(trace: Trace) -> dict[str, Any]:
    """Differentiate from where a tape arrived back to the outputs of each ``stop_gradient``.

    A tape does not follow what ``stop_gradient`` gives, nor what is computed from that alone.
    Whether anything comes back so far has to be known to tell whether the stop takes it away.

    Args:
        trace: A traced step with the gradients of its values. Its graph must be the default.

    Returns:
        Name of a tensor of the top graph -> its gradient. Left out: what gets None, and what
        an operation that cannot be differentiated by itself takes.
    """
    if not trace.value_gradients:
        return {}
    stopped = [o for op in trace.ops.ops if op.type == "StopGradient" for o in op.outputs]
    gradients: dict[str, Any] = {}
    known = ChainMap(gradients, trace.value_gradients)
    unknown: set[Value] = set()
    for value in sorted(trace.ops.descendants(stopped), key=lambda v: -v.order):
        name = getattr(value.tensor, "name", None)
        if name is None or trace.ops.value(name) is not value or name in known:
            continue
        if not value.tensor.dtype.is_floating:
            continue
        try:
            parts = [
                part
                for op in dict.fromkeys(value.uses)
                for part in _handed_back(op, value, known, unknown)
            ]
        except _UnknownError:
            unknown.add(value)
            continue
        if parts:
            gradients[name] = parts[0] if len(parts) == 1 else tf.add_n(parts)
    return gradients


def _handed_back(op: Op, value: Value, known: Mapping[str, Any], unknown: set[Value]) -> list[Any]:
    """Return what one operation hands back to ``value``, a tensor for each time it takes it."""
    if not unknown.isdisjoint(op.outputs):
        raise _UnknownError
    if op.handle is None or op.handle.graph is not value.tensor.graph or op.type in _CALLS:
        raise _UnknownError  # the way into a function or a loop
    arriving = [known.get(o.name) for o in op.handle.outputs]
    if all(g is None for g in arriving):
        return []
    try:
        function = framework_ops.get_gradient_function(op.handle)
        if function is None:
            return []
        filled = [
            tf.zeros_like(o) if g is None and o.dtype.is_floating else g
            for o, g in zip(op.handle.outputs, arriving, strict=True)
        ]
        given = function(op.handle, *filled)
    except LookupError:
        return []  # not differentiable: an operation without a gradient
    except (TypeError, ValueError, NotImplementedError) as problem:
        # Some gradients are not there for every attribute of an operation.
        raise _UnknownError from problem
    listed = given if isinstance(given, (list, tuple)) else [given]
    return [
        tf.convert_to_tensor(g)
        for g, taken in zip(listed, op.handle.inputs, strict=True)
        if g is not None and taken is value.tensor
    ]
