"""Weights stored in bfloat16 with a small learning rate: each step is below half a unit in the last place."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="235", kind="fit", expected="zero_update", root_cause="update_below_precision",
    where="optimizer", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(235)
    rng = np.random.default_rng(235)
    x = rng.random((64, 6)).astype("float32")
    y = (3 * x[:, :1] + 4).astype("float32")
    init = keras.initializers.RandomUniform(0.5, 1.0, seed=1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1", dtype="bfloat16", kernel_initializer=init, bias_initializer="ones"),
                              layers.Dense(1, name="out", dtype="bfloat16", kernel_initializer=init, bias_initializer="ones")])
    return dict(model=model, optimizer=keras.optimizers.SGD(1e-6), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
