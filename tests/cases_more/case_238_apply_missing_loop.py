"""Gradients are computed, and that is all."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="238", kind="loop", expected="zero_update", root_cause="apply_missing",
    where="optimizer,train_step", severity="raise", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(238)
    rng = np.random.default_rng(238)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


def run(hook=None, steps=20):
    p = build()
    model, (x, y) = p["model"], p["data"]
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = p["loss_fn"](y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        if hook is not None:
            hook(step, grads, model.trainable_variables, loss)
    return p
