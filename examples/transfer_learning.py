"""Transfer learning: a base that knows the digits 0 to 4, frozen, and a new head for 5 to 9.

A frozen base is healthy, and the guard is silent. ``python examples/transfer_learning.py
--faulty`` freezes the model and not its base, so nothing is left to train.
"""

import argparse

import keras
from keras import layers
from sklearn.datasets import load_digits

from keras_gradguard import GradientGuard


def digits(lowest):
    """Return the scans [n, 8, 8, 1] of five digits, and which of the five each is."""
    data = load_digits()
    chosen = (data.target >= lowest) & (data.target < lowest + 5)
    return (data.images[chosen, ..., None] / 16.0).astype("float32"), data.target[chosen] - lowest


def trained_base():
    """Return convolutional layers that tell 0, 1, 2, 3 and 4 apart."""
    base = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu", name="conv_1"),
            layers.Conv2D(16, 3, activation="relu", name="conv_2"),
            layers.Flatten(),
        ],
        name="base",
    )
    whole = keras.Sequential([base, layers.Dense(5, activation="softmax")])
    whole.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    whole.fit(*digits(0), epochs=3, verbose=0)
    return base


def main(faulty=False):
    keras.utils.set_random_seed(0)
    base = trained_base()
    model = keras.Sequential(
        [
            base,
            layers.Dense(32, activation="relu", name="head"),
            layers.Dense(5, activation="softmax", name="digit"),
        ]
    )
    (model if faulty else base).trainable = False
    model.compile(
        keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    x, y = digits(5)
    guard = GradientGuard(log_dir=None)
    model.fit(x[:700], y[:700], epochs=4, verbose=2, callbacks=[guard])
    accuracy = model.evaluate(x[700:], y[700:], verbose=0)[1]
    print(f"accuracy {accuracy:.3f} on digits it never saw")
    return accuracy, guard


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A frozen base and a new head.")
    parser.add_argument("--faulty", action="store_true", help="freeze the whole model")
    main(parser.parse_args().faulty)
