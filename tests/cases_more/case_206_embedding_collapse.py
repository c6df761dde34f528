"""Triplet loss on embeddings that a large common offset makes equal: the loss stays at its margin."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="206", kind="loop", expected="zero_gradient", root_cause="embedding_collapse",
    where="loss", severity="raise", fatal_by_step=8,
)


def triplet(y, e):
    a, p, n = e[0::3], e[1::3], e[2::3]
    near = tf.reduce_sum(tf.square(a - p), 1)
    far = tf.reduce_sum(tf.square(a - n), 1)
    return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))


def build():
    keras.utils.set_random_seed(206)
    rng = np.random.default_rng(206)
    x = (1e-3 * rng.normal(size=(63, 6))).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh", name="h1"),
                              layers.Dense(4, name="embed", bias_initializer=keras.initializers.Constant(1e5))])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=triplet, data=(x, np.zeros(63, "float32")))


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
