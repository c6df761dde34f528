"""A physics-informed loss on u_xx of a ReLU network."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="212", kind="loop", expected="zero_gradient,none_gradient", root_cause="second_derivative_of_relu",
    where="loss", severity="raise", fatal_by_step=8,
)


def build():
    keras.utils.set_random_seed(212)
    x = np.linspace(-1, 1, 64)[:, None].astype("float32")
    y = np.sin(3 * x).astype("float32")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(16, activation="relu", name="h1"),
                              layers.Dense(16, activation="relu", name="h2"), layers.Dense(1, name="u")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


def run(hook=None, steps=20):
    p = build()
    model, opt, (x, y) = p["model"], p["optimizer"], p["data"]
    x = tf.constant(x)
    for step in range(steps):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    u = model(x, training=True)
                u_x = inner.gradient(u, x)
            u_xx = outer.gradient(u_x, x, unconnected_gradients="zero")
            loss = p["loss_fn"](y, u_xx)
        tv = model.trainable_variables
        grads = tape.gradient(loss, tv)
        if hook is not None:
            hook(step, grads, tv, loss)
        opt.apply_gradients(zip(grads, tv))
    return p
