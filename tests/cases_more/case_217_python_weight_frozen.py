"""A Python float as loss weight, raised by a callback: the traced step keeps 0.0 for ever."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="217", kind="fit", expected="zero_gradient", root_cause="python_side_effect_in_graph",
    where="loss", severity="raise", fatal_by_step=12,
)


WEIGHT = {"value": 0.0}


def annealed(y, p):
    return WEIGHT["value"] * ops.mean(ops.square(y - p), -1) + 1.0


class Anneal(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        WEIGHT["value"] = min(1.0, 0.2 * (epoch + 1))


def build():
    keras.utils.set_random_seed(217)
    rng = np.random.default_rng(217)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    WEIGHT["value"] = 0.0
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=annealed, data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=[*callbacks, Anneal()], verbose=0)
    return p
