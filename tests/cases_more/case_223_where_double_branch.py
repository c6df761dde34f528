"""tf.where(y > 0, y * log(y / p), 0) with p in the denominator: the branch not taken is 0 * Inf."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="223", kind="loop", expected="non_finite", root_cause="where_double_branch",
    where="loss", severity="raise", fatal_by_step=0,
)


def loss(y, p):
    q = tf.nn.relu(p)
    return tf.reduce_mean(tf.where(q > 0, y * tf.math.log(q) * -1.0, 0.0))


def build():
    keras.utils.set_random_seed(223)
    rng = np.random.default_rng(223)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = rng.random((64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh", name="h1"), layers.Dense(4, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=loss, data=(x, y))


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
