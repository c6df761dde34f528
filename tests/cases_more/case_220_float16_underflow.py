"""Pure float16 without loss scaling: the mean over a million pixels pushes the gradient below 6e-8."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="220", kind="fit", expected="zero_gradient", root_cause="float16_underflow",
    where="h1", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(220)
    rng = np.random.default_rng(220)
    x = rng.normal(size=(256, 6)).astype("float16")
    y = rng.random((256, 4096)).astype("float16")
    model = keras.Sequential([
        keras.Input((6,), dtype="float16"), layers.Dense(8, activation="sigmoid", name="h1", dtype="float16"),
        layers.Dense(8, activation="sigmoid", name="h2", dtype="float16"),
        layers.Dense(4096, activation="sigmoid", name="out", dtype="float16", kernel_initializer=keras.initializers.RandomNormal(0, 0.003, seed=1)),
    ])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.1), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=256, epochs=steps, callbacks=list(callbacks), verbose=0)
    return p
