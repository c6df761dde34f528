"""Recording an eager step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import execute

from keras_gradguard.diagnosis.eager import EagerRecorder
from keras_gradguard.diagnosis.trace import backend_variable

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype("float32")
Y = RNG.normal(size=(8, 1)).astype("float32")


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="relu", name="a"),
            layers.Dropout(0.3),
            layers.BatchNormalization(name="bn"),
            layers.Dense(1, name="b"),
        ]
    )
    return model, keras.optimizers.Adam(0.01)


def train(model, optimizer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X, training=True) - Y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def test_training_is_bit_identical():
    quiet = make()
    for _ in range(3):
        train(*quiet)
    watched = make()
    for _ in range(3):
        with EagerRecorder():
            train(*watched)
    for mine, theirs in zip(watched[0].variables, quiet[0].variables, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_everything_is_put_back():
    before = (
        vars(tf.GradientTape)["gradient"],
        execute.execute,
        type(tf.constant(1.0)).numpy,
    )
    with pytest.raises(KeyError), EagerRecorder():
        raise KeyError
    after = (
        vars(tf.GradientTape)["gradient"],
        execute.execute,
        type(tf.constant(1.0)).numpy,
    )
    assert before == after


def test_tapes_layers_lines_and_variables():
    model, optimizer = make()
    with EagerRecorder() as recorder:
        loss = train(model, optimizer)
    seen = recorder.recording
    assert seen.error is None
    (tape,) = seen.tapes
    assert tape.none == (False,) * 6
    assert tape.target == (seen.value(loss),)
    assert tape.frames[-1].function == "train"
    (matmul, second) = [op for op in seen.ops.ops if op.type == "MatMul"]
    assert matmul.layers[-1] == "a"
    assert second.layers[-1] == "b"
    assert matmul.source.startswith("test_eager.py:")
    reads = seen.ops.reads(id(backend_variable(model.layers[0].kernel)))
    assert [op.layer for op in reads] == ["a"]
    assert all(op.attrs["taped"] for op in reads)
    assert seen.value(loss) in seen.ops.descendants(reads[0].outputs)


def test_bodies_of_functions_are_inlined():
    @tf.function
    def double(x):
        return tf.round(x) * 2.0

    double(tf.ones((2,)))  # traced before the recorder is there
    w = tf.Variable([1.5, 2.5])
    with EagerRecorder() as recorder, tf.GradientTape() as tape:
        loss = tf.reduce_sum(double(w * 1.0))
        assert tape is not None
    recorder.recording.know([w])
    ops = recorder.recording.ops
    behind = [op.type for op in ops.producers(recorder.recording.value(loss))]
    assert "Round" in behind
    assert "ReadVariableOp" in behind


def test_the_recording_is_bounded():
    with EagerRecorder(limit=10) as recorder:
        for _ in range(50):
            tf.add(1.0, 2.0)
    assert len(recorder.recording.ops.ops) == 10
    assert recorder.recording.ops.truncated


def test_nothing_is_kept_alive():
    import gc
    import weakref

    with EagerRecorder() as recorder:
        big = tf.ones((100, 100)) * 2.0
        watch = weakref.ref(big)
        del big
    gc.collect()
    assert recorder.recording.ops.ops
    assert watch() is None


def test_what_leaves_tensorflow_is_noted_with_its_line():
    with EagerRecorder() as recorder:
        x = tf.ones((3,)) * 2.0
        float(tf.reduce_sum(x))
        x.numpy()
    assert [left.how for left in recorder.recording.left] == ["__float__", "numpy"]
    lines = [left.frames[-1].line for left in recorder.recording.left]
    assert lines[1] == lines[0] + 1


def test_two_at_once_are_refused():
    recorder = EagerRecorder()
    with recorder, pytest.raises(RuntimeError, match="use a new one"):
        recorder.__enter__()
