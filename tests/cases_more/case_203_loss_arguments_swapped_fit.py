"""A custom loss whose arguments are named the wrong way round."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="203", kind="fit", expected="bad_contract", root_cause="loss_arguments_swapped",
    where="loss", severity="raise", fatal_by_step=9,
)


def cross_entropy(y_pred, y_true):
    return -ops.sum(y_true * ops.log(y_pred + 1e-7), axis=-1)


def build():
    keras.utils.set_random_seed(203)
    rng = np.random.default_rng(203)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = keras.utils.to_categorical(x[:, :3].argmax(1), 3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"),
                              layers.Dense(3, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn=cross_entropy, data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
