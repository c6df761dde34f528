"""House prices in dollars and areas in square feet, plain SGD."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="228", kind="fit", expected="exploding,non_finite", root_cause="input_scale,learning_rate_too_high",
    where="data", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(228)
    rng = np.random.default_rng(228)
    x = (1000 + 3000 * rng.random((64, 6))).astype("float32")
    y = (150 * x[:, :1]).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu", name="h1"), layers.Dense(1, name="price")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
