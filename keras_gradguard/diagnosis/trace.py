"""Trace one training step into a scratch graph: nothing is executed, nothing is changed.

The step is the user's own: the model is called, the loss computed and the tape asked for
gradients exactly as in training (a custom ``train_step`` runs as it is, with ``apply``
taken out), only that placeholders stand for the batch and the operations land in a
``FuncGraph`` of ours. What the analyses need is written down on the way: which operations
each layer made, what each tape watched, the gradients it gave, and which captured tensor is
which variable.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss
from tensorflow.python.framework.func_graph import FuncGraph

from keras_gradguard.diagnosis import sandbox
from keras_gradguard.diagnosis.feeds import placeholders
from keras_gradguard.diagnosis.source import stack_frames, traceback_frames
from keras_gradguard.diagnosis.step import (
    LayerCall,
    TapeRecord,
    Trace,
    TraceError,
    backend_variable,
)
from keras_gradguard.diagnosis.watch import Watch

__all__ = [
    "Depth",
    "LayerCall",
    "TapeRecord",
    "Trace",
    "TraceError",
    "as_loss",
    "backend_variable",
    "trace_step",
]


Depth = Literal["forward", "step", "values"]
"""How much of a step is traced, see :func:`trace_step`."""


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
    model: Any,
    data: tuple[Any, Any, Any],
    loss: Any,
    optimizer: Any,
    training: bool,
    watch: Watch,
    depth: Depth,
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
    if variables and value is not None and depth != "forward":
        watch.asks_values = depth == "values"
        tape.gradient(scaled, variables)
    return y_pred, value, scaled


def _build(model: Any, x: Any, training: bool) -> None:
    """Build what is not built yet, as ``fit`` would; the values do not depend on when."""
    if all(layer.built for layer in sandbox.all_layers(model)):
        return
    with FuncGraph("gradguard_build").as_default():
        _call_model(model, placeholders(x, "x", []), training)


def trace_step(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    sample_weight: Any = None,
    optimizer: Any = None,
    training: bool = True,
    depth: Depth = "step",
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
        depth: ``"forward"`` leaves out the backward pass, which is more than half of the
            work: the trace has no gradients. ``"values"`` also keeps the gradient of every
            value on the way. Defaults to ``"step"``. A ``train_step`` of the user's own
            always runs as it is.

    Returns:
        The trace.

    Raises:
        TraceError: The user's code cannot run in a graph, or raised. ``frames`` says where.

    Example:
    >>> import numpy as np
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
            watch = Watch(model, graph, outer)
            watch.model_variables = [backend_variable(v) for v in model.variables]
            with graph.as_default(), watch.watching():
                data = tuple(
                    placeholders(item, name, feeds)
                    for item, name in ((x, "x"), (y, "y"), (sample_weight, "sample_weight"))
                )
                if custom:
                    result = _custom_step(model, data, watch, optimizer)
                else:
                    result = _stock_step(model, data, loss, optimizer, training, watch, depth)
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


def _custom_step(model: Any, data: Any, watch: Watch, optimizer: Any) -> tuple[Any, Any, Any]:
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
    model: Any, graph: Any, feeds: Any, data: Any, result: Any, watch: Watch, custom: bool
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
        value_gradients={} if record is None else record.value_gradients,
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
