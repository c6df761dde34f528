"""Tables, rows and samples made from plain arrays, for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_gradguard import statistics
from keras_gradguard.records import Row, Sample, Table, VariableInfo


def table(
    *paths: str,
    optimizer: str = "adam",
    none: Iterable[int] = (),
    size: int = 12,
    layers: Sequence[str] | None = None,
) -> Table:
    paths = paths or ("dense/kernel", "dense/bias")
    layers = layers or [p.rpartition("/")[0] or p for p in paths]
    return Table(
        optimizer=optimizer,
        variables=tuple(
            VariableInfo(path=p, layer=layer, shape=(size,), dtype="float32", size=size)
            for p, layer in zip(paths, layers, strict=True)
        ),
        none=frozenset(none),
    )


def row(step: int, norm: Sequence[float] = (1.0, 2.0), **other: Any) -> Row:
    return Row(step=step, norm=np.asarray(norm, np.float32), **other)


def rows(start: int, stop: int, width: int = 2) -> list[Row]:
    """Rows whose norms tell their place: ``step + (column + 1) / 10``."""
    columns = (np.arange(width) + 1) / 10
    return [row(s, s + columns, loss=float(1000 - s)) for s in range(start, stop)]


def sample(step: int, gradients: Sequence[Any], **other: Any) -> Sample:
    arrays = [np.asarray(g, np.float32) for g in gradients]
    width = len(arrays)
    values = {
        "max_abs": np.array([np.max(np.abs(a), initial=0) for a in arrays], np.float32),
        "update": np.full(width, 0.5, np.float32),
        "weight": np.full(width, 2.0, np.float32),
    }
    return Sample(
        step=step,
        histogram=np.stack([statistics.exponent_counts(a) for a in arrays]).astype(np.int32),
        **{**values, **other},
    )


def events(directory: Path) -> list[Any]:
    """Every event of a run directory, by TensorBoard's own loader, in order of the files."""
    from tensorboard.backend.event_processing import event_file_loader

    found: list[Any] = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        found.extend(event_file_loader.EventFileLoader(str(path)).Load())
    return found


def values(directory: Path) -> list[tuple[int, str, str, Any]]:
    """``(step, tag, plugin, array)`` of every value, in the order written."""
    from tensorboard.util import tensor_util

    plugins: dict[str, str] = {}
    found = []
    for event in events(directory):
        for value in event.summary.value:
            if value.HasField("metadata"):
                plugins[value.tag] = value.metadata.plugin_data.plugin_name
            found.append(
                (
                    event.step,
                    value.tag,
                    plugins[value.tag],
                    tensor_util.make_ndarray(value.tensor),
                )
            )
    return found


def scalars(directory: Path, tag: str) -> dict[int, float]:
    return {step: float(v) for step, t, plugin, v in values(directory) if t == tag}


def texts(directory: Path) -> list[tuple[int, str]]:
    """``(step, text)`` of what the Text tab shows."""
    return [
        (step, str(array.item(), "utf-8"))
        for step, _, plugin, array in values(directory)
        if plugin == "text"
    ]
