"""Activations clipped to [0, 1] in the middle of the model; raw inputs put them all above."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="244", kind="fit", expected="zero_gradient", root_cause="clip_in_forward",
    where="h1", severity="raise", fatal_by_step=12,
)


class Clip(layers.Layer):
    def call(self, x):
        return ops.clip(x, 0.0, 1.0)


def build():
    keras.utils.set_random_seed(244)
    rng = np.random.default_rng(244)
    x = (100 + 100 * rng.random((64, 6))).astype("float32")
    y = rng.normal(size=(64, 1)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="h1", kernel_initializer=keras.initializers.RandomUniform(0.1, 0.5, seed=3)), Clip(name="clip"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.001), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
