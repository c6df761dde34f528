"""A GAN on scanned digits in a loop of one's own: two models, two optimizers, one guard.

Alternating training is healthy, and the guard is silent. ``python examples/gan.py --faulty``
rounds the generated pixels to black and white before the discriminator sees them: a rounded
number has no gradient, so the generator can never learn.
"""

import argparse

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from keras_gradguard import GradientGuard

NOISE = 16
BATCH = 64


def build():
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(64, activation="relu", name="g_hidden"),
            layers.Dense(64, activation="sigmoid", name="g_pixels"),
        ],
        name="generator",
    )
    discriminator = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="leaky_relu", name="d_hidden"),
            layers.Dense(1, name="d_logit"),
        ],
        name="discriminator",
    )
    return generator, discriminator


def main(faulty=False, epochs=3):
    keras.utils.set_random_seed(0)
    images = (load_digits().data / 16.0).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices(images).batch(BATCH, drop_remainder=True)
    generator, discriminator = build()
    g_optimizer = keras.optimizers.Adam(1e-3, name="g_adam")
    d_optimizer = keras.optimizers.Adam(1e-3, name="d_adam")
    bce = keras.losses.BinaryCrossentropy(from_logits=True)
    real, fake = tf.ones((BATCH, 1)), tf.zeros((BATCH, 1))

    def paint(noise):
        pixels = generator(noise, training=True)
        return tf.round(pixels) if faulty else pixels

    @tf.function
    def step(digits):
        noise = tf.random.normal((BATCH, NOISE))
        with tf.GradientTape() as tape:
            d_loss = bce(real, discriminator(digits, training=True))
            d_loss += bce(fake, discriminator(paint(noise), training=True))
        weights = discriminator.trainable_variables
        d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))

        with tf.GradientTape() as tape:
            g_loss = bce(real, discriminator(paint(noise), training=True))
        weights = generator.trainable_variables
        g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return d_loss, g_loss

    guard = GradientGuard(log_dir=None)
    with guard.watch([generator, discriminator], [g_optimizer, d_optimizer], loss=bce):
        for epoch in range(epochs):
            for digits in batches:
                d_loss, g_loss = step(digits)
                guard.step(d_loss + g_loss)
            print(f"epoch {epoch + 1}: discriminator {d_loss:.3f}, generator {g_loss:.3f}")
    print(f"{guard.steps_seen} steps of both optimizers watched, {len(guard.findings)} findings")
    return guard


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A GAN on scanned digits.")
    parser.add_argument("--faulty", action="store_true", help="round the generated pixels")
    main(parser.parse_args().faulty)
