"""LogitsOutput: what it strips, what it refuses, its losses and metrics, serving, the contract."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from keras_gradguard.layers import (
    GradientProbe,
    LogitsOutput,
    logits_mismatch,
    probabilities,
    with_probabilities,
)

RNG = np.random.default_rng(2)
X = RNG.normal(size=(6, 4)).astype("float32")


def sequential(*stack, shape=(4,)):
    return keras.Sequential([keras.Input(shape), *stack])


def classifier(activation="softmax", units=3):
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(units, activation=activation, name="top")(hidden))


def functional_op():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.ops.softmax(layers.Dense(3)(inputs)))


STRIPPED = [
    pytest.param(lambda: layers.Dense(3, activation="softmax"), "softmax", id="dense"),
    pytest.param(lambda: layers.Dense(3, activation=layers.Softmax()), "softmax", id="as-layer"),
    pytest.param(lambda: layers.Dense(3, activation=tf.nn.sigmoid), "sigmoid", id="tf-function"),
    pytest.param(classifier, "softmax", id="functional"),
    pytest.param(functional_op, "softmax", id="functional-op"),
    pytest.param(
        lambda: sequential(layers.Dense(3), layers.Activation("sigmoid")), "sigmoid",
        id="activation-layer-last",
    ),
    pytest.param(
        lambda: sequential(layers.Dense(3), layers.Softmax(), layers.Activation("linear")),
        "softmax", id="linear-after",
    ),
    pytest.param(
        lambda: sequential(layers.Dense(4, activation="sigmoid"), layers.Reshape((2, 2))),
        "sigmoid", id="reshape-after-sigmoid",
    ),
    pytest.param(lambda: sequential(classifier("sigmoid")), "sigmoid", id="nested"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "activation"), STRIPPED)
def test_gives_logits_and_leaves_the_wrapped_layer_alone(make, activation):
    wrapped = make()
    expected = wrapped(X).numpy()
    before = [w.copy() for w in wrapped.get_weights()]
    head = LogitsOutput(wrapped)
    assert head.activation == activation
    logits = head(X)
    act = tf.nn.sigmoid if activation == "sigmoid" else tf.nn.softmax
    np.testing.assert_allclose(act(logits), expected, atol=1e-6)
    assert np.abs(logits - expected).max() > 0.01
    np.testing.assert_array_equal(wrapped(X), expected)  # with its activation, as before
    assert head.weights == wrapped.weights
    for one, other in zip(before, head.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

    model = sequential(head)
    serving = with_probabilities(model)
    np.testing.assert_allclose(serving(X), expected, atol=1e-6)
    assert serving.weights == model.weights
    np.testing.assert_allclose(head.probabilities(logits), expected, atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, head), expected, atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, model), expected, atol=1e-6)


def test_gradient_is_that_of_the_layer_without_its_activation():
    wrapped = layers.Dense(3, activation="softmax", dtype="float64")
    head = LogitsOutput(wrapped)
    plain = layers.Dense(3, dtype="float64")
    head(X), plain(X)
    plain.set_weights(head.get_weights())

    def function(layer):
        return lambda x: tf.reduce_sum(layer(x) ** 2, axis=-1)

    x = tf.constant(X, "float64")
    theoretical, numerical = tf.test.compute_gradient(function(head), [x])
    np.testing.assert_allclose(theoretical[0], numerical[0], atol=1e-5)
    expected, _ = tf.test.compute_gradient(function(plain), [x])
    np.testing.assert_allclose(theoretical[0], expected[0], atol=1e-12)


@pytest.mark.parametrize("stand_in", [True, False])
def test_a_whole_application(stand_in):
    if stand_in:
        base = sequential(
            layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(), layers.Dropout(0.2),
            layers.Dense(5, activation="softmax"), shape=(32, 32, 3),
        )  # fmt: skip
    else:
        base = keras.applications.MobileNet(
            weights=None, input_shape=(32, 32, 3), classes=5, alpha=0.25
        )
    images = RNG.uniform(size=(2, 32, 32, 3)).astype("float32")
    inputs = keras.Input((32, 32, 3))
    model = keras.Model(inputs, LogitsOutput(base)(inputs))
    np.testing.assert_allclose(with_probabilities(model)(images), base(images), atol=1e-6)
    np.testing.assert_allclose(tf.nn.softmax(model(images)), base(images), atol=1e-6)
    assert np.abs(model(images).numpy().sum(-1) - 1).min() > 1e-3


REFUSED = [
    pytest.param(lambda: layers.Dense(2, activation="relu"), "'relu' cannot be neg", id="relu"),
    pytest.param(lambda: layers.Dense(2, activation="tanh"), r"\[-1, 1\]", id="tanh"),
    pytest.param(lambda: layers.Dense(2, activation=lambda x: x**2), "is unknown", id="unknown"),
    pytest.param(lambda: layers.ReLU(), "rectifier", id="relu-layer"),
    pytest.param(lambda: layers.LSTM(2), "not the last thing", id="lstm"),
    pytest.param(lambda: layers.Dense(1, activation="softmax"), "axis of size 1", id="softmax-1"),
    pytest.param(lambda: layers.Dropout(0.5), "cannot see how", id="unknown-layer"),
    pytest.param(lambda: classifier("relu"), "'top'.*'relu'", id="functional-relu"),
    pytest.param(
        lambda: sequential(layers.Dense(4, activation="softmax"), layers.Reshape((2, 2))),
        "no longer on one axis", id="reshape-after-softmax",
    ),
    pytest.param(
        lambda: keras.Model(*(lambda i: (i, [layers.Dense(1)(i), layers.Dense(1)(i)]))(
            keras.Input((4,)))), "2 outputs", id="two-outputs",
    ),
    pytest.param(lambda: keras.Model(), "subclassed", id="subclassed"),
    pytest.param(
        lambda: LogitsOutput(layers.Dense(2, activation="softmax")), "already", id="twice"
    ),
    pytest.param(lambda: "softmax", "`layer` must be a Keras layer", id="not-a-layer"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refuses_with_a_reason(make, message):
    with pytest.raises(ValueError, match=message):
        LogitsOutput(make())


def test_refuses_softmax_over_one_unit_when_it_is_built():
    with pytest.raises(ValueError, match="axis of size 1"):
        LogitsOutput(layers.Softmax())(X[:, :1])


def test_activation_must_fit():
    with pytest.raises(ValueError, match="`activation` must be 'softmax'"):
        LogitsOutput(layers.Dense(3, activation="softmax"), activation="sigmoid")
    with pytest.raises(ValueError, match="Received: activation='relu'"):
        LogitsOutput(layers.Dense(3), activation="relu")
    undeclared = LogitsOutput(layers.Dense(3))
    with pytest.raises(ValueError, match="Pass activation='sigmoid'"):
        undeclared.loss()
    assert LogitsOutput(layers.Dropout(0.5), activation="softmax").activation == "softmax"


LOSSES = [
    pytest.param("sigmoid", 2, {}, keras.losses.BinaryCrossentropy, id="binary"),
    pytest.param(
        "sigmoid", 2, {"label_smoothing": 0.1}, keras.losses.BinaryCrossentropy, id="binary-smooth"
    ),
    pytest.param("softmax", 3, {}, keras.losses.CategoricalCrossentropy, id="categorical"),
    pytest.param(
        "softmax", 3, {"label_smoothing": 0.2, "reduction": "sum"},
        keras.losses.CategoricalCrossentropy, id="categorical-smooth",
    ),
    pytest.param(
        "softmax", 3, {"sparse": True}, keras.losses.SparseCategoricalCrossentropy, id="sparse"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "units", "arguments", "kind"), LOSSES)
def test_loss_equals_the_loss_of_the_probabilities(activation, units, arguments, kind):
    wrapped = layers.Dense(units, activation=activation)
    head = LogitsOutput(wrapped)
    logits = head(X)
    labels = RNG.integers(0, units, size=6)
    if activation == "sigmoid":
        y = RNG.integers(0, 2, size=(6, units)).astype("float32")
    else:
        y = labels if arguments.get("sparse") else np.eye(units, dtype="float32")[labels]
    loss = head.loss(**arguments)
    assert type(loss) is kind
    plain = {k: v for k, v in arguments.items() if k != "sparse"}
    np.testing.assert_allclose(loss(y, logits), kind(**plain)(y, wrapped(X)), rtol=1e-4)


def test_loss_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="`sparse` must be False"):
        LogitsOutput(layers.Dense(1, activation="sigmoid")).loss(sparse=True)
    with pytest.raises(ValueError, match="label_smoothing"):
        LogitsOutput(layers.Dense(3, activation="softmax")).loss(label_smoothing=0.1, sparse=True)


@pytest.mark.parametrize(
    ("activation", "units", "sparse"),
    [("sigmoid", 1, False), ("softmax", 3, False), ("softmax", 3, True)],
)
def test_metrics_of_logits_equal_metrics_of_probabilities(activation, units, sparse):
    wrapped = layers.Dense(units, activation=activation)
    head = LogitsOutput(wrapped)
    logits = head(X)
    assert list(head.metrics) == []  # as Keras reads it
    if activation == "sigmoid":
        y = RNG.integers(0, 2, size=(6, 1)).astype("float32")
        plain = [keras.metrics.BinaryAccuracy(), keras.metrics.AUC()]
        found = head.metrics()
    else:
        labels = RNG.integers(0, units, size=6)
        y = labels if sparse else np.eye(units, dtype="float32")[labels]
        name = "SparseCategoricalAccuracy" if sparse else "CategoricalAccuracy"
        plain = [getattr(keras.metrics, name)()]
        found = head.metrics(sparse=sparse)
    for metric, reference in zip(found, plain, strict=True):
        metric.update_state(y, logits)
        reference.update_state(y, wrapped(X))
        np.testing.assert_allclose(metric.result(), reference.result(), atol=1e-6)


def test_with_probabilities_keeps_other_outputs_and_refuses_models_without_a_head():
    inputs = keras.Input((4,))
    head = LogitsOutput(layers.Dense(2, activation="softmax"), name="head")
    other = layers.Dense(1, name="other")(inputs)
    model = keras.Model(inputs, {"class": GradientProbe()(head(inputs)), "value": other})
    both = with_probabilities(model)(X)
    np.testing.assert_allclose(both["class"], tf.nn.softmax(model(X)["class"]), atol=1e-6)
    np.testing.assert_array_equal(both["value"], model(X)["value"])
    with pytest.raises(ValueError, match="must end in a LogitsOutput"):
        with_probabilities(classifier())


class Subclass(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4, activation="relu")
        self.head = LogitsOutput(layers.Dense(1, activation="sigmoid"), name="head")

    def call(self, inputs):
        return self.head(self.hidden(inputs))


def test_subclassed_model():
    model = Subclass()
    model.compile("adam", model.head.loss(), metrics=model.head.metrics())
    model.fit(X, np.ones((6, 1)), verbose=0)
    np.testing.assert_allclose(with_probabilities(model)(X), tf.nn.sigmoid(model(X)), atol=1e-6)
    assert logits_mismatch(model, "binary_crossentropy").where == ("head", "compile")
    assert logits_mismatch(model, model.head.loss()) is None


def _head(activation="sigmoid", units=1):
    return sequential(LogitsOutput(layers.Dense(units, activation=activation), name="head"))


def my_loss(y_true, y_pred):
    return keras.ops.mean(y_true - y_pred)


K = keras.losses
MISMATCHES = [
    pytest.param(_head(), "binary_crossentropy", "missing_activation", id="name"),
    pytest.param(_head(), "bce", "missing_activation", id="short-name"),
    pytest.param(_head(), K.binary_crossentropy, "missing_activation", id="function"),
    pytest.param(_head(), K.BinaryCrossentropy(), "missing_activation", id="object"),
    pytest.param(_head(), [K.BinaryFocalCrossentropy()], "missing_activation", id="focal-list"),
    pytest.param(_head(), K.KLDivergence(), "missing_activation", id="kl"),
    pytest.param(_head(), K.Dice(), "missing_activation", id="dice"),
    pytest.param(_head(), {"head": "bce"}, "missing_activation", id="dict"),
    pytest.param(
        _head("softmax", 3), "sparse_categorical_crossentropy", "missing_activation", id="sparse"
    ),
    pytest.param(
        _head(), K.CategoricalCrossentropy(from_logits=True), "softmax_over_one_unit", id="one-unit"
    ),
    pytest.param(_head(), K.BinaryCrossentropy(from_logits=True), None, id="fits"),
    pytest.param(
        _head("softmax", 3), K.SparseCategoricalCrossentropy(from_logits=True), None, id="fits-3"
    ),
    pytest.param(_head(), "mse", None, id="mse"),
    pytest.param(_head(), my_loss, None, id="own-function"),
    pytest.param(_head(), None, None, id="none"),
    pytest.param(classifier(), "categorical_crossentropy", None, id="no-head"),
]


@pytest.mark.parametrize(("model", "loss", "cause"), MISMATCHES)
def test_logits_mismatch(model, loss, cause):
    found = logits_mismatch(model, loss)
    assert (found.name if found else None) == cause
    if found:
        assert found.where == ("head", "compile")
        assert "model.get_layer('head').loss(" in found.fix
        assert ("sparse=True" in found.fix) == ("sparse" in str(loss))


def autoencoder(head):
    return sequential(
        layers.Dense(64, activation="relu"), layers.Dense(32, activation="relu"),
        layers.Dense(64, activation="relu"), head, shape=(64,),
    )  # fmt: skip


def test_autoencoder_of_digits_learns_well_below_ln_2():
    images = load_digits().data.astype("float32") / 16
    keras.utils.set_random_seed(0)
    head = LogitsOutput(layers.Dense(64, activation="sigmoid"))
    model = autoencoder(head)
    model.compile(keras.optimizers.Adam(3e-3), head.loss(), jit_compile=False)
    history = model.fit(images[:1500], images[:1500], epochs=10, batch_size=64, verbose=0).history
    held_out = model.evaluate(images[1500:], images[1500:], verbose=0)
    assert abs(history["loss"][0] - math.log(2)) < 0.3
    assert held_out < 0.4  # ln 2 is 0.693; the entropy of the grey pixels alone is 0.26
    restored = with_probabilities(model).predict(images[1500:], verbose=0)
    assert restored.min() >= 0
    assert restored.max() <= 1
    assert np.mean((restored - images[1500:]) ** 2) < 0.5 * images[1500:].var(axis=0).mean()
