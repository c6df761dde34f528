"""Targets in [0, 255], output sigmoid in [0, 1]."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="224", kind="fit", expected="bad_contract", root_cause="label_out_of_range",
    where="data", severity="raise", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(224)
    rng = np.random.default_rng(224)
    x = rng.random((64, 16)).astype("float32")
    y = (255 * x).astype("float32")
    model = keras.Sequential([keras.Input((16,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(16, activation="sigmoid", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
