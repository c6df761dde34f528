"""The routes of the tab, called as TensorBoard calls them, on event files of the real writer."""

from __future__ import annotations

import gzip
import json
import math
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_gradguard.findings import Finding
from keras_gradguard.tensorboard import codes, schema
from keras_gradguard.tensorboard.events import EventWriter

from . import runs, stories


class Board:
    """A plugin over a log directory, with TensorBoard's Python loader and its size limits."""

    def __init__(self, log_dir: Path) -> None:
        from tensorboard.backend.event_processing import data_ingester, data_provider
        from tensorboard.backend.event_processing import plugin_event_multiplexer as multiplexer
        from werkzeug.test import Client

        from keras_gradguard.tensorboard.plugin.plugin import GradGuardPlugin

        self._log_dir = log_dir
        self._source = multiplexer.EventMultiplexer(
            size_guidance=data_ingester.DEFAULT_SIZE_GUIDANCE,
            tensor_size_guidance=data_ingester.DEFAULT_TENSOR_SIZE_GUIDANCE,
        )
        provider = data_provider.MultiplexerDataProvider(self._source, str(log_dir))
        self.plugin = GradGuardPlugin(SimpleNamespace(data_provider=provider))
        self._clients = {path: Client(app) for path, app in self.plugin.get_plugin_apps().items()}
        self.reload()

    def reload(self) -> None:
        self._source.AddRunsFromDirectory(str(self._log_dir))
        self._source.Reload()

    def ask(self, route: str, **query: Any) -> Any:
        return self._clients[route].get("/", query_string=query)

    def json(self, route: str, **query: Any) -> Any:
        answer = self.ask(route, **query)
        assert answer.status_code == 200, answer.get_data(as_text=True)

        def refuse(word: str) -> None:
            raise AssertionError(f"not strict JSON: {word}")

        return json.loads(answer.get_data(as_text=True), parse_constant=refuse)

    def matrix(self, **query: Any) -> tuple[dict[str, Any], np.ndarray]:
        answer = self._clients["/matrix"].get(
            "/", query_string=query, headers={"Accept-Encoding": "gzip"}
        )
        assert answer.status_code == 200, answer.get_data(as_text=True)
        assert answer.headers["Content-Encoding"] == "gzip"
        body = gzip.decompress(answer.get_data())
        (length,) = struct.unpack_from("<I", body)
        head = json.loads(body[4 : 4 + length])
        array = np.frombuffer(body, "<i2", offset=4 + length)
        return head, array.reshape(head["rows"], -1)


def written(log_dir: Path, norms: np.ndarray, **other: Any) -> None:
    """A run with these norms, ``[n, V]``."""
    table = runs.table(*[f"layer_{i // 2}/w{i % 2}" for i in range(norms.shape[1])], **other)
    writer = EventWriter(log_dir)
    for start in range(0, len(norms), 10):
        batch = [runs.row(start + i, n, loss=1.0) for i, n in enumerate(norms[start : start + 10])]
        writer.write_rows(table, batch)
    writer.close()


# ---------------------------------------------------------------------- codes and pooling

number = st.one_of(
    st.floats(1e-38, 1e38),
    st.sampled_from([0.0, math.nan, math.inf, schema.NONE_NORM, 1e-45]),
)


def slow_code(x: float) -> int:
    if math.isnan(x):
        return codes.NAN
    if math.isinf(x):
        return codes.INF
    if x < 0:
        return codes.NONE
    if x == 0:
        return codes.ZERO
    return round(100 * math.log10(x))


@settings(deadline=None, max_examples=200)
@given(st.lists(number, max_size=20))
def test_log10_codes(values):
    got = codes.log10_codes(np.array(values, np.float32))
    expected = [slow_code(float(x)) for x in np.array(values, np.float32)]
    assert all(
        abs(int(a) - b) <= (abs(b) <= codes.LIMIT) for a, b in zip(got, expected, strict=True)
    )


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(-32768, 32767), min_size=1, max_size=60),
    st.integers(0, 70),
    st.integers(1, 70),
    st.integers(1, 30),
)
def test_pooling_takes_the_largest_of_each_column_and_loses_no_row(values, first, length, width):
    steps = np.arange(0, 2 * len(values), 2)
    matrix = np.array(values, np.int16)[:, None]
    got = codes.pooled(steps, matrix, first, first + length, width)
    shown = [i for i, s in enumerate(steps) if s + 2 > first and s < first + length]
    assert set(shown) <= set(range(got.low, got.high))
    assert len(got.start) <= width + 1
    for j, start in enumerate(got.start):
        begin = int(np.flatnonzero(steps == start)[0])
        end = min(begin + got.pool, got.high)
        assert got.codes[j, 0] == max(values[begin:end])
    assert got.end > (got.start[-1] if len(got.start) else -1)


@pytest.mark.parametrize("special", ["nan", "inf"])
def test_one_bad_step_among_thousands_is_still_seen(tmp_path, special):
    norms = np.ones((3000, 4), np.float32)
    norms[1234, 2] = float(special)
    written(tmp_path, norms)
    head, cells = Board(tmp_path).matrix(run="gradguard", width=30)
    code = {"nan": codes.NAN, "inf": codes.INF}[special]
    rows, columns = np.nonzero(cells == code)
    assert rows.tolist() == [2]
    start = head["starts"][columns[0]]
    assert start <= 1234 < start + head["pool"]


def test_zero_is_shown_only_where_every_step_is_zero(tmp_path):
    norms = np.ones((1000, 2), np.float32)
    norms[300:, 0] = 0
    norms[::2, 1] = 0
    written(tmp_path, norms)
    head, cells = Board(tmp_path).matrix(run="gradguard", width=100)
    starts = np.array(head["starts"])
    np.testing.assert_array_equal(cells[0] == codes.ZERO, starts >= 300)
    assert not (cells[1] == codes.ZERO).any()


def test_steps_skipped_by_loss_scaling_are_not_shown_as_bad(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_rows(
        runs.table(),
        [
            runs.row(0, [1.0, math.inf], skipped=True),
            runs.row(1, [1.0, math.inf]),
            runs.row(2, [1.0, 1.0]),
        ],
    )
    writer.close()
    _, cells = Board(tmp_path).matrix(run="gradguard")
    assert cells.tolist() == [[0, 0, 0], [codes.MISSING, codes.INF, 0]]


def test_none_is_not_nan(tmp_path):
    written(tmp_path, np.full((20, 2), np.nan, np.float32), none=[1])
    _, cells = Board(tmp_path).matrix(run="gradguard")
    assert (cells[0] == codes.NAN).all()
    assert (cells[1] == codes.NONE).all()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_layers_join_their_variables(data):
    values = data.draw(st.lists(st.lists(number, min_size=5, max_size=5), min_size=1, max_size=6))
    norms = np.array(values, np.float32)
    groups = [[0, 3], [1], [2, 4]]
    got = codes.by_layer(codes.log10_codes(norms), groups, "norm", np.ones(5))
    for row, joined in zip(norms.astype(np.float64), got, strict=True):
        for columns, code in zip(groups, joined, strict=True):
            part = [x for x in row[columns] if not x < 0]
            if not part:
                assert code == codes.NONE
            elif any(not math.isfinite(x) for x in part) or not any(part):
                assert code == max(slow_code(x) for x in part)
            else:
                assert abs(code - 100 * math.log10(math.hypot(*part))) <= 2


# ---------------------------------------------------------------------- routes


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    logs = tmp_path_factory.mktemp("plugin") / "logs"
    stories.write(logs / "dead", stories.dead, findings=[stories.DEAD])
    stories.write(logs / "nan", stories.diverging, findings=[stories.NAN], steps=450)
    return Board(logs)


def test_table_describes_the_run(board):
    assert board.json("/runs") == {"runs": ["dead/gradguard", "nan/gradguard"]}
    table = board.json("/table", run="dead/gradguard")
    [series] = table["series"]
    assert [v["name"] for v in series["variables"]] == list(stories.PATHS)
    assert series["layers"] == list(stories.LAYERS)
    assert series["span"] == [0, 600]
    assert (series["rows"], series["samples"]) == (600, 12)
    assert table["incidents"] == 1
    assert table["unreadable"] == []


@pytest.mark.parametrize("metric", ["norm", "zero_fraction", "update_ratio", "median"])
def test_the_dead_layers_are_zero_from_the_right_step(board, metric):
    head, cells = board.matrix(run="dead/gradguard", metric=metric)
    starts = np.array(head["starts"])
    zero = cells == (10_000 if metric == "zero_fraction" else codes.ZERO)
    np.testing.assert_array_equal(zero[:8], np.tile(starts >= 320, (8, 1)))
    assert not zero[8:].any()


def test_nonfinite_counts_are_shown(board):
    head, cells = board.matrix(run="nan/gradguard", metric="nonfinite")
    late = np.array(head["starts"]) >= 400
    assert (cells[8:11, late] == 400).all()
    assert (cells[:, ~late] == 0).all()


def test_a_piece_of_the_range_and_layers(board):
    head, cells = board.matrix(
        run="dead/gradguard", group="layer", **{"from": 310, "to": 330, "width": 500}
    )
    assert head["starts"] == list(range(310, 330))
    assert head["end"] == 330
    assert cells.shape == (6, 20)
    assert (cells[:4, 10:] == codes.ZERO).all()
    assert head["loss"]["starts"] == head["starts"]


def test_a_cell_gives_histogram_numbers_and_history(board):
    cell = board.json("/cell", run="dead/gradguard", variable=6, step=420)
    assert cell["name"] == "dense_1/kernel"
    assert cell["histogram"]["step"] == 400
    assert [b[2] for b in cell["histogram"]["buckets"]] == [400.0]
    assert cell["sample"]["zero_fraction"] == 1.0
    assert cell["sample"]["p50"] == "nan"
    assert cell["row"] == {"step": 420, "code": codes.ZERO}
    assert cell["history"]["high"][319] > -500
    assert set(cell["history"]["high"][320:]) == {codes.ZERO}
    alive = board.json("/cell", run="dead/gradguard", variable=11, step=420)
    assert sum(b[2] for b in alive["histogram"]["buckets"]) == 400


def test_incidents_come_with_the_vocabularys_words(board):
    [incident] = board.json("/incidents", run="dead/gradguard")["incidents"]
    assert incident["title"] == "Gradient is exactly zero"
    assert incident["causes"][0]["name"] == "dead_relu"
    assert "ReLU" in incident["causes"][0]["meaning"]
    assert incident["fix"].startswith("Lower the learning rate")
    assert (incident["first_step"], incident["step"]) == (320, 327)


@pytest.mark.parametrize(
    ("route", "query", "word"),
    [
        pytest.param("/table", {}, "run", id="no run"),
        pytest.param("/table", {"run": "nope"}, "nope", id="unknown run"),
        pytest.param("/table", {"run": "../dead"}, "run", id="path as run"),
        pytest.param("/matrix", {"width": 0}, "width", id="no width"),
        pytest.param("/matrix", {"width": 10**6}, "width", id="too wide"),
        pytest.param("/matrix", {"width": "1e3"}, "width", id="not an integer"),
        pytest.param("/matrix", {"width": "٣"}, "width", id="a digit of another script"),
        pytest.param("/matrix", {"from": -1}, "from", id="negative step"),
        pytest.param("/matrix", {"from": 10, "to": 10}, "to", id="empty range"),
        pytest.param("/matrix", {"to": "9" * 5000}, "to", id="huge"),
        pytest.param("/matrix", {"metric": "<b>"}, "metric", id="unknown metric"),
        pytest.param("/matrix", {"group": "model"}, "group", id="unknown group"),
        pytest.param("/matrix", {"series": 7}, "series", id="unknown series"),
        pytest.param("/cell", {"variable": 0}, "step", id="no step"),
        pytest.param("/cell", {"step": 0}, "variable", id="no variable"),
        pytest.param("/cell", {"step": 0, "variable": 12}, "variable", id="no such variable"),
        pytest.param("/incidents", {"run": "dead"}, "run", id="run without our data"),
    ],
)
def test_a_bad_argument_gets_400_and_a_reason(board, route, query, word):
    if "run" not in query and route != "/table":
        query = {"run": "dead/gradguard", **query}
    answer = board.ask(route, **query)
    assert answer.status_code == 400
    assert answer.mimetype == "text/plain"
    assert word in answer.get_data(as_text=True)


def test_static_files_are_served_and_nothing_else(board):
    apps = board.plugin.get_plugin_apps()
    assert {"/index.js", "/heatmap.js", "/style.css"} <= set(apps)
    for path in apps:
        if "." in path:
            answer = board.ask(path)
            assert answer.status_code == 200
            assert answer.mimetype == ("text/css" if path.endswith(".css") else "text/javascript")
            # Relative addresses only, so that a path prefix works; nothing from outside.
            assert "http://" not in answer.get_data(as_text=True)
            assert "https://" not in answer.get_data(as_text=True)


def test_tensorboard_decides_whether_the_tab_is_active(board):
    assert board.plugin.is_active() is False
    assert board.plugin.frontend_metadata().es_module_path == "/index.js"


# ---------------------------------------------------------------------- runs that change


def test_a_growing_run_shows_new_columns_and_reads_old_chunks_once(tmp_path):
    writer = EventWriter(tmp_path, flush_secs=0)
    table = runs.table()
    writer.write_rows(table, runs.rows(0, 300))
    board = Board(tmp_path)
    assert board.matrix(run="gradguard")[0]["end"] == 300
    asked: list[str] = []
    read = board.plugin._provider.read_tensors

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.extend(kwargs["run_tag_filter"].tags)
        return read(*args, **kwargs)

    board.plugin._provider.read_tensors = noted
    for start in range(300, 700, 50):
        writer.write_rows(table, runs.rows(start, start + 50))
        board.reload()
        head, cells = board.matrix(run="gradguard", width=2000)
        assert head["starts"] == list(range(start + 50))
        np.testing.assert_array_equal(
            cells[0], codes.log10_codes(np.arange(start + 50, dtype=np.float32) + np.float32(0.1))
        )
    assert "gradguard/rows/000/000000000" not in asked
    writer.write_finding(stories.DEAD)
    board.reload()
    assert len(board.json("/incidents", run="gradguard")["incidents"]) == 1
    writer.close()


def test_runs_of_different_models_and_a_run_with_incidents_only(tmp_path):
    written(tmp_path / "a", np.ones((30, 3), np.float32))
    written(tmp_path / "b", np.ones((50, 7), np.float32))
    writer = EventWriter(tmp_path / "c")
    writer.write_finding(Finding(symptom="bad_contract", summary="No loss.", where=("compile",)))
    writer.close()
    board = Board(tmp_path)
    assert board.matrix(run="a/gradguard")[1].shape == (3, 30)
    assert board.matrix(run="b/gradguard")[1].shape == (7, 50)
    assert board.json("/table", run="c/gradguard")["series"] == []
    assert board.ask("/matrix", run="c/gradguard").status_code == 400
    [incident] = board.json("/incidents", run="c/gradguard")["incidents"]
    assert incident["step"] is None


def test_several_optimizers_are_several_series(tmp_path):
    writer = EventWriter(tmp_path)
    tables = [runs.table("g/k", optimizer="one"), runs.table("d/k", "d/b", optimizer="two")]
    writer.begin(tables)
    for table in tables:
        writer.write_rows(table, runs.rows(0, 20, width=len(table.variables)))
    writer.close()
    board = Board(tmp_path)
    table = board.json("/table", run="gradguard")
    assert [s["label"] for s in table["series"]] == ["one", "two"]
    assert board.matrix(run="gradguard", series=1)[1].shape == (2, 20)


def test_a_run_written_anew_replaces_the_old_one(tmp_path):
    import shutil

    logs = tmp_path / "logs"
    written(logs, np.ones((600, 2), np.float32))
    board = Board(logs)
    assert board.matrix(run="gradguard")[0]["end"] == 600
    shutil.rmtree(logs)
    written(logs, np.zeros((100, 2), np.float32))
    fresh = Board(logs)  # a new multiplexer, as after a restart of the loader; same plugin cache
    fresh.plugin._store._runs = board.plugin._store._runs
    head, cells = fresh.matrix(run="gradguard")
    assert head["end"] == 100
    assert (cells == codes.ZERO).all()


# ---------------------------------------------------------------------- fuzz

values = st.one_of(
    st.sampled_from(
        ["dead/gradguard", "nan/gradguard", "0", "1", "11", "600", "norm", "median", "layer", ""]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.text(max_size=12),
    st.floats().map(str),
)
queries = st.dictionaries(
    st.one_of(
        st.sampled_from(
            ["run", "series", "metric", "group", "from", "to", "width", "variable", "step"]
        ),
        st.text(max_size=4),
    ),
    values,
    max_size=7,
)


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(["/runs", "/table", "/matrix", "/cell", "/incidents"]), queries)
def test_no_query_gives_a_server_error(board, route, query):
    answer = board.ask(route, **{k: v for k, v in query.items() if k != "self" and k != "route"})
    assert answer.status_code in (200, 400)
    assert b"Traceback" not in answer.get_data()


def damaged(record: bytes, rng: random.Random) -> bytes:
    """An event that still parses, with tensors that lie about themselves."""
    from tensorboard.compat.proto import event_pb2

    event = event_pb2.Event.FromString(record)
    for value in event.summary.value:
        if rng.random() < 0.5:
            continue
        tensor = value.tensor
        kind = rng.randrange(7)
        if kind == 0 and tensor.tensor_content:
            content = bytearray(tensor.tensor_content)
            for _ in range(rng.randrange(1, 40)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            tensor.tensor_content = bytes(content)
        elif kind == 1:
            tensor.tensor_content = tensor.tensor_content[: rng.randrange(50)]
        elif kind == 2:
            tensor.dtype = rng.randrange(30)
        elif kind == 3 and tensor.tensor_shape.dim:
            del tensor.tensor_shape.dim[rng.randrange(len(tensor.tensor_shape.dim))]
        elif kind == 4:
            tensor.tensor_shape.dim.add(size=rng.choice([0, 1, 2, 3, -1]))
        elif kind == 5 and tensor.string_val:
            text = bytearray(tensor.string_val[0])
            for _ in range(rng.randrange(1, 5)):
                text[rng.randrange(len(text))] = rng.choice(b'0"{}[]:,x\xff-9')
            tensor.string_val[0] = bytes(text)
        elif kind == 6:
            event.step = rng.choice([0, 1, 10**6, 2**62, -5])
    data: bytes = event.SerializeToString()
    return data


@pytest.mark.parametrize("seed", range(20))
def test_broken_event_files_give_no_server_error(tmp_path, seed):
    """Records that are damaged inside, with their checksums made right again."""
    from keras_gradguard.tensorboard.record_file import framed

    stories.write(tmp_path, stories.dead, steps=200, findings=[stories.DEAD.replace(step=150)])
    [path] = (tmp_path / "gradguard").glob("events.*")
    raw, records = path.read_bytes(), []
    while raw:
        (length,) = struct.unpack_from("<Q", raw)
        records.append(raw[12 : 12 + length])
        raw = raw[16 + length :]
    rng = random.Random(seed)
    whole = b"".join(
        framed(damaged(record, rng) if i and rng.random() < 0.5 else record)
        for i, record in enumerate(records)
    )
    path.write_bytes(whole[: len(whole) - rng.randrange(200)])
    board = Board(tmp_path)
    assert board.json("/runs")["runs"] == ["gradguard"]
    for route, query in (
        ("/table", {}),
        ("/incidents", {}),
        ("/matrix", {"metric": "norm"}),
        ("/matrix", {"metric": "zero_fraction", "group": "layer"}),
        ("/matrix", {"metric": "update_ratio", "width": 3}),
        ("/matrix", {"metric": "median"}),
        ("/cell", {"variable": 0, "step": 100}),
    ):
        answer = board.ask(route, run="gradguard", **query)
        assert answer.status_code in (200, 400), (route, query)


def test_a_truncated_file_shows_what_is_whole(tmp_path):
    written(tmp_path, np.ones((600, 2), np.float32))
    [path] = (tmp_path / "gradguard").glob("events.*")
    path.write_bytes(path.read_bytes()[:-100])
    head, _ = Board(tmp_path).matrix(run="gradguard")
    assert 250 <= head["end"] < 600


BROKEN = {
    "gradguard/table/001": "[1, 2]",
    "gradguard/table/002": "{",
    "gradguard/table/xyz": '{"variables": []}',
    "gradguard/finding/000000": "3",
    "gradguard/finding/000001": '{"step": "x", "where": 5, "causes": [1], "evidence": {}}',
    "gradguard/other": "text",
}


def test_foreign_content_under_our_tags_is_left_out(tmp_path):
    from keras_gradguard.tensorboard.record_file import RecordFile
    from keras_gradguard.tensorboard.summaries import EventBuilder, file_header

    (tmp_path / "r").mkdir()
    file = RecordFile(tmp_path / "r" / "events.out.tfevents.1.x")
    file.write(file_header(1.0))
    event = EventBuilder(set())
    for tag, text in BROKEN.items():
        event.text(tag, text, plugin=schema.PLUGIN)
    event.text(
        "gradguard/table/000",
        schema.table_json(runs.table(), series=0, label="", names=["a", "b"]),
        plugin=schema.PLUGIN,
    )
    event.tensor(schema.rows_tag(0, 0), np.ones((2, 3)))
    event.tensor(schema.rows_tag(0, 1), np.full((2, 6), np.nan))
    event.tensor(schema.samples_tag(0, 0), np.ones((9, 5)))
    event.text(schema.samples_tag(0, 1), "no tensor", plugin=schema.PLUGIN)
    file.write(event.serialized(5, 1.0))
    file.close()
    board = Board(tmp_path)
    table = board.json("/table", run="r")
    assert [s["series"] for s in table["series"]] == [0]
    assert len(table["unreadable"]) >= 5
    _, cells = board.matrix(run="r")
    assert cells.shape[1] == 0 or cells.size == 0
    [incident] = board.json("/incidents", run="r")["incidents"]
    assert incident["where"] == []
    assert incident["step"] is None
