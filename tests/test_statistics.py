"""Each fast formula against a slow, obvious one that looks at the values themselves."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_gradguard import statistics

TINY = float(np.finfo(np.float32).tiny)  # the smallest normal float32
SPECIAL = [
    0.0,
    -0.0,
    TINY,
    -TINY,
    TINY / 2,
    -TINY / 2,
    1e-45,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    65504.0,
    -65504.0,
    5.9604645e-08,  # smallest float16 subnormal
    6.1035156e-05,  # smallest float16 normal
    3.4028235e38,
    1.0,
    -2.0,
    np.nextafter(np.float32(2), np.float32(0)),
]

single = st.one_of(st.floats(width=32), st.sampled_from(SPECIAL))
vectors = st.lists(single, max_size=40).map(lambda v: np.array(v, np.float32))
profile = settings(deadline=None, max_examples=200)


def is_zero(x: float) -> bool:
    return abs(x) < TINY


def slow_bin(x: np.float32) -> int:
    """Read the bits from the number's binary text, no shifts."""
    bits = format(int(x.view(np.uint32)), "032b")
    sign, exponent = bits[0], int(bits[1:9], 2)
    return exponent if sign == "1" else 256 + exponent


@profile
@given(vectors)
def test_exponent_counts_match_bits_read_one_by_one(values):
    expected = [0] * 512
    for x in values:
        expected[slow_bin(x)] += 1
    assert statistics.exponent_counts(values).tolist() == expected


@profile
@given(vectors)
def test_zero_and_nonfinite_counts(values):
    counts = statistics.exponent_counts(values)
    assert statistics.zero_count(counts) == sum(is_zero(float(x)) for x in values)
    assert statistics.nonfinite_count(counts) == sum(not math.isfinite(x) for x in values)
    assert statistics.total_count(counts) == len(values)
    expected = sum(is_zero(float(x)) for x in values) / len(values) if len(values) else 0.0
    assert statistics.zero_fraction(counts) == pytest.approx(expected)


@profile
@given(vectors, st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_percentiles_are_within_one_octave(values, q):
    counts = statistics.exponent_counts(values)
    got = statistics.log10_percentiles(counts, q)
    finite = sorted(abs(float(x)) for x in values if math.isfinite(x) and not is_zero(float(x)))
    if not finite:
        assert np.isnan(got).all()
        return
    for percentile, value in zip(q, got, strict=True):
        # The value at rank ceil(q * n), the smallest one for q = 0.
        exact = finite[max(math.ceil(percentile / 100 * len(finite)) - 1, 0)]
        assert abs(value - math.log10(exact)) <= statistics.LOG10_OCTAVE + 1e-6


@profile
@given(vectors)
def test_percentiles_do_not_decrease_in_q(values):
    got = statistics.log10_percentiles(statistics.exponent_counts(values), [0, 5, 50, 95, 100])
    assert np.isnan(got).all() or (np.diff(got) >= 0).all()


@profile
@given(vectors)
def test_table_holds_every_finite_value_in_its_bucket(values):
    table = statistics.log10_table(statistics.exponent_counts(values))
    assert table.ndim == 2
    assert table.shape[1] == 3
    assert len(table) >= 1
    assert np.isfinite(table).all()
    assert (table[:, 1] > table[:, 0]).all()
    np.testing.assert_array_equal(table[1:, 0], table[:-1, 1])

    finite = [abs(float(x)) for x in values if math.isfinite(x)]
    assert table[:, 2].sum() == len(finite)
    if finite:
        assert table[0, 2] > 0
        assert table[-1, 2] > 0
    lowest = 2.0**statistics.LOWEST_OCTAVE
    for left, right, count in table:
        if right <= math.log10(lowest) + 1e-9:
            expected = sum(is_zero(x) for x in finite)
        else:
            low, high = 10**left, 10**right
            expected = 0
            for x in finite:
                clamped = max(x, lowest)
                # Bucket edges are powers of two: compare exponents, not rounded logarithms.
                inside = round(math.log2(low)) <= math.frexp(clamped)[1] - 1
                inside = inside and math.frexp(clamped)[1] - 1 < round(math.log2(high))
                expected += inside and not is_zero(x)
        assert count == expected


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="empty"),
        pytest.param([math.nan, math.inf, -math.inf], id="all non-finite"),
    ],
)
def test_table_of_nothing_is_one_empty_finite_bucket(values):
    table = statistics.log10_table(statistics.exponent_counts(values))
    assert table.shape == (1, 3)
    assert np.isfinite(table).all()
    assert table[0, 2] == 0


def test_table_gives_zeros_a_bucket_with_a_width():
    table = statistics.log10_table(statistics.exponent_counts([0.0, -0.0, 1.0]))
    assert table[0, 2] == 2
    assert table[0, 1] - table[0, 0] == pytest.approx(1.0)
    assert table[-1].tolist() == pytest.approx([0.0, math.log10(2), 1.0])


@profile
@given(st.lists(vectors, min_size=1, max_size=5))
def test_merged_histograms_are_those_of_the_joined_values(parts):
    stacked = np.stack([statistics.exponent_counts(p) for p in parts])
    joined = statistics.exponent_counts(np.concatenate(parts))
    np.testing.assert_array_equal(statistics.merge(stacked), joined)


def test_merge_does_not_overflow_int32():
    counts = np.zeros((2, 512), np.int32)
    counts[:, 300] = 2**31 - 1
    assert statistics.merge(counts)[300] == 2 * (2**31 - 1)
    assert statistics.total_count(counts[0]) == 2**31 - 1


@profile
@given(st.lists(vectors, min_size=1, max_size=4))
def test_rows_give_the_same_as_one_by_one(parts):
    stacked = np.stack([statistics.exponent_counts(p) for p in parts])
    for function in (
        statistics.zero_count,
        statistics.nonfinite_count,
        statistics.zero_fraction,
        statistics.total_count,
        statistics.magnitude_counts,
        statistics.log10_percentiles,
    ):
        rows = function(stacked)
        np.testing.assert_array_equal(rows, np.stack([function(c) for c in stacked]))
    for table, counts in zip(statistics.log10_tables(stacked), stacked, strict=True):
        np.testing.assert_array_equal(table, statistics.log10_table(counts))


@profile
@given(vectors, st.integers(-20, 20))
def test_scaling_by_a_power_of_two_shifts_the_octaves(values, power):
    magnitudes = np.abs(values.astype(np.float64))
    safe = values[np.isfinite(values) & (magnitudes > 1e-30) & (magnitudes < 1e30)]
    before = statistics.magnitude_counts(statistics.exponent_counts(safe))
    after = statistics.magnitude_counts(statistics.exponent_counts(safe * np.float32(2.0**power)))
    np.testing.assert_array_equal(np.roll(before, power), after)


@profile
@given(vectors, st.randoms(use_true_random=False))
def test_order_and_sign_do_not_matter(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    np.testing.assert_array_equal(
        statistics.magnitude_counts(statistics.exponent_counts(values)),
        statistics.magnitude_counts(statistics.exponent_counts(-shuffled)),
    )


@profile
@given(hnp.arrays(np.float16, st.integers(0, 30)))
def test_float16_subnormals_are_not_zeros(values):
    counts = statistics.exponent_counts(values)
    assert statistics.zero_count(counts) == sum(float(x) == 0.0 for x in values)


@pytest.mark.parametrize(
    ("values", "zeros", "nonfinite"),
    [
        pytest.param(np.float64([1e-300, 1e300, 1.0]), 1, 1, id="float64 beyond float32"),
        pytest.param(np.complex64([3 + 4j, 0, complex("nan")]), 1, 1, id="complex as magnitude"),
        pytest.param(np.int32([0, 1, -7]), 1, 0, id="integers"),
        pytest.param(np.float32(2.5), 0, 0, id="a scalar"),
        pytest.param(np.zeros((2, 0, 3), np.float32), 0, 0, id="an empty axis"),
    ],
)
def test_exponent_counts_of_other_dtypes(values, zeros, nonfinite):
    counts = statistics.exponent_counts(values)
    assert counts.shape == (512,)
    assert statistics.zero_count(counts) == zeros
    assert statistics.nonfinite_count(counts) == nonfinite
    assert statistics.total_count(counts) == np.size(values)


@profile
@given(hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(-1e3, 1e3, width=32)))
def test_norm_from_half_square(values):
    half = np.float32(0.5 * math.fsum(float(x) ** 2 for x in values))
    expected = math.sqrt(math.fsum(float(x) ** 2 for x in values))
    assert statistics.norm_from_half_square(half) == pytest.approx(expected, rel=1e-6)


def test_norm_from_half_square_passes_nonfinite_and_does_not_overflow():
    got = statistics.norm_from_half_square(np.float32([math.nan, math.inf, 3e38, 0.0]))
    assert math.isnan(got[0])
    assert got[1] == math.inf
    assert got[2] == pytest.approx(math.sqrt(6e38))
    assert got[3] == 0.0
    assert got.dtype == np.float32


@profile
@given(st.lists(st.floats(0, 2.0**63, width=32), max_size=8), st.sets(st.integers(0, 7)))
def test_global_norm(norms, none):
    none = {i for i in none if i < len(norms)}
    kept = [n for i, n in enumerate(norms) if i not in none]
    assert statistics.global_norm(norms, none) == pytest.approx(math.hypot(*kept), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_global_norm_shows_a_nonfinite_norm_unless_left_out(bad):
    assert not math.isfinite(statistics.global_norm([1.0, bad]))
    assert statistics.global_norm([1.0, bad], none=frozenset({1})) == 1.0
    assert statistics.global_norm(np.zeros((3, 0))).tolist() == [0.0, 0.0, 0.0]


def test_update_ratio_in_every_corner():
    got = statistics.update_ratio([1.0, 0.0, 0.0, 2.0, math.nan], [4.0, 3.0, 0.0, 0.0, 1.0])
    assert got[:3].tolist() == [0.25, 0.0, 0.0]
    assert got[3] == math.inf
    assert math.isnan(got[4])
    assert math.isnan(statistics.update_ratio(0.0, math.nan))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        pytest.param(lambda: statistics.zero_count(np.zeros(511)), "512", id="wrong bins"),
        pytest.param(lambda: statistics.zero_count(3), "512", id="a scalar"),
        pytest.param(lambda: statistics.log10_table(np.zeros((2, 512))), "(512,)", id="two rows"),
        pytest.param(lambda: statistics.log10_tables(np.zeros(512)), "(V, 512)", id="one row"),
        pytest.param(lambda: statistics.merge(np.zeros(512)), "axis", id="merge over bins"),
        pytest.param(
            lambda: statistics.log10_percentiles(np.zeros(512), [101]), "`q`", id="percentile 101"
        ),
        pytest.param(
            lambda: statistics.log10_percentiles(np.zeros(512), [math.nan]), "`q`", id="nan"
        ),
    ],
)
def test_bad_arguments_name_themselves(call, word):
    with pytest.raises(ValueError, match="Received") as error:
        call()
    assert word in str(error.value)


def test_needs_no_backend():
    code = (
        "import sys, keras_gradguard.statistics;"
        "assert not {'tensorflow', 'keras', 'jax', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
