"""PaddedSequenceLoss: compares sequences of different lengths by mask, never by shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_gradguard.losses._sequences import (
    as_tensor,
    get_mask,
    is_ragged,
    of_same_shape,
    pad_rows,
    real_rows,
)

Tensor = Any
_MISMATCH = ("pad", "ignore")
_SHORT = ("mse", "mae", "huber")


@keras.saving.register_keras_serializable(package="keras_gradguard")
class PaddedSequenceLoss(keras.losses.Loss):
    """A row-by-row loss between two padded sequences whose lengths may differ.

    Both sequences are padded with zeros to the longer one. With ``m`` the mask of the rows
    that count, the loss is ``sum(m * base(true, pred)) / sum(m)`` (a batch without any row
    has loss 0), and its gradient that of ``base`` at the rows that count, 0 elsewhere.

    Which rows count: those of ``y_pred`` come from its Keras mask (as
    ``DynamicRepeatDense`` gives it), else all count; those of ``y_true`` from
    its Keras mask, from the row lengths of a ragged tensor, or up to the trailing rows
    of ``pad_value``. With ``mismatch="pad"`` a row counts if *either* has it, so a row too many or
    missing is compared with zeros and costs something; with ``"ignore"`` only if *both* have it.

    Args:
        base: ``"mse"``, ``"mae"``, ``"huber"``, the name of another Keras loss, a Keras
            loss object, or a function of ``(y_true, y_pred)`` that gives one number
            per row, ``[batch, time]``.
        mismatch: ``"pad"`` or ``"ignore"``. Use the latter for cross-entropies.
        pad_value: What fills the rows after the end of ``y_true``.
        reduction: As in every Keras loss.
        name: Of the loss.
        **kwargs: Of ``keras.losses.Loss``.

    Call arguments:
        y_true: ``[batch, time, ...]``, or ragged. For a sparse base ``[batch, time]``.
        y_pred: ``[batch, other time, ...]``, float.
        sample_weight: ``[batch]``, ``[batch, 1]`` or ``[batch, time]``, or None.

    Returns:
        A scalar, or ``[batch, longer time]`` without reduction.

    Raises:
        ValueError: Batch or feature sizes differ (nothing is broadcast), or an
            argument is unknown.

    Example:
    >>> import numpy as np
    >>> true = np.array([[[1.0], [1.0], [0.0]]])  # two rows and one of padding
    >>> pred = np.array([[[1.0]]])  # one row
    >>> float(PaddedSequenceLoss()(true, pred))
    0.5
    """

    def __init__(
        self,
        base: Any = "mse",
        mismatch: str = "pad",
        pad_value: float = 0.0,
        reduction: Any = "sum_over_batch_size",
        name: str = "padded_sequence_loss",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, reduction=reduction, **kwargs)
        if mismatch not in _MISMATCH:
            raise ValueError(
                f"`mismatch` must be one of {_MISMATCH}. Received: mismatch={mismatch!r}"
            )
        self.base = base
        self.mismatch = mismatch
        self.pad_value = pad_value
        self._per_row = _per_row(base)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the reduced loss."""
        true, pred, mask = self._align(y_true, y_pred)
        pred._keras_mask = mask
        if sample_weight is not None:
            sample_weight = _row_weights(sample_weight, mask)
        return super().__call__(true, pred, sample_weight=sample_weight)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the loss per row, ``[batch, time]``, of two sequences of equal length."""
        losses = self._per_row(y_true, y_pred)
        if len(losses.shape) != 2:
            raise ValueError(
                "`base` must give one number per row, [batch, time]. Received: "
                f"base={self.base!r}, which gave shape {tuple(losses.shape)}"
            )
        return losses

    def _align(self, y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor, Tensor]:
        true, true_mask = self._target_rows(y_true)
        pred = as_tensor(y_pred)
        _check_shapes(true, pred, one_class_a_row=self.base not in _SHORT)
        pred_mask = get_mask(pred)
        if pred_mask is None:
            pred_mask = ops.ones(ops.shape(pred)[:2], dtype="bool")
        rows = _longer(true, pred)
        true_mask, pred_mask = pad_rows(true_mask, rows), pad_rows(pred_mask, rows)
        combine = ops.logical_or if self.mismatch == "pad" else ops.logical_and
        mask = combine(true_mask, pred_mask)
        true, pred = pad_rows(true, rows), pad_rows(pred, rows)
        if self.pad_value:
            keep = ops.reshape(true_mask, (*ops.shape(true_mask), *[1] * (len(true.shape) - 2)))
            true = ops.where(keep, true, ops.zeros_like(true))
        if len(true.shape) == len(pred.shape):
            true = of_same_shape(true, pred)
        return true, pred, mask

    def _target_rows(self, y_true: Any) -> tuple[Tensor, Tensor]:
        if is_ragged(y_true):
            lengths, true = y_true.row_lengths(), y_true.to_tensor()
            steps = ops.arange(ops.shape(true)[1], dtype="int32")
            return true, ops.less(steps[None], ops.cast(lengths, "int32")[:, None])
        true = as_tensor(y_true)
        if len(true.shape) < 2:
            raise ValueError(
                "`y_true` must be a sequence, [batch, time, ...]. Received: y_true of shape "
                f"{tuple(true.shape)}"
            )
        mask = get_mask(true)
        return true, real_rows(true, self.pad_value) if mask is None else mask

    def get_config(self) -> dict[str, Any]:
        """Return every argument in a form that can be saved."""
        base = self.base
        if not isinstance(base, str):
            base = keras.saving.serialize_keras_object(base)
        return {
            **super().get_config(),
            "base": base,
            "mismatch": self.mismatch,
            "pad_value": self.pad_value,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PaddedSequenceLoss:
        """Make the loss from what ``get_config`` returned."""
        config = dict(config)
        if isinstance(config["base"], dict):
            config["base"] = keras.saving.deserialize_keras_object(config["base"])
        return cls(**config)


def _per_row(base: Any) -> Callable[[Tensor, Tensor], Tensor]:
    if base == "mse":
        return lambda true, pred: _mean(ops.square(pred - true))
    if base == "mae":
        return lambda true, pred: _mean(ops.abs(pred - true))
    try:
        loss = keras.losses.get("huber" if base == "huber" else base)
    except ValueError as error:
        raise ValueError(
            f"`base` must be one of {_SHORT}, a Keras loss or a function. Received: base={base!r}"
        ) from error
    if isinstance(loss, keras.losses.Loss):
        return loss.call  # type: ignore[no-any-return]
    if not callable(loss):
        raise ValueError(
            f"`base` must be one of {_SHORT}, a Keras loss or a function. Received: base={base!r}"
        )
    return loss  # type: ignore[no-any-return]


def _mean(x: Tensor) -> Tensor:
    return ops.mean(x, axis=tuple(range(2, len(x.shape)))) if len(x.shape) > 2 else x


def _longer(true: Tensor, pred: Tensor) -> Any:
    static = true.shape[1], pred.shape[1]
    if None not in static:
        return max(static)
    return ops.maximum(ops.shape(true)[1], ops.shape(pred)[1])


def _check_shapes(true: Tensor, pred: Tensor, one_class_a_row: bool) -> None:
    t, p = tuple(true.shape), tuple(pred.shape)
    same_rank = len(t) == len(p) or (one_class_a_row and len(t) == 2 and len(p) == 3)
    pairs = [(t[0], p[0]), *zip(t[2:], p[2:], strict=False)] if len(p) > 1 else []
    fits = all(a is None or b is None or a == b for a, b in pairs)
    if len(p) < 2 or not same_rank or not fits:
        raise ValueError(
            "`y_true` and `y_pred` must be [batch, time, ...] with equal batch and feature sizes; "
            "only the time may differ, and nothing is broadcast. Received: y_true of shape "
            f"{t}, y_pred of shape {p}"
        )


def _row_weights(sample_weight: Any, mask: Tensor) -> Tensor:
    """Return weights ``[batch, time]`` for the padded rows."""
    weights = ops.convert_to_tensor(sample_weight)
    if len(weights.shape) == 1:
        weights = ops.expand_dims(weights, 1)
    if len(weights.shape) == 3 and weights.shape[-1] == 1:
        weights = ops.squeeze(weights, -1)
    if len(weights.shape) != 2:
        raise ValueError(
            "`sample_weight` must be [batch] or [batch, time]. Received: sample_weight of shape "
            f"{tuple(weights.shape)}"
        )
    if weights.shape[1] == 1:
        return ops.broadcast_to(weights, ops.shape(mask))
    return pad_rows(weights, ops.shape(mask)[1])
