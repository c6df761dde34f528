"""call() writes the clipped weight back into the attribute: from the second step on it is a plain tensor."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

META = dict(
    id="213", kind="loop", expected="none_gradient", root_cause="variable_replaced",
    where="scale", severity="raise", fatal_by_step=1,
)


class Scale(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones", name="w")

    def call(self, x):
        self.w = ops.clip(self.w, 0.0, 3.0)
        return x * self.w


def build():
    keras.utils.set_random_seed(213)
    rng = np.random.default_rng(213)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    scale = Scale(name="scale")
    scale.build((None, 6))
    model = keras.Sequential([keras.Input((6,)), layers.Dense(6, name="h1"), layers.Dense(1, name="out")])
    scaled = Model(scale, model)
    return dict(model=scaled, optimizer=keras.optimizers.SGD(0.01), loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


class Model(keras.Model):
    def __init__(self, scale, body):
        super().__init__()
        self.scale, self.body = scale, body

    def call(self, x):
        return self.body(self.scale(x))


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
