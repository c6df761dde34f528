"""What a guard costs in ``fit``: ratio of a guarded to a plain run, alternating, in one process.

    python benchmarks/fit_overhead.py [--quick]

One line of JSON a workload: median and spread over the rounds of (guarded seconds / plain
seconds), defaults of the guard with TensorBoard on. Tracing is not part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from keras_gradguard import GradientGuard

RNG = np.random.default_rng(0)


def mlp() -> tuple[keras.Model, np.ndarray, int]:
    stack = [layers.Dense(256, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((256,)), *stack, layers.Dense(10)])
    return model, RNG.normal(size=(128 * 100, 256)).astype("float32"), 128


def conv() -> tuple[keras.Model, np.ndarray, int]:
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    return model, RNG.normal(size=(64 * 60, 28, 28, 1)).astype("float32"), 64


def transformer() -> tuple[keras.Model, np.ndarray, int]:
    x = inputs = keras.Input((32, 64))
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(
            x + layers.Dense(64)(layers.Dense(128, activation="gelu")(x))
        )
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return model, RNG.normal(size=(32 * 30, 32, 64)).astype("float32"), 32


WORKLOADS: dict[str, Callable[[], tuple[keras.Model, np.ndarray, int]]] = {
    "mlp": mlp,
    "conv": conv,
    "transformer": transformer,
}


def compiled(
    make: Callable[[], tuple[keras.Model, np.ndarray, int]],
) -> tuple[keras.Model, np.ndarray, np.ndarray, int]:
    model, x, batch = make()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, x, RNG.integers(0, 10, len(x)), batch


def measure(name: str, rounds: int, log_dir: str) -> dict[str, object]:
    runs = []
    for callbacks in ([], [GradientGuard(log_dir=f"{log_dir}/{name}")]):
        model, x, y, batch = compiled(WORKLOADS[name])

        def run(model=model, x=x, y=y, batch=batch, callbacks=callbacks) -> float:
            start = time.perf_counter()
            model.fit(x, y, batch_size=batch, epochs=3, verbose=0, callbacks=callbacks)
            return time.perf_counter() - start

        run()  # traces, and passes the steps at the start that are all sampled
        runs.append(run)
    pairs = [(runs[0](), runs[1]()) for _ in range(rounds)]
    ratios = sorted(guarded / plain for plain, guarded in pairs)
    steps = 3 * len(x) // batch
    return {
        "workload": name,
        "ratio": round(statistics.median(ratios), 4),
        "lowest": round(ratios[0], 4),
        "highest": round(ratios[-1], 4),
        "plain_ms_a_step": round(1e3 * statistics.median(p for p, _ in pairs) / steps, 3),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five rounds instead of fifteen")
    rounds = 5 if parser.parse_args().quick else 15
    with tempfile.TemporaryDirectory() as log_dir:
        for name in WORKLOADS:
            print(json.dumps(measure(name, rounds, log_dir)), flush=True)


if __name__ == "__main__":
    main()
