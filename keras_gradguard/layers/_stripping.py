"""Where a layer's or a model's final sigmoid or softmax is, and how to go without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from keras_gradguard.layers.dynamic_repeat_dense import DynamicRepeatDense

STRIPPED = ("sigmoid", "softmax")
_BOUNDED = {
    "relu": "cannot be negative",
    "relu6": "lies in [0, 6]",
    "softplus": "cannot be negative",
    "exponential": "cannot be negative",
    "tanh": "lies in [-1, 1]",
    "softsign": "lies in [-1, 1]",
    "hard_sigmoid": "lies in [0, 1]",
    "hard_tanh": "lies in [-1, 1]",
    "elu": "is bounded below",
    "selu": "is bounded below",
    "gelu": "is bounded below",
    "silu": "is bounded below",
    "swish": "is bounded below",
    "mish": "is bounded below",
    "leaky_relu": "is squeezed below 0",
    "log_sigmoid": "cannot be positive",
    "log_softmax": "is normalised already",
}


def _classes(*names: str) -> tuple[Any, ...]:
    # By name: not every Keras version has every layer.
    return tuple(getattr(keras.layers, n) for n in names if hasattr(keras.layers, n))


_ACTIVATION_IS_LAST = _classes(
    "Dense", "EinsumDense", "Activation",
    "Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose",
    "SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D",
)  # fmt: skip
_LINEAR = _classes(
    "Identity", "Embedding", "BatchNormalization", "LayerNormalization", "Add", "Subtract",
    "Average", "Dot",
)  # fmt: skip
# They move entries about, so what comes before them may as well come after.
_MOVES_ENTRIES = _classes(
    "Reshape", "Flatten", "Permute", "RepeatVector", "Cropping1D", "Cropping2D", "Cropping3D",
)  # fmt: skip
_KEEPS_ALL = _classes("Identity")
_AROUND_ONE = _classes("TimeDistributed", "SpectralNormalization")


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The end of an output layer or model.

    Args:
        name: ``"sigmoid"``, ``"softmax"`` or None where there is no activation.
        holder: The layer or operation that applies it.
        attribute: What to replace: ``"activation"`` or ``"call"``.
        axis: Of the softmax.
        known: False where nothing is known about the end (a layer of the user's).
    """

    name: str | None
    holder: Any
    attribute: str = "activation"
    axis: int = -1
    known: bool = True


def find_final(layer: Any) -> Final:
    """Return the final activation of a layer or a functional or Sequential model.

    Args:
        layer: What ends in logits or probabilities.

    Returns:
        Where the activation is.

    Raises:
        ValueError: Its end cannot be logits, or cannot be seen.
    """
    final = _find(layer)
    if final.name == "softmax":
        units = getattr(final.holder, "units", None) or getattr(final.holder, "filters", None)
        if units == 1:
            raise ValueError(one_unit(layer))
    return final


def one_unit(layer: Any) -> str:
    """Return why a softmax over one unit is refused."""
    return (
        f"LogitsOutput cannot wrap '{layer.name}': its softmax runs over an axis of size 1 and "
        "is the constant 1, without a gradient. Use one unit with activation='sigmoid' for two "
        "classes, or one unit per class with activation='softmax'."
    )


def _refuse(layer: Any, why: str) -> ValueError:
    return ValueError(
        f"LogitsOutput cannot wrap '{layer.name}' ({type(layer).__name__}): {why} Logits "
        "are any real numbers: use activation=None, 'sigmoid' or 'softmax' on the output."
    )


def _find(layer: Any) -> Final:
    if isinstance(layer, keras.Sequential):
        if not layer.layers:
            raise _refuse(layer, "it has no layers.")
        return _from_chain(list(layer.layers))
    if isinstance(layer, keras.Model):
        return _from_chain(_functional_chain(layer))
    if isinstance(layer, _AROUND_ONE):
        return _find(layer.layer)
    if isinstance(layer, keras.layers.Softmax):
        axis = layer.axis
        if not isinstance(axis, int):
            raise _refuse(layer, f"its softmax runs over several axes, {axis}.")
        return Final(name="softmax", holder=layer, attribute="call", axis=axis)
    if isinstance(layer, _ACTIVATION_IS_LAST):
        name, axis = _name_of(layer, layer.activation)
        return Final(name=name, holder=layer, axis=axis)
    if isinstance(layer, _LINEAR):
        return Final(name=None, holder=layer)
    operation = type(layer).__name__.lower()
    if not isinstance(layer, keras.layers.Layer):
        if operation in STRIPPED:
            axis = getattr(layer, "axis", -1)
            return Final(name=operation, holder=layer, attribute="call", axis=axis)
        if operation in _BOUNDED:
            raise _refuse(layer, f"its output {_BOUNDED[operation]}.")
    if isinstance(layer, _classes("ReLU", "LeakyReLU", "PReLU", "ELU")):
        raise _refuse(layer, "it is a rectifier, so its output is cut or squeezed below 0.")
    if isinstance(layer, (keras.layers.RNN, DynamicRepeatDense)):
        raise _refuse(layer, "its activation is not the last thing it applies.")
    if hasattr(layer, "_gradguard_final"):
        raise _refuse(layer, "it is a LogitsOutput already.")
    return Final(name=None, holder=layer, known=False)


def _name_of(layer: Any, activation: Any) -> tuple[str | None, int]:
    if isinstance(activation, keras.layers.Softmax):
        if not isinstance(activation.axis, int):
            raise _refuse(layer, f"its softmax runs over several axes, {activation.axis}.")
        return "softmax", activation.axis
    name = getattr(activation, "__name__", None) or getattr(activation, "name", repr(activation))
    if activation in (None, keras.activations.linear):
        return None, -1
    # Also tf.nn.sigmoid and keras.ops.softmax; but not a function of the user's that
    # happens to have the name.
    library = str(getattr(activation, "__module__", "")).split(".")[0] in ("keras", "tensorflow")
    if name in STRIPPED and library:
        return name, -1
    if name in _BOUNDED:
        raise _refuse(layer, f"the output of its activation '{name}' {_BOUNDED[name]}.")
    raise _refuse(layer, f"its activation '{name}' is unknown, so it cannot be stripped.")


def _functional_chain(model: Any) -> list[Any]:
    """Return the operations that lead straight to the only output, the last one last."""
    outputs = getattr(model, "outputs", None)
    if not outputs or not hasattr(outputs[0], "_keras_history"):
        raise _refuse(
            model,
            "a subclassed model does not show how it ends. Wrap its output layer instead. ",
        )
    if len(outputs) > 1:
        raise _refuse(model, f"it has {len(outputs)} outputs. Wrap each output layer instead. ")
    chain: list[Any] = []
    tensor = outputs[0]
    while True:
        operation, node_index, _ = tensor._keras_history
        if operation in chain:
            raise _refuse(model, f"its last layer '{operation.name}' is also used before.")
        chain.insert(0, operation)
        inputs = operation._inbound_nodes[node_index].input_tensors
        if len(inputs) != 1:
            return chain
        tensor = inputs[0]


def _from_chain(chain: list[Any]) -> Final:
    """Return the end of a chain, looking through layers that only move entries."""
    moved = None
    for layer in reversed(chain):
        if isinstance(layer, _MOVES_ENTRIES):
            moved = layer
            continue
        if _does_nothing(layer):
            continue
        final = _find(layer)
        if final.name == "softmax" and moved is not None:
            raise _refuse(
                layer,
                f"'{moved.name}' moves the entries after the softmax, so its classes are no longer "
                "on one axis.",
            )
        return final
    return Final(name=None, holder=chain[-1])


def _does_nothing(layer: Any) -> bool:
    if isinstance(layer, _KEEPS_ALL):
        return True
    linear = keras.activations.linear
    return isinstance(layer, keras.layers.Activation) and layer.activation is linear


# Swapping -----------------------------------------------------------------------

_LOCK = threading.Lock()
_OPEN: dict[int, list[Any]] = {}
_MISSING = object()


@contextmanager
def stripped(final: Final) -> Iterator[None]:
    """Run the holder without its activation inside the block.

    The holder itself stays as its owner made it: it may be part of another model, and it
    is saved with its activation. Blocks may overlap (the replicas of a mirrored
    strategy take turns inside a step); the last one out puts the activation back.
    """
    if final.name is None:
        yield
        return
    attributes, key = vars(final.holder), id(final.holder)
    with _LOCK:
        entry = _OPEN.setdefault(key, [0, attributes.get(final.attribute, _MISSING)])
        entry[0] += 1
        attributes[final.attribute] = (
            keras.activations.linear if final.attribute == "activation" else _first_argument
        )
    try:
        yield
    finally:
        with _LOCK:
            entry[0] -= 1
            if entry[0] == 0:
                del _OPEN[key]
                if entry[1] is _MISSING:
                    del attributes[final.attribute]
                else:
                    attributes[final.attribute] = entry[1]


def _first_argument(inputs: Any, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return inputs
