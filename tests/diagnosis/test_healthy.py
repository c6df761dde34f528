"""Healthy look-alikes: a gradient of 0 (or none) that is right must not be called a fault."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_gradguard.diagnosis import Batch, Context, diagnose, explain
from keras_gradguard.findings import Finding

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Experts(layers.Layer):
    """Two experts behind a hard gate that sends every token to the first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(4, activation="relu", name="first")
        self.second = layers.Dense(4, activation="relu", name="second")

    def call(self, x):
        gate = ops.cast(ops.one_hot(ops.zeros((ops.shape(x)[0],), "int32"), 2), x.dtype)
        return gate[:, :1] * self.first(x) + gate[:, 1:] * self.second(x)


class Dropped(layers.Layer):
    """Stochastic depth whose branch is dropped at (almost) every step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.branch = layers.Dense(6, name="branch")
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        keep = ops.floor(keras.random.uniform((), seed=self.seed) + 1e-6)
        return x + keep * self.branch(x)


class Annealed(layers.Layer):
    """An auxiliary loss whose weight starts at 0."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.aux = layers.Dense(1, name="aux")

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="zeros", trainable=False, name="weight")
        self.aux.build(shape)

    def call(self, x):
        self.add_loss(self.weight * ops.mean(ops.square(self.aux(x))))
        return x


class ReZero(layers.Layer):
    """x + gamma * f(x) with gamma 0 at the start."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(6, activation="relu", name="inner")

    def build(self, shape):
        self.gamma = self.add_weight(shape=(), initializer="zeros", name="gamma")
        self.inner.build(shape)

    def call(self, x):
        return x + self.gamma * self.inner(x)


MOSTLY_OFF = keras.initializers.RandomUniform(-3.0, 0.6, seed=1)


def sequential(*stack):
    model = keras.Sequential([keras.Input((6,)), *stack, layers.Dense(1, name="out")])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: sequential(Experts(name="moe")), id="expert without tokens"),
        pytest.param(lambda: sequential(Dropped(name="depth")), id="stochastic depth"),
        pytest.param(lambda: sequential(Annealed(name="aux_loss")), id="auxiliary loss at 0"),
        pytest.param(lambda: sequential(ReZero(name="rezero")), id="residual gamma at 0"),
        pytest.param(
            lambda: sequential(layers.Dense(32, activation="relu", bias_initializer=MOSTLY_OFF)),
            id="mostly-off relu",
        ),
        pytest.param(
            lambda: sequential(layers.Dense(8, name="h"), layers.BatchNormalization()),
            id="bias before normalisation",
        ),
        pytest.param(
            lambda: sequential(layers.Dense(8), layers.LayerNormalization(), layers.Dropout(0.5)),
            id="layer normalisation",
        ),
    ],
)  # fmt: skip
def test_silent(make):
    keras.utils.set_random_seed(1)
    report = diagnose(make(), X, Y)
    assert report.ok, str(report)


def test_converged_is_silent():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, use_bias=False, name="out")])
    model.layers[-1].kernel.assign(np.ones((6, 1)))
    model.compile("adam", "mae")
    assert diagnose(model, np.eye(6, dtype="float32"), np.ones((6, 1), "float32")).ok


def test_hinge_at_its_minimum_is_silent():
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, name="out")])
    model.layers[-1].kernel.assign([[5.0]])
    x = np.array([[1.0], [-1.0]], "float32")
    model.compile("sgd", "hinge")
    assert diagnose(model, x, x).ok


def test_attention_key_bias_is_silent():
    inputs = keras.Input((5, 6))
    hidden = layers.MultiHeadAttention(2, 4, name="mha")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1, name="out")(hidden))
    model.compile("adam", "mse")
    x = RNG.normal(size=(8, 5, 6)).astype("float32")
    assert diagnose(model, x, np.zeros((8, 5, 1), "float32")).ok


@pytest.mark.parametrize(
    ("loss", "severity"),
    [
        pytest.param(["mse", None], "info", id="declared None"),
        pytest.param({"used": "mse"}, "info", id="left out of the dictionary"),
    ],
)
def test_unused_output(loss, severity):
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, name="hidden")(inputs)
    used, spare = layers.Dense(1, name="used")(hidden), layers.Dense(1, name="spare")(hidden)
    outputs = {"used": used, "spare": spare} if isinstance(loss, dict) else [used, spare]
    model = keras.Model(inputs, outputs)
    model.compile("adam", loss)
    y = {"used": Y} if isinstance(loss, dict) else [Y, Y]
    report = diagnose(model, X, y)
    assert [f.severity for f in report.findings if f.symptom == "none_gradient"] == [severity]
    assert report.ok, str(report)


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01 * ops.minimum(ops.cast(step, "float32") / 100.0, 1.0)

    def get_config(self):
        return {}


def test_warm_up_is_healthy():
    model = sequential(layers.Dense(4))
    model.compile(keras.optimizers.Adam(WarmUp()), "mse")
    report = diagnose(model, X, Y)
    assert report.ok
    assert [f.severity for f in report.findings] == ["info"]


def test_masked_sequences_are_silent():
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(10, 4, mask_zero=True, name="emb"),
         layers.GRU(4, name="gru"), layers.Dense(1, name="out")]
    )  # fmt: skip
    model.compile("adam", "mse")
    x = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]])
    assert diagnose(model, x, np.ones((2, 1), "float32")).ok


def test_layer_that_only_lacks_tokens_stays_info():
    keras.utils.set_random_seed(1)
    model = sequential(Experts(name="moe"))
    finding = Finding(
        symptom="zero_gradient",
        summary="The gradient of layer 'second' is exactly 0.",
        where=("second", "moe/second/kernel", "moe/second/bias"),
        severity="raise",
    )
    got = explain(finding, Context(model=model, optimizer=model.optimizer, batch=Batch(x=X, y=Y)))
    assert got.severity == "info"
    assert any("healthy" in n for n in got.notes)
