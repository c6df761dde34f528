"""A linear SimpleRNN with recurrent weights of norm 1.7 over 120 time steps."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="208", kind="fit", expected="exploding,non_finite", root_cause="recurrent_explosion",
    where="rnn", severity="raise", fatal_by_step=8,
)


def build():
    keras.utils.set_random_seed(208)
    rng = np.random.default_rng(208)
    x = rng.normal(size=(64, 120, 3)).astype("float32")
    y = x[:, -1, :1].astype("float32")
    model = keras.Sequential([
        keras.Input((120, 3)),
        layers.SimpleRNN(8, activation="linear", name="rnn", recurrent_initializer=keras.initializers.Orthogonal(gain=1.7)),
        layers.Dense(1, name="out"),
    ])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
