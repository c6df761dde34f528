"""Update every 4th step by a Python counter: it is 1 at trace time, so apply is never in the graph."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
import tensorflow as tf
from keras import layers

META = dict(
    id="216", kind="fit", expected="zero_update", root_cause="python_side_effect_in_graph,apply_missing",
    where="train_step", severity="raise", fatal_by_step=12,
)


class Every4(keras.Sequential):
    count = 0

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.count += 1
        if self.count % 4 == 0:
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def build():
    keras.utils.set_random_seed(216)
    rng = np.random.default_rng(216)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x[:, :1]
    model = Every4([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"), layers.Dense(1, name="out")])
    return dict(model=model, optimizer=keras.optimizers.SGD(0.01), loss_fn="mse", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
