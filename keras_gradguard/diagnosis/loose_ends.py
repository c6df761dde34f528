"""Ways that lead nowhere: what NumPy took away in an eager step, and losses that are constant."""

from __future__ import annotations

from keras_gradguard.diagnosis.cuts import starts_of
from keras_gradguard.diagnosis.opgraph import Value
from keras_gradguard.diagnosis.view import StepView


def comes_back(view: StepView, derived: set[Value]) -> bool:
    """True when a tensor of Python's making takes the place of a value that is left over.

    NumPy reads a tensor's memory without telling anybody, so that only the two loose
    ends are seen: a value that nothing uses, and a later one that nothing made.
    """
    if not view.eager:
        return False
    behind = view.ops.ancestors(view.loss)
    ends = [v for v in derived if not v.uses and v.is_float and v.op is not None]
    reads = {o for v in view.variables for o in starts_of(view.ops, v.key)[1]}
    fresh = [
        v
        for v in behind
        if v.op is None and v.is_float and v.shape and any(set(op.inputs) & reads for op in v.uses)
    ]
    return any(
        f.order > e.order
        and f.shape is not None
        and e.shape is not None
        and f.shape[:1] == e.shape[:1]
        for e in ends
        for f in fresh
    )


def ends_at(view: StepView, derived: set[Value]) -> tuple[str, ...]:
    """Return the place of the last operation on a way that leads nowhere, for ``where``."""
    ends = [v for v in derived if not v.uses and v.op is not None]
    last = max(ends, key=lambda v: v.order, default=None)
    return (view.place(last.op),) if last is not None and last.op else ("loss",)


def loss_is_constant(view: StepView) -> bool:
    """True when no trainable variable of the step has a way to the loss."""
    behind = view.ops.ancestors(view.loss)
    return not any(out in behind for v in view.variables for out in starts_of(view.ops, v.key)[1])
