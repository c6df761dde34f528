"""What the terminal shows of a run, against the numbers that were written."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from keras_gradguard.findings import Finding
from keras_gradguard.tensorboard import show
from keras_gradguard.tensorboard.events import EventWriter

from . import runs, stories


def test_the_dead_run_reads_as_one(tmp_path):
    stories.write(tmp_path, stories.dead, findings=[stories.DEAD])
    [run] = show.overview(tmp_path)
    [series] = run.series
    assert (series.first_step, series.last_step, series.steps) == (0, 599, 600)
    flow = {v.name: v for v in series.variables}
    assert list(flow) == list(stories.PATHS)
    assert flow["dense_1/kernel"].zero_steps == 280
    assert flow["dense_1/kernel"].last == 0
    assert flow["dense_1/kernel"].update_ratio == 0
    assert flow["head/kernel"].zero_steps == 0
    text = show.as_text([run])
    assert "1 incident\n" in text
    assert stories.DEAD.message.splitlines()[0] in text
    lines = {line.split()[0]: line for line in text.splitlines() if "/" in line}
    assert "47 %" in lines["dense_1/bias"]
    assert lines["dense_1/bias"].endswith("·" * 11)
    assert "·" not in lines["head/bias"]


def test_cells_hold_the_largest_norm_of_their_stretch(tmp_path):
    norms = np.arange(1, 97, dtype=np.float32)[:, None]
    writer = EventWriter(tmp_path)
    writer.write_rows(runs.table("a/k"), [runs.row(i, n) for i, n in enumerate(norms)])
    writer.close()
    [variable] = show.overview(tmp_path)[0].series[0].variables
    assert variable.cells == tuple(float(4 * (i + 1)) for i in range(24))


def test_nan_none_and_skipped_steps(tmp_path):
    table = runs.table("a/k", "b/k", none=[1])
    writer = EventWriter(tmp_path)
    writer.write_rows(
        table,
        [
            runs.row(0, [1.0, math.nan]),
            runs.row(1, [math.nan, math.nan]),
            runs.row(2, [math.inf, math.nan], skipped=True),
            runs.row(3, [2.0, math.nan]),
        ],
    )
    writer.close()
    a, b = show.overview(tmp_path)[0].series[0].variables
    assert (a.first, a.last, a.nonfinite_steps) == (1.0, 2.0, 1)
    assert (b.first, b.last, b.nonfinite_steps, b.zero_steps) == (None, None, 0, 0)
    [a_line, b_line] = show.as_text(show.overview(tmp_path)).splitlines()[-2:]
    assert a_line.endswith("▁!█")
    assert b_line.split() == ["b/k", "None", "None", "-", "-", "-"]


def test_json_is_strict_and_complete(tmp_path):
    stories.write(tmp_path / "x", stories.diverging, findings=[stories.NAN], steps=450)
    stories.write(tmp_path / "y", stories.healthy, steps=50)

    def refuse(word: str) -> None:
        raise AssertionError(f"not strict JSON: {word}")

    content = json.loads(show.as_json(show.overview(tmp_path)), parse_constant=refuse)
    first, second = content["runs"]
    assert first["incidents"][0]["symptom"] == "non_finite"
    assert first["series"][0]["variables"][8]["last"] == "nan"
    assert first["series"][0]["variables"][8]["nonfinite_steps"] == 50
    assert second["incidents"] == []


def test_a_run_with_incidents_only_hostile_names_and_damage(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_finding(
        Finding(symptom="bad_contract", summary="\x1b[31mred", where=("\u202ename",))
    )
    writer.close()
    with (tmp_path / "gradguard" / "incidents.jsonl").open("a") as file:
        file.write('{"half": ')
    [run] = show.overview(tmp_path)
    assert run.series == ()
    assert run.unreadable == 1
    text = show.as_text([run])
    assert all(line.isprintable() for line in text.splitlines())
    assert "damaged" in text


def test_many_variables_show_the_ones_in_trouble(tmp_path):
    norms = np.ones(200, np.float32)
    norms[150] = 0
    table = runs.table(*[f"layer_{i}/kernel" for i in range(200)])
    writer = EventWriter(tmp_path)
    writer.write_rows(table, [runs.row(i, norms) for i in range(5)])
    writer.close()
    text = show.as_text(show.overview(tmp_path))
    assert "layer_150/kernel" in text
    assert "and 140 more" in text


def test_a_truncated_file_is_read_as_far_as_it_goes(tmp_path):
    writer = EventWriter(tmp_path)
    for start in range(0, 600, 10):
        writer.write_rows(runs.table(), runs.rows(start, start + 10))
    writer.close()
    [path] = (tmp_path / "gradguard").glob("events.*")
    path.write_bytes(path.read_bytes()[:-40])
    [run] = show.overview(tmp_path)
    assert 256 <= run.series[0].steps < 600


def test_nothing_here(tmp_path):
    assert show.overview(tmp_path) == ()
    assert "No guarded run" in show.as_text(())
    with pytest.raises(NotADirectoryError, match=r"`log_dir`.*Received"):
        show.overview(tmp_path / "missing")


def test_needs_no_backend(tmp_path):
    stories.write(tmp_path, stories.healthy, steps=20)
    code = (
        "import sys; from keras_gradguard.tensorboard import show;"
        f"assert 'head/bias' in show.as_text(show.overview({str(tmp_path)!r}));"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
