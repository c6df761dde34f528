"""A typo: the second weight of the layer is never read."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="215", kind="fit", expected="none_gradient", root_cause="unused_weight",
    where="gate", severity="raise", fatal_by_step=0,
)


class Gate(layers.Layer):
    def build(self, shape):
        self.a = self.add_weight(shape=(shape[-1], 4), name="a")
        self.b = self.add_weight(shape=(shape[-1], 4), name="b")

    def call(self, x):
        return ops.matmul(x, self.a) * ops.sigmoid(ops.matmul(x, self.a))


def build():
    keras.utils.set_random_seed(215)
    rng = np.random.default_rng(215)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), Gate(name="gate"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
