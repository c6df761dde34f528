"""Raw inputs drive the sigmoid to exactly 1; a Reshape hides the logits, the loss clips at 1 - 1e-7."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="226", kind="fit", expected="zero_gradient", root_cause="saturated_output_clipped_loss",
    where="out", severity="raise", fatal_by_step=8,
)


def build():
    keras.utils.set_random_seed(226)
    rng = np.random.default_rng(226)
    x = (300 * (1 + rng.random((64, 6)))).astype("float32")
    y = np.zeros((64, 1, 1), "float32")
    init = keras.initializers.RandomUniform(0, 0.3, seed=1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1", kernel_initializer=init),
                              layers.Dense(1, activation="sigmoid", name="out", kernel_initializer=init), layers.Reshape((1, 1))])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="binary_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
