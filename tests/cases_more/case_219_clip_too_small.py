"""clipnorm=1e-10 with SGD: the step is below the weights' precision."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="219", kind="fit", expected="zero_update", root_cause="clip_too_small",
    where="optimizer", severity="raise", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(219)
    rng = np.random.default_rng(219)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = 5 * x[:, :1] + 3
    init = keras.initializers.RandomUniform(0.2, 0.8, seed=1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="softplus", name="h1", kernel_initializer=init, bias_initializer="ones"),
                              layers.Dense(1, name="out", kernel_initializer=init, bias_initializer="ones")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01, clipnorm=1e-8), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
