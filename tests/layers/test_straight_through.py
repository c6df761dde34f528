"""StraightThrough: exact forward, identity backward."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_gradguard.layers import StraightThrough


def one_hot(x):
    return np.eye(x.shape[-1], dtype=x.dtype)[x.argmax(-1)]


ORACLES = {"round": np.round, "sign": np.sign, "argmax": one_hot}


@pytest.mark.parametrize("fn", ORACLES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_forward_is_exact_and_backward_is_the_identity(fn, data):
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    width = 32 if dtype == "float32" else 64
    x = data.draw(
        hnp.arrays(
            dtype,
            hnp.array_shapes(min_dims=2, max_dims=3, max_side=4),
            elements=st.floats(width=width, allow_nan=False, allow_subnormal=False),
        )
    )
    layer = StraightThrough(fn, dtype=dtype)
    upstream = np.arange(1, x.size + 1, dtype=dtype).reshape(x.shape)
    tensor = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        y = layer(tensor)
    np.testing.assert_array_equal(y, ORACLES[fn](x))
    np.testing.assert_array_equal(tape.gradient(y, tensor, upstream), upstream)


@pytest.mark.parametrize("jit", [False, True])
def test_lets_a_layer_behind_a_step_function_learn(jit):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    for step, learns in (
        (StraightThrough("sign"), True),
        (keras.layers.Activation(keras.ops.sign), False),
    ):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8), step, keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", jit_compile=jit)
        before = model.layers[0].get_weights()[0]
        model.fit(x, x[:, :1], verbose=0)
        assert (np.abs(model.layers[0].get_weights()[0] - before).max() > 0) == learns


@keras.saving.register_keras_serializable(package="test_straight_through")
def half_steps(x):
    return keras.ops.floor(2 * x) / 2


def test_own_function_is_saved(tmp_path):
    layer = StraightThrough(half_steps)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(np.array([[0.7, 1.2]])), [[0.5, 1.0]])


def test_bad_functions_are_refused():
    with pytest.raises(ValueError, match="`fn` must be one of 'round', 'sign', 'argmax'"):
        StraightThrough("ceil")
    with pytest.raises(ValueError, match="must keep the shape"):
        StraightThrough(lambda x: keras.ops.sum(x))(np.ones((2, 2)))
    assert StraightThrough("argmax-one-hot").fn == "argmax"
