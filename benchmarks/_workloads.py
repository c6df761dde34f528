"""The models that the guard's cost is measured on: synthetic data, fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers

CLASSES = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """A model not yet compiled, one epoch of data, and the batch size."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray
    batch: int
    optimizer: str = "adam"

    @property
    def steps(self) -> int:
        """Steps an epoch."""
        return len(self.x) // self.batch

    def loss(self) -> keras.losses.Loss:
        """A new loss object."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compiled(self, *, jit_compile: bool = False) -> Workload:
        """Compile the model in place; return the workload."""
        self.model.compile(self.optimizer, self.loss(), jit_compile=jit_compile)
        return self


def of_shape(model: keras.Model, shape: tuple[int, ...], batch: int, steps: int) -> Workload:
    """Give a model random data: one epoch of so many steps."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch * steps, *shape)).astype("float32")
    return Workload(model, x, rng.integers(0, CLASSES, len(x)), batch)


def mlp(steps: int = 100) -> Workload:
    """Four layers of 256, batch 128: a step of about 3 ms, the hard case."""
    stack = [layers.Dense(256, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((256,)), *stack, layers.Dense(CLASSES)])
    return of_shape(model, (256,), 128, steps)


def conv(steps: int = 40) -> Workload:
    """A small convolutional net, batch 64."""
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    return of_shape(model, (28, 28, 1), 64, steps)


def transformer(steps: int = 30) -> Workload:
    """Three blocks of attention over 32 tokens of width 64, batch 32."""
    x = inputs = keras.Input((32, 64))
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(
            x + layers.Dense(64)(layers.Dense(128, activation="gelu")(x))
        )
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    return of_shape(model, (32, 64), 32, steps)


def wide_mlp(steps: int = 8) -> Workload:
    """12 million parameters in two large kernels, batch 64."""
    stack = [layers.Dense(units, activation="relu") for units in (2400, 3600, 600)]
    model = keras.Sequential([keras.Input((512,)), *stack, layers.Dense(CLASSES)])
    return of_shape(model, (512,), 64, steps)


def embedding(steps: int = 60) -> Workload:
    """An embedding of a million rows with sparse gradients, under SGD."""
    rows = 1_000_000
    model = keras.Sequential(
        [
            keras.Input((16,), dtype="int32"),
            layers.Embedding(rows, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )
    rng = np.random.default_rng(0)
    x = rng.integers(0, rows, (64 * steps, 16)).astype("int32")
    # Adam would update its moments over all rows, whatever the gradient.
    return Workload(model, x, rng.integers(0, CLASSES, len(x)), 64, "sgd")


def deep(steps: int = 12, depth: int = 200) -> Workload:
    """200 layers with 800 variables (four a layer of depth), batch 32."""
    x = inputs = keras.Input((32,))
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(32, activation="relu")(y)
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    return of_shape(model, (32,), 32, steps)


def lstm(steps: int = 20) -> Workload:
    """One LSTM of 128 units over 32 steps, batch 32."""
    model = keras.Sequential([keras.Input((32, 32)), layers.LSTM(128), layers.Dense(CLASSES)])
    return of_shape(model, (32, 32), 32, steps)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "conv": conv,
    "transformer": transformer,
    "wide_mlp": wide_mlp,
    "embedding": embedding,
    "deep": deep,
    "lstm": lstm,
}
FIRST = ("mlp", "conv", "transformer")
