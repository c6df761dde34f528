"""What the data say: statistics against a slow oracle, and the causes drawn from them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_gradguard.diagnosis import Batch, DataStats, data

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=5),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@settings(deadline=None, max_examples=60)
@given(FLOATS)
def test_describe_matches_a_loop(array):
    stats = data.describe("x", array, "input")
    values = [float(v) for v in array.ravel()]
    good = [v for v in values if math.isfinite(v)]
    assert stats.nonfinite == len(values) - len(good)
    assert stats.zero_fraction == pytest.approx(sum(v == 0 for v in values) / len(values))
    if good:
        assert (stats.min, stats.max) == (min(good), max(good))
        assert stats.mean == pytest.approx(math.fsum(good) / len(good), rel=1e-6, abs=1e-30)
    else:
        assert math.isnan(stats.min)


@pytest.mark.parametrize(
    "value",
    [pytest.param(np.array([]), id="empty"), pytest.param(np.array(["a"]), id="text")],
)
def test_describe_leaves_out(value):
    assert data.describe("x", value, "input") is None


def test_batches_are_named_as_the_user_wrote_them():
    batch = Batch(x={"age": np.ones(3), "size": [np.zeros(3), np.ones(3)]}, y=np.ones(3))
    names = [s.name for s in data.describe_batch(batch)]
    assert names == ["x['age']", "x['size'][0]", "x['size'][1]", "y"]


def stats(low, high, role="input", dtype="float32", **more):
    return DataStats(name="x", role=role, min=low, max=high, mean=0.0, dtype=dtype, **more)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "found"),
    [
        pytest.param(-3.0, 3.0, "float32", False, id="standardised"),
        pytest.param(0.0, 1.0, "float32", False, id="pixels scaled"),
        pytest.param(0.0, 255.0, "float32", True, id="raw pixels"),
        pytest.param(1900.0, 2025.0, "float64", True, id="years"),
        pytest.param(0.0, 5000.0, "int32", False, id="indices"),
        pytest.param(0.0, 1e-6, "float32", True, id="tiny"),
        pytest.param(0.0, 0.0, "float32", False, id="all zero is another cause"),
    ],
)
def test_input_scale(low, high, dtype, found):
    assert (data.input_scale([stats(low, high, dtype=dtype)]) is not None) is found


def test_nan_input_names_the_column():
    x = np.ones((4, 3), "float32")
    x[:, 2] = np.nan
    cause = data.nan_input([data.describe("x", x, "input")])
    assert cause.name == "nan_input"
    assert "column 2" in cause.evidence[0].text


def test_zero_input_of_one_of_two_is_weaker():
    both = [stats(0.0, 0.0, zero_fraction=1.0), stats(0.0, 1.0)]
    assert data.zero_input(both).score < 0.7 < data.zero_input(both[:1]).score
    assert data.zero_input(both[1:]) is None


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        pytest.param({0: 1.0, 1: 0.0}, "zero_class_weight", id="the class present"),
        pytest.param({0: 0.0, 1: 1.0}, None, id="another class"),
        pytest.param({0: 0.0}, None, id="a class without a weight counts once"),
    ],
)
def test_class_weight(weights, cause):
    found = data.zero_sample_weight((), weights, np.ones((4, 1)))
    assert (found.name if found else None) == cause


def test_empty_one_hot_rows():
    y = np.eye(4)[[0, 1, 2, 3]]
    assert data.labels_all_zero(y) is None
    y[1:3] = 0
    cause = data.labels_all_zero(y)
    assert cause.evidence[0].value == 0.5
    assert data.labels_all_zero(y, y_pred_units=7) is None
    assert data.labels_all_zero(np.zeros(4)) is None
