"""Reads a run's chunks through TensorBoard's data provider, once each, and keeps them decoded."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tensorboard import errors
from tensorboard.data import provider as provider_lib

from keras_gradguard.tensorboard import codes, schema
from keras_gradguard.tensorboard.summaries import layer_groups

logger = logging.getLogger(__name__)

BATCH: Final = 32  # tags in one read: about 10 MB with 300 variables
RUNS_KEPT: Final = 6
EVERYTHING: Final = 1_000_000
# What TensorBoard's reader and our decoding raise on tensors that lie about themselves.
BROKEN: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError, errors.PublicError)


class Growing:
    """Rows in an array with room to grow; the tail may be taken back and written again.

    Args:
        width: Numbers in a row, or None for a plain vector.
        dtype: Of the array.
    """

    def __init__(self, width: int | None, dtype: Any) -> None:
        self._array = np.empty((0,) if width is None else (0, width), dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> NDArray[Any]:
        """The rows so far."""
        return self._array[: self._size]

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more, so that what is there is copied once at most."""
        needed = self._size + rows
        if needed > len(self._array):
            room = max(needed, 3 * len(self._array) // 2)
            grown = np.empty((room, *self._array.shape[1:]), self._array.dtype)
            grown[: self._size] = self.view
            self._array = grown

    def extend(self, rows: NDArray[Any]) -> None:
        """Append rows."""
        self.reserve(len(rows))
        self._array[self._size : self._size + len(rows)] = rows
        self._size += len(rows)

    def truncate(self, size: int) -> None:
        """Forget the rows from ``size`` on."""
        self._size = min(self._size, size)


@dataclass(slots=True)
class Track:
    """Columns over steps: ``step`` [n] and one array [n] or [n, V] for each name."""

    step: Growing
    arrays: dict[str, Growing]
    tags: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """For each tag read: its stamp and how many rows there were before it."""

    def append(self, steps: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Append rows whose steps come after those there are; others are dropped."""
        last = self.step.view[-1] if len(self.step) else -1
        after = np.maximum.accumulate(np.concatenate([[last], steps]))[:-1] < steps
        whole = bool(after.all())
        self.step.extend(steps if whole else steps[after])
        for name, array in values.items():
            self.arrays[name].extend(array if whole else array[after])

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more."""
        for growing in (self.step, *self.arrays.values()):
            growing.reserve(rows)

    def truncate(self, size: int) -> None:
        """Forget the rows from ``size`` on."""
        for growing in (self.step, *self.arrays.values()):
            growing.truncate(size)

    @property
    def steps(self) -> NDArray[np.int64]:
        """``[n]``, increasing."""
        return self.step.view


METRICS: Final = ("norm", "zero_fraction", "nonfinite", "update_ratio", "median")


class Series:
    """One optimizer's variables: their description, rows and samples."""

    def __init__(self, table: dict[str, Any]) -> None:
        variables = table["variables"]
        self.number = int(table["series"])
        self.label = str(table["label"])
        self.optimizer = str(table["optimizer"])
        self.names = [str(v["name"]) for v in variables]
        self.paths = [str(v["path"]) for v in variables]
        self.layers = [str(v["layer"]) for v in variables]
        self.shapes = [[int(n) for n in v["shape"]] for v in variables]
        self.dtypes = [str(v["dtype"]) for v in variables]
        self.sizes = np.array([int(v["size"]) for v in variables], np.int64)
        self.groups = layer_groups(self.layers)
        width = len(self.names)
        self.rows = Track(
            Growing(None, np.int64),
            {"norm": Growing(width, np.int16), "loss": Growing(None, np.float32)},
        )
        self.samples = Track(
            Growing(None, np.int64),
            {
                "numbers": Growing(len(schema.SAMPLE_FIELDS) * width, np.float32),
                **{m: Growing(width, np.int16) for m in METRICS[1:]},
            },
        )

    def track(self, metric: str) -> Track:
        """Where ``metric`` is kept: every step for the norm, sampled steps for the others."""
        return self.rows if metric == "norm" else self.samples

    def codes(self, metric: str) -> codes.Codes:
        """``[n, V]``."""
        return self.track(metric).arrays[metric].view

    def add_rows(self, data: Iterable[Any]) -> None:
        """Add the values of one chunk of rows; a value of another form is left out."""
        for datum in data:
            block = schema.decode_rows(int(datum.step), np.asarray(datum.numpy))
            if block.norm.shape[1] != len(self.names):
                raise ValueError(f"rows of {block.norm.shape[1]} variables in {len(self.names)}")
            loss = np.where(block.flags & schema.LOSS_SEEN, block.loss, np.nan)
            self.rows.append(block.step, {"norm": codes.norm_codes(block), "loss": loss})

    def add_samples(self, data: Iterable[Any]) -> None:
        """Add the values of one chunk of samples."""
        for datum in data:
            array = np.asarray(datum.numpy)
            if array.shape != (len(schema.SAMPLE_FIELDS), len(self.names)):
                raise ValueError(f"a sample of shape {array.shape}")
            found: dict[str, NDArray[Any]] = {
                k: v[None] for k, v in codes.sample_codes(array).items()
            }
            found["numbers"] = array.astype(np.float32).reshape(1, -1)
            self.samples.append(np.array([int(datum.step)], np.int64), found)


@dataclass(slots=True)
class RunData:
    """What is known about one run."""

    series: dict[int, Series] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    bad: dict[str, Any] = field(default_factory=dict)
    """Tags that could not be decoded, with the stamp at which they were tried."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """Findings in the order they were found."""
        return [self.findings[tag] for tag in sorted(self.findings)]


def _text(datum: Any) -> str:
    item = datum.numpy.item()
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)


class Store:
    """Keeps the last runs looked at; each chunk is read and decoded once.

    Args:
        provider: TensorBoard's data provider.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._runs: OrderedDict[tuple[str, str], RunData] = OrderedDict()
        self._lock = threading.Lock()

    def runs(self, ctx: Any, experiment: str) -> list[str]:
        """Names of the runs that hold data of ours."""
        listed = self._provider.list_tensors(
            ctx, experiment_id=experiment, plugin_name=schema.PLUGIN
        )
        return sorted(listed or {})

    def run(self, ctx: Any, experiment: str, run: str) -> RunData | None:
        """The run, up to date, or None when there is none of that name with such data."""
        listed = self._provider.list_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=schema.PLUGIN,
            run_tag_filter=provider_lib.RunTagFilter(runs=[run]),
        )
        stamps = {
            tag: (series.max_step, series.max_wall_time)
            for tag, series in ((listed or {}).get(run) or {}).items()
        }
        with self._lock:
            if not stamps:
                self._runs.pop((experiment, run), None)
                return None
            data = self._runs.setdefault((experiment, run), RunData())
            self._runs.move_to_end((experiment, run))
            while len(self._runs) > RUNS_KEPT:
                self._runs.popitem(last=False)
        with data.lock:
            self._refresh(data, stamps, lambda tags: self._read(ctx, experiment, run, tags))
        return data

    def _read(self, ctx: Any, experiment: str, run: str, tags: list[str]) -> dict[str, list[Any]]:
        """Read some tags; when a broken one spoils the batch, each by itself."""
        try:
            found = self._provider.read_tensors(
                ctx,
                experiment_id=experiment,
                plugin_name=schema.PLUGIN,
                run_tag_filter=provider_lib.RunTagFilter(runs=[run], tags=tags),
                downsample=EVERYTHING,
            )
        except BROKEN as error:
            if len(tags) == 1:
                logger.warning("cannot read %s of run %s: %s", tags[0], run, error)
                return {}
            parts = [self._read(ctx, experiment, run, [tag]) for tag in tags]
            return {tag: data for part in parts for tag, data in part.items()}
        return {tag: list(data) for tag, data in ((found or {}).get(run) or {}).items()}

    def _refresh(self, data: RunData, stamps: dict[str, Any], read: Any) -> None:
        gone = [
            tag
            for series in data.series.values()
            for track in (series.rows, series.samples)
            for tag in track.tags
            if tag not in stamps
        ]
        if gone:  # the run was deleted and written anew
            data.series.clear()
            data.findings.clear()
            data.bad.clear()
        fresh = sorted(t for t in stamps if t not in data.bad or data.bad[t] != stamps[t])
        texts = [t for t in fresh if t.startswith("gradguard/finding/") and t not in data.findings]
        texts += [
            t
            for t in fresh
            if t.startswith("gradguard/table/") and _number(t, 2) not in data.series
        ]
        for tag, values in self._batches(read, texts):
            try:
                content = json.loads(_text(values[-1]))
                if tag.startswith("gradguard/finding/"):
                    data.findings[tag] = _checked_finding(content)
                else:
                    data.series[_number(tag, 2)] = Series(content)
            except (*BROKEN, IndexError) as error:
                logger.warning("cannot decode %s: %s", tag, error)
                data.bad[tag] = stamps[tag]
        for number, series in data.series.items():
            for kind, track, add, rows in (
                ("rows", series.rows, series.add_rows, schema.ROWS_PER_CHUNK),
                ("samples", series.samples, series.add_samples, schema.VALUES_PER_CHUNK),
            ):
                prefix = f"gradguard/{kind}/{number:03d}/"
                tags = sorted(t for t in fresh if t.startswith(prefix))
                self._refresh_track(data, track, tags, stamps, read, add, rows)

    def _refresh_track(
        self,
        data: RunData,
        track: Track,
        tags: list[str],
        stamps: Any,
        read: Any,
        add: Any,
        rows: int,
    ) -> None:
        changed = [i for i, t in enumerate(tags) if track.tags.get(t, (None,))[0] != stamps[t]]
        if not changed:
            return
        # Only the last chunk of a run grows; what follows a changed one is read again.
        todo = tags[changed[0] :]
        for tag in todo:
            if tag in track.tags:
                track.truncate(track.tags.pop(tag)[1])
        track.reserve(len(todo) * rows)
        for tag, values in self._batches(read, todo):
            before = len(track.step)
            try:
                add(values)
            except BROKEN as error:
                logger.warning("cannot decode %s: %s", tag, error)
                track.truncate(before)
                data.bad[tag] = stamps[tag]
            else:
                track.tags[tag] = (stamps[tag], before)

    @staticmethod
    def _batches(read: Any, tags: list[str]) -> Iterable[tuple[str, list[Any]]]:
        batches = [tags[start : start + BATCH] for start in range(0, len(tags), BATCH)]
        if len(batches) == 1:
            found = read(batches[0])
            yield from ((tag, found[tag]) for tag in batches[0] if found.get(tag))
            return
        # The next batch is fetched while this one is decoded: with the fast loader it comes
        # from another process.
        with ThreadPoolExecutor(max_workers=1) as pool:
            coming = pool.submit(read, batches[0]) if batches else None
            for place, batch in enumerate(batches, start=1):
                found = coming.result() if coming is not None else {}
                coming = pool.submit(read, batches[place]) if place < len(batches) else None
                yield from ((tag, found[tag]) for tag in batch if found.get(tag))


def _number(tag: str, place: int) -> int:
    part = tag.split("/")[place]
    return int(part) if part.isascii() and part.isdigit() else -1


def _checked_finding(content: Any) -> dict[str, Any]:
    """A finding with the types that the page relies on."""
    if not isinstance(content, dict):
        raise TypeError("a finding must be a JSON object")

    def texts(value: Any) -> list[str]:
        return [str(v) for v in value] if isinstance(value, list) else []

    def step(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def evidence(value: Any) -> list[str]:
        items = value if isinstance(value, list) else []
        return [str(v.get("text", "")) for v in items if isinstance(v, dict)]

    causes = content.get("causes")
    return {
        "symptom": str(content.get("symptom", "")),
        "severity": str(content.get("severity", "")),
        "summary": str(content.get("summary", "")),
        "where": texts(content.get("where")),
        "step": step(content.get("step")),
        "first_step": step(content.get("first_step")),
        "optimizer": content.get("optimizer") and str(content["optimizer"]),
        "source": content.get("source") and str(content["source"]),
        "evidence": evidence(content.get("evidence")),
        "fix": str(content.get("fix", "")),
        "message": str(content.get("message", "")),
        "causes": [
            {
                "name": str(c.get("name", "")),
                "score": float(c["score"]) if isinstance(c.get("score"), int | float) else 0.0,
                "evidence": evidence(c.get("evidence")),
                "fix": str(c.get("fix", "")),
                "source": c.get("source") and str(c["source"]),
            }
            for c in (causes if isinstance(causes, list) else [])
            if isinstance(c, dict)
        ],
    }
