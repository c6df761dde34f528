"""Small models and data for tests that train, and what 'the same training' means."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers


def mlp():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(3, activation="softmax"),
        ]
    )


def conv():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def recurrent():
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(50, 6, mask_zero=True),
            layers.GRU(5),
            layers.Dense(3, activation="softmax"),
        ]
    )


def transformer():
    x = inputs = keras.Input((6, 8))
    y = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.2)(y))
    y = layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    x = layers.LayerNormalization()(x + y)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


class TwoHeads(keras.Model):
    """Subclassed, two outputs."""

    def __init__(self):
        super().__init__()
        self.trunk = layers.Dense(8, activation="relu")
        self.a = layers.Dense(3, activation="softmax")
        self.b = layers.Dense(3, activation="softmax")

    def call(self, x):
        h = self.trunk(x)
        return [self.a(h), self.b(h)]


MODELS = {
    "mlp": mlp,
    "conv": conv,
    "recurrent": recurrent,
    "transformer": transformer,
    "two_heads": TwoHeads,
}
SHAPES = {
    "mlp": (6,),
    "conv": (8, 8, 1),
    "recurrent": (7,),
    "transformer": (6, 8),
    "two_heads": (6,),
}


def data(kind, n=40):
    """Return 40 examples: two whole batches of 16 and a partial one."""
    rng = np.random.default_rng(3)
    if kind == "recurrent":
        x = rng.integers(0, 50, (n, 7)).astype("int32")
    else:
        x = rng.normal(size=(n, *SHAPES[kind])).astype("float32")
    y = rng.integers(0, 3, n)
    return x, [y, y] if kind == "two_heads" else y


def train(kind, optimizer, callbacks=(), *, epochs=3, **compile_kwargs):
    """Train from a fixed seed and return (model, history)."""
    keras.utils.set_random_seed(7)
    model = MODELS[kind]()
    loss = "sparse_categorical_crossentropy"
    loss = [loss, loss] if kind == "two_heads" else loss
    model.compile(optimizer=optimizer(), loss=loss, **compile_kwargs)
    x, y = data(kind)
    fitted = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, fitted.history


def state(model):
    """Return every number a training leaves behind, by name."""
    found = {f"model/{i}/{v.path}": np.array(v) for i, v in enumerate(model.variables)}
    variables = enumerate(model.optimizer.variables)
    found |= {f"optimizer/{i}/{v.path}": np.array(v) for i, v in variables}
    return found


def unnamed(found):
    """Drop automatic numbers from names, so that two instances of one model compare."""
    return [np.asarray(v) for v in found.values()]


def assert_same(a, b):
    """Assert that two (model, history) results are equal bit for bit."""
    left, right = unnamed(state(a[0])), unnamed(state(b[0]))
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        np.testing.assert_array_equal(x, y)
    assert a[1] == b[1]
