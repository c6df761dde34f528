"""Write down what happens while a step is traced: layer calls, tapes, captured variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras import tree
from keras.src.layers.layer import Layer
from keras.src.ops.operation import Operation

from keras_gradguard.diagnosis import sandbox
from keras_gradguard.diagnosis.flatten import Span, flatten, operation_count
from keras_gradguard.diagnosis.opgraph import OpGraph
from keras_gradguard.diagnosis.source import Frame, stack_frames
from keras_gradguard.diagnosis.step import LayerCall, TapeRecord, backend_variable


def _listed(structure: Any) -> tuple[Any, ...]:
    return tuple(t for t in tree.flatten(structure) if tf.is_tensor(t))


class Watch:
    """What is written down while a step is traced.

    Args:
        model: The model of the step.
        graph: The scratch graph.
        outer: The user's frames around the whole step.
    """

    def __init__(self, model: Any, graph: Any, outer: tuple[Frame, ...]) -> None:
        self.graph = graph
        self.outer = outer
        self.model_variables: Sequence[Any] = ()
        self.stack: list[str] = []
        self.calls: list[LayerCall] = []
        self.spans: list[Span] = []
        self.records: list[TapeRecord] = []
        self.applies: list[Any] = []
        self.asks_values = False  # whether the next tape is asked for the values on the way, too
        self.known = {id(layer) for layer in sandbox.all_layers(model)}
        self.listed = {id(backend_variable(v)) for v in model.variables}

    def inner_frames(self) -> tuple[Frame, ...]:
        """Return the user's running lines inside the step, innermost last."""
        frames = stack_frames()
        shared = 0
        for mine, theirs in zip(frames, self.outer, strict=False):
            if mine != theirs:
                break
            shared += 1
        return frames[shared:]

    def operation_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what replaces ``Operation.__call__``: as :meth:`call`, layers left out."""
        watched = self.call(original)

        def chosen(operation: Any, *args: Any, **kwargs: Any) -> Any:
            # A layer comes here from its own `__call__`, which is watched already.
            which = original if isinstance(operation, Layer) else watched
            return which(operation, *args, **kwargs)

        return chosen

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what replaces ``Layer.__call__``: the same, written down."""

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
        """Return what replaces ``GradientTape.gradient``: the same, written down."""

        def watched(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            top = tf.compat.v1.get_default_graph() is self.graph
            ops = self.flat() if top else OpGraph()
            count = operation_count(self.graph)
            seen = tuple(tape.watched_variables())
            error, result = None, None
            values = self._float_tensors() if top and self.asks_values else []
            between: Sequence[Any] = ()
            try:
                if values:
                    # In one go: the backward pass makes these gradients anyway.
                    result = original(tape, target, [*sources, *values], *args, **kwargs)
                    result, between = result[: len(sources)], result[len(sources) :]
                else:
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
                    value_gradients={
                        t.name: g
                        for t, g in zip(values, between, strict=False)
                        if g is not None and g.dtype.is_floating
                    },
                )
            )
            return result

        return watched

    def _float_tensors(self) -> list[Any]:
        operations = self.graph.get_operations()
        return [t for op in operations for t in op.outputs if t.dtype.is_floating]

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

    def seen_variables(self) -> list[Any]:
        """Return the variables that the scratch graph read."""
        return list(getattr(self.graph, "_watched_variables", ()))

    def flat(self) -> OpGraph:
        """Return the operations made so far as a flat graph."""
        keys = {name: id(v) for name, v in self.captured().items()}
        return flatten(self.graph, keys, self.spans, self.outer)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's layer calls and tapes for the time of a ``with`` block."""
        with (
            sandbox.replaced(Layer, "__call__", self.call),
            sandbox.replaced(Operation, "__call__", self.operation_call),
            sandbox.replaced(tf.GradientTape, "gradient", self.gradient),
        ):
            yield
