"""A run of any length stays within its bytes, and loses nothing that a finding needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.settings import Settings
from keras_gradguard.tensorboard.events import EventWriter
from keras_gradguard.tensorboard.thinning import Thinning
from tests.tensorboard import runs
from tests.tensorboard.test_events import FINDING

MIB = 1 << 20


def size(directory):
    return sum(p.stat().st_size for p in directory.iterdir() if "tfevents" in p.name)


@settings(deadline=None, max_examples=20)
@given(st.integers(100, 4000), st.integers(MIB, 4 * MIB))
def test_the_limit_holds_for_writes_of_any_size(piece, limit):
    thinning, used, last = Thinning(limit), 0, 0
    for number in range(5000):
        if thinning.keeps(number):
            used, last = used + piece, number
            thinning.used(used)
    assert used <= limit
    assert last >= 2500  # no sudden end


def test_without_a_limit_everything_is_kept():
    thinning = Thinning(None)
    thinning.used(1 << 50)
    assert all(thinning.keeps(n) for n in range(10))


def test_the_first_quarter_is_complete_and_each_halving_lasts_longer():
    thinning, used, changes = Thinning(MIB), 0, []
    for number in range(100_000):
        if thinning.keeps(number):
            before = thinning.every
            used += 100
            thinning.used(used)
            if thinning.every != before:
                changes.append(number)
    assert changes[0] == pytest.approx(MIB / 4 / 100, abs=2)
    lengths = np.diff([0, *changes])
    assert all(lengths[1:] > 1.4 * lengths[:-1])


def steps_of(directory):
    found = [(s, v) for s, t, _, v in runs.values(directory) if t.startswith("gradguard/rows/")]
    return np.concatenate([s + block[:, 0] for s, block in found])


def long_run(tmp_path, *, steps, finding_at=None, **kwargs):
    writer = EventWriter(tmp_path, max_bytes=MIB, **kwargs)
    table = runs.table()
    for start in range(0, steps, 50):
        writer.write_rows(table, runs.rows(start, start + 50))
        writer.write_sample(table, runs.sample(start, [[1.0], [1.0]]))
        if start + 50 == finding_at:
            writer.write_finding(FINDING.replace(step=finding_at - 1))
    writer.close()
    return tmp_path / "gradguard"


def test_a_long_run_stays_within_its_bytes_and_reaches_to_its_end(tmp_path):
    directory = long_run(tmp_path, steps=20_000)
    assert MIB / 3 < size(directory) <= MIB * 1.01
    steps = steps_of(directory)
    assert np.all(np.diff(steps) > 0)
    assert list(steps[:1000]) == list(range(1000))
    assert steps[-1] > 19_900
    curve = [s for s, t, _, _ in runs.values(directory) if t == "gradient_global_norm"]
    assert curve[-1] == 19_999


def test_the_steps_up_to_a_finding_are_written_after_all(tmp_path):
    steps = {}
    for name, at in (("silent", None), ("found", 14_000)):
        steps[name] = set(steps_of(long_run(tmp_path / name, steps=14_000, finding_at=at)))
    since = int(max(steps["silent"]))
    assert since < 13_999
    assert steps["found"] - steps["silent"] == set(range(max(since + 1, 13_872), 14_000))


def test_a_point_of_a_thinned_curve_is_the_largest_of_all_it_stands_for(tmp_path):
    writer = EventWriter(tmp_path, max_bytes=MIB)
    writer._thinning.every = 4
    for start in range(0, 80, 10):
        rows = [runs.row(s, [99.0 if s == 13 else 1.0, 0.0]) for s in range(start, start + 10)]
        writer.write_rows(runs.table(), rows)
    writer.close()
    points = [
        float(v.item())
        for _, t, _, v in runs.values(tmp_path / "gradguard")
        if t == "gradient_global_norm"
    ]
    assert points == [1.0, 99.0, 1.0]  # after the calls 0 and 4, and at the end


@pytest.mark.parametrize("bad", [0, MIB - 1, True, 1.5e9, "1G"])
def test_a_limit_that_cannot_work_is_named(bad):
    with pytest.raises(ValueError, match="max_log_bytes"):
        Settings(max_log_bytes=bad)


def test_the_writer_names_it_too(tmp_path):
    with pytest.raises(ValueError, match="max_bytes"):
        EventWriter(tmp_path, max_bytes=1000)
