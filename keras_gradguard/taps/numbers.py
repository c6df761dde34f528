"""The statistics of a gradient as TensorFlow ops: static shapes, no host calls, XLA-safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_gradguard.taps.untangle import own_copy

BINS = 512


def dense_values(gradient: Any) -> Any:
    """Return the numbers of a gradient as a real tensor of at least float32.

    Args:
        gradient: A tensor, or ``tf.IndexedSlices``, of which only the rows that were
            touched are taken (rows named twice count twice; making them unique would cost
            more than the training step).

    Returns:
        A float32 or float64 tensor; complex numbers become ``[..., 2]`` (real, imaginary),
        so that sums of squares are those of the magnitude.
    """
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    values = own_copy(tf.convert_to_tensor(values))
    if values.dtype.is_complex:
        values = tf.stack([tf.math.real(values), tf.math.imag(values)], axis=-1)
    if values.dtype not in (tf.float32, tf.float64):
        values = tf.cast(values, tf.float32)
    return values


def half_square(values: Any) -> Any:
    """Return half the sum of squares as a float32 scalar: one pass, NaN and Inf show in it."""
    return tf.cast(tf.nn.l2_loss(values), tf.float32)


def magnitudes(values: Any, gradient: Any) -> Any:
    """Return the entries of a gradient as a flat float32 vector; a complex entry as its magnitude.

    Args:
        values: What :func:`dense_values` made of it.
        gradient: The gradient itself.
    """
    if gradient.dtype.is_complex:
        values = tf.norm(values, axis=-1)
    values = tf.cast(values, tf.float32)
    return values if values.shape.rank == 1 else tf.reshape(values, [-1])


def exponent_counts(values: Any) -> Any:
    """Count entries by sign and exponent bits of their float32 value.

    The bit pattern shifted right by 23 (arithmetically) is the sign and the biased
    exponent; adding 256 makes it a bin number from 0 to 511.

    Args:
        values: ``[n]`` float32.

    Returns:
        ``[512]`` int32. Exact, for any n including 0.
    """
    return all_exponent_counts([values])[0]


def all_exponent_counts(several: Sequence[Any]) -> Any:
    """Return :func:`exponent_counts` of several vectors, ``[V, 512]``; zeros for None.

    Args:
        several: ``[n]`` float32 each, or None.
    """
    # Shifted as an unsigned number, sign and exponent are 0 to 511 without an addition, which
    # would be one more pass over memory; the two halves of the counts change places instead.
    twenty_three, unweighted = tf.constant(23, tf.uint32), tf.zeros([0], tf.int32)
    size, nothing = tf.constant(BINS), tf.zeros([BINS], tf.int32)
    counts = [
        nothing
        if values is None
        else tf.raw_ops.DenseBincount(
            input=tf.bitcast(
                tf.bitwise.right_shift(tf.bitcast(values, tf.uint32), twenty_three), tf.int32
            ),
            size=size,
            weights=unweighted,
            binary_output=False,
        )
        for values in several
    ]
    return tf.roll(tf.stack(counts), BINS // 2, 1)


def largest(values: Any) -> Any:
    """Return the largest magnitude as a float32 scalar, 0 for no entries."""
    if values.shape.num_elements():
        return tf.reduce_max(tf.abs(values))
    return tf.reduce_max(tf.concat([tf.abs(values), tf.zeros([1])], axis=0))
