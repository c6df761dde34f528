"""One target is NaN."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="246", kind="fit", expected="non_finite", root_cause="nan_input",
    where="data", severity="raise", fatal_by_step=4,
)


def build():
    keras.utils.set_random_seed(246)
    rng = np.random.default_rng(246)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1].copy()
    y[17] = np.nan
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="h1", activation="tanh"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
