"""StraightThrough: a step function in the forward pass, the identity in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

Tensor = Any


def _one_hot_of_argmax(x: Tensor) -> Tensor:
    return ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1], dtype=x.dtype)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "round": ops.round,
    "sign": ops.sign,
    "argmax": _one_hot_of_argmax,
}


@keras.saving.register_keras_serializable(package="keras_gradguard")
class StraightThrough(keras.layers.Layer):
    """Applies a step function, and lets the gradient through as if it were not there.

    Forward ``y = fn(x)``, exactly. Backward ``dL/dx = dL/dy``. The true derivative of
    a step function is 0 almost everywhere, so nothing before it could learn; the
    straight-through estimator is biased, but points the right way as long as ``fn``
    grows with ``x``.

    Args:
        fn: ``"round"`` (half to even), ``"sign"`` (-1, 0, 1), ``"argmax"`` (one-hot of the
            largest entry of the last axis), or a function from a tensor to a
            tensor of the same shape. To be saved, register it with
            ``keras.saving.register_keras_serializable``.
        **kwargs: Of ``keras.layers.Layer``.

    Call arguments:
        inputs: Float tensor of any shape.

    Returns:
        ``fn(inputs)``, of the shape and dtype of the input.

    Raises:
        ValueError: ``fn`` is unknown, or changes the shape.

    Example:
    >>> import keras
    >>> StraightThrough("round")(keras.ops.array([0.4, 0.6])).numpy().tolist()
    [0.0, 1.0]

    References:
        Y. Bengio, N. Leonard, A. Courville, "Estimating or Propagating Gradients
        Through Stochastic Neurons for Conditional Computation", 2013,
        https://arxiv.org/abs/1308.3432, section 4 ("Straight-Through Estimator").
    """

    def __init__(self, fn: str | Callable[[Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if fn in ("argmax_one_hot", "argmax-one-hot"):
            fn = "argmax"
        if not callable(fn) and fn not in FUNCTIONS:
            raise ValueError(
                f"`fn` must be one of {', '.join(map(repr, FUNCTIONS))} or a function of a "
                f"tensor. Received: fn={fn!r}"
            )
        self.fn = fn
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Nothing to create."""
        self.built = True

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``fn(inputs)`` with the gradient of the identity."""
        apply = self.fn if callable(self.fn) else FUNCTIONS[self.fn]
        stepped = ops.cast(apply(ops.stop_gradient(inputs)), inputs.dtype)
        if tuple(stepped.shape) != tuple(inputs.shape):
            raise ValueError(
                f"`fn` of layer '{self.name}' must keep the shape, since its gradient is that "
                f"of the identity. Received: {tuple(inputs.shape)} in, "
                f"{tuple(stepped.shape)} out"
            )
        return _straight_through(inputs, stepped)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return ``input_shape``."""
        return input_shape

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the mask of the input."""
        return previous_mask

    def get_config(self) -> dict[str, Any]:
        """Return every argument in a form that can be saved."""
        fn = self.fn if isinstance(self.fn, str) else keras.saving.serialize_keras_object(self.fn)
        return {**super().get_config(), "fn": fn}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StraightThrough:
        """Make the layer from what ``get_config`` returned."""
        config = dict(config)
        if not isinstance(config["fn"], str):
            config["fn"] = keras.saving.deserialize_keras_object(config["fn"])
        return cls(**config)


def _straight_through(x: Tensor, stepped: Tensor) -> Tensor:
    # Written as a custom gradient and not as `x + stop_gradient(fn(x) - x)`, which
    # is off by a rounding error in the forward pass.
    @keras.ops.custom_gradient
    def route(x: Tensor, stepped: Tensor) -> Any:
        del x

        def backward(upstream: Tensor) -> Any:
            return upstream, ops.zeros_like(upstream)

        return stepped, backward

    return route(x, stepped)
