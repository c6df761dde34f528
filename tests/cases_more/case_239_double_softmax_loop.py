"""softmax output into softmax_cross_entropy_with_logits."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="239", kind="loop", expected="bad_contract", root_cause="double_activation",
    where="out", severity="warn", fatal_by_step=9,
)


def build():
    keras.utils.set_random_seed(239)
    rng = np.random.default_rng(239)
    x = rng.random((64, 36)).astype("float32")
    y = keras.utils.to_categorical(rng.integers(0, 4, 64), 4)
    model = keras.Sequential([keras.Input((36,)), layers.Dense(16, activation="relu", name="h1"), layers.Dense(4, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01),
                loss_fn=lambda y, p: tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, p)), data=(x, y))


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
