"""One flat graph of the operations of a training step, whoever recorded it.

A traced step (:mod:`~keras_gradguard.diagnosis.trace`) and a recorded eager step
(:mod:`~keras_gradguard.diagnosis.eager`) both become an :class:`OpGraph`: the bodies of
``tf.function``, ``while`` and ``cond`` are inlined, variable reads hang on the variable they
read, and a value that goes through ``assign`` keeps its way. The analyses walk this graph and
never need to know where it came from. Nothing here names a backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keras_gradguard.diagnosis.source import EMPTY, Frame, Stack

ALIAS = "Alias"
"""Type of the pseudo-op that joins a call to the body it runs: the same value, renamed."""

ASSIGN_OPS = frozenset(
    {
        "AssignVariableOp",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "ResourceScatterUpdate",
        "ResourceScatterAdd",
        "ResourceScatterSub",
        "ResourceScatterNdUpdate",
        "ResourceScatterNdAdd",
        "ResourceStridedSliceAssign",
        "Assign",
        "AssignAdd",
        "AssignSub",
    }
)
READ_OPS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """One tensor of the graph.

    Args:
        dtype: Dtype name, e.g. ``"float32"``.
        shape: Static shape with None for unknown sizes, or None when the rank is unknown.
        op: The operation that made it, or None for inputs of the step, variables' handles
            and constants that came from Python.
        index: Which output of ``op`` it is.
        tensor: The backend's own tensor, where there still is one.
        order: Number in the order of creation.
        uses: The operations that take it.
    """

    dtype: str
    shape: tuple[int | None, ...] | None = None
    op: Op | None = None
    index: int = 0
    tensor: Any = None
    order: int = 0
    uses: list[Op] = field(default_factory=list)

    @property
    def is_float(self) -> bool:
        """True for the dtypes that can carry a gradient."""
        return self.dtype.startswith(("float", "bfloat", "half", "complex"))

    def __repr__(self) -> str:
        """Return a short text for debugging."""
        made = f" of {self.op.name or self.op.type}" if self.op else ""
        return f"<Value {self.dtype}{list(self.shape) if self.shape is not None else '?'}{made}>"


@dataclass(slots=True, eq=False, repr=False)
class Op:
    """One operation.

    Args:
        type: The backend's type, e.g. ``"MatMul"``, or :data:`ALIAS`.
        name: Its name in the graph, or ``""``.
        inputs: What it takes. A read of a variable that was assigned before in this step
            takes the assigned value as its last, extra input (see ``assigned``).
        outputs: What it makes. An assign makes one pseudo-value: what was assigned.
        order: Number in the order of creation; inlined bodies come at their call.
        attrs: Attributes as plain Python values.
        stack: Where it was made, or a function that finds that out when it is asked for.
        layers: Names of the layers being called when it was made, outermost first.
        handle: The backend's own operation, where there still is one.
        inside: ``"while"``, ``"cond"``, ``"function"``…: the constructs around it.
        assigned: For a read: the assign ops whose value it may see.
        backward: True when it was made by differentiation.
    """

    type: str
    name: str = ""
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    order: int = 0
    attrs: dict[str, Any] = field(default_factory=dict)
    stack: Stack | Callable[[], Stack] = EMPTY
    layers: tuple[str, ...] = ()
    handle: Any = None
    inside: tuple[str, ...] = ()
    assigned: list[Op] = field(default_factory=list)
    backward: bool = False

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The user's own stack frames inside the step, innermost last."""
        return self._found().frames

    @property
    def api(self) -> str | None:
        """Name of the public Keras function on the user's line (``"argmax"``), if it is one."""
        return self._found().api

    def _found(self) -> Stack:
        if callable(self.stack):
            self.stack = self.stack()
        return self.stack

    @property
    def layer(self) -> str | None:
        """Name of the innermost layer that made it, or None outside of layers."""
        return self.layers[-1] if self.layers else None

    @property
    def source(self) -> str | None:
        """The user's line that made it as ``"file.py:32"``, or None."""
        return self.frames[-1].short if self.frames else None

    def __repr__(self) -> str:
        """Return a short text for debugging."""
        return f"<Op {self.type} {self.name!r}>"


@dataclass(frozen=True, slots=True)
class Call:
    """One inlined call, ``cond`` or ``while`` and the part of ``OpGraph.ops`` it became.

    Args:
        handle: The backend's own operation.
        first: Index of its first operation in ``OpGraph.ops``.
        last: Index after its last one.
    """

    handle: Any
    first: int
    last: int


class OpGraph:
    """The operations of one step in the order of creation, with the variables they read."""

    def __init__(self) -> None:
        """Start empty."""
        self.ops: list[Op] = []
        self.variables: dict[Any, list[Value]] = {}
        self.calls: list[Call] = []
        self.truncated = False
        self._values: dict[Any, Value] = {}
        self._count = 0

    def next_order(self) -> int:
        """Return the next number in the order of creation."""
        self._count += 1
        return self._count

    def value(self, key: Any) -> Value | None:
        """Return the value known under ``key`` (what the recorder chose), or None."""
        return self._values.get(key)

    def add_value(self, key: Any, value: Value) -> Value:
        """Make ``value`` known under ``key``."""
        value.order = value.order or self.next_order()
        self._values[key] = value
        return value

    def add_op(self, op: Op) -> Op:
        """Append ``op`` and register it as a user of its inputs."""
        op.order = self.next_order()
        self.ops.append(op)
        for item in op.inputs:
            item.uses.append(op)
        return op

    def add_variable(self, key: Any, handle: Value) -> None:
        """Say that ``handle`` is a handle of the variable known as ``key``."""
        handles = self.variables.setdefault(key, [])
        if handle not in handles:
            handles.append(handle)

    def link(self, source: Value, target: Value) -> None:
        """Say that ``target`` may hold the very value of ``source``."""
        alias = Op(type=ALIAS, inputs=[source], outputs=[target])
        if target.op is None:
            target.op = alias
        elif target.op.type == ALIAS:
            target.op.inputs.append(source)
            source.uses.append(target.op)
            return
        self.add_op(alias)

    def connect_assigns(self) -> None:
        """Give every read the values that were assigned to its variable before it."""
        written: dict[Value, list[Op]] = {}
        for op in self.ops:
            if not op.inputs or op.inputs[0].dtype != "resource":
                continue
            root = _root(op.inputs[0])
            if op.type in ASSIGN_OPS:
                written.setdefault(root, []).append(op)
            elif op.type in READ_OPS:
                for assign in written.get(root, ()):
                    if assign in op.assigned:
                        continue
                    op.assigned.append(assign)
                    for value in assign.outputs:
                        op.inputs.append(value)
                        value.uses.append(op)

    # ---- walking -------------------------------------------------------------------

    def reads(self, key: Any) -> list[Op]:
        """Return the ops that read the variable ``key`` (assigns are no reads)."""
        seen: list[Op] = []
        for handle in _through_aliases(self.variables.get(key, [])):
            seen += [
                op
                for op in handle.uses
                if op.type != ALIAS
                and op.type not in ASSIGN_OPS
                and op.type not in _NEUTRAL_HANDLE_OPS
                and op not in seen
            ]
        return seen

    def descendants(self, values: Iterable[Value]) -> set[Value]:
        """Return ``values`` and everything computed from them."""
        return _walk(values, lambda v: (out for op in v.uses for out in op.outputs))

    def ancestors(self, values: Iterable[Value]) -> set[Value]:
        """Return ``values`` and everything they are computed from."""
        return _walk(values, lambda v: v.op.inputs if v.op is not None else ())

    def between(self, sources: Iterable[Value], targets: Iterable[Value]) -> set[Value]:
        """Return the values on a way from ``sources`` to ``targets``, both included."""
        return self.descendants(sources) & self.ancestors(targets)

    def producers(self, value: Value, limit: int = 1_000_000) -> Iterator[Op]:
        """Yield the ops behind ``value``, nearest first, each once, aliases left out."""
        queue: deque[Value] = deque([value])
        seen: set[Op] = set()
        while queue and limit > 0:
            op = queue.popleft().op
            if op is None or op in seen:
                continue
            seen.add(op)
            limit -= 1
            if op.type != ALIAS:
                yield op
            queue.extend(op.inputs)

    def consumers(self, value: Value) -> Iterator[Op]:
        """Yield the ops after ``value``, nearest first, each once, aliases left out."""
        queue: deque[Value] = deque([value])
        seen: set[Op] = set()
        while queue:
            for op in queue.popleft().uses:
                if op in seen:
                    continue
                seen.add(op)
                if op.type != ALIAS:
                    yield op
                queue.extend(op.outputs)


_NEUTRAL_HANDLE_OPS = frozenset({"VariableShape", "VarIsInitializedOp", "NoOp"})


def _root(value: Value) -> Value:
    seen = {value}
    while value.op is not None and value.op.type == ALIAS and value.op.inputs:
        value = value.op.inputs[0]
        if value in seen:
            break
        seen.add(value)
    return value


def _through_aliases(handles: Iterable[Value]) -> list[Value]:
    found = list(handles)
    for value in found:
        for op in value.uses:
            if op.type == ALIAS:
                found += [out for out in op.outputs if out not in found]
    return found


def _walk(start: Iterable[Value], step: Callable[[Value], Iterable[Value]]) -> set[Value]:
    todo = list(start)
    seen = set(todo)
    while todo:
        for value in step(todo.pop()):
            if value not in seen:
                seen.add(value)
                todo.append(value)
    return seen
