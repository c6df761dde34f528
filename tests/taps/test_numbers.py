"""Statistics of gradients on the device, in every mode, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard import statistics
from keras_gradguard.taps import numbers

RNG = np.random.default_rng(4)
SUBNORMAL = np.float32(1e-40)
GRADIENTS = {
    "matrix": RNG.normal(size=(3, 5)).astype("float32"),
    "scalar": np.float32(-2.5),
    "empty": np.zeros((0, 4), "float32"),
    "zeros": np.array([0.0, -0.0, 0.0], "float32"),
    "nan": np.array([1.0, np.nan, -3.0], "float32"),
    "inf": np.array([1.0, -np.inf], "float32"),
    "tiny": np.array([1e-38, 2e-38, 3e-30], "float32"),
    "huge": np.array([3e38, -3e38], "float32"),
    "half": RNG.normal(size=7).astype("float16"),
    "half extremes": np.array([65504, 5.96e-8, -6.1e-5, 0], "float16"),
    "double": RNG.normal(size=7),
    "double beyond float32": np.array([1e-60, 1e-3]),
    "complex": (RNG.normal(size=4) + 1j * RNG.normal(size=4)).astype("complex64"),
    "double complex": RNG.normal(size=4) + 1j * RNG.normal(size=4),
    "complex zero": np.array([0j, 3 + 4j], "complex64"),
}
MODES = {
    "eager": lambda f: f,
    "graph": tf.function,
    "xla": lambda f: tf.function(f, jit_compile=True),
}


def measure(gradient):
    values = numbers.dense_values(gradient)
    flat = numbers.magnitudes(values, gradient)
    return numbers.half_square(values), numbers.exponent_counts(flat), numbers.largest(flat)


def oracle(array):
    """Half the sum of squares, counts by exponent and the largest magnitude, entry by entry."""
    entries = [abs(v) if np.iscomplexobj(array) else v for v in np.asarray(array).reshape(-1)]
    with np.errstate(over="ignore"):
        single = [np.float32(v) for v in entries]
    counts = np.zeros(512, np.int64)
    for value in single:
        counts[(int(np.array(value, np.float32).view(np.int32)) >> 23) + 256] += 1
    square = sum(float(v) ** 2 for v in entries) / 2
    top = max([abs(float(v)) for v in single], default=0.0)
    return square, counts, top


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_against_numpy(name, mode):
    array = GRADIENTS[name]
    half, counts, top = (t.numpy() for t in MODES[mode](measure)(tf.constant(array)))
    want_half, want_counts, want_top = oracle(array)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(half, np.float32(want_half), rtol=2e-3)
    np.testing.assert_array_equal(counts, want_counts)
    np.testing.assert_array_equal(counts, statistics.exponent_counts(array))
    if not np.isnan(want_top) and not np.isnan(array.astype(complex)).any():
        np.testing.assert_allclose(top, want_top, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16(mode):
    array = tf.cast(tf.constant([1.5, -2.0, 1e-30, 0.0]), tf.bfloat16)
    half, counts, top = MODES[mode](measure)(array)
    exact = tf.cast(array, tf.float32).numpy()
    np.testing.assert_allclose(half, (exact.astype("float64") ** 2).sum() / 2, rtol=1e-6)
    np.testing.assert_array_equal(counts, statistics.exponent_counts(exact))
    assert float(top) == 2.0


@pytest.mark.parametrize("mode", MODES)
def test_subnormals_count_as_zero(mode):
    _, counts, _ = MODES[mode](measure)(tf.constant([SUBNORMAL, -SUBNORMAL, 0.0, 1.0]))
    assert int(statistics.zero_count(counts.numpy())) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [[0, 3], [2, 2, 2], []], ids=["two", "one thrice", "none"])
def test_of_an_embedding_the_rows_touched_are_counted(rows, mode):
    values = RNG.normal(size=(len(rows), 4)).astype("float32")

    def sparse(values):
        slices = tf.IndexedSlices(values, tf.constant(rows, tf.int32), tf.constant([100, 4]))
        return measure(slices)

    half, counts, top = (t.numpy() for t in MODES[mode](sparse)(tf.constant(values)))
    want_half, want_counts, want_top = oracle(values)
    np.testing.assert_allclose(half, want_half, rtol=1e-5)
    np.testing.assert_array_equal(counts, want_counts)
    np.testing.assert_allclose(top, want_top)
    assert counts.sum() == 4 * len(rows)
