"""A quantiser with floor between encoder and decoder."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="245", kind="fit", expected="zero_gradient,none_gradient", root_cause="zero_gradient_op,non_differentiable_op",
    where="h1", severity="raise", fatal_by_step=12,
)


class Quantise(layers.Layer):
    def call(self, x):
        return ops.floor(4.0 * x) / 4.0


def build():
    keras.utils.set_random_seed(245)
    rng = np.random.default_rng(245)
    x = rng.normal(size=(64, 6)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="h1", activation="tanh"), Quantise(name="quantise"), layers.Dense(6, name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="mse", data=(x, x))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
