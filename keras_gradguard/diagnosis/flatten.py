"""From a traced ``FuncGraph`` to one flat :class:`~keras_gradguard.diagnosis.opgraph.OpGraph`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_gradguard.diagnosis.opgraph import ASSIGN_OPS, Call, Op, OpGraph, Value
from keras_gradguard.diagnosis.source import Frame, user_stack

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CONDS = ("If", "StatelessIf", "Case", "StatelessCase")
_WHILES = ("While", "StatelessWhile")
_SMALL_CONSTANT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """The operations that one layer call made: number ``first`` (from 0) up to ``last``."""

    graph: Any
    first: int
    last: int
    layers: tuple[str, ...]


def operation_count(graph: Any) -> int:
    """Return how many operations a graph has by now."""
    return int(graph.num_operations())


def static_shape(tensor: Any) -> tuple[int | None, ...] | None:
    """Return the static shape of a tensor, or None when its rank is unknown."""
    shape = tensor.shape
    return None if shape.rank is None else tuple(shape.as_list())


def flatten(
    graph: Any,
    variables: Mapping[str, Any],
    spans: Sequence[Span] = (),
    outer: Sequence[Frame] = (),
    limit: int = 200_000,
) -> OpGraph:
    """Inline a traced graph.

    Args:
        graph: A ``FuncGraph``.
        variables: Name of the placeholder that captures a variable's handle -> the key
            under which the variable is to be known.
        spans: Which layer made which operations.
        outer: The user's frames around the whole step; they are left out of the frames of
            the operations, so that an operation made by a library layer has none.
        limit: Most operations to take; ``truncated`` says when there were more.

    Returns:
        The flat graph. The values of the top graph are known under the names of their
        tensors (``"dense/BiasAdd:0"``).
    """
    work = Flattener(OpGraph(), spans, tuple(outer), limit)
    work.inline(graph, (), ())
    for name, key in variables.items():
        value = work.flat.value(f"{name}:0")
        if value is not None:
            work.flat.add_variable(key, value)
    work.flat.connect_assigns()
    return work.flat


class Flattener:
    """Adds traced graphs, with the bodies they call, to an :class:`OpGraph`.

    Args:
        flat: The graph to add to.
        spans: Which layer made which operations.
        outer: The user's frames to leave out, outermost first.
        limit: Most operations to take.
    """

    def __init__(
        self,
        flat: OpGraph,
        spans: Sequence[Span] = (),
        outer: tuple[Frame, ...] = (),
        limit: int = 200_000,
    ) -> None:
        self.flat = flat
        self.outer = outer
        self.limit = limit
        self.calls = 0
        self.around: tuple[str, ...] = ()
        self.layers: dict[int, dict[int, tuple[str, ...]]] = {}  # graph -> operation -> layers
        for span in spans:
            made = self.layers.setdefault(id(span.graph), {})
            for number in range(span.first, span.last):
                if len(span.layers) > len(made.get(number, ())):
                    made[number] = span.layers

    # ---- one graph -----------------------------------------------------------------

    def inline(self, graph: Any, path: tuple[Any, ...], inside: tuple[str, ...]) -> None:
        """Add the operations of ``graph``; ``path`` tells two calls of one body apart."""
        for number, operation in enumerate(graph.get_operations()):
            if len(self.flat.ops) >= self.limit:
                self.flat.truncated = True
                return
            outputs = [self._new(path, t) for t in operation.outputs]
            if operation.type in ("Placeholder", "PlaceholderWithDefault"):
                continue
            inputs = [self._get(path, t) for t in operation.inputs]
            first = len(self.flat.ops)
            for types, add in (
                (_CALLS, self._call),
                (_CONDS, self._cond),
                (_WHILES, self._while),
            ):
                if operation.type in types:
                    around = self.around
                    self.around = self._layers(graph, number)
                    add(operation, inputs, outputs, path, inside)
                    self.around = around
                    self.flat.calls.append(Call(operation, first, len(self.flat.ops)))
            if len(self.flat.ops) > first or operation.type in (*_CALLS, *_CONDS, *_WHILES):
                continue
            if operation.type in ASSIGN_OPS:
                source = inputs[-1] if inputs else None
                outputs = [Value(dtype=source.dtype, shape=source.shape)] if source else []
            op = self._op(operation, operation.type, inputs, outputs, inside)
            op.layers = self._layers(graph, number)

    def _key(self, path: tuple[Any, ...], tensor: Any) -> Any:
        return (path, tensor.name) if path else tensor.name

    def _new(self, path: tuple[Any, ...], tensor: Any) -> Value:
        value = Value(dtype=tensor.dtype.base_dtype.name, shape=static_shape(tensor), tensor=tensor)
        return self.flat.add_value(self._key(path, tensor), value)

    def _get(self, path: tuple[Any, ...], tensor: Any) -> Value:
        found = self.flat.value(self._key(path, tensor))
        return found if found is not None else self._new(path, tensor)

    def _op(
        self,
        operation: Any,
        kind: str,
        inputs: list[Value],
        outputs: list[Value],
        inside: tuple[str, ...],
    ) -> Op:
        op = Op(
            type=kind,
            name=operation.name,
            inputs=inputs,
            outputs=outputs,
            attrs=plain_attrs(operation),
            stack=lambda: user_stack(operation.traceback, self.outer),
            handle=operation,
            inside=inside,
        )
        for index, value in enumerate(outputs):
            value.op, value.index = op, index
        return self.flat.add_op(op)

    def _layers(self, graph: Any, number: int) -> tuple[str, ...]:
        # A body that an earlier call traced was made by no layer of this step, but is run by
        # one.
        made = self.layers.get(id(graph), {}).get(number, ())
        return made if len(made) > len(self.around) else self.around

    # ---- constructs ----------------------------------------------------------------

    def _body(self, operation: Any, name: str) -> Any:
        return operation.graph._get_function(name).graph

    def enter(
        self, body: Any, path: tuple[Any, ...], inside: tuple[str, ...], sources: Sequence[Value]
    ) -> tuple[tuple[Any, ...], list[Value]]:
        """Inline one body; return its path and its outputs."""
        self.calls += 1
        inner = (*path, self.calls)
        self.inline(body, inner, inside)
        for source, argument in zip(sources, body.inputs, strict=False):
            self.flat.link(source, self._get(inner, argument))
        return inner, [self._get(inner, t) for t in body.outputs]

    def _call(self, operation: Any, inputs: Any, outputs: Any, path: Any, inside: Any) -> None:
        body = self._body(operation, operation.get_attr("f").name)
        _, results = self.enter(body, path, (*inside, "function"), inputs)
        for result, output in zip(results, outputs, strict=False):
            self.flat.link(result, output)

    def _cond(self, operation: Any, inputs: Any, outputs: Any, path: Any, inside: Any) -> None:
        if "Case" in operation.type:
            names = [f.name for f in operation.get_attr("branches")]
        else:
            names = [operation.get_attr(k).name for k in ("then_branch", "else_branch")]
        chosen = Value(dtype="bool", shape=())
        self._op(operation, "If", [inputs[0]], [chosen], inside)
        for name in names:
            body = self._body(operation, name)
            _, results = self.enter(body, path, (*inside, "cond"), inputs[1:])
            for result, output in zip(results, outputs, strict=False):
                self.flat.link(result, output)
        for output in outputs:
            self.flat.link(chosen, output)

    def _while(self, operation: Any, inputs: Any, outputs: Any, path: Any, inside: Any) -> None:
        now = (*inside, "while")
        body = self._body(operation, operation.get_attr("body").name)
        test = self._body(operation, operation.get_attr("cond").name)
        inner, results = self.enter(body, path, now, inputs)
        again, going_on = self.enter(test, path, now, inputs)
        counted = Value(dtype="bool", shape=())
        self._op(operation, "While", list(going_on), [counted], inside)
        for i, (result, output) in enumerate(zip(results, outputs, strict=False)):
            self.flat.link(result, self._get(inner, body.inputs[i]))
            if i < len(test.inputs):
                self.flat.link(result, self._get(again, test.inputs[i]))
            # Not from the call's input to its output: a loop that runs at least once hands on
            # only what its body made.
            self.flat.link(result, output)
            if result.dtype not in ("resource", "variant"):
                self.flat.link(counted, output)


def plain_attrs(operation: Any) -> dict[str, Any]:
    """Return the attributes of a graph operation that are plain Python values.

    Dtypes become their names. A constant of at most 64 entries has its numbers under
    ``"value"``.
    """
    found: dict[str, Any] = {}
    if operation.type == "Const":
        size = operation.outputs[0].shape.num_elements()
        if size is not None and size <= _SMALL_CONSTANT:
            found["value"] = tf.make_ndarray(operation.get_attr("value"))
        return found
    for key, attr in operation.node_def.attr.items():
        kind = attr.WhichOneof("value")
        if kind in ("i", "f", "b"):
            found[key] = getattr(attr, kind)
        elif kind == "s":
            found[key] = attr.s.decode("utf-8", "replace")
        elif kind == "type":
            found[key] = tf.as_dtype(attr.type).name
        elif kind == "func":
            found[key] = attr.func.name
    return found
