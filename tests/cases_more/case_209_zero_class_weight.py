"""class_weight computed by integer division: 0 for every class."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from keras import layers

META = dict(
    id="209", kind="fit", expected="zero_gradient", root_cause="zero_class_weight",
    where="class_weight,data", severity="raise", fatal_by_step=8,
)


def build():
    keras.utils.set_random_seed(209)
    rng = np.random.default_rng(209)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="h1"),
                              layers.Dense(3, activation="softmax", name="out")])
    return dict(model=model, optimizer=keras.optimizers.Adam(0.01), loss_fn="sparse_categorical_crossentropy", data=(x, y))


def run(callbacks=(), steps=20):
    p = build()
    x, y = p["data"]
    counts = np.bincount(y)
    p["model"].compile(optimizer=p["optimizer"], loss=p["loss_fn"])
    p["model"].fit(x, y, batch_size=16, epochs=-(-steps // 4), verbose=0, callbacks=list(callbacks),
                   class_weight={k: int(c) // len(y) for k, c in enumerate(counts)})
    return p
