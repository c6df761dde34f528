"""A custom training loop in ``@tf.function``, plain or watched."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf
from _measure import Clock
from _workloads import Workload


class Loop:
    """A block is one pass over the data.

    Args:
        workload: Model and data.
        guard: A GradientGuard that watches the loop, or None.
    """

    def __init__(self, workload: Workload, guard: Any = None) -> None:
        model, optimizer = workload.model, keras.optimizers.get(workload.optimizer)
        loss_fn = workload.loss()
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        data = tf.data.Dataset.from_tensor_slices((workload.x, workload.y))
        self._data = data.batch(workload.batch, drop_remainder=True).prefetch(2)
        self.steps = workload.steps
        self._step, self._guard = step, guard
        self._stack = contextlib.ExitStack()
        if guard is not None:
            self._stack.enter_context(guard.watch(model, optimizer, loss=loss_fn))

    def warm_up(self, steps: int) -> None:
        """Train at least so many steps, unmeasured."""
        for _ in range(-(-steps // self.steps) + 1):
            self.block(Clock())

    def block(self, clock: Clock) -> None:
        """Train one pass."""
        clock.start()
        for x, y in self._data:
            loss = self._step(x, y)
            if self._guard is not None:
                self._guard.step(loss)
        clock.stop()

    def close(self) -> None:
        """Stop watching."""
        self._stack.close()
