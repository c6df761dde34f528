"""Targets in their several forms turned into lengths, rows and masks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

Tensor = Any


def is_ragged(x: Any) -> bool:
    """Return whether ``x`` is a ragged tensor, without importing a backend."""
    return hasattr(x, "row_lengths") and hasattr(x, "to_tensor")


def as_tensor(x: Any) -> Tensor:
    """Return ``x`` as a tensor of its own dtype, its Keras mask kept."""
    mask = get_mask(x)
    x = ops.convert_to_tensor(x)
    if mask is not None:
        x._keras_mask = mask
    return x


def get_mask(x: Any) -> Tensor | None:
    """Return the Keras mask of a tensor, or None."""
    return getattr(x, "_keras_mask", None)


def real_rows(x: Tensor, pad_value: float) -> Tensor:
    """Return a mask of the rows before the trailing padding.

    Args:
        x: ``[batch, time, ...]``.
        pad_value: What padding rows are filled with. A row of padding between two
            real rows is real.

    Returns:
        ``[batch, time]`` bool.
    """
    filled = ops.not_equal(x, ops.cast(pad_value, x.dtype))
    if len(x.shape) > 2:
        filled = ops.any(filled, axis=tuple(range(2, len(x.shape))))
    # A row is real if it, or any row after it, is filled.
    from_the_end = ops.cumsum(ops.cast(ops.flip(filled, axis=1), "int32"), axis=1)
    return ops.greater(ops.flip(from_the_end, axis=1), 0)


def lengths_of(targets: Any, kind: str, pad_value: float, dtype: str) -> Tensor:
    """Return target lengths ``[batch]``, in rows.

    Args:
        targets: Lengths ``[batch]`` or ``[batch, 1]``; a mask ``[batch, time]``; a padded
            sequence ``[batch, time, ...]``; or a ragged tensor.
        kind: ``"lengths"``, ``"mask"``, ``"padded"``, or ``"auto"``.
        pad_value: Of a padded sequence.
        dtype: Of the result.

    Returns:
        ``[batch]`` float tensor.

    Raises:
        ValueError: The form cannot be told, or does not fit ``kind``.
    """
    if is_ragged(targets):
        return ops.cast(targets.row_lengths(), dtype)
    targets = as_tensor(targets)
    rank = len(targets.shape)
    if kind == "auto":
        kind = _guess(targets)
    if kind == "lengths":
        if rank == 2 and targets.shape[1] in (1, None):
            targets = ops.reshape(targets, (-1,)) if targets.shape[1] == 1 else targets
        if len(targets.shape) != 1:
            raise ValueError(
                "`y_true` must be lengths of shape [batch] or [batch, 1]. For a mask or a padded "
                "sequence use LengthLoss(target='mask') or target='padded'. Received: y_true of "
                f"shape {tuple(targets.shape)}"
            )
        return ops.cast(targets, dtype)
    if rank < 2:
        raise ValueError(
            f"`y_true` must be [batch, time, ...] for target={kind!r}. Received: y_true of shape "
            f"{tuple(targets.shape)}"
        )
    if kind == "mask":
        if rank != 2:
            raise ValueError(
                "`y_true` must be a mask [batch, time]. Received: y_true of shape "
                f"{tuple(targets.shape)}"
            )
        return ops.sum(ops.cast(ops.not_equal(targets, ops.zeros_like(targets)), dtype), axis=1)
    mask = get_mask(targets)
    rows = real_rows(targets, pad_value) if mask is None else mask
    return ops.sum(ops.cast(rows, dtype), axis=1)


def _guess(targets: Tensor) -> str:
    rank, dtype = len(targets.shape), keras.backend.standardize_dtype(targets.dtype)
    if rank == 2 and dtype == "bool":
        return "mask"
    if rank <= 1 or (rank == 2 and targets.shape[1] == 1):
        return "lengths"
    if rank == 2 and targets.shape[1] is None:
        raise ValueError(
            "`y_true` of shape [batch, unknown] may be lengths, a mask or a padded sequence. Say "
            "which: LengthLoss(target='lengths'), 'mask' or 'padded'."
        )
    return "padded"


def of_same_shape(true: Tensor, pred: Tensor) -> Tensor:
    """Return ``true``, checked by the run to have the shape of ``pred``.

    For sizes that are not known before the run: a subtraction would broadcast a
    batch of one without a word. (XLA drops the check: its shapes are known.)
    """
    if None not in (*true.shape, *pred.shape) or tf.executing_eagerly():
        return true
    check = tf.debugging.assert_equal(
        tf.shape(true),
        tf.shape(pred),
        message="`y_true` and `y_pred` must have equal batch and feature sizes; nothing is "
        "broadcast.",
    )
    with tf.control_dependencies([check]):
        return tf.identity(true)


def pad_rows(x: Tensor, rows: Any) -> Tensor:
    """Return ``x`` with zeros (False) added along axis 1, up to ``rows``."""
    missing = rows - ops.shape(x)[1]
    # A concatenation, since a tensor may be the number of rows but not the width of a pad.
    tail = ops.zeros((ops.shape(x)[0], missing, *ops.shape(x)[2:]), dtype=x.dtype)
    return ops.concatenate([x, tail], axis=1)
