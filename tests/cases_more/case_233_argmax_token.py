"""An encoder whose argmax picks the row of an embedding."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="233", kind="fit", expected="none_gradient", root_cause="non_differentiable_op",
    where="encoder", severity="raise", fatal_by_step=0,
)


class Pick(layers.Layer):
    def build(self, shape):
        self.book = self.add_weight(shape=(shape[-1], 4), name="book", initializer="glorot_uniform")

    def call(self, x):
        return ops.take(self.book, ops.argmax(x, -1), axis=0)


def build():
    keras.utils.set_random_seed(233)
    rng = np.random.default_rng(233)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="encoder"), Pick(name="pick"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
