"""A layer that is built and listed but never called."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="247", kind="loop", expected="none_gradient", root_cause="unused_layer",
    where="skip", severity="raise", fatal_by_step=0,
)


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.h1, self.skip, self.out = (layers.Dense(n, name=name) for n, name in ((8, "h1"), (8, "skip"), (1, "out")))
        self.skip.build((None, 6))

    def call(self, x):
        return self.out(tf.nn.relu(self.h1(x)))


def build():
    keras.utils.set_random_seed(247)
    rng = np.random.default_rng(247)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = Net()
    model(x[:1])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn=lambda y, p: tf.reduce_mean(tf.square(y - p)), data=(x, y))


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
