"""What is measured for one diagnosis, each thing once and only when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_gradguard.diagnosis.context import Batch, Context, DataStats
from keras_gradguard.diagnosis.data import as_array, describe, describe_batch, leaves
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.opgraph import Value
from keras_gradguard.diagnosis.sandbox import is_stock_train_step
from keras_gradguard.diagnosis.trace import (
    Trace,
    TraceError,
    as_loss,
    backend_variable,
    trace_step,
)
from keras_gradguard.diagnosis.view import StepView, view_of_trace
from keras_gradguard.taps.names import automatic_prefixes, path_of

T = TypeVar("T")

MOST_EXAMPLES = 512
MOST_NUMBERS = 4_000_000  # entries of x that one probe looks at


class Facts:
    """Lazy measurements of one context.

    Args:
        context: What may be looked at. Nothing in it is changed.
        through: A partner (a discriminator) that the output goes through before the loss.
    """

    def __init__(self, context: Context, through: Any = None) -> None:
        self.context = context
        self.through = through
        self.notes: list[str] = []
        self.synthetic: str | None = None
        self.trace_error: TraceError | None = None

    # ---- names ---------------------------------------------------------------------

    @cached_property
    def models(self) -> tuple[Any, ...]:
        """The model and its partners."""
        every = (self.context.model, *self.context.partners)
        return tuple(m for m in every if m is not None)

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of variable paths that Keras made up."""
        return automatic_prefixes(self.models)

    def name(self, variable: Any) -> str:
        """Return a variable's path as the user knows it."""
        return path_of(variable, self.prefixes)

    # ---- data ----------------------------------------------------------------------

    @cached_property
    def is_symbolic(self) -> bool:
        """True when the batch has shapes but no values (seen while a step was traced)."""
        batch = self.context.batch
        return batch is not None and any(_is_symbolic(a) for _, a in leaves("x", batch.x))

    @cached_property
    def batch(self) -> Batch | None:
        """The batch, cut to a bearable number of examples."""
        batch = self.context.batch
        if batch is None or batch.x is None:
            return None
        if self.is_symbolic:
            return Batch(
                x=_filled(batch.x), y=_filled(batch.y), sample_weight=_filled(batch.sample_weight)
            )
        counts = []
        for _, item in leaves("x", batch.x):
            shape = np.shape(item)
            if not shape:
                return batch
            each = max(int(np.prod(shape[1:])), 1)
            counts.append(min(shape[0], MOST_EXAMPLES, max(MOST_NUMBERS // each, 2)))
        if not counts:
            return batch
        keep = min(counts)

        def head(value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, dict):
                return {k: head(v) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(head(v) for v in value)
            return value[:keep] if np.ndim(value) else value

        return Batch(
            x=head(batch.x), y=head(batch.y), sample_weight=head(batch.sample_weight),
            size=batch.size,
        )  # fmt: skip

    @cached_property
    def data(self) -> tuple[DataStats, ...]:
        """Statistics of inputs, targets and weights: of the batch, else as gathered."""
        if self.is_symbolic:
            return self.context.data
        return describe_batch(self.context.batch) or self.context.data

    # ---- the step ------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace | None:
        """The traced step, or None when there is no batch or the step cannot be traced."""
        if self.context.trace is not None:
            found: Trace = self.context.trace
            return found
        if self.batch is None or self.context.model is None:
            return None
        for loss, y, what in self._attempts():
            try:
                found = trace_step(
                    self.context.model,
                    self.batch.x,
                    y,
                    loss=loss,
                    sample_weight=self.batch.sample_weight,
                    optimizer=self.context.optimizer,
                )
            except TraceError as error:
                self.trace_error = self.trace_error or error
                continue
            if found.loss is None:
                continue
            self.synthetic = what
            return found
        return None

    def _attempts(self) -> Iterable[tuple[Any, Any, str | None]]:
        """Yield (loss, targets, what is made up) from the user's own step to a stand-in."""
        context, batch = self.context, self.batch
        given = batch if batch is not None else Batch(x=None)
        model = context.model
        compiled = bool(getattr(model, "compiled", False))
        own = context.loss
        made_up = ((_halves_like_output, "all 0.5"), (_class_zero, "class 0"))
        if self.through is not None and own is not None:
            if given.y is not None:
                yield _behind(self.through, as_loss(own)), given.y, None
            for make, word in made_up:
                yield _behind(self.through, make(own)), None, f"The target ({word})"
            return
        if context.mode == "fit" and compiled:
            yield None, given.y, None
        if own is not None and (given.y is not None or context.mode == "fit"):
            yield own, given.y, None
        if own is None and compiled and context.mode != "loop":
            yield None, given.y, None
        if own is None and not compiled and context.mode == "fit" and context.batch is not None:
            yield _own_losses_only, None, None
        if own is not None and given.y is None and context.mode != "fit":
            for make, word in made_up:
                yield make(own), None, f"The target ({word})"
        yield _chain(self.context.partners), None, "The loss"

    @property
    def is_own_loss(self) -> bool:
        """True when the traced loss is the user's, not a stand-in (its targets may be)."""
        return self.trace is not None and self.synthetic != "The loss"

    @cached_property
    def view(self) -> StepView | None:
        """The view of the traced step."""
        return view_of_trace(self.trace) if self.trace is not None else None

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """What the model returns, as values of the traced graph."""
        return self.view.outputs if self.view is not None else ()

    @cached_property
    def loss_values(self) -> tuple[Value, ...]:
        """The differentiated values."""
        return self.view.loss if self.view is not None else ()

    @cached_property
    def reach(self) -> set[Value]:
        """Everything that the loss is computed from."""
        return self.view.ops.ancestors(self.loss_values) if self.view is not None else set()

    @property
    def custom_step(self) -> bool:
        """True when the user wrote ``train_step``."""
        model = self.context.model
        return hasattr(model, "train_step") and not is_stock_train_step(model)

    # ---- numbers -------------------------------------------------------------------

    def compute(self, make: Callable[[], Sequence[Any]]) -> list[NDArray[Any]]:
        """Add operations to the traced graph and run them on its batch.

        Args:
            make: Called with the graph as default; returns tensors.
        """
        trace = self.trace
        if trace is None:
            return []
        with trace.graph.as_default():
            tensors = list(make())
        return run(trace, tensors) if tensors else []

    @cached_property
    def loss(self) -> float | None:
        """The loss on the batch, before loss scaling."""
        trace = self.trace
        if trace is None or trace.loss is None:
            return None
        return float(np.mean(run(trace, [trace.loss])[0]))

    @cached_property
    def gradients(self) -> dict[str, NDArray[Any] | None]:
        """Name of each trainable variable -> its unscaled gradient on the batch, or None."""
        trace = self.trace
        if trace is None or not trace.gradients:
            return {}
        live = [(v, g) for v, g in zip(trace.variables, trace.gradients, strict=True)]
        found: dict[str, NDArray[Any] | None] = {self.name(v): None for v, _ in live}
        wanted = [(v, g) for v, g in live if g is not None]
        scale = self._loss_scale()
        arrays = self.compute(
            lambda: [tf.cast(tf.convert_to_tensor(g), tf.float32) for _, g in wanted]
        )
        if scale != 1.0 and not all(np.isfinite(a).all() for a in arrays):
            plain = self._unscaled_gradients([v for v, _ in wanted])
            if plain:
                arrays, scale = plain, 1.0
                self.notes.append(
                    f"The loss scale of {self._loss_scale():g} is still too high for this batch; "
                    "the loss-scale optimizer skips such steps and halves it."
                )
        for (v, _), array in zip(wanted, arrays, strict=True):
            found[self.name(v)] = array / np.float32(scale)
        return found

    def _unscaled_gradients(self, variables: Sequence[Any]) -> list[NDArray[Any]]:
        """Return gradients of the loss before scaling, where every variable is read plainly."""
        trace = self.trace
        if trace is None or trace.loss is None:
            return []
        reads = []
        for v in variables:
            outs = [o.tensor for op in trace.ops.reads(trace.key(v)) for o in op.outputs]
            here = [t for t in outs if t is not None and t.graph is trace.graph]
            if not here or len(here) != len(outs):
                return []
            reads.append(here)
        flat = [t for here in reads for t in here]

        def make() -> list[Any]:
            parts = iter(tf.gradients(trace.loss, flat))
            sums = []
            for here in reads:
                given = [g for g in (next(parts) for _ in here) if g is not None]
                dense = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in given]
                sums.append(tf.add_n(dense) if dense else tf.zeros(()))
            return sums

        arrays = self.compute(make)
        fits = all(a.shape == tuple(v.shape) for a, v in zip(arrays, variables, strict=True))
        return arrays if fits else []

    def _loss_scale(self) -> float:
        trace = self.trace
        if trace is None or trace.scaled_loss is trace.loss or trace.loss is None:
            return 1.0
        scaled, plain = run(trace, [trace.scaled_loss, trace.loss])
        ratio = float(np.mean(scaled)) / float(np.mean(plain)) if np.mean(plain) else 1.0
        return ratio if np.isfinite(ratio) and ratio > 0 else 1.0

    @cached_property
    def variables(self) -> dict[str, Any]:
        """Name -> trainable variable of the traced step (else of the model)."""
        if self.trace is not None:
            source = self.trace.variables
        else:
            source = getattr(self.context.model, "trainable_variables", ())
        return {self.name(v): v for v in source}

    @cached_property
    def predictions(self) -> tuple[DataStats, ...]:
        """Statistics of what the model returns on the batch."""
        trace = self.trace
        if trace is None or not self.outputs:
            return tuple(s for s in self.context.data if s.role == "output")
        arrays = run(trace, [v.tensor for v in self.outputs])
        many = len(arrays) > 1
        found = (
            describe(f"y_pred[{i}]" if many else "y_pred", a, "output")
            for i, a in enumerate(arrays)
        )
        return tuple(s for s in found if s is not None)

    def layer(self, name: str) -> Any:
        """Return a layer of the traced step (or of the model) by its name, or None."""
        if self.trace is not None:
            for call in reversed(self.trace.layers):
                if call.name == name:
                    return call.layer
        return None

    def is_partner(self, name: str | None) -> bool:
        """Return True when a layer belongs to another model than the one that is trained."""
        if name is None:
            return False
        from keras_gradguard.diagnosis.sandbox import all_layers

        mine = {la.name for la in all_layers(self.context.model)}
        theirs = {la.name for p in self.context.partners for la in all_layers(p)}
        return name in theirs and name not in mine

    def target_arrays(self) -> list[NDArray[Any]]:
        """Return the targets as arrays, flat; empty when there are none."""
        if self.batch is None:
            return []
        arrays = (as_array(a) for _, a in leaves("y", self.batch.y))
        return [a for a in arrays if a is not None]

    def target_values(self) -> list[Value]:
        """Return the placeholders of the targets as values of the traced graph."""
        trace = self.trace
        if trace is None or trace.y is None:
            return []
        found = (trace.value(t) for t in tf.nest.flatten(trace.y) if tf.is_tensor(t))
        return [v for v in found if v is not None]

    def backend(self, variable: Any) -> Any:
        """Return the ``tf.Variable`` behind a Keras variable."""
        return backend_variable(variable)


def outside_graphs(work: Callable[[], T]) -> T:
    """Call ``work`` eagerly, even while a graph is being traced.

    Graphs and tapes belong to a thread, and ``tf.init_scope`` would leave the graph but also
    stop every tape; another thread has neither.

    Args:
        work: What to do. It must not raise.
    """
    if tf.executing_eagerly():
        return work()
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="gradguard-diagnosis")
    thread.start()
    thread.join()
    return results[0]


_UNKNOWN_SIZE = 4


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, tf.TypeSpec):
        return True
    return tf.is_tensor(value) and not hasattr(value, "numpy")


def _filled(structure: Any) -> Any:
    """Return arrays of zeros in place of symbolic tensors and specs, with their shapes."""

    def fill(leaf: Any) -> Any:
        if not _is_symbolic(leaf):
            return leaf
        shape = leaf.shape
        sizes = [_UNKNOWN_SIZE if d is None else d for d in shape.as_list()] if shape.rank else []
        dtype = leaf.dtype.as_numpy_dtype
        return np.full(sizes, "" if leaf.dtype == tf.string else 0, dtype=dtype)

    return None if structure is None else tf.nest.map_structure(fill, structure)


def _own_losses_only(y_true: Any, y_pred: Any) -> Any:
    """Stand for a missing loss: only what layers added by ``add_loss`` counts."""
    del y_true
    first = tf.nest.flatten(y_pred)[0]
    return tf.zeros((), first.dtype if first.dtype.is_floating else tf.float32)


def _behind(partner: Any, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the loss of a model whose output goes through a partner (a discriminator) first."""

    def behind(y_true: Any, y_pred: Any) -> Any:
        if not tf.is_tensor(y_pred) or not _fits(partner, y_pred):
            raise ValueError("the output does not fit the other model")
        return loss(y_true, partner(y_pred, training=True))

    return behind


def _halves_like_output(loss: Any) -> Callable[[Any, Any], Any]:
    function = as_loss(loss)

    def with_halves(y_true: Any, y_pred: Any) -> Any:
        del y_true
        # 0.5: an output at either of its ends is then not at the minimum of the loss.
        targets = tf.nest.map_structure(lambda t: tf.ones_like(t) * tf.cast(0.5, t.dtype), y_pred)
        return function(targets, y_pred)

    return with_halves


def _class_zero(loss: Any) -> Callable[[Any, Any], Any]:
    function = as_loss(loss)

    def with_class_zero(y_true: Any, y_pred: Any) -> Any:
        del y_true
        return function(tf.zeros(tf.shape(y_pred)[:-1], tf.int32), y_pred)

    return with_class_zero


def _chain(partners: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return a stand-in loss that leans on every output, through a partner where one fits."""

    def lean(y_true: Any, y_pred: Any) -> Any:
        del y_true
        values = [t for t in tf.nest.flatten(y_pred) if t.dtype.is_floating]
        for partner in partners:
            for value in list(values):
                if _fits(partner, value):
                    through = tf.nest.flatten(partner(value, training=True))
                    values = [t for t in through if t.dtype.is_floating]
                    break
        total = tf.zeros((), tf.float32)
        for value in values:
            flat = tf.reshape(tf.cast(value, tf.float32), [-1])
            # Different weights on different entries: a plain sum would be constant behind a
            # softmax and hide what is alive.
            ramp = 0.5 + tf.math.mod(tf.range(tf.size(flat), dtype=tf.float32) * 0.6180339887, 1.0)
            total += tf.reduce_mean(flat * ramp)
        return total

    return lean


def _fits(partner: Any, value: Any) -> bool:
    shapes = getattr(partner, "input_shape", None)
    if not isinstance(shapes, tuple) or (shapes and isinstance(shapes[0], tuple)):
        return False
    given = value.shape.as_list()
    return len(given) == len(shapes) and all(
        a is None or b is None or a == b for a, b in zip(given, shapes, strict=True)
    )
