"""Padding value 0 is also the only token: Embedding(mask_zero=True) masks every position."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="210", kind="fit", expected="zero_gradient", root_cause="all_masked",
    where="data", severity="raise", fatal_by_step=8,
)


def build():
    keras.utils.set_random_seed(210)
    rng = np.random.default_rng(210)
    x = np.zeros((64, 7), "int32")
    y = rng.integers(0, 5, (64, 7))
    model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(10, 6, mask_zero=True, name="emb"),
                              layers.GRU(8, return_sequences=True, name="gru"), layers.Dense(5, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="sparse_categorical_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(*p["data"], batch_size=16, epochs=-(-steps // 4), callbacks=list(callbacks), verbose=0)
    return p
