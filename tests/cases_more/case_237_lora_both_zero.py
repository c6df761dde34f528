"""A LoRA pair on a frozen kernel with A and B both zero."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="237", kind="fit", expected="zero_gradient", root_cause="zero_init",
    where="lora", severity="raise", fatal_by_step=12,
)


class Lora(layers.Layer):
    def build(self, shape):
        self.base = self.add_weight(shape=(shape[-1], 4), name="base", trainable=False)
        self.a = self.add_weight(shape=(shape[-1], 2), name="a", initializer="zeros")
        self.b = self.add_weight(shape=(2, 4), name="b", initializer="zeros")

    def call(self, x):
        return ops.matmul(x, self.base) + ops.matmul(ops.matmul(x, self.a), self.b)


def build():
    keras.utils.set_random_seed(237)
    rng = np.random.default_rng(237)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = (x[:, :4] * 2).astype("float32")
    model = keras.Sequential([keras.Input((6,)), Lora(name="lora")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.05), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
