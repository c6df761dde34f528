"""A condition that costs next to nothing on the many steps on which it is not met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

_LOWERED = "_lower_using_switch_merge"


def when(condition: Any, do: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return what ``tf.cond`` returns, with the branch not taken left out of the graph's run.

    TensorFlow turns a condition into switches, one for every tensor that a branch reads, and
    walks through all operations of the branch that is not taken, every step, to mark them as
    dead: with twenty operations a variable that costs more than the statistics themselves. As
    one operation that calls a function, the branch not taken does not cost anything. A function
    called like that runs on one device, so this is done only where there is one.

    Args:
        condition: Bool scalar.
        do: Called while tracing; what happens when it is met.
        otherwise: The same for when it is not. Both return tensors of the same types.
    """
    if not stays_whole():
        return tf.cond(condition, do, otherwise)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = tf.cond(condition, do, otherwise)
    for operation in graph.get_operations()[before:]:
        if operation.type in ("If", "StatelessIf"):
            operation._set_attr(_LOWERED, attr_value_pb2.AttrValue(b=False))
    return result


def stays_whole() -> bool:
    """Return True where :func:`when` makes one operation of a condition."""
    return not tf.executing_eagerly() and not tf.distribute.has_strategy() and _one_device()


def _one_device() -> bool:
    devices = tf.config.list_logical_devices()
    return len(devices) == 1 and devices[0].device_type == "CPU"
