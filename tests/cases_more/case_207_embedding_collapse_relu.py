"""Triplet loss on a ReLU embedding that is off for every example: all embeddings are 0."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers, ops

META = dict(
    id="207", kind="fit", expected="zero_gradient", root_cause="embedding_collapse",
    where="embed", severity="raise", fatal_by_step=8,
)


def triplet(y, e):
    e = ops.reshape(e, (-1, 4, 4))
    near = ops.sum(ops.square(e[:, 0] - e[:, 1]), 1)
    far = ops.sum(ops.square(e[:, 0] - e[:, 2]), 1)
    return ops.mean(ops.maximum(near - far + 0.5, 0.0))


def build():
    keras.utils.set_random_seed(207)
    rng = np.random.default_rng(207)
    x = rng.random((64, 6)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh", name="h1"),
                              layers.Dense(4, activation="relu", name="embed", bias_initializer=keras.initializers.Constant(-30.0))])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.001), loss_fn=triplet, data=(x, np.zeros((64, 1), "float32")))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
