"""One call of ``apply``, taken apart: which gradients for which variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_gradguard.taps import numbers, optimizers
from keras_gradguard.taps.channel import TensorFlowChannel


def raw(variable: Any) -> Any:
    """Return the ``tf.Variable`` behind a Keras variable (or the thing itself)."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def identity_of(variable: Any) -> int:
    """Return a key that is the same for a Keras variable and its ``tf.Variable``."""
    return id(raw(variable))


class Update:
    """One call of ``apply``: the optimizer, its real method and the lists, paired up.

    Args:
        optimizer: The Keras optimizer, or None for gradients handed over by hand.
        original: The real ``apply``.
        all_grads: What ``apply`` was given.
        passed: The variables that ``apply`` was given, or None.
        channel: Where the numbers go.
        grads: The gradients that are watched.
        variables: Their variables, in the same order.
    """

    def __init__(
        self,
        optimizer: Any,
        original: Callable[..., Any],
        all_grads: list[Any],
        passed: list[Any] | None,
        channel: TensorFlowChannel,
        grads: list[Any],
        variables: list[Any],
    ) -> None:
        self.optimizer = optimizer
        self.original = original
        self.all_grads = all_grads
        self.passed = passed
        self.channel = channel
        self.grads = grads
        self.present = [i for i, g in enumerate(grads) if g is not None]
        self.variables = [raw(variables[i]) for i in self.present]

    @classmethod
    def by_hand(
        cls, channel: TensorFlowChannel, grads: Sequence[Any], variables: Sequence[Any]
    ) -> Update:
        """Return the update that an unknown optimizer makes of gradients handed over."""
        return cls(None, _nothing, [], None, channel, list(grads), list(variables))

    def apply(self) -> Any:
        """Let the optimizer do what it was asked for."""
        return self.original(self.all_grads, self.passed)

    def weights(self) -> list[Any]:
        """Read the variables that have a gradient."""
        return [tf.convert_to_tensor(v) for v in self.variables]

    def scale(self) -> Any:
        """Return the factor on the gradients, a float32 scalar."""
        return tf.cast(optimizers.loss_scale(self.optimizer), tf.float32)

    def scaled(self) -> bool:
        """Return True when the gradients are multiplied by anything but 1."""
        return self.optimizer is not None and (
            optimizers.scales_loss(self.optimizer)
            or getattr(self.optimizer, "loss_scale_factor", None) is not None
        )

    def learning_rate(self) -> Any:
        """Return the learning rate of this step as a float32 scalar, NaN without optimizer."""
        if self.optimizer is None:
            return tf.constant(float("nan"))
        return tf.cast(optimizers.learning_rate(self.optimizer), tf.float32)


def moved(after: Any, before: Any) -> Any:
    """Return half the sum of squares of the change and of the old value, ``[2]`` float32."""
    return tf.stack(_halves(after, before))


def all_moved(after: Sequence[Any], before: Sequence[Any]) -> Any:
    """Return :func:`moved` of several variables, ``[V, 2]`` float32."""
    halves = [h for a, b in zip(after, before, strict=True) for h in _halves(a, b)]
    return tf.reshape(tf.stack(halves), [-1, 2])


def _halves(after: Any, before: Any) -> list[Any]:
    old = numbers.dense_values(before)
    new = numbers.dense_values(after)
    return [numbers.half_square(new - old), numbers.half_square(old)]


def _nothing(grads: Any, variables: Any) -> None:
    """Stand in for an optimizer that does not exist."""
