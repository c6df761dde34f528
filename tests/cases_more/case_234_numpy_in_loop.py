"""The prediction goes through .numpy() before the loss."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="234", kind="loop", expected="none_gradient", root_cause="leaves_tensorflow",
    where="loss", severity="raise", fatal_by_step=0,
)


def build():
    keras.utils.set_random_seed(234)
    rng = np.random.default_rng(234)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01),
                loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - np.tanh(p.numpy()))), data=(x, y))


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
