"""How far a guarded training under XLA is from a plain one: XLA fuses anew when it is watched.

python -m benchmarks.xla_difference
"""

from __future__ import annotations

import json

import keras
import numpy as np

from keras_gradguard import GradientGuard
from tests.training import MODELS, train


def weights(kind: str, callbacks: list[keras.callbacks.Callback]) -> list[np.ndarray]:
    model, _ = train(
        kind, lambda: keras.optimizers.Adam(0.01), callbacks, epochs=10, jit_compile=True
    )
    return [np.array(v) for v in model.trainable_variables]


def main() -> None:
    for kind in MODELS:
        plain, again = weights(kind, []), weights(kind, [])
        guarded = weights(kind, [GradientGuard(log_dir=None)])
        differences = [
            max(float(np.max(np.abs(a - b))) for a, b in zip(plain, other, strict=True))
            for other in (again, guarded)
        ]
        largest = max(float(np.max(np.abs(w))) for w in plain)
        print(
            json.dumps(
                {
                    "model": kind,
                    "steps": 30,
                    "plain_against_plain": differences[0],
                    "guarded_against_plain": differences[1],
                    "largest_weight": largest,
                }
            )
        )


if __name__ == "__main__":
    main()
