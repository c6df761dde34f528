"""Binary labels coded 1 and 2 with binary_crossentropy."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="225", kind="fit", expected="bad_contract", root_cause="label_out_of_range",
    where="data", severity="raise", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(225)
    rng = np.random.default_rng(225)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = (1 + (x[:, :1] > 0)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, activation="sigmoid", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="binary_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
