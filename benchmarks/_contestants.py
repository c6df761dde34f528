"""What is compared in ``fit``: the guard, and what people use instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from _workloads import Workload

from keras_gradguard import GradientGuard


class HomeMade(keras.callbacks.Callback):
    """The callback that people write: a tape over a batch and a histogram of every gradient.

    Args:
        workload: Model and data; the gradients are those of its first batch.
        log_dir: Where to write.
        every: Steps between two looks.
    """

    def __init__(self, workload: Workload, log_dir: str, every: int) -> None:
        super().__init__()
        self._x = tf.constant(workload.x[: workload.batch])
        self._y = tf.constant(workload.y[: workload.batch])
        self._loss = workload.loss()
        self._writer = tf.summary.create_file_writer(log_dir)
        self._every, self._step = every, 0

    @tf.function
    def _gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
        return tape.gradient(loss, self._model.trainable_variables)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._step % self._every:
            return
        gradients = self._gradients(self._x, self._y)
        with self._writer.as_default(step=self._step):
            for variable, gradient in zip(self._model.trainable_variables, gradients, strict=True):
                gradient = tf.convert_to_tensor(gradient)
                tf.summary.histogram(f"gradient/{variable.path}", gradient)


def takes_activations() -> bool:
    """Whether this version of the guard watches activations."""
    return "activations" in inspect.signature(GradientGuard.__init__).parameters


def names() -> list[str]:
    """Return the contestants' names, the plain ``fit`` first."""
    # What makes the callbacks asks for the workload, but not before it is called.
    return list(contestants(None, ""))


def contestants(workload: Any, log_dir: str) -> dict[str, Callable[[], list[Any]]]:
    """Return what makes the callbacks of each contestant, by name; the plain ``fit`` first."""
    found: dict[str, Callable[[], list[Any]]] = {
        "plain": list,
        "guard": lambda: [GradientGuard(log_dir=f"{log_dir}/guard")],
        "guard, sample_every=10": lambda: [
            GradientGuard(log_dir=f"{log_dir}/guard_10", sample_every=10)
        ],
        "guard, sample_every=1": lambda: [
            GradientGuard(log_dir=f"{log_dir}/guard_1", sample_every=1)
        ],
        "Keras TensorBoard(histogram_freq=1)": lambda: [
            keras.callbacks.TensorBoard(f"{log_dir}/keras", histogram_freq=1)
        ],
        "home-made, every step": lambda: [HomeMade(workload, f"{log_dir}/home_1", 1)],
        "home-made, every 50 steps": lambda: [HomeMade(workload, f"{log_dir}/home_50", 50)],
    }
    if takes_activations():
        found["guard, activations=True"] = lambda: [
            GradientGuard(log_dir=f"{log_dir}/guard_activations", activations=True)
        ]
    return found
