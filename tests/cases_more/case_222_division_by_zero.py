"""A layer that standardises each example; some examples are constant, so it divides 0 by 0."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="222", kind="fit", expected="non_finite", root_cause="division_by_zero",
    where="standardise", severity="raise", fatal_by_step=1,
)


class Standardise(layers.Layer):
    def call(self, x):
        mean = ops.mean(x, -1, keepdims=True)
        spread = ops.max(x, -1, keepdims=True) - ops.min(x, -1, keepdims=True)
        return (x - mean) / spread


def build():
    keras.utils.set_random_seed(222)
    rng = np.random.default_rng(222)
    x = rng.normal(size=(64, 6)).astype("float32")
    x[5:40] = 1.0
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), Standardise(name="standardise"), layers.Dense(8, activation="tanh", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
