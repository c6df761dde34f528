"""Row weights against the definition, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.layers._rows import boundary_weights, row_mask, row_positions, whole_weights

LENGTHS = st.lists(
    st.one_of(st.floats(0, 1e4, width=32, allow_subnormal=False), st.integers(0, 50).map(float)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(0, 12))
def test_weights_are_the_covered_part_of_each_row(lengths, rows):
    n = tf.constant(lengths, "float32")
    t = row_positions(n, rows)
    weights, mask = boundary_weights(t).numpy(), row_mask(t).numpy()
    assert weights.shape == mask.shape == (len(lengths), rows)
    for b, length in enumerate(n.numpy()):
        for i in range(rows):
            assert weights[b, i] == min(max(np.float32(length - np.float32(i)), 0), 1)
            assert mask[b, i] == (i < length)
    np.testing.assert_array_equal(whole_weights(t).numpy(), mask.astype("float32"))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40).map(lambda k: k / 8), st.integers(1, 6))
def test_gradient_is_the_central_difference_everywhere(length, rows):
    n, h = tf.constant([length], "float64"), 1 / 16
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(n)
        weights = tf.unstack(boundary_weights(row_positions(n, rows))[0])
    jacobian = [float(tape.gradient(weight, n)[0]) for weight in weights]
    for i in range(rows):
        up, down = (min(max(length + s * h - i, 0), 1) for s in (1, -1))
        assert math.isclose(jacobian[i], (up - down) / (2 * h), abs_tol=1e-12)


def test_nan_is_seen_in_weights_and_in_mask():
    t = row_positions(tf.constant([math.nan]), 3)
    for weights in (boundary_weights(t), whole_weights(t)):
        assert np.isnan(weights.numpy()).all()
    assert row_mask(t).numpy().all()
