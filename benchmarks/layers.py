"""Speed of DynamicRepeatDense, against a Python loop, RepeatVector + TimeDistributed, and matmul.

One training step (forward, backward to kernel, bias and inputs), compiled with ``tf.function``,
with and without XLA. Every figure is the median of several rounds in which the candidates take
turns, so that a busy machine slows all of them. Run ``python benchmarks/layers.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_gradguard.layers import DynamicRepeatDense

Step = Callable[[], Any]


def loop_over_dense(units: int, n: int) -> Any:
    """Return a layer that applies one Dense n times in Python."""
    dense = keras.layers.Dense(units)

    class Loop(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.dense = dense
            self.dense.build(shape)

        def call(self, x: Any) -> Any:
            return tf.stack([self.dense(x) for _ in range(n)], axis=1)

    return Loop()


def repeat_vector(units: int, n: int, features: int) -> Any:
    """Return RepeatVector(n) followed by TimeDistributed(Dense(units))."""
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.RepeatVector(n),
            keras.layers.TimeDistributed(keras.layers.Dense(units)),
        ]
    )


class Matmul(keras.layers.Layer):
    """The bound: n rows a batch through one kernel, as one matrix product and nothing else."""

    def __init__(self, units: int, n: int, recurrent: bool) -> None:
        super().__init__()
        self.units, self.n, self.recurrent = units, n, recurrent

    def build(self, shape: Any) -> None:
        rows = self.units if self.recurrent else shape[-1]
        self.kernel = self.add_weight(shape=(rows, self.units))

    def call(self, x: Any) -> Any:
        # Rows of distinct values, so that nothing can be shared between them.
        width = self.units if self.recurrent else x.shape[-1]
        rows = tf.ones((x.shape[0] * self.n, width)) * x[0, 0]
        return tf.matmul(rows, self.kernel)


def training_step(layer: Any, x: Any, jit: bool, repeats: Any = None) -> Step:
    """Return a compiled forward and backward pass."""

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x) if repeats is None else layer(x, repeats=repeats)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, [x, *[v.value for v in layer.trainable_variables]])

    layer(x) if repeats is None else layer(x, repeats=repeats)
    compiled = tf.function(run, jit_compile=jit, autograph=False)
    return lambda: compiled(x)


def measure(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median seconds of each step, taking turns."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            result = step()
            result[-1].numpy()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(batch: int, features: int, units: int, n: int, jit: bool, rounds: int) -> None:
    """Print one table."""
    x = tf.constant(np.random.default_rng(0).normal(size=(batch, features)), "float32")
    repeats = tf.fill([batch], float(n))
    steps = {
        "DynamicRepeatDense, max_repeats": training_step(
            DynamicRepeatDense(units, max_repeats=n), x, jit, repeats
        ),
        "RepeatVector + TimeDistributed": training_step(repeat_vector(units, n, features), x, jit),
        "Python loop over Dense": training_step(loop_over_dense(units, n), x, jit),
        "matmul bound": training_step(Matmul(units, n, recurrent=False), x, jit),
        "DynamicRepeatDense, feedback": training_step(
            DynamicRepeatDense(units, max_repeats=n, feedback=True), x, jit, repeats
        ),
        "matmul bound, feedback": training_step(Matmul(units, n, recurrent=True), x, jit),
    }
    if not jit:
        steps["DynamicRepeatDense, no limit"] = training_step(
            DynamicRepeatDense(units), x, jit, repeats
        )
    seconds = measure(steps, rounds)
    print(f"\nbatch {batch}, features {features}, units {units}, n {n}, XLA {jit}")
    for name, value in seconds.items():
        print(f"  {name:<34}{value * 1e3:9.3f} ms")
    plain, fed = seconds["DynamicRepeatDense, max_repeats"], seconds["DynamicRepeatDense, feedback"]
    for name, ratio in {
        "/ RepeatVector + TimeDistributed": plain / seconds["RepeatVector + TimeDistributed"],
        "/ Python loop over Dense": plain / seconds["Python loop over Dense"],
        "/ matmul bound": plain / seconds["matmul bound"],
        "feedback / matmul bound": fed / seconds["matmul bound, feedback"],
    }.items():
        print(f"  {name:<34}{ratio:9.2f} x")


def main() -> None:
    """Measure small, middle and large shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    for shape in ((32, 64, 64, 16), (128, 256, 256, 16), (256, 512, 512, 16)):
        for jit in (False, True):
            compare(*shape, jit, rounds)


if __name__ == "__main__":
    main()
