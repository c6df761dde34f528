"""Images divided by 255 in integer arithmetic: every pixel is 0."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="227", kind="fit", expected="zero_gradient", root_cause="zero_input",
    where="data", severity="raise", fatal_by_step=12,
)


def build():
    keras.utils.set_random_seed(227)
    rng = np.random.default_rng(227)
    pixels = rng.integers(0, 255, (64, 36)).astype("uint8")
    x = (pixels // 255).astype("float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential([keras.Input((36,)), layers.Dense(16, activation="relu", name="h1"), layers.Dense(3, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="sparse_categorical_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
