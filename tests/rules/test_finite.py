"""NaN and Inf: at once, except while a loss scale looks for its level."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradguard.policy import Policy
from keras_gradguard.rules.finite import non_finite
from tests.histories import history, sample, table

NAN, INF = float("nan"), float("inf")
POLICY = Policy(scale_patience=4)


def counted(bad=0, good=9):
    counts = np.zeros((2, 512), np.int32)
    counts[:, 383] = good
    counts[0, 255] = bad
    return counts


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(history([[1, 1]] * 5), None, id="healthy"),
        pytest.param(history([[1, 1], [NAN, 1], [1, 1]]), (1, ("v0",)), id="NaN"),
        pytest.param(history([[1, 1], [INF, INF]]), (1, ("v0", "v1")), id="Inf"),
        pytest.param(history([[1, 1]] * 3, loss=[1, NAN, 1]), (1, ("loss",)), id="only the loss"),
        pytest.param(history([[1, 1]] * 3, loss=[1, -INF, 1]), (1, ("loss",)), id="loss Inf"),
        pytest.param(history([[NAN, 1]] * 3, loss=NAN), (0, ("v0",)), id="gradient before loss"),
        pytest.param(history([[NAN, 1], [1, 1]], new=1), None, id="told before"),
        pytest.param(
            history([[NAN, 1]] * 3, columns=table("v0", "v1", none=(0,))), None, id="None is no NaN"
        ),
        pytest.param(
            history([[INF, 1]], samples=[sample(0, [1, 1], histogram=counted(0))]),
            None,
            id="the sum overflowed, no entry did",
        ),
        pytest.param(
            history([[INF, 1]], samples=[sample(0, [1, 1], histogram=counted(1))]),
            (0, ("v0",)),
            id="an entry is Inf",
        ),
        pytest.param(
            history([[INF, 1]], loss=INF, samples=[sample(0, [1, 1], histogram=counted(0))]),
            (0, ("loss",)),
            id="the sum overflowed and so did the loss",
        ),
        pytest.param(
            history([[INF, INF]], samples=[sample(0, [1, 1], histogram=counted(1))]),
            (0, ("v0",)),
            id="of two sums one overflowed, the other holds an Inf",
        ),
        pytest.param(
            history([[NAN, 1]], samples=[sample(0, [1, 1], histogram=counted(0))]),
            (0, ("v0",)),
            id="NaN never comes from overflow",
        ),
        pytest.param(
            history([[1, 1]], samples=[sample(0, [1, 1], weight=NAN)]),
            (0, ("v0", "v1")),
            id="weights",
        ),
        pytest.param(
            history([[1, 1]], samples=[sample(0, [NAN, NAN], weight=NAN)]), None, id="not measured"
        ),
        pytest.param(
            history([[INF, 1], *[[1, 1]] * 4], skipped=[True] + [False] * 4, scale=2.0**15),
            None,
            id="one step skipped",
        ),
        pytest.param(history([[INF, 1]] * 3, skipped=True, scale=8.0), None, id="scale search"),
        pytest.param(
            history([[1, 1], *[[INF, 1]] * 4], skipped=[False] + [True] * 4, scale=8.0),
            (4, ("v0",)),
            id="skipping persists",
        ),
        pytest.param(
            history([[INF, 1], [1, 1]] * 5, skipped=[True, False] * 5, scale=8.0),
            None,
            id="every other step skipped",
        ),
    ],
)
def test_non_finite(made, expected):
    found = non_finite(made, POLICY)
    if expected is None:
        assert found == ()
        return
    (finding,) = found
    assert (finding.step, finding.where) == expected
    assert finding.severity == "raise"


def test_ignored_variables_may_be_anything():
    policy = Policy(ignore="v0")
    assert non_finite(history([[NAN, 1]]), policy) == ()
    assert non_finite(history([[NAN, NAN]]), policy)[0].where == ("v1",)


def test_evidence_counts_the_entries():
    made = history([[INF, 1]], samples=[sample(0, [1, 1], histogram=counted(2, 6))])
    (finding,) = non_finite(made, POLICY)
    assert any("2 of 8 entries" in e.text for e in finding.evidence)


NORM = st.sampled_from([0.0, 1.0, NAN, INF])


@given(st.lists(st.tuples(NORM, NORM, st.sampled_from([None, 1.0, NAN])), min_size=1, max_size=9))
def test_the_first_bad_row_is_found(rows):
    made = history([[a, b] for a, b, _ in rows], loss=[lo for *_, lo in rows])
    bad = [
        t
        for t, (a, b, lo) in enumerate(rows)
        if not np.isfinite([a, b]).all() or (lo is not None and np.isnan(lo))
    ]
    found = non_finite(made, POLICY)
    assert (found[0].step if found else None) == (bad[0] if bad else None)
