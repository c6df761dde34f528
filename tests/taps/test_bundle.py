"""Many tensors that pass as one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard.taps.bundle import Bundle


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "shapes",
    [
        [("float32", (2, 3))],
        [("float32", ()), ("float64", (0,)), ("float32", (4, 1)), ("float16", (3,))],
    ],
    ids=["one", "several dtypes"],
)
def test_what_is_tied_comes_out_in_its_order(shapes, graph):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype(dtype) for dtype, shape in shapes]
    tensors = [tf.constant(v) for v in values]
    bundle = Bundle([(t.dtype, t.shape) for t in tensors])

    def through():
        tied = bundle.tied(tensors)
        assert len(tied) == len(bundle.empty()) == len({dtype for dtype, _ in shapes})
        return bundle.untied(tied)

    out = (tf.function(through) if graph else through)()
    assert [t.shape.as_list() for t in out] == [list(shape) for _, shape in shapes]
    for value, tensor in zip(values, out, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), value)


def test_a_variable_of_unknown_shape():
    variable = tf.Variable([1.0, 2.0], shape=tf.TensorShape(None))
    bundle = Bundle([(variable.dtype, variable.shape)])
    (out,) = bundle.untied(bundle.tied([variable.read_value()]))
    assert out.numpy().tolist() == [1.0, 2.0]


def test_old_values_outlive_an_assignment():
    variable = tf.Variable([1.0, 2.0])
    bundle = Bundle([(variable.dtype, variable.shape)])
    tied = bundle.tied([variable.read_value()])
    variable.assign_sub([1.0, 1.0])
    assert bundle.untied(tied)[0].numpy().tolist() == [1.0, 2.0]
