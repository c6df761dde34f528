"""Targets (64,), predictions (64, 1): the difference is (64, 64)."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="204", kind="loop", expected="bad_contract", root_cause="loss_broadcast",
    where="loss", severity="raise", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(204)
    rng = np.random.default_rng(204)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = (2 * x[:, 0] - x[:, 1]).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu", name="h1"),
                              layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01),
                loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


def run(hook=None, steps=20):
    p = build()
    model, opt, (x, y) = p["model"], p["optimizer"], p["data"]
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = p["loss_fn"](y, model(x, training=True))
        tv = model.trainable_variables
        grads = tape.gradient(loss, tv)
        if hook is not None:
            hook(step, grads, tv, loss)
        opt.apply_gradients(zip(grads, tv))
    return p
