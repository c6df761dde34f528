"""A statistic reads a copy, so that the rest of the graph keeps its rounding."""

import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard.taps.untangle import own_copy

X = tf.constant(np.random.default_rng(1).normal(size=999).astype("float32"))
Y = tf.constant(np.random.default_rng(2).normal(size=999).astype("float32"))


def product(a, b):
    return a * b


def chain(a, b):
    return a * b * 3.0


def total(a, b):
    return a + b + 1.5


def through_identity(a, b):
    return tf.stop_gradient(tf.identity(a * b))


@pytest.mark.parametrize("make", [product, chain, total, through_identity])
def test_reading_changes_no_bit(make):
    def step(a, b, look):
        g = make(a, b)
        seen = tf.reduce_sum(tf.square(own_copy(g))) if look else tf.zeros([])
        return g * tf.constant(0.37), seen

    plain, _ = tf.function(lambda a, b: step(a, b, False))(X, Y)
    looked, seen = tf.function(lambda a, b: step(a, b, True))(X, Y)
    np.testing.assert_array_equal(plain, looked)
    np.testing.assert_allclose(seen, np.square(make(X, Y)).sum(), rtol=1e-4)


@pytest.mark.parametrize("make", [product, chain, total, through_identity])
def test_the_copy_is_equal(make):
    @tf.function
    def both(a, b):
        g = make(a, b)
        return g, own_copy(g)

    np.testing.assert_allclose(*both(X, Y), rtol=1e-6)


def test_eager_tensors_and_others_are_themselves():
    assert own_copy(X) is X
    assert own_copy(3.0) == 3.0

    @tf.function
    def step(a):
        g = tf.tanh(a)
        assert own_copy(g) is g
        return g

    step(X)


def test_tensors_of_an_outer_graph_are_left_alone():
    @tf.function
    def step(a, b):
        g = a * b

        def inner():
            assert own_copy(g) is not None
            return tf.reduce_sum(own_copy(g))

        return tf.cond(tf.reduce_sum(a) > 1e9, lambda: tf.zeros([]), inner)

    np.testing.assert_allclose(step(X, Y), np.sum(X.numpy() * Y.numpy()), rtol=1e-3)
