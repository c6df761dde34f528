"""A hand-written KL divergence with y log y, y one-hot, and log of a ReLU output."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="231", kind="fit", expected="non_finite", root_cause="log_of_zero",
    where="loss", severity="raise", fatal_by_step=1,
)


def kl(y, p):
    return ops.sum(y * (ops.log(y + 1e-9) - ops.log(p)), -1)


def build():
    keras.utils.set_random_seed(231)
    rng = np.random.default_rng(231)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = keras.utils.to_categorical(x[:, :3].argmax(1), 3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(3, activation="relu", name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=kl, data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
