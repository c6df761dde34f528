"""Unscaled inputs saturate a hidden sigmoid for every example."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="230", kind="fit", expected="zero_gradient", root_cause="saturated_activation",
    where="h1", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(230)
    rng = np.random.default_rng(230)
    x = (5000 + 100 * rng.random((64, 6))).astype("float32")
    y = rng.normal(size=(64, 1)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="sigmoid", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.001), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
