"""The bounded table of a run's norms, against the same run kept whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradguard.flow import Flow
from keras_gradguard.records import Row

VALUES = st.sampled_from([0.0, 1e-30, 0.5, 3.0, float("inf"), float("nan")])


def rows_of(norms, skipped=()):
    return [
        Row(step=i, norm=np.array(n, np.float32), skipped=i in skipped) for i, n in enumerate(norms)
    ]


@given(
    st.lists(st.tuples(VALUES, VALUES), max_size=70),
    st.integers(1, 9),
    st.sampled_from([2, 4, 8]),
)
def test_every_column_holds_the_largest_of_its_steps(norms, block, columns):
    flow = Flow(2, columns=columns)
    rows = rows_of(norms)
    for at in range(0, len(rows), block):
        flow.add(rows[at : at + block])
    steps = flow.steps.tolist()
    assert len(steps) <= columns
    assert steps[:1] == [0][: len(norms)]
    for i, step in enumerate(steps):
        end = steps[i + 1] if i + 1 < len(steps) else len(norms)
        with np.errstate(invalid="ignore"):
            whole = np.array(norms[step:end], np.float32).max(axis=0)
        np.testing.assert_array_equal(flow.norms[i], whole)
    assert len(set(np.diff(steps))) <= 1


def test_steps_that_loss_scaling_threw_away_are_left_out():
    flow = Flow(1)
    flow.add(rows_of([[np.inf], [np.inf], [2.0], [3.0]], skipped={0, 1}))
    assert flow.steps.tolist() == [2, 3]
    assert flow.norms.tolist() == [[2.0], [3.0]]


@pytest.mark.parametrize("steps", [0, 1, 512, 513, 5000])
def test_a_long_run_stays_small(steps):
    flow = Flow(3)
    flow.add(rows_of(np.ones((steps, 3))))
    assert len(flow.steps) <= 512
    assert len(flow.steps) > min(steps, 256) - 1
