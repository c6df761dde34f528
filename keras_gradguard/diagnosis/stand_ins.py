"""Losses that stand in for one that cannot be seen: made-up targets, made-up losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_gradguard.diagnosis.trace import as_loss


def own_losses_only(y_true: Any, y_pred: Any) -> Any:
    """Stand for a missing loss: only what layers added by ``add_loss`` counts."""
    del y_true
    first = tf.nest.flatten(y_pred)[0]
    return tf.zeros((), first.dtype if first.dtype.is_floating else tf.float32)


def behind(partner: Any, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the loss of a model whose output goes through a partner (a discriminator) first."""

    def through_partner(y_true: Any, y_pred: Any) -> Any:
        if not tf.is_tensor(y_pred) or not _fits(partner, y_pred):
            raise ValueError("the output does not fit the other model")
        return loss(y_true, partner(y_pred, training=True))

    return through_partner


def halves_like_output(loss: Any) -> Callable[[Any, Any], Any]:
    """Return the loss with targets of 0.5 in the shape of the output."""
    function = as_loss(loss)

    def with_halves(y_true: Any, y_pred: Any) -> Any:
        del y_true
        # 0.5: an output at either of its ends is then not at the minimum of the loss.
        targets = tf.nest.map_structure(lambda t: tf.ones_like(t) * tf.cast(0.5, t.dtype), y_pred)
        return function(targets, y_pred)

    return with_halves


def class_zero(loss: Any) -> Callable[[Any, Any], Any]:
    """Return the loss with class 0 for every example."""
    function = as_loss(loss)

    def with_class_zero(y_true: Any, y_pred: Any) -> Any:
        del y_true
        return function(tf.zeros(tf.shape(y_pred)[:-1], tf.int32), y_pred)

    return with_class_zero


def leaning(partners: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return a stand-in loss that leans on every output, through a partner where one fits."""

    def lean(y_true: Any, y_pred: Any) -> Any:
        del y_true
        values = [t for t in tf.nest.flatten(y_pred) if t.dtype.is_floating]
        for partner in partners:
            for value in list(values):
                if _fits(partner, value):
                    through = tf.nest.flatten(partner(value, training=True))
                    values = [t for t in through if t.dtype.is_floating]
                    break
        total = tf.zeros((), tf.float32)
        for value in values:
            flat = tf.reshape(tf.cast(value, tf.float32), [-1])
            # Different weights on different entries: a plain sum would be constant behind a
            # softmax and hide what is alive.
            ramp = 0.5 + tf.math.mod(tf.range(tf.size(flat), dtype=tf.float32) * 0.6180339887, 1.0)
            total += tf.reduce_mean(flat * ramp)
        return total

    return lean


def _fits(partner: Any, value: Any) -> bool:
    shapes = getattr(partner, "input_shape", None)
    if not isinstance(shapes, tuple) or (shapes and isinstance(shapes[0], tuple)):
        return False
    given = value.shape.as_list()
    return len(given) == len(shapes) and all(
        a is None or b is None or a == b for a, b in zip(given, shapes, strict=True)
    )
