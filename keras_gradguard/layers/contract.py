"""Whether a compiled loss fits a LogitsOutput: what a guard asks before training."""

from __future__ import annotations

from typing import Any

import keras

from keras_gradguard.findings import Cause, Evidence
from keras_gradguard.layers._stripping import _MOVES_ENTRIES, _does_nothing
from keras_gradguard.layers.gradient_probe import GradientProbe, _layers_in
from keras_gradguard.layers.logits_output import LogitsOutput

# Losses of Keras that read their predictions as probabilities. Those of the first
# group take logits with `from_logits=True`; the others never do.
_CROSSENTROPIES = {
    "binary_crossentropy": "binary",
    "binary_focal_crossentropy": "binary",
    "categorical_crossentropy": "categorical",
    "categorical_focal_crossentropy": "categorical",
    "categorical_generalized_cross_entropy": "categorical",
    "sparse_categorical_crossentropy": "categorical",
}
_PROBABILITY_ONLY = {"kl_divergence", "poisson", "dice", "tversky"}
_ALIASES = {"bce": "binary_crossentropy", "kld": "kl_divergence", "kldivergence": "kl_divergence"}


def find_logits_outputs(model: Any) -> list[LogitsOutput]:
    """Return every LogitsOutput in a model (or the layer itself), each once."""
    return [layer for layer in _layers_in(model) if isinstance(layer, LogitsOutput)]


def output_heads(model: Any) -> list[LogitsOutput | None] | None:
    """Return, per output of a model, the LogitsOutput that gives it.

    Args:
        model: Any Keras model.

    Returns:
        One entry per output in Keras' flat order: the head, or None for an output that does
        not come from one. None for a model whose graph is not known (subclassed, not
        built).
    """
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if not outputs or not all(hasattr(t, "_keras_history") for t in outputs):
        return None
    return [_head_of(t) for t in outputs]


def _head_of(tensor: Any) -> Any:
    while True:
        operation, node_index, tensor_index = tensor._keras_history
        if isinstance(operation, LogitsOutput):
            return operation
        if isinstance(operation, keras.Model):
            heads = output_heads(operation)
            if heads is None:
                found = find_logits_outputs(operation)
                return found[0] if len(found) == 1 else None
            return heads[tensor_index]
        if not (
            isinstance(operation, (*_MOVES_ENTRIES, GradientProbe)) or _does_nothing(operation)
        ):
            return None
        inputs = operation._inbound_nodes[node_index].input_tensors
        if len(inputs) != 1:
            return None
        tensor = inputs[0]


def logits_mismatch(model: Any, loss: Any) -> Cause | None:
    """Return why a compiled loss does not fit the model's LogitsOutput, or None.

    Pure: reads the model and the loss, runs neither. A loss that is not known (a function of the
    user's, MSE) is never called a mismatch.

    Args:
        model: A Keras model.
        loss: What was given to ``compile``: a name, a function, a ``keras.losses.Loss``, or a
            list or dictionary of them, one per output; or None.

    Returns:
        The cause (``missing_activation``: logits go to a loss on probabilities, or
        ``softmax_over_one_unit``) with the fix, or None.

    Example:
    >>> import keras
    >>> head = LogitsOutput(keras.layers.Dense(1, activation="sigmoid"), name="head")
    >>> model = keras.Sequential([keras.Input((4,)), head])
    >>> logits_mismatch(model, "binary_crossentropy").name
    'missing_activation'
    >>> logits_mismatch(model, head.loss()) is None
    True
    """
    if loss is None:
        return None
    heads = output_heads(model)
    if heads is None:
        found = find_logits_outputs(model)
        heads = [found[0]] if len(found) == 1 else []
    for head, own_loss in _pairs(model, heads, loss):
        cause = None if head is None or own_loss is None else _mismatch(head, own_loss)
        if cause is not None:
            return cause
    return None


def _pairs(model: Any, heads: list[LogitsOutput | None], loss: Any) -> list[tuple[Any, Any]]:
    if isinstance(loss, dict):
        own = dict(zip(_output_names(model), heads, strict=False))
        return [(own.get(key), value) for key, value in loss.items()]
    if isinstance(loss, list | tuple):
        return list(zip(heads, loss, strict=False))
    return [(head, loss) for head in heads]


def _output_names(model: Any) -> list[str]:
    """Return the keys that a dictionary of losses has, in Keras' flat order of outputs."""
    structure = getattr(model, "output", None)  # a Sequential model has none
    if isinstance(structure, dict):
        return sorted(structure)
    names = getattr(model, "output_names", None)
    return list(names or [t._keras_history[0].name for t in getattr(model, "outputs", None) or []])


def _loss_name(loss: Any) -> str | None:
    """Return the Keras name of a loss, or None for a loss that Keras does not define."""
    fn = getattr(loss, "fn", loss)
    if isinstance(loss, str):
        try:
            fn = keras.losses.get(loss)
        except ValueError:
            return None
    module = str(getattr(fn, "__module__", "") or "")
    if not module.startswith("keras."):
        return None
    name = str(getattr(fn, "__name__", ""))
    return _ALIASES.get(name, name)


def _from_logits(loss: Any) -> bool:
    value = getattr(loss, "from_logits", None)
    if value is None:
        value = (getattr(loss, "_fn_kwargs", None) or {}).get("from_logits", False)
    return bool(value)


def _mismatch(head: LogitsOutput, loss: Any) -> Cause | None:
    name = _loss_name(loss)
    if name is None or name not in _CROSSENTROPIES.keys() | _PROBABILITY_ONLY:
        return None
    where = (head.name, "compile")
    sparse = name.startswith("sparse")
    if not _from_logits(loss):
        kind = head.activation or "sigmoid"
        argument = "sparse=True" if sparse and kind == "softmax" else ""
        fix = f"compile with loss=model.get_layer('{head.name}').loss({argument})"
        if head.activation is None:
            fix += ", after LogitsOutput(..., activation='sigmoid' or 'softmax')"
        return Cause(
            name="missing_activation",
            score=1.0,
            where=where,
            evidence=(
                Evidence(
                    name="loss",
                    value=name,
                    text=f"'{head.name}' gives logits, and the loss '{name}' reads them as "
                    "probabilities (from_logits is not True)",
                ),
            ),
            fix=fix + ".",
        )
    one_unit = _CROSSENTROPIES[name] == "categorical" and _classes_of(head) == 1
    if not one_unit:
        return None
    return Cause(
        name="softmax_over_one_unit",
        score=1.0,
        where=where,
        evidence=(
            Evidence(
                name="loss",
                value=name,
                text=f"the loss '{name}' takes the softmax of '{head.name}', which has one unit",
            ),
        ),
        fix=f"compile with loss=model.get_layer('{head.name}').loss().",
    )


def _classes_of(head: LogitsOutput) -> int | None:
    layer = head._gradguard_final[0].holder
    units = getattr(layer, "units", None)
    return units if isinstance(units, int) else getattr(layer, "filters", None)
