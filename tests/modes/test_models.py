"""Models of every kind, and training steps that somebody wrote."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.modes.twice import (
    LOSS,
    SLOW,
    assert_nothing_left,
    assert_unchanged,
    compiled,
    data,
    fitted,
    row,
    shows,
)
from tests.training import mlp


def nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu")])
    middle = keras.Sequential([keras.Input((6,)), inner, layers.Dense(6)])
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(middle(middle(inputs))))


class AddsLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.out = layers.Dense(3, activation="softmax")

    def call(self, x):
        h = self.hidden(x)
        self.add_loss(1e-3 * keras.ops.sum(keras.ops.square(h)))
        return self.out(h)


class OwnStep(keras.Model):
    """A ``train_step`` with three updates, as in reinforcement learning."""

    def train_step(self, batch):
        x, y = batch
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def own_step():
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="relu")(inputs)
    return OwnStep(inputs, layers.Dense(3, activation="softmax")(hidden))


class Compiled(keras.Model):
    """A ``train_step`` that hands over to Keras' own."""

    def train_step(self, batch):
        x, y = batch
        return super().train_step((x * 0.5, y))


def handing_over():
    inputs = keras.Input((6,))
    return Compiled(inputs, layers.Dense(3, activation="softmax")(inputs))


def with_state():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1),
            layers.Dense(3, activation="softmax"),
        ]
    )


MODELS = [
    row("Models", "nested and shared models", nested, 6, id="nested", marks=SLOW),
    row("Models", "add_loss in a subclassed model", AddsLoss, 6, id="add_loss", marks=SLOW),
    row(
        "Training steps",
        "a train_step with several updates",
        own_step,
        18,
        id="own_step",
        marks=SLOW,
    ),
    row("Training steps", "a train_step that calls Keras'", handing_over, 6, id="handing_over"),
    row(
        "Models", "batch normalisation, dropout, noise", with_state, 6, id="with_state", marks=SLOW
    ),
]


@pytest.mark.parametrize(("make", "steps"), MODELS)
def test_models(make, steps):
    def train(guards):
        model = compiled(make)
        return model, fitted(model, guards)

    assert_unchanged(train, steps=steps)


def two_in_two_out():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    h = layers.Dense(8, activation="relu")(layers.Concatenate()([a, b]))
    left = layers.Dense(3, activation="softmax", name="left")(h)
    return keras.Model({"a": a, "b": b}, {"left": left, "right": layers.Dense(1, name="right")(h)})


@pytest.mark.slow
@shows("Models", "several inputs and outputs, with loss_weights")
def test_several_inputs_and_outputs():
    x, y = data()

    def train(guards):
        model = compiled(
            two_in_two_out,
            loss={"left": LOSS, "right": "mse"},
            loss_weights={"left": 1.0, "right": 0.3},
        )
        inputs, labels = {"a": x, "b": -x}, {"left": y, "right": y.astype("float32")}
        return model, fitted(model, guards, x=inputs, y=labels)

    assert_unchanged(train)


@pytest.mark.slow
@shows("Models", "keras.applications (MobileNetV3Small, without weights)")
def test_an_application():
    x = np.random.default_rng(1).uniform(0, 255, (8, 32, 32, 3)).astype("float32")
    y = np.arange(8) % 3

    def make():
        return keras.applications.MobileNetV3Small(
            (32, 32, 3), weights=None, classes=3, minimalistic=True, alpha=0.35
        )

    def train(guards):
        model = compiled(make)
        return model, fitted(model, guards, x=x, y=y, batch_size=4, epochs=1)

    assert_unchanged(train, steps=2)


@shows("Models", "layers frozen and unfrozen between fits")
def test_frozen_and_unfrozen_between_fits():
    def train(guards):
        model, told = compiled(), {}
        for number, trainable in enumerate((True, False, True)):
            model.layers[0].trainable = trainable
            model.compile(keras.optimizers.Adam(0.01), LOSS)
            told[number] = fitted(model, guards)["loss"]
            if guards:
                (channel,) = guards[0]._sessions[0].observer.tap.channels.values()
                assert channel.size == (6 if trainable else 4)
                assert channel.optimizer is model.optimizer
        return model, told

    assert_unchanged(train)


LORA = pytest.mark.skipif(
    not hasattr(layers.Dense, "enable_lora"), reason="this Keras has no enable_lora"
)


@shows("Models", "LoRA (Dense.enable_lora, Embedding.enable_lora)")
@LORA
def test_lora():
    x = np.random.default_rng(0).integers(0, 20, (40, 4))

    def make():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                layers.Embedding(20, 6),
                layers.Flatten(),
                layers.Dense(8, activation="relu"),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.layers[0].enable_lora(2)
        model.layers[2].enable_lora(2)
        return model

    def train(guards):
        model = compiled(make)
        return model, fitted(model, guards, x=x, y=data()[1])

    # The half of an adapter that starts at 0 keeps the other half's gradient at 0 for one step.
    assert_unchanged(train)


NOT_ALL = pytest.mark.filterwarnings("ignore:.*does not have a `quantize`:UserWarning")


@NOT_ALL
@shows("Models", 'quantised to int8 (model.quantize("int8")), with LoRA on top')
@LORA
def test_quantised():
    x, y = data()

    def make():
        model = mlp()
        model.quantize("int8")
        model.layers[0].enable_lora(2)
        model.layers[1].enable_lora(2)
        return model

    def train(guards):
        model = compiled(make)
        return model, fitted(model, guards, x=x, y=y)

    assert_unchanged(train)


@NOT_ALL
@shows("Models", 'float8 training (model.quantize("float8"))')
def test_float8():
    def make():
        model = mlp()
        model.quantize("float8")
        return model

    def train(guards):
        model = compiled(make)
        return model, fitted(model, guards)

    # The scales and histories of float8 are "gradients" to be written, not to be watched.
    *_, seen = assert_unchanged(train)
    paths = {v.path for v in seen._sessions[0].observer.tap.streams()[0].table.variables}
    assert len(paths) == 6


class Gan(keras.Model):
    """Two optimizers, a train step of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.built = True

    def call(self, x):
        return self.discriminator(x)

    def compile(self, optimizer, loss, **kwargs):
        super().compile(optimizer=optimizer, **kwargs)
        self.g_optimizer = keras.optimizers.RMSprop(0.01)

    def train_step(self, batch):
        real = batch[0]
        noise = tf.ones((tf.shape(real)[0], 3))
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(noise))
            d_loss = tf.reduce_mean(tf.nn.softplus(-self.discriminator(real)))
            d_loss += tf.reduce_mean(tf.nn.softplus(fake))
        variables = self.discriminator.trainable_variables
        self.optimizer.apply(tape.gradient(d_loss, variables), variables)
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(noise))
            g_loss = tf.reduce_mean(tf.nn.softplus(-fake))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply(tape.gradient(g_loss, variables), variables)
        return {"d_loss": d_loss, "g_loss": g_loss}


@shows("Training steps", "a GAN with two optimizers")
def test_a_gan():
    def train(guards):
        model = compiled(Gan)
        return model, fitted(model, guards)

    *_, seen = assert_unchanged(train, steps=12)
    assert len(seen._sessions[0].observer.tap.channels) == 2


def test_nothing_left_can_fail():
    plain, other = compiled(), compiled()
    other.optimizer.extra = 1
    with pytest.raises(AssertionError):
        assert_nothing_left(plain, other)


def test_a_change_is_seen():
    def train(guards):
        model = compiled()
        return model, fitted(model, guards, epochs=2 + len(guards))

    with pytest.raises(AssertionError):
        assert_unchanged(train, steps=9)
