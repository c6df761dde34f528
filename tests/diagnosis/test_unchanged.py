"""A diagnosis changes nothing: weights, optimizer, statistics, metrics, seeds, Python state."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard.diagnosis import Batch, Context, diagnose, explain, preflight
from keras_gradguard.findings import Finding


def network():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="h1"),
            layers.BatchNormalization(name="bn"),
            layers.Activation("relu"),
            layers.Dropout(0.3),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 6)).astype("float32")
    return model, x, x.sum(axis=1, keepdims=True)


def snapshot(model):
    values = [np.array(v) for v in model.variables]
    values += [np.array(v) for v in model.optimizer.variables]
    values += [np.array(v) for m in model.metrics for v in m.variables]
    return values, sorted(vars(model)), sorted(vars(model.optimizer)), len(model.losses)


def assert_same(before, after):
    assert len(before[0]) == len(after[0])
    for a, b in zip(before[0], after[0], strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    assert before[1:] == after[1:]


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_diagnose_changes_nothing(trained):
    model, x, y = network()
    if trained:
        model.fit(x, y, epochs=2, verbose=0)
    before = snapshot(model)
    state = tf.random.get_global_generator().state.numpy().copy()
    diagnose(model, x, y)
    assert_same(before, snapshot(model))
    assert (tf.random.get_global_generator().state.numpy() == state).all()
    assert model.optimizer.built is trained


def test_training_goes_on_as_without():
    def losses(look):
        model, x, y = network()
        first = model.fit(x, y, epochs=2, verbose=0).history["loss"]
        if look:
            diagnose(model, x, y)
            diagnose(model, 1e4 * x, y)
        return first + model.fit(x, y, epochs=2, verbose=0).history["loss"]

    assert losses(True) == losses(False)


def test_a_diverging_trial_puts_the_weights_back():
    x = np.arange(200, dtype="float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, name="line")])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    before = snapshot(model)
    report = diagnose(model, x, 2 * x)
    assert report.findings[0].cause == "learning_rate_too_high"
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("symptom", ["zero_gradient", "zero_update", "none_gradient", "non_finite"])
def test_explain_changes_nothing(symptom):
    model, x, y = network()
    before = snapshot(model)
    finding = Finding(symptom=symptom, summary="A test.", where=("h1/kernel",))
    explain(finding, Context(model=model, optimizer=model.optimizer, batch=Batch(x=x, y=y)))
    assert_same(before, snapshot(model))


def test_preflight_of_a_healthy_model_is_silent():
    model, x, y = network()
    assert preflight(model, model.optimizer, None, Batch(x=x, y=y)) == ()


class Broken(layers.Layer):
    def call(self, x):
        raise ZeroDivisionError("the user's own bug")


def test_a_failing_diagnosis_lets_the_finding_out():
    model = keras.Sequential([Broken(name="broken")])
    finding = Finding(symptom="zero_gradient", summary="Every gradient is 0.", where=("a/kernel",))
    got = explain(finding, Context(model=model, batch=Batch(x=np.ones((2, 2)))))
    assert got.summary == finding.summary
    assert got.severity == "raise"
    assert any("ZeroDivisionError" in n for n in got.notes)


def test_explain_without_anything_says_unknown():
    finding = Finding(symptom="zero_gradient", summary="Every gradient is 0.", where=("a/kernel",))
    assert explain(finding, Context(model=None)).cause == "unknown"


def test_diagnose_refuses_what_is_no_model():
    with pytest.raises(TypeError, match="`model` must be a Keras model"):
        diagnose("model", np.ones((2, 2)))
