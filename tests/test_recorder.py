"""The recorder against an obvious one that keeps everything for ever."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_gradguard.recorder import Recorder
from keras_gradguard.records import Row
from tests.histories import sample, table

WIDTH = 3
TINY = np.finfo(np.float32).tiny
NORMS = hnp.arrays(
    np.float32,
    WIDTH,
    elements=st.one_of(
        st.sampled_from([0.0, 1.0, np.nan, np.inf, 2.0**-149]),
        st.floats(0, 2.0**100, width=32),
    ),
)
LOSSES = st.one_of(st.none(), st.sampled_from([0.0, np.nan, np.inf]), st.floats(-10, 10))


@st.composite
def readings(draw):
    step, found = 0, []
    for _ in range(draw(st.integers(0, 6))):
        lost = draw(st.integers(0, 2))
        step += lost
        rows = []
        for _ in range(draw(st.integers(0, 5))):
            rows.append(
                Row(
                    step=step,
                    norm=draw(NORMS),
                    loss=draw(LOSSES),
                    scale=draw(st.sampled_from([1.0, 1024.0])),
                    skipped=draw(st.booleans()),
                    update_due=draw(st.booleans()),
                )
            )
            step += 1
        samples = [sample(r.step, np.ones(WIDTH)) for r in rows if draw(st.booleans())]
        found.append((rows, samples, lost, draw(st.booleans())))
    return found


@given(readings(), st.integers(1, 8), st.integers(1, 4))
def test_against_a_recorder_that_keeps_everything(found, keep_rows, keep_samples):
    recorder = Recorder(table=table("a", "b", "c"), keep_rows=keep_rows, keep_samples=keep_samples)
    rows, samples, lost, judged = [], [], 0, 0
    # TensorFlow 2.16 makes the processor take subnormal numbers for zero: nothing to compare then.
    norms = np.array([r.norm for new_rows, *_ in found for r in new_rows])
    assume(np.float32(1e-45) > 0 or not ((norms != 0) & (np.abs(norms) < TINY)).any())
    for new_rows, new_samples, gone, look in found:
        recorder.add(new_rows, new_samples, lost=gone)
        rows += new_rows
        samples += new_samples
        lost += gone
        if look:
            recorder.history()
            judged = len(rows)
    history = recorder.history()
    kept = rows[-keep_rows:]
    assert recorder.rows == tuple(kept)
    assert recorder.samples == tuple(samples[-keep_samples:]) == history.samples
    assert history.step.tolist() == [r.step for r in kept]
    assert history.norm.shape == (len(kept), WIDTH)
    for t, row in enumerate(kept):
        np.testing.assert_array_equal(history.norm[t], row.norm)
        assert history.loss_known[t] == (row.loss is not None)
        np.testing.assert_array_equal(history.loss[t], np.nan if row.loss is None else row.loss)
        assert (history.due[t], history.skipped[t]) == (row.update_due, row.skipped)
        assert history.scale[t] == row.scale
    assert history.new == min(len(rows) - judged, len(kept))
    assert history.complete == (lost == 0 and len(rows) <= keep_rows)
    assert (recorder.seen, recorder.lost) == (len(rows) + lost, lost)
    peak = np.zeros(WIDTH, np.float32)
    for row in rows:
        for i, value in enumerate(row.norm):
            if np.isfinite(value):
                peak[i] = max(peak[i], value)
    np.testing.assert_array_equal(history.peak, peak)
    np.testing.assert_array_equal(history.ever_nonzero, peak > 0)
    finite = [r.loss for r in rows if r.loss is not None and np.isfinite(r.loss)]
    assert history.first_loss == (finite[0] if finite else None)
    assert recorder.history().new == 0


@pytest.mark.parametrize("none", [(), (0,), (1, 2), (0, 1, 2)])
def test_present_follows_the_latest_table(none):
    recorder = Recorder(table=table("a", "b", "c"))
    recorder.add((), table=table("a", "b", "c", none=none))
    assert recorder.history().present.tolist() == [i not in none for i in range(3)]
