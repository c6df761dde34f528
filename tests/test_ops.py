"""The safe ops: equal to the plain op where that is defined, finite everywhere else."""

from __future__ import annotations

import math
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_gradguard.ops import safe_divide, safe_log, safe_norm, safe_sqrt

DTYPES = ["float16", "float32", "float64", "bfloat16"]
RTOL = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}


def arrays(dtype, **kwargs):
    """Finite arrays that hold the awkward numbers of the dtype more often than not."""
    width = {"float16": 16, "float32": 32, "bfloat16": 32, "float64": 64}[dtype]
    info = np.finfo("float32" if dtype == "bfloat16" else dtype)
    largest = 3.3e38 if dtype == "bfloat16" else float(info.max)
    awkward = [0.0, -0.0, 1.0, -1.0, float(info.tiny), float(info.smallest_subnormal), largest]
    largest = float(np.array(largest, info.dtype))
    elements = st.one_of(
        st.sampled_from([float(np.array(a, info.dtype)) for a in awkward]),
        st.floats(-largest, largest, width=width, allow_subnormal=True),
        st.floats(-8, 8, width=width, allow_subnormal=False),
    )
    return hnp.arrays(
        "float32" if dtype == "bfloat16" else dtype,
        kwargs.pop("shape", hnp.array_shapes(max_dims=2, max_side=4)),
        elements=elements,
    )


def run(function, *arguments, dtype):
    """Return value and gradients, in eager mode, graph mode and XLA, as float64 arrays."""
    tensors = [tf.cast(tf.constant(a), dtype) for a in arguments]

    def step(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        return [value, *tape.gradient(value, list(tensors))]

    return [tf.cast(t, "float64").numpy() for t in step(*tensors)]


def subnormal(x, dtype):
    # Wider types flush them to zero on every device; float16 keeps them.
    tiny = np.finfo("float32" if dtype == "bfloat16" else dtype).tiny
    return (np.abs(x) < tiny) & (dtype != "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_safe_sqrt(dtype, data):
    x = data.draw(arrays(dtype))
    value, gradient = run(safe_sqrt, x, dtype=dtype)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()
    x = tf.cast(tf.cast(x, dtype), "float64").numpy()
    regular = (x > 0) & ~subnormal(x, dtype)
    np.testing.assert_allclose(value[regular], np.sqrt(x[regular]), rtol=RTOL[dtype])
    np.testing.assert_allclose(gradient[regular], 0.5 / np.sqrt(x[regular]), rtol=4 * RTOL[dtype])
    assert (value[~regular] == 0).all()
    assert (gradient[~regular] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_safe_log(dtype, data):
    x = data.draw(arrays(dtype))
    value, gradient = run(safe_log, x, dtype=dtype)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()
    x = tf.cast(tf.cast(x, dtype), "float64").numpy()
    regular = (x > 0) & ~subnormal(x, dtype)
    np.testing.assert_allclose(
        value[regular], np.log(x[regular]), rtol=2 * RTOL[dtype], atol=RTOL[dtype]
    )
    steep = (
        1 / np.where(regular, x, np.inf) > 65000 if dtype == "float16" else np.zeros_like(x, bool)
    )
    smooth = regular & ~steep
    # The reciprocal of the largest numbers is subnormal.
    np.testing.assert_allclose(
        gradient[smooth],
        1 / x[smooth],
        rtol=2 * RTOL[dtype],
        atol=1e-307 if dtype == "float64" else 1e-37,
    )
    assert (gradient[~regular] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_safe_divide(dtype, data):
    shape = data.draw(hnp.array_shapes(max_dims=2, max_side=4))
    x, y = data.draw(arrays(dtype, shape=shape)), data.draw(arrays(dtype, shape=shape))
    value, to_x, to_y = run(safe_divide, x, y, dtype=dtype)
    for found in (value, to_x, to_y):
        assert np.isfinite(found).all()
    x, y = (tf.cast(tf.cast(a, dtype), "float64").numpy() for a in (x, y))
    assert (value[y == 0] == 0).all()
    largest = float(tf.as_dtype(dtype).max)
    tiny = float(np.finfo("float32" if dtype == "bfloat16" else dtype).tiny)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, dx, dy = x / y, 1 / y, -x / y / y
    regular = (y != 0) & ~subnormal(y, dtype) & ~subnormal(x, dtype)
    for part in (plain, dx, dy):
        size = np.abs(part)
        regular &= (size < largest * 0.9) & ((size > tiny * 1.1) | (part == 0))
    tolerance = 4 * RTOL[dtype]
    np.testing.assert_allclose(value[regular], plain[regular], rtol=tolerance)
    np.testing.assert_allclose(to_x[regular], dx[regular], rtol=tolerance)
    np.testing.assert_allclose(to_y[regular], dy[regular], rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_safe_norm(dtype, data):
    x = data.draw(arrays(dtype, shape=hnp.array_shapes(min_dims=2, max_dims=2, max_side=4)))
    value, gradient = run(safe_norm, x, dtype=dtype)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()
    x = tf.cast(tf.cast(x, dtype), "float64").numpy()
    x = np.where(subnormal(x, dtype), 0, x)
    norms = np.array([math.hypot(*row) for row in x])
    fits = norms < float(tf.as_dtype(dtype).max) * 0.99
    # The smallest numbers of a dtype lie one spacing apart: no result is closer than that.
    spacing = float(np.finfo("float32" if dtype == "bfloat16" else dtype).smallest_subnormal)
    np.testing.assert_allclose(value[fits], norms[fits], rtol=4 * RTOL[dtype], atol=spacing)
    assert (value[~fits] > 0).all()
    assert (gradient[norms == 0] == 0).all()
    inside = fits & (
        norms > 100 * float(np.finfo("float32" if dtype == "bfloat16" else dtype).tiny)
    )
    expected = x[inside] / norms[inside][:, None]
    tolerance = 8 * RTOL[dtype]
    np.testing.assert_allclose(gradient[inside], expected, rtol=tolerance, atol=tolerance)


POINTS = [
    pytest.param(safe_sqrt, [[0.3, 2.0, 40.0]], id="sqrt"),
    pytest.param(safe_log, [[0.3, 2.0, 40.0]], id="log"),
    pytest.param(safe_divide, [[0.3, -2.0, 40.0], [2.0, 0.5, -3.0]], id="divide"),
    pytest.param(safe_norm, [[0.3, -2.0, 40.0]], id="norm"),
    pytest.param(lambda x: safe_norm(x[None], axis=None), [[0.3, -2.0, 0.0]], id="norm-all"),
    pytest.param(lambda x: safe_norm(x, keepdims=True), [[0.0, 0.0, 1e-30]], id="norm-small"),
]


@pytest.mark.parametrize(("function", "arguments"), POINTS)
def test_gradients_equal_central_differences(function, arguments):
    tensors = [tf.constant(a, "float64") for a in arguments]
    small = max(abs(v) for a in arguments for v in a) < 1e-10
    theoretical, numerical = tf.test.compute_gradient(
        function, tensors, delta=1e-33 if small else 1e-6
    )
    for one, other in zip(theoretical, numerical, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-3)


EDGES = tf.constant([0.0, -1.0, 1e-40, 1e-38, 1e-20, 4.0, 3e38])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "function",
    [safe_sqrt, safe_log, lambda x: safe_divide(1.0, x), lambda x: safe_divide(x, 1e-10),
     lambda x: safe_norm(x[:, None]), safe_norm],
    ids=["sqrt", "log", "reciprocal", "divide", "norm", "norm-of-all"],
)  # fmt: skip
def test_graph_mode_and_xla_are_as_finite_as_eager(function, jit):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x)
        return value, tape.gradient(value, x)

    eager = step(EDGES)
    for found, expected in zip(
        tf.function(step, autograph=False, jit_compile=jit)(EDGES), eager, strict=True
    ):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_nan_and_inf_are_not_hidden(jit):
    x = tf.constant([math.nan, math.inf, 0.0])
    for function in (
        safe_sqrt,
        safe_log,
        lambda x: safe_divide(x, 2.0),
        lambda x: safe_norm(x[:, None]),
    ):
        value = tf.function(function, autograph=False, jit_compile=jit)(x).numpy()
        assert np.isnan(value[0])
        assert value[1] > 1e38
        assert np.isfinite(value[2])
    assert np.isnan(safe_divide(1.0, x).numpy()[0])
    assert np.isnan(safe_divide(math.nan, 0.0).numpy())
    assert np.isnan(safe_norm(x).numpy())


def test_symbolic_tensors_integers_and_broadcasting():
    inputs = keras.Input((3,))
    outputs = safe_divide(safe_sqrt(inputs), safe_norm(safe_log(inputs), keepdims=True))
    model = keras.Model(inputs, outputs)
    assert outputs.shape == (None, 3)
    x = np.array([[1.0, 4.0, 0.0]], "float32")
    logs = np.array([0, np.log(4), np.log(np.finfo("float32").tiny)])
    np.testing.assert_allclose(model(x)[0], np.sqrt(x[0]) / np.linalg.norm(logs), rtol=1e-5)
    assert safe_sqrt([4, 9]).numpy().tolist() == [2.0, 3.0]
    assert safe_divide(np.ones((2, 1)), np.full((1, 3), 2.0)).shape == (2, 3)
    assert safe_norm(np.ones((2, 3, 4)), axis=(0, 2)).shape == (3,)
    assert safe_norm(np.ones((2, 3)), axis=None).shape == ()
    with pytest.raises(TypeError, match="`x` must be real"):
        safe_sqrt(np.ones(2, "complex64"))
