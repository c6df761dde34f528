"""GradientProbe: a place in the model whose upstream gradient can be watched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Tensor = Any
Sink = Callable[[Tensor], Any]
# TensorFlow's graphs for the gradient of a loop's body and of a condition's branch.
_GRADIENT_GRAPHS = ("_WhileBodyGradFuncGraph", "_CondGradFuncGraph")


@keras.saving.register_keras_serializable(package="keras_gradguard")
class GradientProbe(keras.layers.Layer):
    """Identity in forward and backward, whose gradient a guard can see.

    Put it anywhere between two layers. While a guard is installed, ``dL/dx`` at this
    place appears in its table and in TensorBoard beside the variables'. Without
    a guard the layer returns its input itself: no operation is added.

    A guard sets ``_gradguard_sink`` before the training step is traced, and sets it back to
    None afterwards. It is called once for every use of the layer in every backward pass,
    with the upstream gradient, a tensor of the shape and dtype of the input.

    The sink runs where the backward pass runs: eagerly, or in the graph that
    ``tape.gradient`` builds, which for a model inside a nested ``tf.function`` is an inner
    graph. So a sink must not keep the tensor: it reduces it, assigns the
    result to a ``tf.Variable`` there, and returns the assignment, which the gradient then
    waits for. Inside a graph loop or condition (``tf.while_loop``, an RNN
    cell, ``tf.cond``) TensorFlow lets the backward pass write to no variable; a probe there
    stays a plain identity, and says so in a warning when a guard looks at it.

    Args:
        **kwargs: Of ``keras.layers.Layer``.

    Call arguments:
        inputs: A tensor of any shape and dtype; never cast.

    Returns:
        The input.

    Example:
    >>> import keras
    >>> x = keras.ops.ones((2, 3))
    >>> GradientProbe()(x) is x
    True
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.autocast = False
        self.supports_masking = True
        self._gradguard_sink: Sink | None = None

    def build(self, input_shape: Any) -> None:
        """Nothing to create."""
        self.built = True

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``inputs``."""
        sink = self._gradguard_sink
        if sink is None:
            return inputs
        return _watched(inputs, sink, self.name)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return ``input_shape``."""
        return input_shape

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return a symbolic tensor like ``inputs``."""
        return keras.KerasTensor(inputs.shape, dtype=inputs.dtype)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the mask of the input."""
        return previous_mask


def _watched(inputs: Tensor, sink: Sink, name: str) -> Tensor:
    forward_graph = _current_graph()

    @tf.custom_gradient
    def identity(x: Tensor) -> Any:
        def backward(upstream: Tensor) -> Tensor:
            if _in_gradient_of_control_flow(forward_graph):
                warnings.warn(
                    f"GradientProbe '{name}' is inside a loop or condition of the graph, where "
                    "its gradient cannot be watched. Put it outside, or run eagerly "
                    "(run_eagerly=True).",
                    stacklevel=2,
                )
                return upstream
            done = sink(upstream)
            if done is None or tf.executing_eagerly():
                return upstream
            # The backward pass of a nested function drops what nothing depends on.
            with tf.control_dependencies([done]):
                return tf.identity(upstream)

        return tf.identity(x), backward

    return identity(inputs)


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _in_gradient_of_control_flow(forward_graph: Any) -> bool:
    graph = _current_graph()
    while graph is not None and graph is not forward_graph:
        if type(graph).__name__ in _GRADIENT_GRAPHS:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def find_probes(model: keras.Model) -> list[GradientProbe]:
    """Return every GradientProbe in a model, nested ones too, each once.

    Args:
        model: A Keras model or layer.

    Returns:
        The probes, in the order of the layers.
    """
    return [layer for layer in _layers_in(model) if isinstance(layer, GradientProbe)]


def _layers_in(root: Any) -> list[Any]:
    flatten = getattr(root, "_flatten_layers", None)
    # A tf.Module holds no Keras layers that could be asked.
    return [] if flatten is None else list(flatten(include_self=True, recursive=True))
