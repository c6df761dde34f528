"""A LearningRateScheduler that divides integers: 0 from the second epoch on."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="236", kind="fit", expected="zero_update", root_cause="learning_rate_zero",
    where="optimizer", severity="raise", fatal_by_step=20,
)


def build():
    keras.utils.set_random_seed(236)
    rng = np.random.default_rng(236)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=40):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, lr: float(1 // (1 + 10 * epoch)) * 0.01)
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=[schedule, *callbacks], verbose=0)
    return p
