"""Reading a tensor of a graph without changing how TensorFlow optimises the graph around it.

TensorFlow's arithmetic optimiser regroups chains of products (and of sums) when every
intermediate value is used once: ``(a * b) * rate`` may become ``a * (b * rate)``, which differs
in the last bit. A statistic of the gradient ``a * b`` would be a second use and forbid the
regrouping, so the training would no longer be bit for bit the same. The statistic therefore
reads its own copy of the product, marked so that the two are not merged again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

# Operations that the optimiser regroups with a neighbour of the same kind.
_KINDS = {"Mul": "product", "Add": "sum", "AddV2": "sum", "AddN": "sum"}
# Operations that it takes out, so that a use of their result is a use of what goes in.
_TAKEN_OUT = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient"})
_MARK = "_gradguard_copy"


def own_copy(tensor: Any) -> Any:
    """Return a tensor equal to ``tensor`` whose use does not change the rest of the graph.

    Args:
        tensor: A tensor of the graph being traced, or an eager tensor.

    Returns:
        The tensor itself, unless it is made by an operation that might be regrouped; then the
        value of a copy of that operation.
    """
    if hasattr(tensor, "numpy") or not isinstance(tensor, tf.Tensor):
        return tensor
    graph = tf.compat.v1.get_default_graph()
    if tensor.graph is not graph:
        return tensor
    made = _behind(tensor)
    return _copy(graph, made.op) if made.op.type in _KINDS else tensor


def _behind(tensor: Any) -> Any:
    """Return the tensor that ``tensor`` is once operations that do nothing are taken out."""
    while tensor.op.type in _TAKEN_OUT:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _copy(graph: Any, op: Any) -> Any:
    inputs = []
    for tensor in op.inputs:
        made = _behind(tensor)
        inner = made.op
        alike = _KINDS.get(inner.type) == _KINDS[op.type] and len(made.consumers()) < 2
        inputs.append(_copy(graph, inner) if alike else tensor)
    attributes = dict(op.node_def.attr)
    attributes[_MARK] = attr_value_pb2.AttrValue(b=True)
    # No control inputs: a product or a sum of values needs none.
    with tf.control_dependencies(None), tf.device(op.device or None):
        copy = graph.create_op(
            op.type, inputs, [op.outputs[0].dtype], attrs=attributes, name="gradguard_copy"
        )
    copy.outputs[0].set_shape(op.outputs[0].shape)
    return copy.outputs[0]
