"""Record the operations of an eager training step, as it runs and without touching it.

TensorFlow calls operation callbacks after every eager operation. The recorder notes what
went in and out (as ids, never the tensors themselves, so that nothing is kept alive), the
user's line, and the layer. A compiled ``tf.function`` shows up as one operation and its body
is inlined; one that is traced while the recorder is on has its tapes noted with the graph
they saw.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from keras import tree
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import op_callbacks
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import script_ops

from keras_gradguard.diagnosis import sandbox
from keras_gradguard.diagnosis.flatten import Flattener, flatten, static_shape
from keras_gradguard.diagnosis.opgraph import ASSIGN_OPS, Op, OpGraph, Value
from keras_gradguard.diagnosis.source import Frame, Stack, running_stack, stack_frames

_LEAVING = ("numpy", "__array__", "__float__", "__int__", "__index__", "__complex__")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapeSeen:
    """One ``tape.gradient(target, sources)`` that was seen.

    Args:
        ops: The graph that the tape's target lives in.
        target: The differentiated values.
        sources: What was asked for: variables or tensors, flat.
        none: One per source: True when its gradient is None.
        watched: The backend's variables that the tape watched.
        traced: True when the tape ran while a ``tf.function`` was traced.
        frames: The user's lines, innermost last.
    """

    ops: OpGraph
    target: tuple[Value, ...]
    sources: tuple[Any, ...]
    none: tuple[bool, ...]
    watched: tuple[Any, ...]
    traced: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Left:
    """A tensor that was turned into a Python or NumPy value.

    Args:
        value: The tensor.
        how: The method: ``"numpy"``, ``"__float__"``…
        frames: The user's lines, innermost last.
    """

    value: Value
    how: str
    frames: tuple[Frame, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """What was seen of an eager step.

    Args:
        ops: The eager operations, flat; tensors are known under their ids.
        tapes: The calls of ``tape.gradient``, in order.
        left: Tensors that left TensorFlow, in order.
        variables: ``id(tf_variable)`` -> the backend's variable, for all known ones.
        error: Why recording stopped early, or None.
    """

    ops: OpGraph
    tapes: list[TapeSeen] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    variables: dict[int, Any] = field(default_factory=dict)
    error: str | None = None

    def value(self, tensor: Any) -> Value | None:
        """Return the :class:`Value` of an eager tensor seen while recording, or None."""
        return self.ops.value(getattr(tensor, "_id", None))

    def know(self, variables: Sequence[Any]) -> None:
        """Say which variables may have been read, so that reads get an owner.

        Args:
            variables: Keras or backend variables.
        """
        for variable in variables:
            inner = getattr(variable, "_value", None)
            inner = inner if isinstance(inner, tf.Variable) else variable
            handle = getattr(inner, "handle", None)
            if handle is None:
                continue
            self.variables[id(inner)] = inner
            value = self.ops.value(getattr(handle, "_id", None))
            if value is not None:
                self.ops.add_variable(id(inner), value)


class EagerRecorder:
    """Context manager that records the eager operations of this thread while it is active.

    Nothing is computed, and no value changes. What is kept is bounded by ``limit``
    operations; after that the recording is marked as truncated and nothing more is noted.

    Args:
        limit: Most operations to note. Defaults to 50,000.

    Example:
    >>> w = tf.Variable(2.0)
    >>> with EagerRecorder() as recorder:
    ...     with tf.GradientTape() as tape:
    ...         loss = tf.round(w * 3.0)
    ...     gradient = tape.gradient(loss, w)
    >>> [op.type for op in recorder.recording.ops.ops]
    ['ReadVariableOp', 'Mul', 'Round']
    >>> recorder.recording.tapes[0].none
    (True,)
    """

    def __init__(self, limit: int = 50_000) -> None:
        """See the class."""
        self.recording = Recording(ops=OpGraph())
        self.limit = limit
        self._bodies: dict[str, Any] = {}
        self._stack: contextlib.ExitStack | None = None
        self._thread = 0
        self._differentiating = 0
        self._outer: tuple[Frame, ...] = ()
        self._flattener = Flattener(self.recording.ops, limit=limit)

    # ---- on and off ----------------------------------------------------------------

    def __enter__(self) -> EagerRecorder:
        """Start recording."""
        if self._stack is not None:
            raise RuntimeError("This EagerRecorder is active already; use a new one.")
        self._thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            stack.enter_context(sandbox.replaced(tf.GradientTape, "gradient", self._gradient))
            stack.enter_context(sandbox.replaced(AtomicFunction, "call_flat", self._call_flat))
            for name in _LEAVING:
                owner = next((c for c in _TENSOR.__mro__ if name in vars(c)), None)
                if owner is not None and owner is not object:
                    with contextlib.suppress(TypeError):  # a method that C++ does not let go
                        stack.enter_context(sandbox.replaced(owner, name, self._leaving_by(name)))
            stack.enter_context(
                sandbox.replaced(script_ops, "py_func_common", self._numpy_function)
            )
            op_callbacks.add_op_callback(self._seen)
            stack.callback(op_callbacks.remove_op_callback, self._seen)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop recording; ``recording`` stays."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        self._bodies.clear()
        self.recording.ops.connect_assigns()

    # ---- operations ----------------------------------------------------------------

    def _seen(
        self,
        op_type: Any,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        if graph is not None or self._differentiating or self.recording.error:
            return
        try:
            self._note(op_type, inputs, attrs, outputs)
        except Exception as problem:
            # Whatever is wrong with the recording must not reach the user's training; it is
            # said in the diagnosis instead.
            self.recording.error = f"{type(problem).__name__}: {problem}"

    def _note(self, op_type: Any, inputs: Any, attrs: Any, outputs: Any) -> None:
        flat = self.recording.ops
        if len(flat.ops) >= self.limit:
            flat.truncated = True
            return
        kind = op_type.decode() if isinstance(op_type, bytes) else op_type
        taken = [self._value(t) for t in inputs]
        made = [self._value(t) for t in (outputs or ())]
        stack, layers, assigned = _where_am_i()
        body = self._bodies.get(kind)
        if body is not None:
            self._inline(body, taken, made, layers)
            return
        if kind in ASSIGN_OPS and taken:
            made = [Value(dtype=taken[-1].dtype, shape=taken[-1].shape)]
        op = Op(
            type=kind,
            inputs=taken,
            outputs=made,
            attrs={**_pairs(attrs), "taped": not pywrap_tfe.TFE_Py_TapeSetIsEmpty()},
            stack=stack,
            layers=layers,
        )
        if kind in ASSIGN_OPS and assigned:
            op.attrs["variable"] = assigned
        for index, value in enumerate(made):
            value.op, value.index = op, index
        flat.add_op(op)

    def _value(self, tensor: Any) -> Value:
        number = getattr(tensor, "_id", None)
        found = self.recording.ops.value(number) if number is not None else None
        if found is None:
            dtype = getattr(tensor, "dtype", None)
            shape = getattr(tensor, "shape", None)
            found = Value(
                dtype=dtype.base_dtype.name if isinstance(dtype, tf.DType) else "unknown",
                shape=static_shape(tensor) if isinstance(shape, tf.TensorShape) else None,
            )
            key = number if number is not None else object()
            self.recording.ops.add_value(key, found)
        return found

    def _inline(self, body: Any, taken: list[Value], made: list[Value], layers: Any) -> None:
        flat = self.recording.ops
        self._flattener.around = layers
        _, results = self._flattener.enter(body, ("eager",), ("function",), taken)
        for result, output in zip(results, made, strict=False):
            flat.link(result, output)

    # ---- what else is worth a note -------------------------------------------------

    def _call_flat(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_flat(function: Any, *args: Any) -> Any:
            if not self._differentiating and tf.executing_eagerly():
                name = function.name
                name = name.decode() if isinstance(name, bytes) else name
                self._bodies[name] = function.graph
            return original(function, *args)

        return call_flat

    def _gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            watched = tuple(tape.watched_variables())
            self.recording.know(watched)
            self._differentiating += 1
            try:
                result = original(tape, target, sources, *args, **kwargs)
            finally:
                self._differentiating -= 1
            self._note_tape(target, sources, result, watched)
            return result

        return gradient

    def _note_tape(self, target: Any, sources: Any, result: Any, watched: Any) -> None:
        flat_sources = tuple(tree.flatten(sources))
        single = tf.is_tensor(sources) or isinstance(sources, tf.Variable)
        gradients = [result] if single or result is None else _in_order(result)
        if len(gradients) != len(flat_sources):
            return
        targets = [t for t in tree.flatten(target) if tf.is_tensor(t)]
        graph = None if not targets or tf.executing_eagerly() else targets[0].graph
        ops = self.recording.ops if graph is None else self._traced(graph, watched, flat_sources)
        keys = [t._id if graph is None else t.name for t in targets]
        values = tuple(v for v in (ops.value(k) for k in keys) if v is not None)
        self.recording.know([s for s in flat_sources if hasattr(s, "handle")])
        self.recording.tapes.append(
            TapeSeen(
                ops=ops,
                target=values,
                sources=flat_sources,
                none=tuple(g is None for g in gradients),
                watched=tuple(watched),
                traced=graph is not None,
                frames=stack_frames(sys._getframe(2)),
            )
        )

    def _traced(self, graph: Any, watched: Any, sources: Any) -> OpGraph:
        variables = [*watched, *getattr(graph, "_watched_variables", ())]
        variables += [getattr(s, "_value", s) for s in sources]
        handles = {id(v.handle): v for v in variables if getattr(v, "handle", None) is not None}
        keys = {
            inner.op.name: id(handles[id(outside)])
            for outside, inner in getattr(graph, "captures", ())
            if id(outside) in handles
        }
        self.recording.variables.update({id(v): v for v in handles.values()})
        return flatten(graph, keys, limit=self.limit)

    def _numpy_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def numpy_function(func: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in inp if isinstance(inp, (list, tuple)) else [inp]:
                self._note_leaving(tensor, "numpy_function")
            return original(func, inp, *args, **kwargs)

        return numpy_function

    def _note_leaving(self, tensor: Any, how: str) -> None:
        value = self.recording.ops.value(getattr(tensor, "_id", None))
        if value is not None and not self._differentiating and value.is_float:
            frames = stack_frames(sys._getframe(2))
            self.recording.left.append(Left(value=value, how=how, frames=frames))

    def _leaving_by(self, how: str) -> Callable[[Any], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def leaving(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                self._note_leaving(tensor, how)
                return original(tensor, *args, **kwargs)

            return leaving

        return make


_TENSOR = framework_ops.EagerTensor


def _in_order(result: Any) -> list[Any]:
    if isinstance(result, dict):
        return [result[k] for k in sorted(result)]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _pairs(attrs: Any) -> dict[str, Any]:
    """Return an eager operation's attributes as plain Python values."""
    found: dict[str, Any] = {}
    items = list(attrs or ())
    for key, value in zip(items[::2], items[1::2], strict=False):
        if isinstance(value, bytes):
            found[key] = value.decode("utf-8", "replace")
        elif isinstance(value, tf.DType):
            found[key] = value.name
        elif key in ("SrcT", "DstT", "T", "dtype") and isinstance(value, int):
            found[key] = tf.as_dtype(value).name
        elif isinstance(value, (bool, int, float, str)):
            found[key] = value
    return found


def _where_am_i() -> tuple[Stack, tuple[str, ...], str | None]:
    """Return the user's lines, the layers being called, and the variable being assigned."""
    stack, frames = running_stack(sys._getframe(3))
    layers: list[str] = []
    assigned: str | None = None
    for frame in frames:
        code = frame.f_code
        if code.co_name == "__call__" and code.co_filename.endswith("keras/src/layers/layer.py"):
            layer = frame.f_locals.get("self")
            layers.append(str(getattr(layer, "name", type(layer).__name__)))
        elif assigned is None and code.co_filename.endswith("ops/resource_variable_ops.py"):
            # Not yet there while the variable itself is being made.
            name = getattr(frame.f_locals.get("self"), "_handle_name", None)
            assigned = None if name is None else str(name).removesuffix(":0")
    return stack, tuple(reversed(layers)), assigned
