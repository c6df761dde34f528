"""What is measured for one diagnosis, each thing once and only when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import tensorflow as tf
from numpy.typing import NDArray

from keras_gradguard.diagnosis.bearable import cut, filled, is_symbolic
from keras_gradguard.diagnosis.context import Batch, Context, DataStats
from keras_gradguard.diagnosis.data import as_array, describe, describe_batch, leaves
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.numbers import Numbers, measure
from keras_gradguard.diagnosis.opgraph import Value
from keras_gradguard.diagnosis.sandbox import is_stock_train_step
from keras_gradguard.diagnosis.stand_ins import (
    behind,
    class_zero,
    halves_like_output,
    leaning,
    own_losses_only,
)
from keras_gradguard.diagnosis.trace import (
    Depth,
    Trace,
    TraceError,
    as_loss,
    backend_variable,
    trace_step,
)
from keras_gradguard.diagnosis.view import StepView, view_of_trace
from keras_gradguard.taps.names import automatic_prefixes, path_of

T = TypeVar("T")


class Facts:
    """Lazy measurements of one context.

    Args:
        context: What may be looked at. Nothing in it is changed.
        through: A partner (a discriminator) that the output goes through before the loss.
        depth: How much of the step is traced, as in ``trace_step``.
    """

    def __init__(self, context: Context, through: Any = None, *, depth: Depth = "step") -> None:
        self.context = context
        self.through = through
        self.depth = depth
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
        return batch is not None and any(is_symbolic(a) for _, a in leaves("x", batch.x))

    @cached_property
    def batch(self) -> Batch | None:
        """The batch, cut to a bearable number of examples."""
        batch = self.context.batch
        if batch is None or batch.x is None:
            return None
        if self.is_symbolic:
            return filled(batch)
        return cut(batch)

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
                    depth=self.depth,
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
        made_up = ((halves_like_output, "all 0.5"), (class_zero, "class 0"))
        if self.through is not None and own is not None:
            if given.y is not None:
                yield behind(self.through, as_loss(own)), given.y, None
            for make, word in made_up:
                yield behind(self.through, make(own)), None, f"The target ({word})"
            return
        if context.mode == "fit" and compiled:
            yield None, given.y, None
        if own is not None and (given.y is not None or context.mode == "fit"):
            yield own, given.y, None
        if own is None and compiled and context.mode != "loop":
            yield None, given.y, None
        if own is None and not compiled and context.mode == "fit" and context.batch is not None:
            yield own_losses_only, None, None
        if own is not None and given.y is None and context.mode != "fit":
            for make, word in made_up:
                yield make(own), None, f"The target ({word})"
        yield leaning(self.context.partners), None, "The loss"

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
    def numbers(self) -> Numbers | None:
        """Loss, gradients and liveness of the traced step, all from one run of it."""
        return None if self.trace is None else measure(self.trace)

    @property
    def loss(self) -> float | None:
        """The loss on the batch, before loss scaling."""
        return None if self.numbers is None else self.numbers.loss

    @cached_property
    def gradients(self) -> dict[str, NDArray[Any] | None]:
        """Name of each trainable variable -> its unscaled gradient on the batch, or None."""
        trace = self.trace
        if trace is None or not trace.gradients or self.numbers is None:
            return {}
        if self.numbers.note is not None:
            self.notes.append(self.numbers.note)
        names = [self.name(v) for v in trace.variables]
        return dict(zip(names, self.numbers.gradients, strict=True))

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
