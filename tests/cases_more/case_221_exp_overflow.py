"""A hand-written softmax without subtracting the maximum, on raw inputs."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="221", kind="fit", expected="non_finite", root_cause="exp_overflow",
    where="loss", severity="raise", fatal_by_step=1,
)


def softmax_loss(y, z):
    e = ops.exp(z)
    return -ops.sum(y * ops.log(e / ops.sum(e, -1, keepdims=True)), -1)


def build():
    keras.utils.set_random_seed(221)
    rng = np.random.default_rng(221)
    x = (200 * rng.random((64, 6))).astype("float32")
    y = keras.utils.to_categorical(x[:, :3].argmax(1), 3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu", name="h1"), layers.Dense(3, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=softmax_loss, data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
