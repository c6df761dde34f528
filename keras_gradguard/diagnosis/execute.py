"""Compute chosen tensors of a traced step on its batch, and leave every variable as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.eager.context import FunctionCallOptions
from tensorflow.python.framework import ops as framework_ops

from keras_gradguard.diagnosis.opgraph import ASSIGN_OPS
from keras_gradguard.diagnosis.trace import Trace


def run(
    trace: Trace,
    tensors: Sequence[Any],
    *,
    instead: Mapping[int, Any] | None = None,
    limit_bytes: int = 2_000_000_000,
) -> list[Any]:
    """Execute a traced step as far as ``tensors`` need it.

    Args:
        trace: A traced step.
        tensors: Symbolic tensors of ``trace.graph``.
        instead: ``id(tf_variable)`` -> value to compute with in place of the variable's own;
            the variable itself is left alone.
        limit_bytes: Refuse to fetch more than this many bytes, as far as static shapes
            tell. Defaults to 2 GB.

    Returns:
        NumPy arrays in the order of ``tensors``.

    Raises:
        ValueError: The tensors are too large together.

    All tensors are computed in one run on the trace's batch with the variables' present
    values. Operations that the tensors do not depend on (metric updates, moving averages)
    do not run at all. Variables that are written nevertheless are put back.
    """
    wanted = list(tensors)
    total = sum(_size(t) for t in wanted)
    if total > limit_bytes:
        raise ValueError(
            f"`tensors` would take {total:,} bytes, more than limit_bytes={limit_bytes:,}. "
            "Fetch fewer tensors, or reductions of them."
        )
    stand_ins = {key: tf.Variable(value, trainable=False) for key, value in (instead or {}).items()}
    written = _written(trace)
    before = [(v, v.read_value()) for v in written]
    try:
        with _as_written(), _function(trace, wanted) as name:
            results = context.context().call_function(
                name, _arguments(trace, stand_ins), len(wanted)
            )
    finally:
        for variable, value in before:
            variable.assign(value)
    return [np.asarray(r) for r in results or ()]


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Run functions of this thread without graph rewriting.

    A rewritten graph fuses operations (a fused ReLU turns NaN into 0), and rewriting takes
    longer than running once.
    """
    now = context.context()
    before = now.function_call_options
    config = config_pb2.ConfigProto()
    config.CopyFrom(now.config)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    now.function_call_options = FunctionCallOptions(config_proto=config)
    try:
        yield
    finally:
        now.function_call_options = before


def _size(tensor: Any) -> int:
    count = tensor.shape.num_elements()
    return int(count or 1) * max(int(tensor.dtype.size), 1)


def _arguments(trace: Trace, stand_ins: Mapping[int, Any]) -> list[Any]:
    """Return the batch and what the graph captured, stand-ins in place of variables."""
    values = [value for _, value in trace.feeds]
    for outside, inner in trace.graph.captures:
        stand_in = stand_ins.get(id(trace.captured.get(inner.op.name)))
        values.append(outside if stand_in is None else stand_in.handle)
    return values


@contextlib.contextmanager
def _function(trace: Trace, wanted: Sequence[Any]) -> Iterator[bytes]:
    """Register a function of batch and captures that gives ``wanted``; yield its name.

    TensorFlow's own code cuts it out of the graph. Copying the operations one by one in
    Python, which ``prune`` does, takes a thousand times as long.
    """
    inputs = [*(h for h, _ in trace.feeds), *(inner for _, inner in trace.graph.captures)]
    needed = _needed(wanted, {t.op for t in inputs})
    name = f"__gradguard_probe_{framework_ops.uid()}"
    now = context.context()
    with trace.graph._c_graph.get() as graph:
        made = pywrap_tf_session.TF_GraphToFunction_wrapper(
            graph,
            name,
            False,
            [op._c_op for op in needed],
            [t._as_tf_output() for t in inputs],
            [t._as_tf_output() for t in wanted],
            [],  # names of the outputs: TensorFlow makes them
            [],  # outputs of control: all that runs is needed for a value
            [],
            None,
            "",
        )
    now.add_c_function(made)
    pywrap_tf_session.TF_DeleteFunction(made)
    try:
        yield name.encode()
    finally:
        now.remove_function(name)


def _needed(wanted: Sequence[Any], given: set[Any]) -> list[Any]:
    """Return the operations that ``wanted`` depends on, those that are ``given`` left out."""
    todo = [t.op for t in wanted]
    seen = set(given)
    found = []
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        found.append(op)
        todo += [t.op for t in op.inputs]
        todo += op.control_inputs
    return found


def _written(trace: Trace) -> list[Any]:
    """Return the variables that an operation of the step writes."""
    found: dict[int, Any] = {}
    if any(op.type in ASSIGN_OPS for op in trace.ops.ops):
        by_key = {id(v): v for v in trace.captured.values()}
        for key, handles in trace.ops.variables.items():
            if key in by_key and _is_written(handles):
                found[key] = by_key[key]
    return list(found.values())


def _is_written(handles: Iterable[Any]) -> bool:
    todo = list(handles)
    seen = set(todo)
    while todo:
        for op in todo.pop().uses:
            if op.type in ASSIGN_OPS:
                return True
            if op.type == "Alias":
                new = [v for v in op.outputs if v not in seen]
                seen.update(new)
                todo += new
    return False
