"""Whether a gradient passes one operation: against the tape itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard.diagnosis.cuts import starts_of, way
from keras_gradguard.diagnosis.eager import EagerRecorder
from keras_gradguard.diagnosis.oracle import Oracle
from keras_gradguard.diagnosis.trace import trace_step

FUNCTIONS = {
    "abs": tf.abs,
    "argmax": lambda x: tf.cast(tf.argmax(x, -1), tf.float32),
    "batch matmul": lambda x: tf.matmul(x[None], x[None], transpose_b=True),
    "cast down and up": lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32),
    "cast to int": lambda x: tf.cast(tf.cast(x, tf.int32), tf.float32),
    "ceil": tf.math.ceil,
    "clip": lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "concat": lambda x: tf.concat([x, x], 0),
    "cumsum": tf.cumsum,
    "einsum": lambda x: tf.einsum("ij,kj->ik", x, x),
    "erf": tf.math.erf,
    "expand": lambda x: tf.expand_dims(x, 0),
    "floor": tf.floor,
    "floor div": lambda x: x // 2.0,
    "floor mod": lambda x: x % 2.0,
    "gather": lambda x: tf.gather(x, [0, 1]),
    "greater": lambda x: tf.cast(x > 0, tf.float32),
    "identity": tf.identity,
    "is nan": lambda x: tf.cast(tf.math.is_nan(x), tf.float32),
    "layer norm": lambda x: layers.LayerNormalization()(x),
    "leaky relu": tf.nn.leaky_relu,
    "logsumexp": lambda x: tf.reduce_logsumexp(x, -1),
    "maximum": lambda x: tf.maximum(x, 0.0),
    "one hot": lambda x: tf.one_hot(tf.argmax(x, -1), 3),
    "pad": lambda x: tf.pad(x, [[1, 1], [0, 0]]),
    "relu": tf.nn.relu,
    "reverse": lambda x: tf.reverse(x, [0]),
    "rint": tf.math.rint,
    "round": tf.round,
    "shape": lambda x: tf.cast(tf.shape(x), tf.float32),
    "sign": tf.sign,
    "slice": lambda x: x[:, :2],
    "softmax": tf.nn.softmax,
    "sort": lambda x: tf.sort(x, -1),
    "split": lambda x: tf.split(x, 3, -1)[0],
    "stack": lambda x: tf.stack([x, x]),
    "stop": tf.stop_gradient,
    "tile": lambda x: tf.tile(x, [2, 2]),
    "top k indices": lambda x: tf.cast(tf.math.top_k(x, 2).indices, tf.float32),
    "top k values": lambda x: tf.math.top_k(x, 2).values,
    "transpose": tf.transpose,
    "unsorted segment": lambda x: tf.math.unsorted_segment_sum(x, [0, 1, 0, 1], 2),
    "where": lambda x: tf.where(x > 0, x, 0.0),
    "zeros like": tf.zeros_like,
}


class One(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.w = self.add_weight(shape=(4, 3), initializer="ones", name="w")

    def call(self, x):
        return tf.reduce_sum(self.function(self.w + 0.0)) + tf.reduce_sum(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graph_walk_agrees_with_the_tape(name):
    layer = One(FUNCTIONS[name])
    trace = trace_step(layer, np.ones((2, 2), "float32"), None, loss=lambda t, p: p)
    found = {v.path: g for v, g in zip(trace.variables, trace.gradients, strict=True)}
    (gradient,) = [g for path, g in found.items() if path.endswith("w")]
    _, starts = starts_of(trace.ops, trace.key(layer.w))
    walked = way(trace.ops, Oracle(), starts, [trace.value(trace.loss)])
    assert walked.open is (gradient is not None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_recorded_walk_agrees_with_the_tape(name):
    if name == "layer norm":
        pytest.skip("a layer made inside the recording")
    w = tf.Variable(tf.ones((4, 3)))
    with EagerRecorder() as recorder:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(FUNCTIONS[name](w + 0.0))
        gradient = tape.gradient(loss, w)
    seen = recorder.recording
    assert seen.tapes[0].none == (gradient is None,)
    _, starts = starts_of(seen.ops, id(w))
    walked = way(seen.ops, Oracle(), starts, seen.tapes[0].target)
    assert walked.open is (gradient is not None)


def test_keras_is_on_tensorflow():
    assert keras.backend.backend() == "tensorflow"
