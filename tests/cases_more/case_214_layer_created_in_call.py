"""A hidden layer made anew inside call(): its weights are random at every step."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="214", kind="loop", expected="zero_update", root_cause="layer_created_in_call",
    where="net", severity="raise", fatal_by_step=9,
)


class Net(keras.Model):
    def __init__(self):
        super().__init__(name="net")
        self.out = layers.Dense(1, name="out")

    def call(self, x):
        h = layers.Dense(8, activation="relu")(x)
        return self.out(h)


def build():
    keras.utils.set_random_seed(214)
    rng = np.random.default_rng(214)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    return dict(model=Net(), optimizer=keras.optimizers.SGD(0.01), loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


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
