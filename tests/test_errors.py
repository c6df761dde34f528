"""Errors carry their finding through pickles, threads of work and autograph."""

import pickle

import keras
import pytest
import tensorflow as tf

from keras_gradguard import errors
from keras_gradguard.errors import GradientGuardError, GradientGuardWarning, error_for
from keras_gradguard.findings import Cause, Finding
from keras_gradguard.vocabulary import SYMPTOMS


def finding(symptom="non_finite"):
    return Finding(
        symptom=symptom,
        summary="It is NaN.",
        where=("h1/kernel",),
        step=3,
        causes=(Cause(name="nan_input", score=0.9, fix="Drop the rows."),),
    )


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_has_its_own_error(symptom):
    error = error_for(finding(symptom))
    assert type(error) is not GradientGuardError
    assert isinstance(error, GradientGuardError)
    assert error.finding == finding(symptom)
    assert str(error).strip() == error.finding.message
    assert getattr(errors, type(error).__name__) is type(error)
    assert type(error).__doc__


def test_no_two_symptoms_share_an_error():
    assert len({type(error_for(finding(s))) for s in SYMPTOMS}) == len(SYMPTOMS)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_errors_pickle(symptom, protocol):
    error = error_for(finding(symptom))
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert back.finding == error.finding
    assert str(back) == str(error)


@pytest.mark.parametrize(
    "content", [finding(), "Nothing is being watched."], ids=["finding", "text"]
)
def test_warnings_pickle_and_speak(content):
    warning = GradientGuardWarning(content)
    back = pickle.loads(pickle.dumps(warning))
    assert back.finding == warning.finding
    assert str(back) == str(warning)
    assert (warning.finding is None) == isinstance(content, str)


def boom(x):
    raise error_for(finding())


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_class_survives_tf_function(depth, jit):
    def step(x, left):
        if left == 0:
            return boom(x)
        inner = tf.function(lambda y: step(y, left - 1))
        return inner(x) + 1.0

    with pytest.raises(errors.NonFiniteError) as caught:
        tf.function(lambda x: step(x, depth), jit_compile=jit)(tf.ones([2]))
    assert caught.value.finding == finding()


def test_the_class_survives_the_call_of_a_layer():
    class Raises(keras.layers.Layer):
        def call(self, x):
            return boom(x)

    @tf.function
    def step(x):
        return Raises()(x)

    with pytest.raises(errors.NonFiniteError) as caught:
        step(tf.ones([2, 2]))
    assert caught.value.finding.step == 3


def test_the_class_survives_a_tensorflow_loop():
    @tf.function
    def step(n):
        total = tf.constant(0.0)
        for _ in tf.range(n):
            if total < 1.0:
                total += boom(total)
        return total

    with pytest.raises(errors.NonFiniteError):
        step(tf.constant(3))
