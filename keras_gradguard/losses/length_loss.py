"""LengthLoss: a loss on real-valued sequence lengths, with a gradient at any distance."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_gradguard.losses._sequences import lengths_of, of_same_shape

Tensor = Any
_BASES = ("mse", "huber")
_TARGETS = ("auto", "lengths", "mask", "padded")


@keras.saving.register_keras_serializable(package="keras_gradguard")
class LengthLoss(keras.losses.Loss):
    """Squared (or Huber) difference between predicted and target sequence lengths.

    Replaces a loss on ``tf.shape(y_pred)[1]``: a shape is an integer and has no
    gradient. The predicted length is a real number, such as the lengths that
    ``DynamicRepeatDense`` returns. With ``e = predicted - target`` per example::

        "mse":    e ** 2                                            gradient 2 e
        "huber":  e ** 2 / 2 if |e| <= delta                        gradient clip(e, -delta, delta)
                  else delta * |e| - delta ** 2 / 2

    Args:
        base: ``"mse"`` or ``"huber"``.
        delta: Where the Huber loss turns linear, in rows.
        target: What ``y_true`` is: ``"lengths"``, ``"mask"``, ``"padded"``, or ``"auto"``:
            boolean ``[batch, time]`` is a mask; ``[batch]`` and ``[batch, 1]`` are lengths;
            anything longer is a padded sequence. Ragged tensors are recognised always.
        pad_value: What fills the rows after the end of a padded sequence. A sequence whose
            own last rows are all ``pad_value`` looks shorter: give lengths or a mask then.
        reduction: As in every Keras loss.
        name: Of the loss.
        **kwargs: Of ``keras.losses.Loss``.

    Call arguments:
        y_true: ``[batch]`` or ``[batch, 1]`` lengths, ``[batch, time]`` mask, ``[batch, time,
            ...]`` padded, or ragged.
        y_pred: ``[batch]`` or ``[batch, 1]`` float, in rows.
        sample_weight: ``[batch]``, or None.

    Returns:
        A scalar, or ``[batch]`` without reduction.

    Raises:
        ValueError: An argument is unknown, or the shapes do not fit; nothing is broadcast.

    Example:
    >>> import numpy as np
    >>> float(LengthLoss()(np.array([3.0, 1.0]), np.array([2.0, 1.0])))
    0.5
    """

    def __init__(
        self,
        base: str = "mse",
        delta: float = 1.0,
        target: str = "auto",
        pad_value: float = 0.0,
        reduction: Any = "sum_over_batch_size",
        name: str = "length_loss",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, reduction=reduction, **kwargs)
        if base not in _BASES:
            raise ValueError(f"`base` must be one of {_BASES}. Received: base={base!r}")
        if target not in _TARGETS:
            raise ValueError(f"`target` must be one of {_TARGETS}. Received: target={target!r}")
        if not delta > 0:
            raise ValueError(f"`delta` must be above 0. Received: delta={delta!r}")
        self.base = base
        self.delta = delta
        self.target = target
        self.pad_value = pad_value

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the reduced loss."""
        # Before Keras turns a mask into floats, and a ragged tensor into an error.
        lengths = lengths_of(y_true, self.target, self.pad_value, self.dtype)
        y_pred = ops.convert_to_tensor(y_pred)
        if len(y_pred.shape) == 2 and y_pred.shape[1] == 1:
            y_pred = ops.squeeze(y_pred, 1)
        if len(y_pred.shape) != 1:
            raise ValueError(
                "`y_pred` of LengthLoss must be one real length per example, [batch] or "
                f"[batch, 1]. Received: y_pred of shape {tuple(y_pred.shape)}"
            )
        return super().__call__(lengths, y_pred, sample_weight=sample_weight)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the loss per example, ``[batch]``; both arguments are lengths."""
        if None not in (y_true.shape[0], y_pred.shape[0]) and y_true.shape != y_pred.shape:
            raise ValueError(
                "`y_true` and `y_pred` must hold the same number of examples. Received: "
                f"{y_true.shape[0]} target and {y_pred.shape[0]} predicted lengths"
            )
        error = y_pred - of_same_shape(y_true, y_pred)
        if self.base == "mse":
            return ops.square(error)
        size = ops.abs(error)
        near = ops.minimum(size, self.delta)
        return 0.5 * ops.square(near) + self.delta * (size - near)

    def get_config(self) -> dict[str, Any]:
        """Return every argument in a form that can be saved."""
        return {
            **super().get_config(),
            "base": self.base,
            "delta": self.delta,
            "target": self.target,
            "pad_value": self.pad_value,
        }
