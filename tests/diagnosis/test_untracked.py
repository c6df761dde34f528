"""Weights that the model does not list."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_gradguard.diagnosis.trace import trace_step
from keras_gradguard.diagnosis.untracked import untracked

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 1)).astype("float32")


class Gate(layers.Layer):
    def __init__(self, trainable_gate=True, **options):
        super().__init__(**options)
        self.gate = tf.Variable(tf.ones((4,)), trainable=trainable_gate, name="gate_weight")

    def call(self, x):
        return x * self.gate


class MadeInCall(layers.Layer):
    def call(self, x):
        return layers.Dense(3, name="fresh")(x)


def causes(*middle, loss="mse"):
    model = keras.Sequential([keras.Input((4,)), *middle, layers.Dense(1, name="top")])
    return untracked(trace_step(model, X, Y, loss=loss))


def test_bare_variable():
    found = causes(Gate(name="gated"))
    assert [(c.name, c.where) for c in found] == [("untracked_variable", ("gated", "gate_weight"))]
    assert found[0].source.startswith("test_untracked.py:")
    assert "add_weight" in found[0].fix


def test_bare_variable_that_is_not_trainable_is_healthy():
    assert causes(Gate(trainable_gate=False)) == ()


def test_bare_variable_without_a_way_to_the_loss_is_left_alone():
    class Stopped(Gate):
        def call(self, x):
            return x * tf.stop_gradient(self.gate)

    assert causes(Stopped()) == ()


def test_layer_made_in_call():
    found = causes(MadeInCall(name="maker"))
    assert [(c.name, c.where[:2]) for c in found] == [("layer_created_in_call", ("maker", "fresh"))]


def test_layer_hidden_in_a_lambda():
    hidden = layers.Dense(3, name="hidden")
    found = causes(layers.Lambda(lambda x: hidden(x), name="closure"))
    assert [(c.name, c.where[:2]) for c in found] == [("untracked_variable", ("closure", "hidden"))]


def test_a_teacher_in_the_loss_is_healthy():
    teacher = keras.Sequential([keras.Input((4,)), layers.Dense(1)])

    def loss(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_pred - teacher(tf.constant(X))))

    assert causes(layers.Dense(2), loss=loss) == ()


def test_nested_models_and_shared_layers_are_healthy():
    shared = layers.Dense(4, name="shared")
    inner = keras.Sequential([keras.Input((4,)), shared], name="block")
    assert causes(inner, shared, layers.BatchNormalization(), layers.Dropout(0.5)) == ()


def test_recurrent_and_attention_layers_are_healthy():
    i = keras.Input((5, 4))
    h = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(i)
    h = layers.MultiHeadAttention(2, 3)(h, h)
    model = keras.Model(i, layers.Dense(1)(layers.GlobalAveragePooling1D()(h)))
    x = RNG.normal(size=(16, 5, 4)).astype("float32")
    assert untracked(trace_step(model, x, Y, loss="mse")) == ()
