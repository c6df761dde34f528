"""The optimizer was built on the model that was cloned; apply(grads) updates the old one."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="218", kind="loop", expected="zero_update", root_cause="optimizer_built_for_other_variables",
    where="optimizer", severity="raise", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(218)
    rng = np.random.default_rng(218)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    old = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, name="out")])
    opt = keras.optimizers.Adam(0.01)
    opt.build(old.trainable_variables)
    return dict(model=keras.models.clone_model(old), old=old, optimizer=opt, loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


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
        opt.apply(grads)
    return p
