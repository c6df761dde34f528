"""What the guard's own tensors hold, written in one place for the writer and the readers.

TensorBoard thins out every tag: third-party tensors to 10 values (100 with its fast loader),
scalars to 1000. The complete record therefore goes into *chunks*, each under a tag of its own
with at most :data:`VALUES_PER_CHUNK` values, which no loader thins out::

    gradguard/table/<series>              one JSON text: the columns, see :func:`table_json`
    gradguard/rows/<series>/<chunk>       float32 [n, 4 + V]: every optimizer step
    gradguard/samples/<series>/<chunk>    float32 [9, V]: one sampled step
    gradguard/finding/<number>            one JSON text: a finding

A *series* is one optimizer's variables; a new list of variables starts a new series.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from keras_gradguard import statistics
from keras_gradguard.records import Row, Sample, Table

PLUGIN: Final = "gradguard"
VERSION: Final = 1
VALUES_PER_CHUNK: Final = 8
ROWS_PER_CHUNK: Final = 256
ROW_HEAD: Final = 4  # step, loss, loss scale, flags
SAMPLE_FIELDS: Final = (
    "zero_fraction",
    "nonfinite",
    "update_ratio",
    "p05",
    "p50",
    "p95",
    "max_abs",
    "update",
    "weight",
)
NONE_NORM: Final = -1.0
"""Stands for the norm of a gradient that is None; real norms are never negative."""
MAX_OFFSET: Final = 1 << 24
"""Steps are stored relative to the event's own step: float32 is exact up to here."""

SKIPPED: Final = 1
UPDATE_DUE: Final = 2
LOSS_SEEN: Final = 4

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Consecutive rows, decoded. ``n`` steps, ``V`` variables.

    Args:
        step: ``[n]`` int64.
        loss: ``[n]`` float32, NaN where it was not seen or was NaN (see ``flags``).
        scale: ``[n]`` float32 loss scale.
        flags: ``[n]`` int64, sum of :data:`SKIPPED`, :data:`UPDATE_DUE`, :data:`LOSS_SEEN`.
        norm: ``[n, V]`` float32; :data:`NONE_NORM` where the gradient is None.
    """

    step: NDArray[np.int64]
    loss: Float32
    scale: Float32
    flags: NDArray[np.int64]
    norm: Float32


def encode_rows(rows: Sequence[Row], none: frozenset[int] = frozenset()) -> Float32:
    """Rows as one ``[n, 4 + V]`` float32 tensor, steps relative to the first row's.

    Args:
        rows: At least one, of the same table, spanning less than :data:`MAX_OFFSET` steps.
        none: Columns whose gradient is None.
    """
    first = rows[0].step
    block = np.empty((len(rows), ROW_HEAD + len(rows[0].norm)), np.float32)
    for line, row in zip(block, rows, strict=True):
        flags = SKIPPED * row.skipped + UPDATE_DUE * row.update_due
        flags += LOSS_SEEN * (row.loss is not None)
        loss = np.nan if row.loss is None else row.loss
        line[:ROW_HEAD] = row.step - first, loss, row.scale, flags
        line[ROW_HEAD:] = row.norm
    if none:
        block[:, [ROW_HEAD + i for i in sorted(none)]] = NONE_NORM
    return block


def decode_rows(step: int, block: NDArray[Any]) -> RowBlock:
    """Undo :func:`encode_rows`.

    Args:
        step: Step of the event that carried the tensor.
        block: ``[n, 4 + V]``.

    Raises:
        ValueError: The tensor does not have this form.
    """
    if block.ndim != 2 or block.shape[1] < ROW_HEAD or block.dtype.kind != "f":
        raise ValueError(
            "rows must be a float tensor [n, 4 + V]. "
            f"Received: shape {block.shape}, dtype {block.dtype}"
        )
    head = block[:, :ROW_HEAD]
    if not (np.isfinite(head[:, [0, 3]]).all() and (np.abs(head[:, [0, 3]]) <= MAX_OFFSET).all()):
        raise ValueError("rows hold a step or flags that are not small integers")
    return RowBlock(
        step=step + head[:, 0].astype(np.int64),
        loss=head[:, 1].astype(np.float32),
        scale=head[:, 2].astype(np.float32),
        flags=head[:, 3].astype(np.int64),
        norm=block[:, ROW_HEAD:].astype(np.float32),
    )


def encode_sample(sample: Sample, none: frozenset[int] = frozenset()) -> Float32:
    """A sample's numbers (not its histograms) as a ``[9, V]`` tensor, see ``SAMPLE_FIELDS``.

    Args:
        sample: The statistics.
        none: Columns whose gradient is None: all their numbers become NaN (a zero fraction is
            never NaN otherwise).
    """
    counts = sample.histogram
    percentiles = statistics.log10_percentiles(counts, (5.0, 50.0, 95.0))
    with np.errstate(over="ignore"):  # a ratio beyond float32 is as good as Inf
        block = np.stack(
            [
                statistics.zero_fraction(counts),
                statistics.nonfinite_count(counts),
                statistics.update_ratio(sample.update, sample.weight),
                *np.moveaxis(percentiles, -1, 0),
                sample.max_abs,
                sample.update,
                sample.weight,
            ]
        ).astype(np.float32)
    block[:, sorted(none)] = np.nan
    return block


def table_json(table: Table, *, series: int, label: str, names: Sequence[str]) -> str:
    """The columns of a series as strict JSON.

    Args:
        table: Its variables.
        series: Its number within the run.
        label: The optimizer's name in tags, or ``""`` when there is only one.
        names: ``[V]``, the name of each variable in tags: ``gradient_log10/<name>``.
    """
    columns = [
        {
            "path": info.path,
            "name": name,
            "layer": info.layer,
            "shape": list(info.shape),
            "dtype": info.dtype,
            "size": info.size,
            "trainable": info.trainable,
            "sparse": info.sparse,
        }
        for info, name in zip(table.variables, names, strict=True)
    ]
    content = {
        "version": VERSION,
        "series": series,
        "label": label,
        "optimizer": table.optimizer,
        "variables": columns,
    }
    # ASCII only: a name may hold a lone surrogate, which no file encoding takes.
    return json.dumps(content, allow_nan=False)


def rows_tag(series: int, chunk: int) -> str:
    """Tag of one chunk of rows."""
    return f"gradguard/rows/{series:03d}/{chunk:09d}"


def samples_tag(series: int, chunk: int) -> str:
    """Tag of one chunk of samples."""
    return f"gradguard/samples/{series:03d}/{chunk:09d}"


def table_tag(series: int) -> str:
    """Tag of a series' columns."""
    return f"gradguard/table/{series:03d}"


def finding_tag(number: int) -> str:
    """Tag of one finding."""
    return f"gradguard/finding/{number:06d}"
