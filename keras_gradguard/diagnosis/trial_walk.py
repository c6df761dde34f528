"""A few trial steps on copies of weights and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_gradguard.diagnosis.learning_rate import inner, learning_rate_at


def walk(
    optimizer: Any,
    variables: Sequence[Any],
    measure: Callable[[], Sequence[NDArray[Any]]],
    steps: int,
) -> list[float]:
    """Take a few steps with a copy of the optimizer and put the weights back.

    Args:
        optimizer: The Keras optimizer; only read.
        variables: Keras variables; changed while this runs, afterwards as before.
        measure: Returns the loss and one gradient a variable, at the present weights.
        steps: How many steps to take.

    Returns:
        The loss before each step and after the last; ends at the first that is not finite.
    """
    source = inner(optimizer)
    rate = learning_rate_at(optimizer)
    config = dict(source.get_config())
    config.update(learning_rate=rate if rate is not None else 0.0)
    config.update(gradient_accumulation_steps=None, use_ema=False, loss_scale_factor=None)
    clone = type(source).from_config(config)
    copies = [
        keras.Variable(v.value, dtype=keras.backend.standardize_dtype(v.dtype), name=f"walk_{i}")
        for i, v in enumerate(variables)
    ]
    clone.build(copies)
    copy_state(source, clone, variables)
    before = [np.array(v) for v in variables]
    losses: list[float] = []
    try:
        for _ in range(steps + 1):
            loss, *gradients = measure()
            losses.append(float(np.mean(loss)))
            if len(losses) > steps or not math.isfinite(losses[-1]):
                break
            clone.apply([keras.ops.convert_to_tensor(g) for g in gradients], copies)
            for variable, copy in zip(variables, copies, strict=True):
                constraint = getattr(variable, "constraint", None)
                variable.assign(copy if constraint is None else constraint(copy.value))
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    return losses


def copy_state(source: Any, clone: Any, variables: Sequence[Any]) -> None:
    """Give the clone the moments of the original where they belong to the same variables."""
    known = [id(v) for v in getattr(source, "_trainable_variables", ())]
    if not getattr(source, "built", False) or known != [id(v) for v in variables]:
        return
    by_shape = list(zip(source.variables, clone.variables, strict=False))
    if len(source.variables) != len(clone.variables):
        return
    rate = getattr(clone, "_learning_rate", None)
    for old, new in by_shape:
        if new is not rate and tuple(old.shape) == tuple(new.shape):
            new.assign(keras.ops.cast(old.value, new.dtype))
