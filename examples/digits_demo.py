"""A healthy run and a faulty one, on real scans of handwritten digits.

The classifier trains by ``fit`` and leaves gradient histograms for TensorBoard. The
autoencoder makes the mistake of its life (a sigmoid output, scored by a loss that applies the
sigmoid again) and is stopped within a few steps, told why.

Run it with ``python examples/digits_demo.py [log_dir]``.
"""

import sys
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from keras_gradguard import GradientGuard, GradientGuardError


def digits():
    """Return 1797 scans of 8 x 8 pixels from 0 to 1, and the digit on each."""
    data = load_digits()
    return (data.images / 16.0).astype("float32"), data.target


def train_classifier(log_dir):
    """Train a small convolutional classifier under the guard; return its accuracy."""
    keras.utils.set_random_seed(1)
    x, y = digits()
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu", name="conv"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(32, activation="relu", name="hidden"),
            layers.Dense(10, name="digit"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    guard = GradientGuard(log_dir=log_dir, sample_every=20)
    model.fit(x[:1500], y[:1500], epochs=6, batch_size=32, verbose=2, callbacks=[guard])
    accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)[1]
    return accuracy, guard


def train_autoencoder(log_dir, steps=100):
    """Train the faulty autoencoder in a custom loop under the guard."""
    keras.utils.set_random_seed(1)
    images = digits()[0].reshape(-1, 64)[:256]
    pixels = images * 255.0  # forgotten: the scale of the inputs
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, activation="relu", name="code"),
            layers.Dense(64, activation="sigmoid", name="reconstruction"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.3)

    def loss_fn(target, output):
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=target, logits=output))

    guard = GradientGuard(log_dir=log_dir)
    with guard.watch(model, optimizer, loss=loss_fn):
        for _ in range(steps):
            with tf.GradientTape() as tape:
                loss = loss_fn(images, model(pixels, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            guard.step(loss)
    return guard


def main(log_dir="logs/digits"):
    print("1. A healthy classifier")
    accuracy, guard = train_classifier(str(Path(log_dir) / "classifier"))
    print(
        f"\n   finished: accuracy {accuracy:.3f} on digits it never saw, {guard.steps_seen} steps "
        f"watched, {len(guard.findings)} findings\n"
    )
    print("2. An autoencoder that cannot learn\n")
    try:
        train_autoencoder(str(Path(log_dir) / "autoencoder"))
    except GradientGuardError as error:
        print(f"   {type(error).__name__}: {error}\n")
        print(f"See the gradients:  tensorboard --logdir {log_dir}")
        return error.finding
    raise SystemExit("The faulty autoencoder was not stopped.")


if __name__ == "__main__":
    main(*sys.argv[1:2])
