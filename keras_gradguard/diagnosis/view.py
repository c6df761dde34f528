"""One view of a training step for the analyses, whether it was traced or recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_gradguard.diagnosis.eager import Left, Recording, TapeSeen
from keras_gradguard.diagnosis.opgraph import Op, OpGraph, Value
from keras_gradguard.diagnosis.sandbox import all_layers
from keras_gradguard.diagnosis.source import Frame
from keras_gradguard.diagnosis.trace import Trace, backend_variable
from keras_gradguard.taps.names import automatic_prefixes, path_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VariableSeen:
    """A trainable variable in this step.

    Args:
        variable: The Keras or backend variable (or whatever was handed to the tape).
        key: Its key in ``OpGraph.variables``.
        name: Its path as the user knows it, e.g. ``"dense_1/kernel"``.
        owner: The layer object that holds it, or None.
        layer: Name of that layer, else the path without its last part.
        dtype: Dtype name.
        none: True when its gradient is None; None when that is not known.
        watched: Whether the tape saw a read of it; None when that is not known.
    """

    variable: Any
    key: int
    name: str
    owner: Any
    layer: str
    dtype: str
    none: bool | None
    watched: bool | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepView:
    """What the analyses look at.

    Args:
        ops: The operations, flat.
        loss: The differentiated values.
        outputs: What the model returned, as far as known.
        variables: The trainable variables.
        left: Tensors that were turned into Python values (recorded steps only).
        model: The model, or None.
        eager: True for a recorded eager step: operations know whether a tape was active.
        trace: The trace behind this view, or None.
        custom_step: True when the model has its own ``train_step``.
        tape_frames: The user's lines that asked the tape (recorded steps).
        names: Key -> name of every variable known, trainable or not.
        complete: False when operations are missing, so that "never read" means nothing.
    """

    ops: OpGraph
    loss: tuple[Value, ...]
    outputs: tuple[Value, ...]
    variables: tuple[VariableSeen, ...]
    left: tuple[Left, ...] = ()
    model: Any = None
    eager: bool = False
    trace: Trace | None = None
    custom_step: bool = False
    tape_frames: tuple[Frame, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    complete: bool = True

    @property
    def stock_layers(self) -> frozenset[str]:
        """Names of the layers of the model that Keras ships."""
        if self.model is None:
            return frozenset()
        return frozenset(
            str(layer.name)
            for layer in all_layers(self.model)
            if type(layer).__module__.startswith("keras.") and type(layer).__name__ != "Lambda"
        )

    def place(self, op: Op) -> str:
        """Return where an operation stands, as a word of ``where``: a layer, or the loss."""
        if op.layers:
            return op.layers[-1]
        if self.custom_step and not self._after_outputs(op):
            return "train_step"
        return "loss"

    def _after_outputs(self, op: Op) -> bool:
        return bool(self.ops.ancestors(op.inputs) & set(self.outputs))


def owners_of(model: Any) -> dict[int, Any]:
    """Return ``id(backend variable)`` -> the layer that holds it itself."""
    found: dict[int, Any] = {}
    if model is None:
        return found
    for layer in all_layers(model):
        own = [
            *getattr(layer, "_trainable_variables", ()),
            *getattr(layer, "_non_trainable_variables", ()),
        ]
        for variable in own:
            found.setdefault(id(backend_variable(variable)), layer)
    return found


def see_variables(
    variables: Sequence[Any],
    none: Sequence[bool | None],
    watched: Iterable[Any] | None,
    models: Sequence[Any],
) -> tuple[VariableSeen, ...]:
    """Gather what is known about each variable.

    Args:
        variables: Keras or backend variables.
        none: One per variable: its gradient is None, is not, or unknown (None).
        watched: What the tape watched, or None when not known.
        models: The models that hold them.
    """
    owners: dict[int, Any] = {}
    for model in models:
        owners.update(owners_of(model))
    prefixes = automatic_prefixes(models)
    seen = None if watched is None else {id(w) for w in watched}
    found = []
    for variable, is_none in zip(variables, none, strict=True):
        inner = backend_variable(variable)
        owner = owners.get(id(inner))
        name = path_of(variable, prefixes)
        dtype = getattr(variable, "dtype", "unknown")
        found.append(
            VariableSeen(
                variable=variable,
                key=id(inner),
                name=name,
                owner=owner,
                layer=str(owner.name) if owner is not None else name.rsplit("/", 1)[0],
                dtype=str(getattr(dtype, "name", dtype)),
                none=is_none,
                watched=None if seen is None else id(inner) in seen,
            )
        )
    return tuple(found)


def _names(variables: Iterable[Any], models: Sequence[Any]) -> dict[int, str]:
    prefixes = automatic_prefixes(models)
    found = {id(v): path_of(v, prefixes) for v in variables}
    for model in models:
        found.update({id(backend_variable(v)): path_of(v, prefixes) for v in model.variables})
    return found


def view_of_trace(trace: Trace) -> StepView:
    """Return the view of a traced step."""
    if trace.gradients:
        none: list[bool | None] = [g is None for g in trace.gradients]
    else:
        none = [None] * len(trace.variables)
    target: tuple[Any, ...] = (trace.scaled_loss,) if trace.scaled_loss is not None else ()
    main = [r for r in trace.records if r.ops is trace.ops]
    if main:
        target = main[-1].target or target
    loss = tuple(v for v in (trace.value(t) for t in target) if v is not None)
    outputs = tuple(
        v
        for v in (trace.value(t) for t in tf.nest.flatten(trace.y_pred) if tf.is_tensor(t))
        if v is not None
    )
    return StepView(
        ops=trace.ops,
        loss=loss,
        outputs=outputs,
        variables=see_variables(
            trace.variables, none, trace.watched if trace.records else None, [trace.model]
        ),
        model=trace.model,
        trace=trace,
        custom_step=trace.custom_step,
        names=_names(trace.captured.values(), [trace.model]),
        complete=not trace.ops.truncated,
    )


def view_of_recording(
    recording: Recording,
    model: Any = None,
    *,
    variables: Sequence[Any] | None = None,
    loss: Any = None,
) -> StepView | None:
    """Return the view of a recorded step.

    Args:
        recording: What was recorded.
        model: The model, for the names of layers and which tape to look at.
        variables: The variables in question. Defaults to those the tape was asked for.
        loss: The loss tensor, to find the tape by. Defaults to the last fitting tape.

    Returns:
        The view, or None when no tape was used.
    """
    asked = variables if variables is not None else getattr(model, "trainable_variables", ())
    recording.know(asked)
    tape = _tape_of(recording, asked, loss)
    if tape is None:
        return None
    none = {id(backend_variable(s)): n for s, n in zip(tape.sources, tape.none, strict=True)}
    chosen = list(tape.sources) if variables is None else list(variables)
    keys = {id(backend_variable(v)): v for v in asked}
    chosen = [keys.get(id(backend_variable(v)), v) for v in chosen]
    return StepView(
        ops=tape.ops,
        loss=tape.target,
        outputs=(),
        variables=see_variables(
            chosen,
            [none.get(id(backend_variable(v))) for v in chosen],
            tape.watched,
            [model] if model is not None else [],
        ),
        left=() if tape.traced else tuple(recording.left),
        model=model,
        eager=not tape.traced,
        tape_frames=tape.frames,
        names=_names(recording.variables.values(), [model] if model is not None else []),
        complete=not (tape.ops.truncated or recording.error),
    )


def _tape_of(recording: Recording, variables: Sequence[Any], loss: Any) -> TapeSeen | None:
    if loss is not None:
        value = recording.value(loss)
        for tape in reversed(recording.tapes):
            if value is not None and value in tape.target:
                return tape
    wanted = {id(backend_variable(v)) for v in variables}
    best, most = None, -1
    for tape in recording.tapes:
        count = sum(id(backend_variable(s)) in wanted for s in tape.sources)
        if count >= most:
            best, most = tape, count
    return best
