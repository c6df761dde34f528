"""A frozen convolutional base, a batch of one, Adam at 0.01: gradients zero after a few steps.

Raw pixels from 0 to 255 pass through the base, so the head sees features of several hundred;
one step of Adam at 0.01 throws all 64 units of the ReLU layer below zero for every image, and a
unit that is off for every image gets no gradient to come back. VGG16 is built without
downloading weights.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_gradguard import GradientGuard, GradientGuardError

SIZE = 32


def photos(count=64):
    """Return ``count`` pictures of two kinds (bright top, bright bottom) and their kind."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, count)
    x = rng.integers(0, 120, (count, SIZE, SIZE, 3))
    for picture, bottom in zip(x, kind, strict=True):
        half = slice(SIZE // 2, None) if bottom else slice(0, SIZE // 2)
        picture[half] += 130
    return x.astype("float32"), kind


def build(rescale):
    """Return base + head; with ``rescale`` the pixels are brought to about unit size."""
    base = keras.applications.VGG16(include_top=False, weights=None, input_shape=(SIZE, SIZE, 3))
    base.trainable = False
    scale = [layers.Rescaling(1 / 127.5, offset=-1.0)] if rescale else []
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            *scale,
            base,
            layers.Flatten(),
            *([layers.BatchNormalization(name="standardise")] if rescale else []),
            layers.Dense(64, activation="relu", name="head_relu"),
            layers.Dense(2, activation="softmax", name="head_out"),
        ]
    )


def train(model, optimizer, batch_size, steps, guard):
    """Train in a custom loop; return the losses."""
    x, y = photos()
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    losses = []
    with guard.watch(model, optimizer, loss=loss_fn):
        for step in range(steps):
            rows = np.arange(step * batch_size, (step + 1) * batch_size) % len(x)
            with tf.GradientTape() as tape:
                loss = loss_fn(y[rows], model(x[rows], training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            guard.step(loss)
            losses.append(float(loss))
    return losses


def faulty():
    """Train until the guard stops it; return the finding."""
    keras.utils.set_random_seed(3)
    model = build(rescale=False)
    # An untrained VGG16 shrinks its input; give the features the size that trained ones have.
    for layer in model.layers[0].layers:
        if isinstance(layer, layers.Conv2D):
            layer.kernel.assign(layer.kernel * 1.6)
    try:
        train(model, keras.optimizers.Adam(0.01), 1, 64, GradientGuard(log_dir=None))
    except GradientGuardError as error:
        return error.finding
    raise SystemExit("The faulty version was not stopped.")


def cured():
    """Train with scaled pixels, standardised features, a batch of 16 and a smaller step."""
    keras.utils.set_random_seed(3)
    guard = GradientGuard(log_dir=None)
    losses = train(build(rescale=True), keras.optimizers.Adam(0.001), 16, 30, guard)
    return losses, guard.findings


def main():
    print(faulty())
    losses, findings = cured()
    print(f"\nCured: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {len(findings)} findings.")


if __name__ == "__main__":
    main()
