"""What a tap needs to know about a Keras optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf


def is_optimizer(thing: Any) -> bool:
    """Return True for a Keras optimizer."""
    return isinstance(thing, keras.optimizers.Optimizer)


def inner(optimizer: Any) -> Any:
    """Return the optimizer that does the work, unwrapping loss scaling."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def parts(optimizer: Any) -> list[Any]:
    """Return the optimizers among which a ``MultiOptimizer`` shares its variables out, or []."""
    several = getattr(keras.optimizers, "MultiOptimizer", None)  # Keras 3.14 and newer
    core = inner(optimizer)
    return list(core.optimizers) if several is not None and isinstance(core, several) else []


def builds_from_weights(optimizer: Any) -> bool:
    """Return True when building the optimizer reads the weights, as ``ScheduleFreeAdamW`` does.

    Keras builds an optimizer inside the traced step, so that this reading is a part of each step;
    built beforehand the training would be another one.
    """
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    cores = parts(optimizer) or [inner(optimizer)]
    return kind is not None and any(isinstance(core, kind) for core in cores)


def scales_loss(optimizer: Any) -> bool:
    """Return True when gradients reach ``apply`` multiplied by a dynamic loss scale."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale(optimizer: Any) -> Any:
    """Return the factor on the gradients that reach ``apply`` (a variable, a float, or 1.0)."""
    if scales_loss(optimizer):
        return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    factor = getattr(optimizer, "loss_scale_factor", None)
    return 1.0 if factor is None else factor


def accumulation_steps(optimizer: Any) -> int:
    """Return k when only every k-th ``apply`` changes the weights, else 1.

    Of several parts the slowest counts: after so many steps each of them was due.
    """
    shared = parts(optimizer)
    if shared:
        return max(accumulation_steps(p) for p in shared)
    return int(getattr(inner(optimizer), "gradient_accumulation_steps", None) or 1)


def raw_iterations(optimizer: Any) -> int:
    """Return how often ``apply`` ran, micro-batches of an accumulation counted."""
    core = inner(optimizer)
    counter = getattr(core, "_iterations", None)
    # Asked while a step is being traced, too: the value as it is now, not a tensor of the graph.
    with tf.init_scope():
        value = core.iterations if counter is None else counter
        return int(keras.ops.convert_to_numpy(value))


def learning_rate(optimizer: Any) -> Any:
    """Return the learning rate of the step to come, as the optimizer itself would compute it.

    Of several parts it is the largest: 0 means that all of them stand still.
    """
    shared = parts(optimizer)
    if shared:
        rates = [tf.cast(learning_rate(p), tf.float32) for p in shared]
        return tf.reduce_max(tf.stack(rates))
    return inner(optimizer).learning_rate


def learning_rate_ahead(optimizer: Any, horizon: Iterable[int] = (1, 10, 100, 1000)) -> float:
    """Return the largest learning rate within the steps to come (for warm-up from zero).

    Args:
        optimizer: A Keras optimizer.
        horizon: How many steps ahead to look.
    """
    shared = parts(optimizer)
    if shared:
        return max(learning_rate_ahead(p, horizon) for p in shared)
    core = inner(optimizer)
    schedule = getattr(core, "_learning_rate", None)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return float(keras.ops.convert_to_numpy(core.learning_rate))
    now = int(keras.ops.convert_to_numpy(core.iterations))
    return max(float(keras.ops.convert_to_numpy(schedule(now + k))) for k in horizon)


def of_model(model: Any) -> list[Any]:
    """Return the optimizers a model holds: its compiled one and those in its attributes.

    Args:
        model: A Keras model. Attributes that are lists or dictionaries are looked into, so
            that a GAN's ``self.d_optimizer`` and ``self.g_optimizer`` are both found.
    """
    found: list[Any] = []
    wrapped: set[int] = set()

    def visit(value: Any, depth: int = 0) -> None:
        if is_optimizer(value):
            if all(value is not f for f in found):
                found.append(value)
            if scales_loss(value):
                wrapped.add(id(value.inner_optimizer))
        elif depth < 2 and isinstance(value, dict):
            for item in list(value.values()):
                visit(item, depth + 1)
        elif depth < 2 and isinstance(value, (list, tuple)) and len(value) <= 64:
            for item in value:
                visit(item, depth + 1)

    visit(getattr(model, "optimizer", None))
    for name, value in list(vars(model).items()):
        if name not in ("_layers", "_operations", "_tracker"):
            visit(value)
    return [f for f in found if id(f) not in wrapped]
