"""A convolution whose ReLU is off everywhere after a bad initial bias."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="243", kind="fit", expected="zero_gradient", root_cause="dead_relu",
    where="conv", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(243)
    rng = np.random.default_rng(243)
    x = rng.random((64, 8, 8, 1)).astype("float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3, name="conv", activation="relu", bias_initializer=keras.initializers.Constant(-20.0)),
                              layers.Flatten(), layers.Dense(3, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.001), loss_fn="sparse_categorical_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
