"""Keeps the batch of the last sampled step, so that a diagnosis need not take one from the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_gradguard.taps.threads import alone

_EXAMPLES = 64


class BatchKeeper:
    """Holds the first examples of the batch that the last sampled step trained on.

    In graph mode the batch is copied into device variables on sampled steps only. XLA needs
    static shapes, so there a fixed number of examples is taken, from the top again when the batch
    is smaller, and :meth:`batch` cuts the repetitions off; arrays with another axis of unknown
    length are not kept. With several replicas nothing is kept: a replica sees a part of the batch.

    Args:
        examples: Most examples to keep of a batch.
    """

    def __init__(self, examples: int = _EXAMPLES) -> None:
        self.examples = examples
        self.size: int | None = None
        self.output: Any = None
        self.paused = False
        self._current: Any = None
        self._kept: Any = None
        self._variables: list[Any] = []
        self._structure: Any = None
        self._count: Any = None

    def see(self, data: Any) -> None:
        """Take note of the batch that is being trained on, traced or eager."""
        if examined():
            return
        self._current = data

    @property
    def current(self) -> Any:
        """The batch of the step being traced or run; its tensors may have no values yet."""
        return self._current

    def forget(self) -> None:
        """Let go of tensors of a step that is over."""
        self._current = None
        self.output = None

    def save(self, *, compiled: bool, when: Any = None) -> None:
        """Keep the batch noted by :meth:`see`. Called inside the sampled branch in a graph.

        Args:
            compiled: The step is compiled by XLA.
            when: A scalar bool tensor; keep the batch only when it is True. None always does.
        """
        data = self._current
        if data is None or tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return
        if tf.executing_eagerly():
            self._kept = tf.nest.map_structure(self._head, data)
            self._variables = []
            return
        given = [t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)]
        if not all_reachable(given) or (compiled and not _can_be_static(data)):
            # Out of reach: a function is traced twice when it creates variables, and this batch
            # belongs to the first of its two graphs.
            return
        structure = tf.nest.map_structure(self._static_head if compiled else self._head, data)
        leaves = tf.nest.flatten(structure, expand_composites=True)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        forms = [(t.dtype, t.shape if compiled else None) for t in tensors]
        if [(v.dtype, v.shape if compiled else None) for v in self._variables] != forms:
            # Not in the trace: a function that makes variables is traced twice.
            self._variables = alone(lambda: [_holder(*form) for form in forms])
            length = functools.partial(_holder, tf.int32, tf.TensorShape([]))
            self._count = alone(length) if compiled else None
        self._structure = structure

        def assign() -> Any:
            for variable, tensor in zip(self._variables, tensors, strict=True):
                variable.assign(tensor)
            if compiled:
                lengths = [tf.shape(t)[0] for t in given if t.shape.rank]
                self._count.assign(tf.reduce_min(tf.stack([self.examples, *lengths])))
            return tf.zeros([])

        if when is None:
            assign()
        else:
            tf.cond(when, assign, lambda: tf.zeros([]))

    def batch(self) -> Any:
        """Return the kept batch as NumPy arrays in the structure that the step got, or None."""
        if self._kept is not None and not self._variables:
            return tf.nest.map_structure(_numpy, self._kept)
        if not self._variables or self._structure is None:
            return None
        values = [v.read_value() for v in self._variables]
        if any(v.shape.rank is None for v in values):
            return None
        if self._count is not None:
            count = int(self._count.numpy())
            values = [v[:count] if v.shape.rank else v for v in values]
        leaves = tf.nest.flatten(self._structure, expand_composites=True)
        fill = iter(values)
        filled = [next(fill) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        packed = tf.nest.pack_sequence_as(self._structure, filled, expand_composites=True)
        return tf.nest.map_structure(_numpy, packed)

    def _head(self, leaf: Any) -> Any:
        if tf.is_tensor(leaf) and isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0:
            return leaf[: self.examples]
        return leaf

    def _static_head(self, leaf: Any) -> Any:
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            rows = tf.math.mod(tf.range(self.examples), tf.shape(leaf)[0])
            return tf.gather(leaf, rows)
        return leaf


@contextlib.contextmanager
def watching_step(
    model: Any, around: Callable[[Any], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Let ``model.train_step`` run inside ``around`` while a train function is made.

    The train function keeps the replacement: ``around`` is entered whenever the step is traced,
    and on every step that runs eagerly.

    Args:
        model: A Keras model; its instance dictionary is afterwards what it was before.
        around: Called with the batch.
    """
    own = vars(model)
    missing = object()
    previous = own.get("train_step", missing)
    original = model.train_step

    def train_step(data: Any) -> Any:
        with around(data):
            return original(data)

    own["train_step"] = train_step
    try:
        yield
    finally:
        if previous is missing:
            del own["train_step"]
        else:
            own["train_step"] = previous


@contextlib.contextmanager
def watching_calls(model: Any, keeper: BatchKeeper) -> Iterator[None]:
    """Let calls of ``model`` show their inputs to ``keeper`` for the time of a ``with`` block.

    Args:
        model: A Keras model; its instance dictionary is afterwards what it was before.
        keeper: Who wants to see the inputs.
    """
    own = vars(model)
    missing = object()
    previous = own.get("call", missing)
    original = getattr(model, "call", None)
    if original is None:  # a tf.Module, say
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            keeper.see(args[0])
        result = original(*args, **kwargs)
        if not keeper.paused:
            keeper.output = result
        return result

    own["call"] = call
    try:
        yield
    finally:
        keeper.forget()
        if own.get("call") is not call:
            pass  # somebody put their own in place meanwhile; it is not ours to remove
        elif previous is missing:
            del own["call"]
        else:
            own["call"] = previous


def _holder(dtype: Any, shape: Any) -> Any:
    blank = "" if dtype == tf.string else False if dtype == tf.bool else 0
    initial = tf.fill([] if shape is None else shape.as_list(), tf.constant(blank, dtype))
    return tf.Variable(
        initial,
        trainable=False,
        shape=tf.TensorShape(None) if shape is None else shape,
        dtype=dtype,
        name="gradguard_batch",
    )


def _can_be_static(data: Any) -> bool:
    """Return True when only the first axis of every array has an unknown length."""
    leaves = [t for t in tf.nest.flatten(data) if t is not None]
    return all(
        isinstance(t, tf.Tensor)
        and t.dtype != tf.string
        and t.shape.rank is not None
        and t.shape[1:].is_fully_defined()
        for t in leaves
        if not isinstance(t, (bool, int, float))
    )


def examined() -> bool:
    """Return True inside a graph that the diagnosis traces: its inputs are placeholders."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if str(getattr(graph, "name", "")).startswith("gradguard"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def all_reachable(tensors: list[Any]) -> bool:
    """Return True when every tensor can be used in the graph that is being traced."""
    graph, outer = tf.compat.v1.get_default_graph(), set()
    while graph is not None:
        outer.add(id(graph))
        graph = getattr(graph, "outer_graph", None)
    return all(hasattr(t, "numpy") or id(getattr(t, "graph", None)) in outer for t in tensors)


def _numpy(leaf: Any) -> Any:
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf


def as_numpy(structure: Any) -> Any:
    """Return a structure of tensors as NumPy arrays."""
    return tf.nest.map_structure(_numpy, structure)


def examples(structure: Any) -> int:
    """Return the length of the first axis of the first array of a structure, 0 without any."""
    for leaf in tf.nest.flatten(structure):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0] or 0)
    return 0
