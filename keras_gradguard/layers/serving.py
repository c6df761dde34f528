"""From logits back to probabilities: for a tensor, and for a whole model."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

Tensor = Any


def apply_activation(logits: Tensor, activation: str, axis: int = -1) -> Tensor:
    """Return sigmoid or softmax of logits, computed in float32 at least."""
    logits = ops.convert_to_tensor(logits)
    dtype = keras.backend.result_type(logits.dtype, "float32")
    logits = ops.cast(logits, dtype)
    return ops.sigmoid(logits) if activation == "sigmoid" else ops.softmax(logits, axis=axis)


def probabilities(logits: Tensor, source: Any) -> Tensor:
    """Return the probabilities that logits stand for; for custom loops.

    Args:
        logits: Tensor of logits, classes on the last axis.
        source: ``"sigmoid"`` or ``"softmax"``, or the ``LogitsOutput`` that gave the logits,
            or a model with exactly one.

    Returns:
        Tensor of the same shape, float32 at least.

    Raises:
        ValueError: ``source`` does not say which activation it is.

    Example:
    >>> probabilities([0.0], "sigmoid").numpy().tolist()
    [0.5]
    """
    if source in ("sigmoid", "softmax"):
        return apply_activation(logits, source)
    from keras_gradguard.layers.contract import find_logits_outputs

    found = find_logits_outputs(source) if isinstance(source, keras.layers.Layer) else []
    if len(found) != 1:
        raise ValueError(
            "`source` must be 'sigmoid', 'softmax', a LogitsOutput, or a model with exactly one "
            f"LogitsOutput. Received: source={source!r} with {len(found)} of them"
        )
    return found[0].probabilities(logits)


@keras.saving.register_keras_serializable(package="keras_gradguard")
class Probabilities(keras.layers.Layer):
    """Sigmoid or softmax of logits, in float32 at least; the end of a serving model.

    Args:
        activation: ``"sigmoid"`` or ``"softmax"``.
        axis: Axis of the classes of a softmax.
        **kwargs: Of ``keras.layers.Layer``.

    Call arguments:
        inputs: Logits, any shape.

    Returns:
        Probabilities of the same shape. The gradient is that of the activation.

    Raises:
        ValueError: ``activation`` is neither.

    Example:
    >>> import keras
    >>> Probabilities("softmax")(keras.ops.zeros((1, 2))).numpy().tolist()
    [[0.5, 0.5]]
    """

    def __init__(self, activation: str, axis: int = -1, **kwargs: Any) -> None:
        if activation not in ("sigmoid", "softmax"):
            raise ValueError(
                f"`activation` must be 'sigmoid' or 'softmax'. Received: activation={activation!r}"
            )
        super().__init__(**kwargs)
        self.autocast = False
        self.activation = activation
        self.axis = axis
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Nothing to create."""
        self.built = True

    def call(self, inputs: Tensor) -> Tensor:
        """Return the probabilities."""
        return apply_activation(inputs, self.activation, self.axis)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return ``input_shape``."""
        return input_shape

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return a symbolic tensor like ``inputs``, float32 at least."""
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        return keras.KerasTensor(inputs.shape, dtype=dtype)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the mask of the input."""
        return previous_mask

    def get_config(self) -> dict[str, Any]:
        """Return every argument in a form that can be saved."""
        return {**super().get_config(), "activation": self.activation, "axis": self.axis}


def with_probabilities(model: Any, name: str | None = None) -> Any:
    """Return a model that shares the weights and ends in probabilities.

    For ``predict``, serving and export; train the model itself, on logits. Every output that
    comes from a ``LogitsOutput`` gets the activation that was stripped there; other
    outputs stay as they are.

    Args:
        model: A functional or Sequential model, a ``LogitsOutput``, or a subclassed model
            whose only ``LogitsOutput`` gives its only output.
        name: Of the new model.

    Returns:
        An uncompiled ``keras.Model`` with the same inputs.

    Raises:
        ValueError: The model has no output from a ``LogitsOutput``, or its
            activation is not known.

    Example:
    >>> import keras
    >>> from keras_gradguard.layers import LogitsOutput
    >>> head = LogitsOutput(keras.layers.Dense(3, activation="softmax"))
    >>> model = keras.Sequential([keras.Input((4,)), head])
    >>> float(with_probabilities(model)(keras.ops.ones((1, 4))).numpy().sum().round(4))
    1.0
    """
    from keras_gradguard.layers.contract import find_logits_outputs, output_heads

    heads = output_heads(model)
    if heads is None:
        found = find_logits_outputs(model)
        if len(found) != 1:
            raise _none_found(model, len(found))
        return keras.Sequential([model, _ending(found[0])], name=name)
    if not any(heads):
        raise _none_found(model, 0)
    outputs = [
        tensor if head is None else _ending(head)(tensor)
        for head, tensor in zip(heads, model.outputs, strict=True)
    ]
    if isinstance(model, keras.Sequential):
        inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
        return keras.Model(inputs, outputs[0], name=name)
    packed = keras.tree.pack_sequence_as(model.output, outputs)
    return keras.Model(model.input, packed, name=name)


def _ending(head: Any) -> Probabilities:
    activation = head._known_activation("activation")
    return Probabilities(activation, axis=head.axis, name=f"{head.name}_probabilities")


def _none_found(model: Any, count: int) -> ValueError:
    return ValueError(
        "`model` must end in a LogitsOutput, e.g. "
        "LogitsOutput(Dense(1, activation='sigmoid')); a subclassed model must have exactly one. "
        f"Received: model '{getattr(model, 'name', model)}' with {count} of them"
    )
