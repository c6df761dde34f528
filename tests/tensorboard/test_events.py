"""Event files, decoded with TensorBoard's own reader and compared with what was put in."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard import statistics
from keras_gradguard.errors import GradientGuardWarning
from keras_gradguard.findings import Cause, Finding
from keras_gradguard.tensorboard import schema
from keras_gradguard.tensorboard.events import EventWriter
from keras_gradguard.tensorboard.naming import NameRegistry, printable

from . import runs

FINDING = Finding(
    symptom="zero_gradient",
    summary="Every gradient of 'dense' has been exactly 0 for 8 updates.",
    where=("dense/kernel",),
    step=12,
    first_step=5,
    causes=(Cause(name="dead_relu", score=0.9, fix="Use leaky_relu in 'dense'."),),
)


def run_of(tmp_path: Path, name: str = "gradguard") -> Path:
    return tmp_path / name


# ---------------------------------------------------------------------- what is written


def test_sample_gives_histograms_and_scalars_metric_first(tmp_path):
    kernel = [0.0, 0.0, 1e-3, -2.0, math.nan, 3.0]
    writer = EventWriter(tmp_path)
    writer.write_rows(runs.table(), [runs.row(50, [3.0, 4.0], loss=0.7)])
    writer.write_sample(runs.table(), runs.sample(50, [kernel, [1.0]]))
    writer.close()

    got = {(tag, plugin): (step, v) for step, tag, plugin, v in runs.values(run_of(tmp_path))}
    counts = statistics.exponent_counts(kernel)
    expected = {
        ("gradient_log10/dense/kernel", "histograms"): statistics.log10_table(counts),
        ("gradient_log10/dense/bias", "histograms"): [[0.0, math.log10(2), 1.0]],
        ("gradient_norm/dense/kernel", "scalars"): 3.0,
        ("gradient_norm/dense/bias", "scalars"): 4.0,
        ("gradient_zero_fraction/dense/kernel", "scalars"): 2 / 6,
        ("gradient_zero_fraction/dense/bias", "scalars"): 0.0,
        ("gradient_nonfinite/dense/kernel", "scalars"): 1.0,
        ("gradient_nonfinite/dense/bias", "scalars"): 0.0,
        ("update_ratio/dense/kernel", "scalars"): 0.25,
        ("update_ratio/dense/bias", "scalars"): 0.25,
        ("gradient_global_norm", "scalars"): 5.0,
        ("loss", "scalars"): 0.7,
    }
    both = np.stack([counts, statistics.exponent_counts([1.0])]).sum(0)
    for q, value in zip((5, 50, 95), statistics.log10_percentiles(both), strict=True):
        expected[f"gradient_log10_p{q:02d}/dense", "scalars"] = value
    shown = {key: v for key, v in got.items() if key[1] in ("scalars", "histograms")}
    assert set(shown) == set(expected)
    for key, (step, value) in shown.items():
        assert step == 50
        np.testing.assert_allclose(value, expected[key], rtol=1e-6, err_msg=str(key))


def test_every_row_comes_back_through_chunks_of_which_none_is_thinned_out(tmp_path):
    writer = EventWriter(tmp_path, flush_secs=1e9)
    table = runs.table("a/k", "b/k", "c/k", none=[1])
    for start in range(0, 1000, 10):
        writer.write_rows(table, runs.rows(start, start + 10, width=3))
        if start % 70 == 0:
            writer.flush()
    writer.close()

    values: dict[str, list] = {}
    for step, tag, plugin, array in runs.values(run_of(tmp_path)):
        if tag.startswith("gradguard/rows/"):
            assert plugin == schema.PLUGIN
            values.setdefault(tag, []).append(schema.decode_rows(step, array))
    assert all(len(v) <= schema.VALUES_PER_CHUNK for v in values.values())
    assert all(sum(len(b.step) for b in v) <= schema.ROWS_PER_CHUNK for v in values.values())
    blocks = [block for tag in sorted(values) for block in values[tag]]
    steps = np.concatenate([b.step for b in blocks])
    norms = np.concatenate([b.norm for b in blocks])
    np.testing.assert_array_equal(steps, np.arange(1000))
    np.testing.assert_allclose(norms[:, 0], np.arange(1000) + 0.1, rtol=1e-6)
    np.testing.assert_allclose(norms[:, 2], np.arange(1000) + 0.3, rtol=1e-6)
    assert (norms[:, 1] == schema.NONE_NORM).all()
    assert (np.concatenate([b.loss for b in blocks]) == 1000 - np.arange(1000)).all()


def test_tensorboards_data_provider_reads_all_chunks_and_marks_the_plugin(tmp_path):
    from tensorboard.backend.event_processing import data_ingester, data_provider
    from tensorboard.backend.event_processing import plugin_event_multiplexer as multiplexer
    from tensorboard.context import RequestContext

    writer = EventWriter(tmp_path)
    for start in range(0, 600, 5):
        writer.write_rows(runs.table(), runs.rows(start, start + 5))
        writer.flush()
    writer.write_finding(FINDING)
    writer.close()
    source = multiplexer.EventMultiplexer(
        size_guidance=data_ingester.DEFAULT_SIZE_GUIDANCE,
        tensor_size_guidance=data_ingester.DEFAULT_TENSOR_SIZE_GUIDANCE,
    )
    source.AddRunsFromDirectory(str(tmp_path))
    source.Reload()
    provider = data_provider.MultiplexerDataProvider(source, str(tmp_path))
    context = RequestContext()
    plugins = provider.list_plugins(context, experiment_id="")
    assert {"gradguard", "scalars", "text"} <= set(plugins)
    tensors = provider.read_tensors(
        context, experiment_id="", plugin_name="gradguard", downsample=10**6
    )["gradguard"]
    steps = sorted(
        step
        for tag, data in tensors.items()
        if tag.startswith("gradguard/rows/")
        for datum in data
        for step in schema.decode_rows(datum.step, datum.numpy).step
    )
    assert steps == list(range(600))
    table = json.loads(tensors["gradguard/table/000"][0].numpy.item())
    assert [v["name"] for v in table["variables"]] == ["dense/kernel", "dense/bias"]
    assert json.loads(tensors["gradguard/finding/000000"][0].numpy.item())["cause"] == "dead_relu"


@pytest.mark.parametrize("sample_first", [False, True])
def test_norm_of_a_sampled_step_comes_from_its_row_in_either_order(tmp_path, sample_first):
    writer = EventWriter(tmp_path)
    calls = [
        lambda: writer.write_rows(runs.table(), runs.rows(0, 10)),
        lambda: writer.write_sample(runs.table(), runs.sample(5, [[1.0], [1.0]])),
    ]
    for call in reversed(calls) if sample_first else calls:
        call()
    writer.close()
    got = runs.scalars(run_of(tmp_path), "gradient_norm/dense/bias")
    assert got == {5: pytest.approx(5.2)}


def test_variables_without_a_gradient_get_no_curves(tmp_path):
    table = runs.table("a/kernel", "b/kernel", none=[0])
    writer = EventWriter(tmp_path)
    writer.write_rows(table, [runs.row(0, [math.nan, 2.0])])
    writer.write_sample(table, runs.sample(0, [[], [1.0]]))
    writer.close()
    tags = {tag for _, tag, plugin, _ in runs.values(run_of(tmp_path)) if plugin != "gradguard"}
    assert "gradient_norm/b/kernel" in tags
    assert not [t for t in tags if t.endswith(("/a/kernel", "/a"))]
    assert runs.scalars(run_of(tmp_path), "gradient_global_norm") == {0: 2.0}


def test_global_norm_is_the_largest_and_shows_nonfinite_but_not_skipped_steps(tmp_path):
    writer = EventWriter(tmp_path)
    table = runs.table()
    writer.write_rows(table, [runs.row(0, [3, 4]), runs.row(1, [30, 40]), runs.row(2, [0, 1])])
    writer.write_rows(table, [runs.row(3, [math.nan, 1]), runs.row(4, [0, 1])])
    writer.write_rows(table, [runs.row(5, [math.inf, 1], skipped=True), runs.row(6, [0, 1])])
    writer.write_rows(table, [runs.row(7, [math.nan, 1], skipped=True)])
    writer.close()
    got = runs.scalars(run_of(tmp_path), "gradient_global_norm")
    assert {k: v for k, v in got.items() if k != 4} == {2: 50.0, 6: 1.0}
    assert math.isnan(got[4])


def test_histograms_can_be_switched_off(tmp_path):
    writer = EventWriter(tmp_path, histograms=False)
    writer.write_sample(runs.table(), runs.sample(0, [[1.0], [0.0]]))
    writer.close()
    tags = {tag for _, tag, _, _ in runs.values(run_of(tmp_path))}
    assert not [t for t in tags if t.startswith("gradient_log10")]
    assert "gradient_zero_fraction/dense/bias" in tags


def test_a_ratio_to_weights_of_zero_and_all_zero_layers_leave_no_nonfinite_points(tmp_path):
    writer = EventWriter(tmp_path)
    weight = np.float32([0.0, 1.0])
    writer.write_sample(runs.table(), runs.sample(0, [[0.0], [0.0]], weight=weight))
    writer.close()
    for _, tag, plugin, array in runs.values(run_of(tmp_path)):
        if plugin in ("scalars", "histograms"):
            assert np.isfinite(array).all(), tag
    assert runs.scalars(run_of(tmp_path), "update_ratio/dense/kernel") == {}
    assert runs.scalars(run_of(tmp_path), "gradient_zero_fraction/dense/kernel") == {0: 1.0}


# ---------------------------------------------------------------------- several optimizers


def tags_of(directory: Path, prefix: str) -> set[str]:
    return {t for _, t, _, _ in runs.values(directory) if t.startswith(prefix)}


def test_one_optimizer_is_not_named(tmp_path):
    writer = EventWriter(tmp_path)
    writer.begin([runs.table("a/k", optimizer="adam")])
    writer.write_rows(runs.table("a/k", optimizer="adam"), [runs.row(0, [1.0])])
    writer.close()
    assert tags_of(run_of(tmp_path), "gradient_global_norm") == {"gradient_global_norm"}


def test_announced_optimizers_are_named_even_with_equal_names_and_variables(tmp_path):
    tables = [
        runs.table("dense/kernel", optimizer="adam"),
        runs.table("dense/kernel", "dense/bias", optimizer="adam"),
        runs.table("dense/kernel", optimizer="sgd"),
    ]
    writer = EventWriter(tmp_path)
    writer.begin(tables)
    for table in tables:
        width = len(table.variables)
        writer.write_rows(table, [runs.row(0, np.ones(width))])
        writer.write_sample(table, runs.sample(0, [[1.0]] * width))
    writer.close()
    assert tags_of(run_of(tmp_path), "gradient_norm/") == {
        "gradient_norm/adam/dense/kernel",
        "gradient_norm/adam_2/dense/kernel",
        "gradient_norm/adam_2/dense/bias",
        "gradient_norm/sgd/dense/kernel",
    }
    assert len(tags_of(run_of(tmp_path), "gradguard/table/")) == 3


def test_an_unannounced_second_optimizer_gets_its_name(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_rows(runs.table("a/k", optimizer="adam"), [runs.row(0, [1.0])])
    writer.write_rows(runs.table("a/k", optimizer="check"), [runs.row(0, [1.0])])
    writer.close()
    assert tags_of(run_of(tmp_path), "loss") == set()
    assert tags_of(run_of(tmp_path), "gradient_global_norm") == {
        "gradient_global_norm",
        "gradient_global_norm/check",
    }
    assert not run_of(tmp_path, "gradguard_1").exists()


def test_new_variables_of_the_same_optimizer_start_a_series_not_a_label(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_sample(runs.table("a/k"), runs.sample(0, [[1.0]]))
    writer.write_sample(runs.table("a/k", "b/k"), runs.sample(50, [[1.0], [1.0]]))
    writer.close()
    got = tags_of(run_of(tmp_path), "gradient_zero_fraction/")
    assert got == {"gradient_zero_fraction/a/k", "gradient_zero_fraction/b/k"}
    assert len(tags_of(run_of(tmp_path), "gradguard/table/")) == 2


# ---------------------------------------------------------------------- several runs


def test_a_second_run_gets_a_directory_of_its_own(tmp_path):
    for _ in range(3):
        writer = EventWriter(tmp_path)
        writer.write_rows(runs.table(), runs.rows(0, 10))
        writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "gradguard",
        "gradguard_1",
        "gradguard_2",
    ]
    for directory in tmp_path.iterdir():
        assert len(list(directory.glob("events.*"))) == 1


def test_the_same_writer_goes_on_where_the_steps_go_on(tmp_path):
    writer = EventWriter(tmp_path)
    for start in range(0, 50, 10):
        writer.write_rows(runs.table(), runs.rows(start, start + 10))
        writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["gradguard"]
    assert len(runs.scalars(run_of(tmp_path), "loss")) == 5
    plugins = {t: p for _, t, p, _ in runs.values(run_of(tmp_path))}
    assert plugins["loss"] == "scalars"


@pytest.mark.parametrize("kind", ["rows", "sample", "begin"])
def test_the_same_writer_starts_a_new_run_when_the_steps_start_again(tmp_path, kind):
    writer = EventWriter(tmp_path)
    writer.write_rows(runs.table(), runs.rows(0, 10))
    writer.write_sample(runs.table(), runs.sample(0, [[1.0], [1.0]]))
    writer.write_finding(FINDING)
    if kind == "rows":
        writer.write_rows(runs.table(), runs.rows(0, 10))
    elif kind == "sample":
        writer.write_sample(runs.table(), runs.sample(0, [[1.0], [1.0]]))
    else:
        writer.begin([runs.table()], step=0)
        writer.write_finding(FINDING)
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gradguard", "gradguard_1"]
    first, second = (runs.values(run_of(tmp_path, n)) for n in ("gradguard", "gradguard_1"))
    assert len([v for v in first if v[1] == "loss"]) == 1
    assert len([v for v in first if v[1].startswith("gradguard/finding/")]) == 1
    assert len([v for v in second if v[1].startswith("gradguard/finding/")]) == (kind == "begin")


def test_nothing_is_made_before_something_is_written(tmp_path):
    writer = EventWriter(tmp_path / "logs")
    writer.begin([runs.table()])
    writer.write_rows(runs.table(), [])
    writer.flush()
    writer.close()
    assert writer.directory is None
    assert not (tmp_path / "logs").exists()


# ---------------------------------------------------------------------- incidents


def test_incidents_are_cumulative_in_text_and_one_json_object_a_line(tmp_path):
    other = Finding(symptom="non_finite", summary="The loss is NaN.", where=("loss",), step=20)
    writer = EventWriter(tmp_path)
    writer.write_finding(FINDING)
    # Before any flush or close: the file is complete at once.
    lines = (run_of(tmp_path) / "incidents.jsonl").read_text().splitlines()
    assert len(lines) == 1
    writer.write_finding(other)
    writer.close()
    lines = (run_of(tmp_path) / "incidents.jsonl").read_text().splitlines()

    def refuse(word: str) -> None:
        raise AssertionError(f"not strict JSON: {word}")

    found = [json.loads(line, parse_constant=refuse) for line in lines]
    for got, finding in zip(found, [FINDING, other], strict=True):
        assert got.pop("time") > 1.6e9
        assert got == finding.to_dict()
    texts = [
        (s, str(v.item(), "utf-8")) for s, t, p, v in runs.values(run_of(tmp_path)) if p == "text"
    ]
    assert [s for s, _ in texts] == [12, 20]
    assert "| dead relu |" in texts[1][1]
    assert "The loss is NaN." in texts[1][1]
    assert "The loss is NaN." not in texts[0][1]


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "a|b`c```\nd\r\n# e",
    "../../etc/passwd",
    "/absolute",
    "\x00\x1b[31m",
    "\ud800",
    "שלום/\u202egnp.exe",
    "",
    "a" * 3000,
]


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
def test_hostile_names_stay_inside_and_inert(tmp_path):
    from tensorboard import plugin_util

    logs = tmp_path / "logs"
    table = runs.table(*HOSTILE, layers=HOSTILE)
    width = len(HOSTILE)
    writer = EventWriter(logs)
    writer.write_rows(table, runs.rows(0, 3, width=width))
    writer.write_sample(table, runs.sample(1, [[1.0]] * width))
    writer.write_finding(FINDING.replace(where=tuple(HOSTILE), summary=" ".join(HOSTILE)))
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]
    assert [p.name for p in logs.iterdir()] == ["gradguard"]
    assert len(list((logs / "gradguard").iterdir())) == 2
    got = tags_of(logs / "gradguard", "gradient_norm/")
    assert len(got) == width
    assert all(t.isprintable() for t in got)
    page = next(
        str(v.item(), "utf-8") for _, _, p, v in runs.values(logs / "gradguard") if p == "text"
    )
    html = plugin_util.markdown_to_safe_html(page)
    assert "<img" not in html
    assert html.count("<tr>") == 2
    assert json.loads((logs / "gradguard" / "incidents.jsonl").read_text())["where"] == HOSTILE


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["", "adam"]), st.text(max_size=6)), max_size=20))
def test_no_two_names_are_shared_and_each_stays_the_same(keys):
    registry = NameRegistry()
    names = {key: registry.name(*key) for key in keys}
    assert len(set(names.values())) == len(names)
    assert all(name.isprintable() for name in names.values())
    assert all(registry.name(*key) == name for key, name in names.items())


def test_printable_names_are_left_alone():
    assert printable("блок 1/ядро 'ü'") == "блок 1/ядро 'ü'"


def test_colliding_names_are_told_apart():
    registry = NameRegistry()
    assert registry.name("", "a\n") == r"a\n"
    assert registry.name("", r"a\n") == r"a\n~2"


# ---------------------------------------------------------------------- failures


def warned_once(call) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [w.category for w in caught] == [GradientGuardWarning]
    return str(caught[0].message)


def use(writer: EventWriter, start: int = 0) -> None:
    """Everything a training does with a writer."""
    for step in range(start, start + 100, 10):
        writer.write_rows(runs.table(), runs.rows(step, step + 10))
        writer.write_sample(runs.table(), runs.sample(step, [[1.0], [1.0]]))
        writer.flush()
    writer.write_finding(FINDING)
    writer.flush()
    writer.close()


def test_a_log_dir_that_is_a_file_warns_once(tmp_path):
    (tmp_path / "logs").write_text("mine")
    writer = EventWriter(tmp_path / "logs")
    assert "training goes on" in warned_once(lambda: (use(writer), use(writer, 100)))
    assert (tmp_path / "logs").read_text() == "mine"


def test_a_log_dir_deleted_in_training_warns_once(tmp_path):
    import shutil

    writer = EventWriter(tmp_path / "logs")
    writer.write_rows(runs.table(), runs.rows(0, 10))
    writer.flush()
    shutil.rmtree(tmp_path / "logs")
    warned_once(lambda: use(writer, 10))
    assert not (tmp_path / "logs").exists()


def test_a_read_only_directory_warns_once(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Read-only" in warned_once(lambda: use(EventWriter(tmp_path / "logs")))


def test_a_disk_that_fills_up_warns_once_and_keeps_what_was_flushed(tmp_path):
    """A real limit of the operating system: files of at most 20 kB in a child process."""
    code = f"""
        import resource, signal, sys, warnings
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.tensorboard import runs, test_events
        from keras_gradguard.tensorboard.events import EventWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = EventWriter({str(tmp_path)!r})
        writer.write_rows(runs.table(), runs.rows(0, 10))
        writer.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(10, 3000, 10):
                writer.write_rows(runs.table(), runs.rows(step, step + 10))
                writer.flush()
            writer.write_finding(test_events.FINDING)
            writer.close()
        assert len(caught) == 1, caught
        print("trained to the end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "trained to the end"
    assert "Traceback" not in done.stderr
    got = runs.scalars(run_of(tmp_path), "loss")
    assert len(got) > 10
    assert sorted(got) == [10 * i + 9 for i in range(len(got))]
    assert json.loads((run_of(tmp_path) / "incidents.jsonl").read_text())["step"] == 12


def test_everything_up_to_the_last_flush_is_readable_after_kill_9(tmp_path):
    code = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.tensorboard import runs, test_events
        from keras_gradguard.tensorboard.events import EventWriter
        writer = EventWriter({str(tmp_path)!r}, flush_secs=1e9)
        for step in range(0, 300, 10):
            writer.write_rows(runs.table(), runs.rows(step, step + 10))
        writer.write_finding(test_events.FINDING)
        writer.flush()
        print("flushed", flush=True)
        step = 300
        while True:
            writer.write_rows(runs.table(), runs.rows(step, step + 10))
            step += 10
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "flushed"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    steps = np.concatenate(
        [
            schema.decode_rows(step, array).step
            for step, tag, _, array in runs.values(run_of(tmp_path))
            if tag.startswith("gradguard/rows/")
        ]
    )
    assert steps[:300].tolist() == list(range(300))
    assert len(json.loads((run_of(tmp_path) / "incidents.jsonl").read_text())["where"]) == 1


def test_no_file_stays_open(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        use(EventWriter(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param({"run": ""}, "run", id="empty run"),
        pytest.param({"run": "../up"}, "run", id="run leaves the directory"),
        pytest.param({"run": ".."}, "run", id="run is the parent"),
        pytest.param({"run": "a\x00"}, "run", id="control character"),
        pytest.param({"flush_secs": -1}, "flush_secs", id="negative time"),
        pytest.param({"flush_secs": math.nan}, "flush_secs", id="nan time"),
        pytest.param({"log_dir": "gs://bucket/logs"}, "log_dir", id="remote path"),
    ],
)
def test_bad_arguments_name_themselves(tmp_path, arguments, word):
    with pytest.raises(ValueError, match=rf"`{word}`.*Received"):
        EventWriter(**{"log_dir": tmp_path, **arguments})


def test_tensorboard_is_not_imported_before_something_is_written(tmp_path):
    code = f"""
        import sys
        import keras_gradguard.tensorboard.events as events
        writer = events.EventWriter({str(tmp_path)!r})
        assert "tensorboard" not in sys.modules, "at import"
        from tests.tensorboard import runs
        writer.write_rows(runs.table(), runs.rows(0, 1))
        assert "tensorboard" in sys.modules, "the check can fail"
        assert not {{"tensorflow", "keras"}} & set(sys.modules)
    """
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=env, cwd=root)
