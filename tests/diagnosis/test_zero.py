"""Zero gradients by structure, and clips that cut off everything."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_gradguard.diagnosis.trace import trace_step
from keras_gradguard.diagnosis.zero import zero_gradient

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 1)).astype("float32")


def net(*middle, **options):
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="low", **options),
            *middle,
            layers.Dense(1, name="top"),
        ]
    )


@pytest.mark.parametrize("sign", [ops.sign, tf.sign], ids=["keras", "tf"])
def test_sign(sign):
    model = net(layers.Lambda(lambda h: sign(h), name="binary"))
    found = zero_gradient(trace_step(model, X, Y, loss="mse"))
    assert [c.name for c in found] == ["zero_gradient_op"]
    assert found[0].where == ("binary", "low", "low/kernel", "low/bias")
    assert found[0].source.startswith("test_zero.py:")
    assert "StraightThrough" in found[0].fix


def test_sign_beside_an_open_way_is_healthy():
    model = net(layers.Lambda(lambda h: h * ops.sign(h)))
    assert zero_gradient(trace_step(model, X, Y, loss="mse")) == ()


class Penalty(keras.Model):
    """The norm of the input gradient of a ReLU net: the first bias has a zero gradient."""

    def __init__(self, activation):
        super().__init__()
        self.net = net(activation=activation)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = tf.reduce_sum(self(x))
            slope = inner.gradient(total, x)
            loss = tf.reduce_mean(tf.square(slope))
        self.optimizer.apply_gradients(
            zip(
                outer.gradient(loss, self.net.trainable_variables),
                self.net.trainable_variables,
                strict=True,
            )
        )
        return {"loss": loss}


def test_second_derivative_of_relu():
    model = Penalty("relu")
    model.compile("sgd")
    model(X)
    found = zero_gradient(trace_step(model, X, Y))
    assert [c.name for c in found] == ["second_derivative_of_relu"]
    assert "low/bias" in found[0].where


def test_second_derivative_of_a_smooth_activation_is_healthy():
    model = Penalty("tanh")
    model.compile("sgd")
    model(X)
    assert zero_gradient(trace_step(model, X, Y)) == ()


def clipped_tf(y_true, y_pred):
    return tf.reduce_mean(tf.square(tf.clip_by_value(y_pred, 100.0, 101.0) - y_true))


def clipped_keras(y_true, y_pred):
    return ops.mean(ops.square(ops.clip(y_pred, 100.0, 101.0) - y_true))


def maximum(y_true, y_pred):
    return tf.reduce_mean(tf.maximum(y_pred, 100.0) + y_true)


def minimum(y_true, y_pred):
    return ops.mean(ops.minimum(-100.0, y_pred) + y_true)


@pytest.mark.parametrize("loss", [clipped_tf, clipped_keras, maximum, minimum])
def test_clip_in_the_loss(loss):
    found = zero_gradient(trace_step(net(), X, Y, loss=loss))
    assert [c.name for c in found] == ["clip_in_forward"]
    assert found[0].where[0] == "loss"
    assert "top/bias" in found[0].where
    assert found[0].source.startswith("test_zero.py:")


def test_clip_on_both_sides():
    def loss(y_true, y_pred):
        far = tf.where(y_pred > 0, 50.0, -50.0) + y_pred
        return tf.reduce_mean(tf.square(tf.clip_by_value(far, -1.0, 1.0) - y_true))

    found = zero_gradient(trace_step(net(), X, Y, loss=loss))
    assert [c.name for c in found] == ["clip_in_forward"]


def test_clip_in_a_layer_names_only_what_is_behind_it():
    model = net(layers.Lambda(lambda h: ops.clip(h, 100.0, 101.0), name="guard"))
    found = zero_gradient(trace_step(model, X, Y, loss="mse"))
    assert found[0].name == "clip_in_forward"
    assert found[0].where == ("guard", "low", "low/kernel", "low/bias")


def test_a_clip_that_lets_some_entries_through_is_healthy():
    keras.utils.set_random_seed(0)  # with other weights it may let none through
    model = net(layers.Lambda(lambda h: ops.clip(h, -0.1, 0.1), name="guard"))
    assert zero_gradient(trace_step(model, X, Y, loss="mse")) == ()


def test_dead_relu_is_not_explained_here():
    model = net(activation="relu", bias_initializer=keras.initializers.Constant(-100.0))
    assert zero_gradient(trace_step(model, X, Y, loss="mse")) == ()
