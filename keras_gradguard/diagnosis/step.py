"""What is known about one traced training step: the records, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_gradguard.diagnosis.opgraph import OpGraph, Value
from keras_gradguard.diagnosis.source import Frame


class TraceError(RuntimeError):
    """The step could not be traced.

    Args:
        message: What happened.
        frames: The user's lines where it happened, innermost last.
        kind: Class name of the original error.
    """

    def __init__(self, message: str, frames: tuple[Frame, ...] = (), kind: str = "") -> None:
        super().__init__(message)
        self.frames = frames
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCall:
    """One call of a layer (or of a Keras operation in a functional model) in the step.

    Args:
        layer: The layer object.
        name: Its name.
        parents: Names of the layers whose ``call`` it is in, outermost first.
        inputs: The symbolic tensors it took, flat.
        outputs: The symbolic tensors it gave, flat.
        graph: The graph in which it was called.
        frames: The user's lines that called it, innermost last.
        built_here: True when the layer is none of the model's and was built in this step.
    """

    layer: Any
    name: str
    parents: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    graph: Any
    frames: tuple[Frame, ...] = ()
    built_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapeRecord:
    """One ``tape.gradient(target, sources)``.

    Args:
        target: The differentiated tensors, flat.
        sources: What was asked for: variables or tensors, flat.
        gradients: One per source: a tensor, ``IndexedSlices`` or None.
        watched: The backend's variables that the tape watched.
        ops: The operations up to this point, flat.
        operations: How many operations the top graph had at this point.
        error: Why ``tape.gradient`` raised, or None.
        value_gradients: Name of a tensor of the top graph -> its gradient, where asked for.
    """

    target: tuple[Any, ...]
    sources: tuple[Any, ...]
    gradients: tuple[Any, ...]
    watched: tuple[Any, ...]
    ops: OpGraph
    operations: int
    error: str | None = None
    value_gradients: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One traced training step.

    Args:
        model: The model.
        graph: The scratch ``FuncGraph``.
        feeds: ``(placeholder, value)`` for every array of the batch.
        x: Inputs as placeholders, in the structure that the model takes.
        y: Targets as placeholders (or None).
        sample_weight: Weights as placeholders (or None).
        y_pred: What the model returned (or None when it was not called as a whole).
        loss: The scalar loss before loss scaling, or None when there was none.
        scaled_loss: What was differentiated.
        variables: Trainable Keras variables whose gradients were asked for.
        gradients: One per variable: tensor, ``IndexedSlices`` or None.
        watched: The backend's variables that the tape watched.
        ops: The operations of the forward pass and the loss, flat. Variables are known
            under ``id(tf_variable)``, see :meth:`key`.
        layers: The layer calls in order.
        records: Every ``tape.gradient`` of the step (one with the stock ``train_step``).
        applies: ``(optimizer, gradients, variables)`` of every ``apply`` of a custom step.
        captured: Name of the placeholder of a captured handle -> the variable.
        untracked: Trainable backend variables in the graph that the model does not list.
        custom_step: True when the model has its own ``train_step``.
        known_layers: ``id`` of every layer that the model lists.
        notes: What went differently from training, for the reader.
        value_gradients: Name of a tensor of the top graph -> its gradient, for the values
            between variables and loss that have one; empty when they were not asked for.
    """

    model: Any
    graph: Any
    feeds: tuple[tuple[Any, Any], ...]
    x: Any
    y: Any
    sample_weight: Any
    y_pred: Any
    loss: Any
    scaled_loss: Any
    variables: tuple[Any, ...]
    gradients: tuple[Any, ...]
    watched: tuple[Any, ...]
    ops: OpGraph
    layers: tuple[LayerCall, ...]
    records: tuple[TapeRecord, ...]
    applies: tuple[Any, ...] = ()
    captured: dict[str, Any] = field(default_factory=dict)
    untracked: tuple[Any, ...] = ()
    custom_step: bool = False
    known_layers: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    value_gradients: dict[str, Any] = field(default_factory=dict)

    def key(self, variable: Any) -> int:
        """Return the key of a Keras or backend variable in ``ops.variables``."""
        return id(backend_variable(variable))

    def value(self, tensor: Any) -> Value | None:
        """Return the :class:`Value` of a tensor of the top graph, or None."""
        return self.ops.value(getattr(tensor, "name", None)) if tensor is not None else None

    def is_watched(self, variable: Any) -> bool:
        """Return True when the tape saw a read of ``variable``."""
        mine = backend_variable(variable)
        return any(w is mine for w in self.watched)


def backend_variable(variable: Any) -> Any:
    """Return the ``tf.Variable`` inside a Keras variable (or the variable itself)."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable
