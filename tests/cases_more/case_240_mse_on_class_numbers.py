"""Integer class labels, softmax over 5 units, mse."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="240", kind="fit", expected="bad_contract", root_cause="wrong_loss_for_labels",
    where="loss", severity="keras", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(240)
    rng = np.random.default_rng(240)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = rng.integers(0, 5, 64)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(5, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
