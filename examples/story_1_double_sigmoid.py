"""An autoencoder whose loss sits still while its gradients are zero, and the cure.

The decoder ends in a sigmoid; ``tf.nn.sigmoid_cross_entropy_with_logits`` applies another one.
What the loss takes for logits lies between 0 and 1, so nothing below ln 2 can be reached where a
pixel is dark, and once the first sigmoid is saturated every gradient is exactly zero.
``LogitsOutput`` makes the layer emit logits and hands out the loss that fits.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from keras_gradguard import GradientGuard, GradientGuardError, LogitsOutput, probabilities


def images():
    """Return 1797 scanned digits as rows of 64 pixels from 0 to 1."""
    return (load_digits().data / 16.0).astype("float32")


def faulty(steps=60):
    """Train until the guard stops it; return the finding."""
    keras.utils.set_random_seed(2)
    x = images()[:256]
    pixels = x * 255.0
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, activation="relu", name="code"),
            layers.Dense(64, activation="sigmoid", name="recon"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.3)

    def loss_fn(target, output):
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=target, logits=output))

    guard = GradientGuard(log_dir=None)
    try:
        with guard.watch(model, optimizer, loss=loss_fn):
            for _ in range(steps):
                with tf.GradientTape() as tape:
                    loss = loss_fn(x, model(pixels, training=True))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                guard.step(loss)
    except GradientGuardError as error:
        return error.finding
    raise SystemExit("The faulty version was not stopped.")


def cured(steps=300):
    """Train with LogitsOutput and scaled pixels; return the loss and the largest pixel error."""
    keras.utils.set_random_seed(2)
    x = images()
    output = LogitsOutput(layers.Dense(64, activation="sigmoid", name="recon"))
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(32, activation="relu", name="code"), output]
    )
    loss_fn, optimizer = output.loss(), keras.optimizers.Adam(0.01)
    guard = GradientGuard(log_dir=None)
    rng = np.random.default_rng(2)
    with guard.watch(model, optimizer, loss=loss_fn):
        for _ in range(steps):
            batch = x[rng.integers(0, len(x), 128)]
            with tf.GradientTape() as tape:
                loss = loss_fn(batch, model(batch, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            guard.step(loss)
    reconstruction = probabilities(model(x[:200]), "sigmoid")
    error = float(tf.reduce_mean(tf.abs(reconstruction - x[:200])))
    return float(loss), error, guard.findings


def main():
    print(faulty())
    loss, error, findings = cured()
    print(
        f"\nWith LogitsOutput: loss {loss:.3f} (ln 2 is 0.693), mean pixel error {error:.3f}, "
        f"{len(findings)} findings."
    )


if __name__ == "__main__":
    main()
