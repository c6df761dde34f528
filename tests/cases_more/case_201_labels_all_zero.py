"""One-hot labels built with a comparison that never matches: every row sums to 0."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="201", kind="fit", expected="bad_contract", root_cause="labels_all_zero",
    where="data", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(201)
    rng = np.random.default_rng(201)
    x = rng.normal(size=(64, 6)).astype("float32")
    species = rng.integers(1, 4, 64)
    y = np.stack([species == name for name in ("1", "2", "3")], 1).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"),
                              layers.Dense(3, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="categorical_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
