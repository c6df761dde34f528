"""Names of variables are those a user can search for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard.taps import names


class TwoTowers(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left = layers.Dense(2, name="left")

    def call(self, x):
        return self.left(x)


def built(model):
    model(np.zeros((1, 3), "float32"))
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: keras.Sequential([layers.Dense(2, name="out")]), ["out/kernel", "out/bias"]),
        (
            lambda: keras.Sequential([layers.Dense(2, name="out")], name="net"),
            ["out/kernel", "out/bias"],
        ),
        (lambda: TwoTowers(), ["left/kernel", "left/bias"]),
        (lambda: TwoTowers(name="mine"), ["mine/left/kernel", "mine/left/bias"]),
    ],
    ids=["sequential", "named sequential", "subclass", "named subclass"],
)
def test_no_automatic_prefix(make, expected):
    model = built(make())
    prefixes = names.automatic_prefixes([model])
    found = [names.path_of(v, prefixes) for v in model.trainable_variables]
    assert [f.split("/")[-2:] for f in found] == [e.split("/")[-2:] for e in expected]
    if "mine" in expected[0] or prefixes:
        assert found == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("sequential/out/kernel", "out/kernel"),
        ("sequential_12/out/kernel", "out/kernel"),
        ("functional_3/out/kernel", "out/kernel"),
        ("sequentially/out/kernel", "sequentially/out/kernel"),
        ("model_zoo/out/kernel", "model_zoo/out/kernel"),
        ("kernel:0", "kernel"),
    ],
)
def test_path_of(path, expected):
    class Thing:
        pass

    thing = Thing()
    thing.path = path
    assert names.path_of(thing) == expected


def test_a_prefix_is_never_the_whole_name():
    class Thing:
        path = "net/"

    assert names.path_of(Thing(), ("net/",)) == "net/"


def test_describe():
    embedding = keras.Variable(np.ones((9, 2), "float32"), name="table")
    twins = [tf.Variable(tf.zeros([3]), name="w"), tf.Variable(tf.zeros([], tf.float64), name="w")]
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([9, 2]))
    infos = names.describe([embedding, *twins], [slices, None, None])
    assert [i.path for i in infos] == ["table", "w", "w#1"]
    assert [i.size for i in infos] == [18, 3, 1]
    assert [i.sparse for i in infos] == [True, False, False]
    assert [i.dtype for i in infos] == ["float32", "float32", "float64"]
    assert infos[2].shape == ()
