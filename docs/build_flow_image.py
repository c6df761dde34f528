"""Draws docs/images/flow.png: a network whose first layer dies in the middle of a run.

python docs/build_flow_image.py
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_gradguard import GradientGuard, GradientGuardWarning, Policy

HERE = Path(__file__).parent


def main() -> None:
    """Train, break the first layer, train on, draw."""
    warnings.simplefilter("ignore", GradientGuardWarning)
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(1600, 12)).astype("float32")
    y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, activation="relu", name="first"),
            keras.layers.Dense(32, activation="relu", name="second"),
            keras.layers.Dense(16, activation="relu", name="third"),
            keras.layers.Dense(1, activation="sigmoid", name="answer"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy")

    def breaks(epoch: int, logs: Any) -> None:
        del logs
        if epoch == 3:
            model.layers[0].bias.assign(np.full(32, -50.0))

    broken = keras.callbacks.LambdaCallback(on_epoch_begin=breaks)
    guard = GradientGuard(log_dir=None, policy=Policy(zero_gradient="warn"))
    model.fit(x, y, epochs=6, callbacks=[broken, guard], verbose=0)
    figure = guard.plot()
    figure.set_size_inches(11, 3.6)
    figure.savefig(HERE / "images" / "flow.png", dpi=90)


if __name__ == "__main__":
    main()
