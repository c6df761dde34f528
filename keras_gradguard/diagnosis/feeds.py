"""A batch as placeholders of a scratch graph."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree


def _as_array(item: Any) -> Any:
    """Return ``item`` as Keras' data adapters would hand it to the step."""
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if not isinstance(item, (tf.Tensor, tf.Variable)):
        if tf.is_tensor(item):
            return item
        item = np.asarray(item)
        if item.dtype == np.float64:
            item = item.astype(keras.config.floatx())
        elif item.dtype == object:
            raise ValueError(
                "Every array of the batch must have a numeric dtype. Received an array of "
                f"dtype object and shape {item.shape}; convert it with np.asarray(x, 'float32')."
            )
    with tf.init_scope():  # a real tensor, also while the scratch graph is the default
        return tf.convert_to_tensor(item)


def placeholders(data: Any, name: str, feeds: list[tuple[Any, Any]]) -> Any:
    """Return ``data`` with a placeholder of the default graph in place of every array.

    Args:
        data: An array or a structure of arrays, or None.
        name: Name for the placeholders.
        feeds: Gets ``(placeholder, value)`` for each.
    """

    def one(item: Any) -> Any:
        item = _as_array(item)
        if not isinstance(item, tf.Tensor):
            return item  # Python scalars, None and composite tensors stay as they are
        holder = tf.compat.v1.placeholder(item.dtype, item.shape, name=name)
        feeds.append((holder, item))
        return holder

    return None if data is None else tree.map_structure(one, data)
