"""Trace one training step into a scratch graph: nothing is executed, nothing is changed.

The step is the user's own: the model is called, the loss computed and the tape asked for
gradients exactly as in training (a custom ``train_step`` runs as it is, with ``apply``
taken out), only that placeholders stand for the batch and the operations land in a
``FuncGraph`` of ours. What the analyses need is written down on the way: which operations
each layer made, what each tape watched, the gradients it gave, and which captured tensor is
which variable.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.layers.layer import Layer
from keras.src.ops.operation import Operation
from keras.src.trainers.compile_utils import CompileLoss
from tensorflow.python.framework.func_graph import FuncGraph

from keras_gradguard.diagnosis import sandbox
from keras_gradguard.diagnosis.flatten import Span, flatten, operation_count
from keras_gradguard.diagnosis.opgraph import OpGraph, Value
from keras_gradguard.diagnosis.source import Frame, stack_frames, traceback_frames


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
    """

    target: tuple[Any, ...]
    sources: tuple[Any, ...]
    gradients: tuple[Any, ...]
    watched: tuple[Any, ...]
    ops: OpGraph
    operations: int
    error: str | None = None


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


# ---- the batch -----------------------------------------------------------------------


def _as_array(item: Any) -> Any:
    """Return ``item`` as Keras' data adapters would hand it to the step."""
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if not isinstance(item, (tf.Tensor, tf.Variable)):
        if tf.is_tensor(item):
            return item
        item = np.asarray(item)
        if item.dtype == np.float64:
            item = item.astype(keras.config.floatx())
        elif item.dtype == object:
            raise ValueError(
                "Every array of the batch must have a numeric dtype. Received an array of "
                f"dtype object and shape {item.shape}; convert it with np.asarray(x, 'float32')."
            )
    with tf.init_scope():  # a real tensor, also while the scratch graph is the default
        return tf.convert_to_tensor(item)


def _placeholders(data: Any, name: str, feeds: list[tuple[Any, Any]]) -> Any:
    def one(item: Any) -> Any:
        item = _as_array(item)
        if not isinstance(item, tf.Tensor):
            return item  # Python scalars, None and composite tensors stay as they are
        holder = tf.compat.v1.placeholder(item.dtype, item.shape, name=name)
        feeds.append((holder, item))
        return holder

    return None if data is None else tree.map_structure(one, data)


def _listed(structure: Any) -> tuple[Any, ...]:
    return tuple(t for t in tree.flatten(structure) if tf.is_tensor(t))


# ---- watching ------------------------------------------------------------------------


class _Watch:
    """What is written down while the step is traced."""

    def __init__(self, model: Any, graph: Any, outer: tuple[Frame, ...]) -> None:
        self.graph = graph
        self.outer = outer
        self.stack: list[str] = []
        self.calls: list[LayerCall] = []
        self.spans: list[Span] = []
        self.records: list[TapeRecord] = []
        self.applies: list[Any] = []
        self.known = {id(layer) for layer in sandbox.all_layers(model)}
        self.listed = {id(backend_variable(v)) for v in model.variables}

    def inner_frames(self) -> tuple[Frame, ...]:
        frames = stack_frames()
        shared = 0
        for mine, theirs in zip(frames, self.outer, strict=False):
            if mine != theirs:
                break
            shared += 1
        return frames[shared:]

    def operation_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        watched = self.call(original)

        def chosen(operation: Any, *args: Any, **kwargs: Any) -> Any:
            # A layer comes here from its own `__call__`, which is watched already.
            which = original if isinstance(operation, Layer) else watched
            return which(operation, *args, **kwargs)

        return chosen

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(layer: Any, *args: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            first = operation_count(graph)
            parents = tuple(self.stack)
            self.stack.append(layer.name)
            was_built = bool(getattr(layer, "built", True))
            try:
                outputs = original(layer, *args, **kwargs)
            finally:
                self.stack.pop()
            names = (*parents, layer.name)
            self.spans.append(Span(graph, first, operation_count(graph), names))
            self.calls.append(
                LayerCall(
                    layer=layer,
                    name=layer.name,
                    parents=parents,
                    inputs=_listed((args, kwargs)),
                    outputs=_listed(outputs),
                    graph=graph,
                    frames=self.inner_frames(),
                    built_here=not was_built and id(layer) not in self.known,
                )
            )
            return outputs

        return watched

    def gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            top = tf.compat.v1.get_default_graph() is self.graph
            ops = self.flat() if top else OpGraph()
            count = operation_count(self.graph)
            seen = tuple(tape.watched_variables())
            error, result = None, None
            try:
                result = original(tape, target, sources, *args, **kwargs)
            except LookupError as problem:
                error = str(problem)
                result = tree.map_structure(lambda _: None, sources)
            gradients = tree.flatten(result) if result is not None else []
            flat_sources = tuple(tree.flatten(sources))
            if len(gradients) != len(flat_sources):
                gradients = list(result) if isinstance(result, (list, tuple)) else [result]
            self.records.append(
                TapeRecord(
                    target=_listed(target),
                    sources=flat_sources,
                    gradients=tuple(gradients),
                    watched=seen,
                    ops=ops,
                    operations=count,
                    error=error,
                )
            )
            return result

        return watched

    def captured(self) -> dict[str, Any]:
        """Return placeholder name -> variable for every captured variable."""
        by_handle: dict[int, Any] = {}
        for variable in [*self.seen_variables(), *self.model_variables]:
            handle = getattr(variable, "handle", None)
            if handle is not None:
                by_handle[id(handle)] = variable
        return {
            inner.op.name: by_handle[id(outside)]
            for outside, inner in self.graph.captures
            if id(outside) in by_handle
        }

    model_variables: Sequence[Any] = ()

    def seen_variables(self) -> list[Any]:
        return list(getattr(self.graph, "_watched_variables", ()))

    def flat(self) -> OpGraph:
        keys = {name: id(v) for name, v in self.captured().items()}
        return flatten(self.graph, keys, self.spans, self.outer)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with (
            sandbox.replaced(Layer, "__call__", self.call),
            sandbox.replaced(Operation, "__call__", self.operation_call),
            sandbox.replaced(tf.GradientTape, "gradient", self.gradient),
        ):
            yield


# ---- the step ------------------------------------------------------------------------


def _call_model(model: Any, x: Any, training: bool) -> Any:
    if getattr(model, "_call_has_training_arg", True):
        return model(x, training=training)
    return model(x)


def as_loss(loss: Any) -> Any:
    """Return a loss as something to call with ``(y_true, y_pred)``, and optionally weights.

    Args:
        loss: A callable, the name of a Keras loss, or a list or dictionary of these.

    Returns:
        The callable itself, or Keras' own compiled form of the others.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(loss, str):
        return keras.losses.get(loss)
    if isinstance(loss, (list, tuple, dict)):
        return CompileLoss(loss)
    if callable(loss):
        return loss
    raise TypeError(
        "`loss` must be a callable of (y_true, y_pred), the name of a Keras loss, or a list or "
        f"dictionary of these. Received: loss={loss!r}"
    )


def _explicit_loss(model: Any, loss: Any, y: Any, y_pred: Any, weight: Any) -> Any:
    function = as_loss(loss)
    takes_weight = isinstance(function, (keras.losses.Loss, CompileLoss))
    if weight is not None and takes_weight:
        value = function(y, y_pred, sample_weight=weight)
    else:
        value = function(y, y_pred)
        if weight is not None:
            value = value * tf.cast(weight, value.dtype)
    value = tf.convert_to_tensor(value)
    if value.shape.rank != 0:
        # What `fit` does with a function that returns one loss per example.
        value = tf.reduce_mean(value)
    for extra in model.losses:
        value = value + tf.cast(tf.reduce_sum(extra), value.dtype)
    return value


def _stock_step(
    model: Any, data: tuple[Any, Any, Any], loss: Any, optimizer: Any, training: bool
) -> tuple[Any, Any, Any]:
    x, y, weight = data
    with tf.GradientTape() as tape:
        y_pred = _call_model(model, x, training)
        if loss is not None:
            value = _explicit_loss(model, loss, y, y_pred, weight)
        else:
            value = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training
            )
        scaled = optimizer.scale_loss(value) if optimizer is not None else value
    variables = list(model.trainable_variables)
    if variables and value is not None:
        tape.gradient(scaled, variables)
    return y_pred, value, scaled


def _build(model: Any, x: Any, training: bool) -> None:
    """Build what is not built yet, as ``fit`` would; the values do not depend on when."""
    if all(layer.built for layer in sandbox.all_layers(model)):
        return
    with FuncGraph("gradguard_build").as_default():
        _call_model(model, _placeholders(x, "x", []), training)


def trace_step(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    sample_weight: Any = None,
    optimizer: Any = None,
    training: bool = True,
) -> Trace:
    """Trace one training step without executing or changing anything.

    Args:
        model: A Keras model or layer.
        x: Inputs of one batch: an array, or a list or dictionary of arrays.
        y: Targets in the same forms, or None.
        loss: A callable of ``(y_true, y_pred)``, the name of a Keras loss, a list or
            dictionary of these; None for the model's own ``compute_loss`` and
            ``train_step``.
        sample_weight: Weights in the same forms, or None.
        optimizer: Only for its loss scaling. Defaults to the compiled one.
        training: Whether the model is called in training mode.

    Returns:
        The trace.

    Raises:
        TraceError: The user's code cannot run in a graph, or raised. ``frames`` says where.

    Example:
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")])
    >>> step = trace_step(model, np.ones((4, 2)), np.ones((4, 1)), loss="mse")
    >>> [call.name for call in step.layers if call.name == "out"]
    ['out']
    """
    if optimizer is None and loss is None:
        optimizer = getattr(model, "optimizer", None)
    custom = (
        loss is None and isinstance(model, keras.Model) and not sandbox.is_stock_train_step(model)
    )
    graph = FuncGraph("gradguard_step")
    outer = stack_frames()
    feeds: list[tuple[Any, Any]] = []
    try:
        _build(model, x, training)
        with warnings.catch_warnings(), sandbox.untouched(model, optimizers=(optimizer,)):
            warnings.simplefilter("ignore")
            watch = _Watch(model, graph, outer)
            watch.model_variables = [backend_variable(v) for v in model.variables]
            with graph.as_default(), watch.watching():
                data = tuple(
                    _placeholders(item, name, feeds)
                    for item, name in ((x, "x"), (y, "y"), (sample_weight, "sample_weight"))
                )
                if custom:
                    result = _custom_step(model, data, watch, optimizer)
                else:
                    result = _stock_step(model, data, loss, optimizer, training)
            return _finish(model, graph, feeds, data, result, watch, custom)
    except TraceError:
        raise
    except Exception as problem:
        frames = traceback_frames(problem.__traceback__)
        shared = 0
        for mine, theirs in zip(frames, outer, strict=False):
            if (mine.file, mine.function) != (theirs.file, theirs.function):
                break
            shared += 1
        raise TraceError(
            f"{type(problem).__name__}: {_first_words(problem)}",
            frames[shared:],
            type(problem).__name__,
        ) from problem


def _first_words(problem: Exception) -> str:
    """Return the telling lines of an error's text; Keras puts its own words around them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(problem))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " ".join(lines[:2])


def _custom_step(model: Any, data: Any, watch: _Watch, optimizer: Any) -> tuple[Any, Any, Any]:
    def on_apply(which: Any, grads: Any, variables: Any) -> None:
        watch.applies.append((which, tuple(grads), None if variables is None else tuple(variables)))

    tapped = tuple(o for o in (*sandbox.all_optimizers(model), optimizer) if o is not None)
    with sandbox.nothing_applied(on_apply, tapped):
        model.train_step(keras.utils.pack_x_y_sample_weight(*data))
    whole = [c for c in watch.calls if c.layer is model]
    outputs = whole[-1].outputs if whole else None
    y_pred = outputs[0] if outputs is not None and len(outputs) == 1 else outputs
    target = watch.records[-1].target if watch.records else ()
    loss = target[0] if target else None
    return y_pred, loss, loss


def _finish(
    model: Any, graph: Any, feeds: Any, data: Any, result: Any, watch: _Watch, custom: bool
) -> Trace:
    y_pred, loss, scaled = result
    record = _main_record(watch.records, model)
    with graph.as_default():
        ops = record.ops if record is not None and record.ops.ops else watch.flat()
    known = {id(backend_variable(v)): v for v in model.trainable_variables}
    if record is None:
        variables, gradients = tuple(model.trainable_variables), ()
    else:
        pairs = [
            (known.get(id(backend_variable(s)), s), g)
            for s, g in zip(record.sources, record.gradients, strict=False)
            if isinstance(s, tf.Variable) or hasattr(s, "_value")
        ]
        variables = tuple(v for v, _ in pairs)
        gradients = tuple(g for _, g in pairs)
        if custom and record.target:
            loss = scaled = record.target[0]
    listed = watch.listed
    seen = {id(v): v for v in [*watch.seen_variables(), *watch.captured().values()]}
    untracked = tuple(
        v for v in seen.values() if id(v) not in listed and getattr(v, "trainable", False)
    )
    notes = []
    if ops.truncated:
        notes.append("The step has too many operations; only the first ones were looked at.")
    if record is not None and record.error:
        notes.append(record.error)
    return Trace(
        model=model,
        graph=graph,
        feeds=tuple(feeds),
        x=data[0],
        y=data[1],
        sample_weight=data[2],
        y_pred=y_pred,
        loss=loss,
        scaled_loss=scaled,
        variables=variables,
        gradients=gradients,
        watched=record.watched if record is not None else (),
        ops=ops,
        layers=tuple(watch.calls),
        records=tuple(watch.records),
        applies=tuple(watch.applies),
        captured=watch.captured(),
        untracked=untracked,
        custom_step=custom,
        known_layers=frozenset(watch.known),
        notes=tuple(notes),
    )


def _main_record(records: Sequence[TapeRecord], model: Any) -> TapeRecord | None:
    """Return the tape that asks for most of the model's own variables (the last of equals)."""
    own = {id(backend_variable(v)) for v in model.trainable_variables}
    best, most = None, -1
    for record in records:
        count = sum(id(backend_variable(s)) in own for s in record.sources)
        if count >= most and count > 0:
            best, most = record, count
    return best or (records[-1] if records else None)
