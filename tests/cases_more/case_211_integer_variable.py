"""A trainable weight made with dtype int32."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="211", kind="fit", expected="none_gradient", root_cause="integer_variable",
    where="shift", severity="raise", fatal_by_step=0,
)


class Shift(layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=(shape[-1],), dtype="int32", initializer="ones", name="shift", trainable=True)

    def call(self, x):
        return x + ops.cast(self.shift, "float32")


def build():
    keras.utils.set_random_seed(211)
    rng = np.random.default_rng(211)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), Shift(name="shift"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
