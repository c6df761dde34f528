"""A sequence whose length the network predicts: no gradient through tf.range(n), and the cure.

The task: from the image of a digit, a sequence of as many rows as the digit says, each
row a 1. Run it with ``python examples/story_3_length_from_dense.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_gradguard import GradientGuard
from keras_gradguard.layers import DynamicRepeatDense
from keras_gradguard.losses import LengthLoss, PaddedSequenceLoss

MOST_ROWS = 20
TRAINING = 1400
EPOCHS = 30


def digits() -> tuple[Any, Any, Any]:
    """Return images [1797, 64] in [0, 1], sequences [1797, 9, 1] and lengths [1797]."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = data.data[order].astype("float32") / 16
    lengths = data.target[order].astype("float32")
    rows = (np.arange(9) < lengths[:, None]).astype("float32")
    return images, rows[..., None], lengths


class CountUp(keras.layers.Layer):
    """Rows of ones, as many as the whole part of n says."""

    def call(self, n: Any) -> Any:
        """Return ones of shape [largest n, 1]."""
        rows = tf.range(tf.cast(tf.reduce_max(n), tf.int32))  # an integer: the gradient ends here
        return tf.ones_like(rows, tf.float32)[:, None]


def count_rows(y_true: Any, y_pred: Any) -> Any:
    """Return how many rows there are too many or too few."""
    rows = tf.shape(y_pred)[0]  # an integer again
    return tf.cast(tf.abs(rows - tf.cast(tf.reduce_max(y_true), tf.int32)), tf.float32)


def faulty(*callbacks: keras.callbacks.Callback) -> str:
    """Train on the number of rows itself; return the error that stops it.

    Args:
        *callbacks: Without any it is Keras that stops; a GradientGuard says where and why.
    """
    images, _, lengths = digits()
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(32, activation="relu")(inputs)
    n = keras.layers.Dense(1, activation="softplus", name="n")(hidden)
    model = keras.Model(inputs, CountUp()(n))
    model.compile("adam", loss=count_rows)
    try:
        model.fit(images, lengths, batch_size=1, epochs=1, verbose=0, callbacks=list(callbacks))
    except Exception as error:  # whatever stops it is what this example shows
        return f"{type(error).__name__}: {error}"
    return "trained"


def build() -> keras.Model:
    """Return a functional model from images to rows and their real-valued number n."""
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(256, activation="relu")(inputs)
    hidden = keras.layers.Dense(128, activation="relu")(hidden)
    # n is a Dense(1), as before. On top of a softmax it is a mean over what the image may
    # be, which learns ten separate numbers better than a plain regression does.
    kinds = keras.layers.Dense(64, activation="softmax")(hidden)
    n = keras.layers.Dense(
        1,
        activation="softplus",
        kernel_initializer=keras.initializers.RandomUniform(0, 10),
        name="n",
    )(kinds)
    repeat = DynamicRepeatDense(1, max_repeats=MOST_ROWS, return_lengths=True, name="repeat")
    rows, lengths = repeat(hidden, n)
    return keras.Model(inputs, [rows, lengths])


def accuracy(model: keras.Model, images: Any, lengths: Any) -> float:
    """Return the share of images that get exactly the right number of rows."""
    predicted = model.predict(images, verbose=0)[1]
    return float(np.mean(np.round(predicted) == lengths))


def cured() -> dict[str, float]:
    """Train with ``fit`` and in a custom loop; return the held-out figures of both."""
    images, sequences, lengths = digits()
    train = images[:TRAINING], sequences[:TRAINING], lengths[:TRAINING]
    held_out = images[TRAINING:], lengths[TRAINING:]
    result = {}

    keras.utils.set_random_seed(0)
    model = build()
    model.compile(schedule(), loss=[PaddedSequenceLoss(), LengthLoss()])
    history = model.fit(
        train[0], list(train[1:]), batch_size=64, epochs=EPOCHS, shuffle=True, verbose=0
    )
    result["fit: first loss"] = history.history["loss"][0]
    result["fit: last loss"] = history.history["loss"][-1]
    result["fit: held-out accuracy"] = accuracy(model, *held_out)

    keras.utils.set_random_seed(0)
    model, optimizer = build(), schedule()
    row_loss, length_loss = PaddedSequenceLoss(), LengthLoss()

    @tf.function
    def train_step(x: Any, y: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            rows, predicted = model(x, training=True)
            loss = row_loss(y, rows) + length_loss(n, predicted)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = tf.data.Dataset.from_tensor_slices(train).shuffle(TRAINING, seed=0).batch(64)
    losses = [float(train_step(*batch)) for _ in range(EPOCHS) for batch in batches]
    result["loop: first loss"], result["loop: last loss"] = losses[0], losses[-1]
    result["loop: held-out accuracy"] = accuracy(model, *held_out)
    return result


def schedule() -> keras.optimizers.Optimizer:
    """Return Adam whose learning rate falls to 0 along a cosine."""
    steps = EPOCHS * -(-TRAINING // 64)
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, steps))


def main() -> None:
    """Print what both formulations come to."""
    print("Without a guard:", faulty())
    print("With one:", faulty(GradientGuard(log_dir=None)))
    for name, value in cured().items():
        print(f"cured: {name} {value:.3f}")


if __name__ == "__main__":
    main()
