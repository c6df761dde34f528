"""Does a gradient pass through one operation? Asked of TensorFlow itself, one op at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops

from keras_gradguard.diagnosis.opgraph import ALIAS, ASSIGN_OPS, READ_OPS, Op, Value

ZERO_INPUTS = {
    "Sign": 0,
    "ReluGrad": 1,
    "Relu6Grad": 1,
    "LeakyReluGrad": 1,
}
"""Operations whose registered gradient is exactly 0 everywhere -> the input it is 0 for."""

# Registered, and None all the same (tensorflow/python/ops/math_grad.py); for eager
# operations, which cannot be copied into a scratch graph.
_ALWAYS_NONE = frozenset(
    {
        "ArgMax",
        "ArgMin",
        "Ceil",
        "Floor",
        "FloorDiv",
        "PreventGradient",
        "Rint",
        "Round",
        "StopGradient",
        "TruncateDiv",
    }
)
_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless"})


def carries(value: Value) -> bool:
    """Return True when a tensor can carry a gradient at all (floats, and lists of tensors)."""
    return value.is_float or value.dtype == "variant"


class Oracle:
    """Remembers what TensorFlow answered for each kind of operation."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._known: dict[Any, tuple[bool, ...]] = {}

    def passes(self, op: Op, value: Value) -> bool:
        """Return True when ``op`` hands a gradient back to its input ``value``.

        Args:
            op: An operation of an :class:`~keras_gradguard.diagnosis.opgraph.OpGraph`.
            value: One of its inputs.

        Returns:
            False when the gradient with respect to ``value`` is None: no gradient is
            registered, the registered one is None, or no output can carry one.
        """
        if op.type == ALIAS:
            return carries(value) and any(carries(o) for o in op.outputs)
        if op.type in ("If", "While") or op.type in ASSIGN_OPS | _PYTHON_OPS:
            return False
        if op.type in READ_OPS:
            return all(value not in a.outputs for a in op.assigned)
        if not carries(value) or not any(carries(o) for o in op.outputs):
            return False
        if "_gradient_op_type" in op.attrs:
            return True  # tf.custom_gradient: the user's word for it
        answers = self._ask(op)
        return any(
            answer for answer, taken in zip(answers, op.inputs, strict=False) if taken is value
        )

    def _ask(self, op: Op) -> tuple[bool, ...]:
        key = (op.type, tuple(v.dtype for v in (*op.inputs, *op.outputs)), op.handle is None)
        if key not in self._known:
            self._known[key] = _answer(op)
        return self._known[key]


def _answer(op: Op) -> tuple[bool, ...]:
    if op.type in _ALWAYS_NONE:
        return (False,) * len(op.inputs)
    if op.handle is not None:
        try:
            return _differentiate(op.handle)
        except LookupError:
            return (False,) * len(op.inputs)
        except (TypeError, ValueError, AttributeError, IndexError):
            # A gradient function may want more than a bare copy of the op has (constant
            # inputs, known shapes). Then its being registered has to do.
            pass
    try:
        registered = framework_ops._gradient_registry.lookup(op.type)
    except LookupError:
        registered = None
    return tuple(registered is not None and carries(v) for v in op.inputs)


def _differentiate(operation: Any) -> tuple[bool, ...]:
    """Copy one operation into a scratch graph and differentiate it there."""
    with tf.Graph().as_default() as graph:
        inputs = [
            tf.compat.v1.placeholder(t.dtype, None if t.dtype == tf.variant else t.shape)
            for t in operation.inputs
        ]
        copy = graph._create_op_internal(
            operation.type,
            inputs,
            [t.dtype for t in operation.outputs],
            attrs=dict(operation.node_def.attr),
            name="copy",
        )
        outputs = [t for t in copy.outputs if t.dtype.is_floating or t.dtype.is_complex]
        if not outputs:
            raise ValueError("nothing to differentiate: only variants")
        gradients: Sequence[Any] = tf.gradients(
            outputs, inputs, unconnected_gradients=tf.UnconnectedGradients.NONE
        )
        return tuple(g is not None for g in gradients)
