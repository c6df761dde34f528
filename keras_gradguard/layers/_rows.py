"""The rows of DynamicRepeatDense: their recurrence, weights and mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops

Tensor = Any


def row_positions(lengths: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``t[b, i] = lengths[b] - i``: how much of row ``i`` the length covers.

    Args:
        lengths: ``[batch]`` float, in rows.
        rows: Number of rows.

    Returns:
        ``[batch, rows]``, the dtype of ``lengths``.
    """
    index = ops.cast(ops.arange(rows, dtype="int32"), lengths.dtype)
    return ops.expand_dims(lengths, 1) - ops.expand_dims(index, 0)


def boundary_weights(t: Tensor) -> Tensor:
    """Return ``clip(t, 0, 1)`` with an exact derivative, also at its two corners.

    The derivative is 1 inside (0, 1) and 0 outside. At 0 and 1 it is the mean of
    the two one-sided derivatives, 1/2: what a central difference measures, and
    never 0 for a length that is exactly whole, which would trap it there.
    (``clip`` itself has derivative 1 at both corners, so the two rows that meet at
    a whole length would both count in full.)
    """
    inside = ops.logical_and(ops.greater(t, 0.0), ops.less(t, 1.0))
    within = ops.logical_and(ops.greater_equal(t, 0.0), ops.less_equal(t, 1.0))
    slope = 0.5 * (ops.cast(inside, t.dtype) + ops.cast(within, t.dtype))
    # `slope` is 0, 1/2 or 1, so the difference and the sum below are exact.
    constant = ops.stop_gradient(ops.clip(t, 0.0, 1.0) - slope * t)
    return constant + slope * t


def whole_weights(t: Tensor) -> Tensor:
    """Return 1 for the rows of a whole length, else 0; NaN for a NaN length."""
    weights = ops.cast(ops.greater(t, 0.0), t.dtype)
    return ops.where(ops.isnan(t), t, weights)


def row_mask(t: Tensor) -> Tensor:
    """Return True for rows with any weight; a NaN length masks nothing, so it is seen."""
    # Not `not (t <= 0)`: XLA turns that into `t > 0`.
    return ops.logical_or(ops.greater(t, 0.0), ops.isnan(t))


def recurrent_rows(
    base: Tensor,
    kernel: Tensor,
    activation: Callable[[Tensor], Tensor],
    rows: int | Tensor,
    most: int | None,
) -> Tensor:
    """Return ``row_i = activation(base + row_{i-1} @ kernel)`` for ``i < rows``; ``row_{-1} = 0``.

    Args:
        base: ``[batch, units]``.
        kernel: ``[units, units]``.
        activation: Applied to every row.
        rows: Number of rows.
        most: A bound on ``rows`` known beforehand, or None. XLA needs it.

    Returns:
        ``[batch, rows, units]``.
    """
    if tf.executing_eagerly() and int(rows) == 0:
        # No turn of the loop would read the kernel, whose gradient is 0 and not None.
        return ops.expand_dims(base + ops.matmul(tf.zeros_like(base), kernel), 1)[:, :0]

    def step(i: Tensor, previous: Tensor, done: Any) -> tuple[Any, ...]:
        row = tf.ensure_shape(activation(base + tf.matmul(previous, kernel)), base.shape)
        return i + 1, row, done.write(i, row)

    array = tf.TensorArray(base.dtype, size=rows, element_shape=base.shape)
    *_, array = tf.while_loop(
        lambda i, previous, done: i < rows,
        step,
        (tf.constant(0), tf.zeros_like(base), array),
        maximum_iterations=most,
    )
    return tf.transpose(array.stack(), (1, 0, 2))
