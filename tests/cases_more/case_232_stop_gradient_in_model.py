"""A layer with stop_gradient on the only path to the lower half."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="232", kind="fit", expected="none_gradient", root_cause="stop_gradient",
    where="h1", severity="raise", fatal_by_step=0,
)


class Detach(layers.Layer):
    def call(self, x):
        return ops.stop_gradient(x)


def build():
    keras.utils.set_random_seed(232)
    rng = np.random.default_rng(232)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), Detach(name="detach"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
