"""Which values between a variable and the loss get a gradient other than 0 on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.numbers import health, living
from keras_gradguard.diagnosis.opgraph import Value


def top_tensor(value: Value, facts: Facts) -> Any:
    """Return the tensor of a value when it lives in the top graph, else None."""
    tensor = value.tensor
    trace = facts.trace
    if trace is None or tensor is None or getattr(tensor, "graph", None) is not trace.graph:
        return None
    return tensor


def liveness(facts: Facts, starts: Sequence[Value]) -> Callable[[Value], bool | None]:
    """Say which values between ``starts`` and the loss get a gradient other than 0.

    Args:
        facts: Measurements. A step traced to the depth ``"values"`` costs nothing more here;
            any other (a ``train_step`` of the user's own) is differentiated once again.
        starts: Where the ways to the loss begin.

    Returns:
        A function of a value: True, False, or None when its gradient cannot be asked for
        (inside a loop's body, or not connected by differentiable operations).
    """
    trace, view = facts.trace, facts.view
    if trace is None or view is None:
        return lambda _: None
    state: dict[Value, bool] = dict.fromkeys(facts.loss_values, True)
    if trace.value_gradients and facts.numbers is not None:
        named = facts.numbers.alive.items()
        known = ((view.ops.value(name), alive) for name, alive in named)
        state.update((v, alive) for v, alive in known if v is not None)
        return state.get
    between = view.ops.descendants(starts) & facts.reach
    values = [v for v in between if v.is_float and top_tensor(v, facts) is not None]
    values.sort(key=lambda v: v.order)
    order: list[Value] = []

    def make() -> list[Any]:
        gradients = tf.gradients(trace.scaled_loss, [v.tensor for v in values])
        connected = [(v, g) for v, g in zip(values, gradients, strict=True) if g is not None]
        order.extend(v for v, _ in connected)
        return health([g for _, g in connected])

    for table in facts.compute(make):
        state.update(zip(order, living(table), strict=True))
    return state.get
