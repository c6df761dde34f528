"""What a guarded run leaves for TensorBoard: event files and ``incidents.jsonl``.

No TensorFlow is needed, and TensorBoard is imported with the first thing written, not before.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from keras_gradguard import statistics
from keras_gradguard.errors import GradientGuardWarning
from keras_gradguard.findings import Finding
from keras_gradguard.records import ActivationSample, Float, Row, Sample, Table
from keras_gradguard.tensorboard import incidents, schema
from keras_gradguard.tensorboard.activations import add_activations
from keras_gradguard.tensorboard.flow_image import FlowHistory, picture
from keras_gradguard.tensorboard.layout import layout_bytes
from keras_gradguard.tensorboard.naming import NameRegistry, printable
from keras_gradguard.tensorboard.record_file import RecordFile
from keras_gradguard.tensorboard.summaries import (
    EventBuilder,
    file_header,
    layer_groups,
)
from keras_gradguard.tensorboard.thinning import SMALLEST, Thinning

logger = logging.getLogger("keras_gradguard")

_NORMS_KEPT: Final = 1024
_ROWS_HELD: Final = 128
_file_numbers = itertools.count()


class _Series:
    """One list of variables and how far its record has got."""

    def __init__(self, table: Table, number: int, names: list[str], layers: list[str]) -> None:
        self.table = table
        self.number = number
        self.names = names
        self.layers = layer_groups(layers)
        self.rows: list[Row] = []
        self.last_step = -1
        self.last_sample = -1
        self.chunk, self.values_in_chunk, self.rows_in_chunk = 0, 0, 0
        self.samples_written = 0
        # What was offered, and what of it was left out since the last that was kept.
        self.rows_offered, self.samples_offered, self.calls = 0, 0, 0
        self.left_out: deque[Row] = deque(maxlen=_ROWS_HELD)
        self.peak: float | None = None
        self.loss: float | None = None
        # A sampled step's norm is known from its row, which may come before or after.
        self.norms: dict[int, Float] = {}
        self.awaited: set[int] = set()
        self.flow: FlowHistory | None = None


class EventWriter:
    """Writes a run's numbers and findings under ``<log_dir>/<run>``.

    **Which directory.** The run's own directory, beside Keras' ``train`` and ``validation``
    (two writers in one directory lose each other's points), is made when the first thing is
    written. When ``<log_dir>/gradguard`` is there already, from an earlier training, the new
    run goes to ``gradguard_1``, then ``gradguard_2``, ...: runs are never mixed. The same
    writer may be used for several trainings: after :meth:`close` it goes on in the same
    directory when the optimizer's steps go on (``fit`` called again), and in a new one when
    they start again.

    **Tags** name the metric first: ``gradient_log10/<variable>``, ``gradient_norm/...``,
    ``gradient_zero_fraction/...``, ``gradient_nonfinite/...``, ``update_ratio/...``, and
    ``gradient_log10_p05/<layer>`` with ``p50`` and ``p95``; of layer outputs
    ``activation_log10/<layer>``, ``activation_zero_fraction/...``, ``activation_dead_fraction/...``
    and ``activation_saturated_fraction/...``. With several optimizers their name
    stands before the variable's (``gradient_norm/generator/dense/kernel``): announce them with
    :meth:`begin`; one that appears later unannounced gets its name, the first keeps none.

    **How much.** A run takes at most about ``max_bytes``, however long it is: see
    :class:`~keras_gradguard.tensorboard.thinning.Thinning`. With a finding, the steps before it
    that had been left out are written after all, and incidents are always written.

    **Failure.** A full or read-only disk, or a directory that is deleted meanwhile, gives one
    :class:`~keras_gradguard.errors.GradientGuardWarning`; then nothing more is written and
    training goes on. What was flushed stays readable, also after ``kill -9``.

    Not safe for use from several threads at once.

    Args:
        log_dir: Local directory for all runs; made when missing.
        run: Name of the run's directory in it. Defaults to ``"gradguard"``.
        flush_secs: Written data reach the disk after this many seconds at the latest (when
            something is written at all). Defaults to 10.
        histograms: Write histograms and percentile bands. False leaves the scalars, the rows
            for the GradGuard tab and the incidents. Defaults to True.
        images: Write a picture of the gradient flow, ``gradient_flow``, to the Images tab at each
            :meth:`close`. Defaults to False.
        buffer_bytes: Flush earlier when this much is waiting. Defaults to 1 MiB.
        max_bytes: Bytes of a run's event files; None for no limit. Defaults to 2 GiB.

    Raises:
        ValueError: ``run`` is not a plain directory name, ``flush_secs`` is negative,
            ``max_bytes`` is below 1 MiB or ``log_dir`` is not a local path.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        run: str = "gradguard",
        flush_secs: float = 10.0,
        histograms: bool = True,
        images: bool = False,
        buffer_bytes: int = 1 << 20,
        max_bytes: int | None = 1 << 31,
    ) -> None:
        if not run or run in (".", "..") or run != printable(run) or set(run) & set("/\\:"):
            raise ValueError(f"`run` must be a plain directory name. Received: run={run!r}")
        if not flush_secs >= 0:
            raise ValueError(
                f"`flush_secs` must be a number of at least 0. Received: flush_secs={flush_secs!r}"
            )
        if max_bytes is not None and max_bytes < SMALLEST:
            raise ValueError(
                f"`max_bytes` must be at least {SMALLEST} (1 MiB), or None for no limit. "
                f"Received: max_bytes={max_bytes!r}"
            )
        if "://" in os.fspath(log_dir):
            raise ValueError(
                "`log_dir` must be a local directory; copy it to remote storage after training, "
                f"or mount that. Received: log_dir={log_dir!r}"
            )
        self._root = Path(log_dir)
        self._run = run
        self._flush_secs = flush_secs
        self._histograms = histograms
        self._images = images
        self._buffer_bytes = buffer_bytes
        self._max_bytes = max_bytes
        self._directory: Path | None = None
        self._file: RecordFile | None = None
        self._failed = False
        self._next_flush = 0.0
        self._latest = 0.0
        self._declared: list[Table] = []
        self._forget_run()

    @property
    def directory(self) -> Path | None:
        """The run's directory, or None before anything was written."""
        return self._directory

    # ------------------------------------------------------------------ public

    def begin(self, tables: Sequence[Table], *, step: int | None = None) -> None:
        """Say that a training starts, with which optimizers and at which step.

        Optional, but needed for several optimizers to get their names into the tags from the
        start, and for a finding that comes before the first step of a second training to land
        in the second run. Writes nothing.

        Args:
            tables: One for each optimizer.
            step: Optimizer step that comes next, or None when unknown.
        """
        if step is not None and any(step <= s.last_step for s in self._series.values()):
            self._guarded(self._new_run)
        self._declared = list(tables)

    def write_rows(self, table: Table, rows: Sequence[Row]) -> None:
        """Write every optimizer step of ``rows``, complete, and their scalars.

        The scalars ``gradient_global_norm`` and ``loss`` get one point a call: the largest norm
        of the call's steps (a non-finite one counts as the largest) and the last loss. In a run
        that nears ``max_bytes`` some rows are left out, and a point stands for several calls.

        Args:
            table: The columns.
            rows: In the order of their steps. A step that is not after the last one written
                for this table starts a new run.
        """
        if rows:
            self._guarded(lambda: self._write_rows(table, rows))

    def write_sample(self, table: Table, sample: Sample) -> None:
        """Write the histograms and scalars of one sampled step.

        Args:
            table: The columns. Variables whose gradient is None are left out.
            sample: The statistics.
        """
        self._guarded(lambda: self._write_sample(table, sample))

    def write_activations(self, sample: ActivationSample) -> None:
        """Write what the layers put out at one sampled step.

        Args:
            sample: The statistics.
        """
        self._guarded(lambda: self._write_activations(sample))

    def write_finding(self, finding: Finding) -> None:
        """Write a finding at once: to ``incidents.jsonl`` (synced to the disk) and the Text tab.

        Args:
            finding: What was found.
        """
        if self._failed and self._directory is not None:
            # The event file may have failed for its size; a line of JSON may still fit.
            with suppress(OSError):
                self._append_incident(self._directory, finding)
        self._guarded(lambda: self._write_finding(finding))

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._guarded(self._flush)

    def close(self) -> None:
        """Flush and release the file. Writing again later is allowed, see the class."""
        self._guarded(self._close)

    # ------------------------------------------------------------------ failure

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except OSError as error:
            self._give_up(
                f"{error.strerror or error}",
                "Check the disk's free space and the directory's permissions.",
            )
        except Exception as error:
            # A mistake in writing must not end a training of days; it is told in full.
            logger.exception("writing to '%s' failed", self._directory or self._root)
            self._give_up(
                f"{type(error).__name__}: {error}",
                "This is a fault of keras_gradguard: please report it, with the logged traceback.",
            )

    def _give_up(self, reason: str, advice: str) -> None:
        self._failed = True
        if self._file is not None:
            self._file.abandon()
            self._file = None
        for series in self._series.values():
            series.rows.clear()
        warnings.warn(
            GradientGuardWarning(
                f"Cannot write to '{self._directory or self._root}' ({reason}): training goes on, "
                f"but nothing more is logged there. {advice}"
            ),
            stacklevel=5,
        )

    # ------------------------------------------------------------------ the run's directory

    def _forget_run(self) -> None:
        self._series: dict[tuple[str, tuple[str, ...]], _Series] = {}
        self._labels: dict[Any, str] = {}
        self._variable_names = NameRegistry()
        self._layer_names = NameRegistry()
        self._call_names = NameRegistry()
        self._findings: list[Finding] = []
        self._described: set[str] = set()
        self._layout_written = False
        self._thinning = Thinning(self._max_bytes)
        self._bytes_before = 0

    def _new_run(self) -> None:
        self._close()
        self._directory = None
        self._forget_run()

    def _opened(self) -> RecordFile:
        if self._file is None:
            if self._directory is None:
                self._directory = self._made_directory()
            # Readers take a directory's files in the order of their names.
            when, number = f"{int(self._clock()):010d}", f"{next(_file_numbers):06d}"
            name = f"events.out.tfevents.{when}.{os.getpid()}.{number}.gradguard"
            self._file = RecordFile(self._directory / name, self._buffer_bytes)
            self._file.write(file_header(self._clock()))
            self._described.clear()
            self._next_flush = time.monotonic()
        return self._file

    def _made_directory(self) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            directory = self._root / (f"{self._run}_{number}" if number else self._run)
            try:
                # Making it, not looking for it, decides: two processes cannot both succeed.
                directory.mkdir()
            except FileExistsError:
                number += 1
            else:
                return directory

    def _flush(self) -> None:
        for series in self._series.values():
            self._write_block(series)
        if self._file is not None:
            self._file.flush()
        self._next_flush = time.monotonic() + self._flush_secs

    def _flush_if_due(self) -> None:
        if time.monotonic() >= self._next_flush:
            self._flush()

    def _close(self) -> None:
        if self._file is not None:
            for series in self._series.values():
                self._write_curves(series)
                self._write_image(series)
        self._flush()
        file, self._file = self._file, None
        if file is not None:
            self._bytes_before += file.size
            file.close()

    def _write(self, event: EventBuilder, step: int) -> None:
        if len(event):
            file = self._opened()
            file.write(event.serialized(step, self._clock()))
            self._thinning.used(self._bytes_before + file.size)

    def _clock(self) -> float:
        """Seconds since 1970, never less than before: a run's files are read by their time."""
        self._latest = max(self._latest, time.time())
        return self._latest

    def _event(self) -> EventBuilder:
        self._opened()  # a new file needs the metadata of its tags again
        return EventBuilder(self._described)

    # ------------------------------------------------------------------ series and names

    def _label(self, table: Table) -> str:
        """The optimizer's name for tags: empty for the only or first one."""
        declared = [t for t in self._declared if _key(t) == _key(table)]
        key: Any = _key(table) if declared else table.optimizer
        if key not in self._labels:
            alone = len(self._declared) < 2 if declared else not self._labels
            wanted = "" if alone else printable(table.optimizer)
            label, number = wanted, 1
            while label in self._labels.values():
                number += 1
                label = f"{wanted or printable(table.optimizer)}_{number}"
            self._labels[key] = label
        return self._labels[key]

    def _series_of(self, table: Table) -> _Series:
        key = _key(table)
        series = self._series.get(key)
        if series is None:
            label = self._label(table)
            names = [self._variable_names.name(label, v.path) for v in table.variables]
            layers = [self._layer_names.name(label, v.layer) for v in table.variables]
            series = self._series[key] = _Series(table, len(self._series), names, layers)
            event = self._event()
            event.text(
                schema.table_tag(series.number),
                schema.table_json(table, series=series.number, label=label, names=names),
                plugin=schema.PLUGIN,
            )
            self._write(event, 0)
        elif series.table.none != table.none:
            self._write_block(series)
            series.table = table
        return series

    def _suffix(self, table: Table) -> str:
        label = self._label(table)
        return f"/{label}" if label else ""

    # ------------------------------------------------------------------ rows

    def _write_rows(self, table: Table, rows: Sequence[Row]) -> None:
        if rows[0].step <= self._series_of(table).last_step:
            self._new_run()
        series = self._series_of(table)
        for row in rows:
            if self._thinning.keeps(series.rows_offered):
                series.left_out.clear()
                self._keep(series, row)
            else:
                series.left_out.append(row)
            series.rows_offered += 1
            series.norms[row.step] = row.norm
        series.last_step = rows[-1].step
        for step in [*itertools.islice(series.norms, max(0, len(series.norms) - _NORMS_KEPT))]:
            del series.norms[step]
        if self._images:
            if series.flow is None:
                series.flow = FlowHistory(len(series.names))
            series.flow.add(rows, table.none)

        counted = [row for row in rows if not row.skipped]
        if counted:
            norms = statistics.global_norm(np.stack([r.norm for r in counted]), table.none)
            # np.maximum passes NaN on, and Inf is the largest: neither hides behind a finite norm.
            series.peak = float(np.max(norms if series.peak is None else [series.peak, *norms]))
        losses = [row.loss for row in rows if row.loss is not None]
        if losses:
            series.loss = float(losses[-1])
        if self._thinning.keeps(series.calls):
            self._write_curves(series)
        series.calls += 1

        for step in sorted(series.awaited & {row.step for row in rows}):
            self._write_norms(series, step)
        if series.rows_in_chunk + len(series.rows) >= schema.ROWS_PER_CHUNK:
            self._write_block(series)
        self._flush_if_due()

    def _keep(self, series: _Series, row: Row) -> None:
        full = series.rows_in_chunk + len(series.rows) >= schema.ROWS_PER_CHUNK
        far = series.rows and row.step - series.rows[0].step >= schema.MAX_OFFSET
        if full or far:
            self._write_block(series)
        series.rows.append(row)

    def _write_curves(self, series: _Series) -> None:
        """Write what gathered since the last point of the curves over the whole model."""
        event = self._event()
        suffix = self._suffix(series.table)
        if series.peak is not None:
            event.scalar(f"gradient_global_norm{suffix}", series.peak)
        if series.loss is not None:
            event.scalar(f"loss{suffix}", series.loss)
        series.peak = series.loss = None
        self._write(event, series.last_step)

    def _write_block(self, series: _Series) -> None:
        """Write the waiting rows as one value of the current chunk."""
        if not series.rows:
            return
        rows, series.rows = series.rows, []
        event = self._event()
        event.tensor(
            schema.rows_tag(series.number, series.chunk),
            schema.encode_rows(rows, series.table.none),
        )
        self._write(event, rows[0].step)
        series.values_in_chunk += 1
        series.rows_in_chunk += len(rows)
        if (
            series.values_in_chunk == schema.VALUES_PER_CHUNK
            or series.rows_in_chunk >= schema.ROWS_PER_CHUNK
        ):
            series.chunk += 1
            series.values_in_chunk = series.rows_in_chunk = 0

    # ------------------------------------------------------------------ samples

    def _write_sample(self, table: Table, sample: Sample) -> None:
        if sample.step <= self._series_of(table).last_sample:
            self._new_run()
        series = self._series_of(table)
        series.last_sample = sample.step
        series.samples_offered += 1
        if not self._thinning.keeps(series.samples_offered - 1):
            return
        event = self._event()
        numbers = schema.encode_sample(sample, table.none)
        event.tensor(
            schema.samples_tag(series.number, series.samples_written // schema.VALUES_PER_CHUNK),
            numbers,
        )
        series.samples_written += 1
        zero, nonfinite, ratio = numbers[:3].tolist()
        tables = statistics.log10_tables(sample.histogram) if self._histograms else []
        for i, name in enumerate(series.names):
            if i in table.none:
                continue
            if self._histograms:
                event.histogram(f"gradient_log10/{name}", tables[i])
            event.scalar(f"gradient_zero_fraction/{name}", zero[i])
            event.scalar(f"gradient_nonfinite/{name}", nonfinite[i])
            if math.isfinite(ratio[i]):  # no ratio to weights that are all zero
                event.scalar(f"update_ratio/{name}", ratio[i])
        if self._histograms:
            self._add_bands(event, series, table, sample)
        self._write(event, sample.step)
        if sample.step in series.norms:
            self._write_norms(series, sample.step)
        else:
            series.awaited.add(sample.step)
        self._flush_if_due()

    def _add_bands(
        self, event: EventBuilder, series: _Series, table: Table, sample: Sample
    ) -> None:
        if not self._layout_written:
            self._layout_written = True
            event.layout(layout_bytes(self._all_layers(series)))
        seen = {
            layer: [i for i in columns if i not in table.none]
            for layer, columns in series.layers.items()
        }
        layers = [layer for layer, columns in seen.items() if columns]
        if not layers:
            return
        columns = [i for layer in layers for i in seen[layer]]
        begins = np.cumsum([0, *(len(seen[layer]) for layer in layers[:-1])])
        counts = np.add.reduceat(sample.histogram[columns].astype(np.int64), begins, axis=0)
        bands = statistics.log10_percentiles(counts, (5.0, 50.0, 95.0))
        for layer, band in zip(layers, bands, strict=True):
            if math.isfinite(band[1]):  # NaN when every entry is zero: the curve ends there
                for q, value in zip(("p05", "p50", "p95"), band, strict=True):
                    event.scalar(f"gradient_log10_{q}/{layer}", float(value))

    def _all_layers(self, series: _Series) -> list[str]:
        """Layers of the announced tables and of ``series``, without repetition."""
        names = [
            self._layer_names.name(self._label(table), info.layer)
            for table in self._declared
            for info in table.variables
        ]
        return list(dict.fromkeys([*names, *series.layers]))

    def _write_norms(self, series: _Series, step: int) -> None:
        series.awaited.discard(step)
        norm = series.norms[step].tolist()
        event = self._event()
        for i, name in enumerate(series.names):
            if i not in series.table.none:
                event.scalar(f"gradient_norm/{name}", norm[i])
        self._write(event, step)

    def _write_image(self, series: _Series) -> None:
        if series.flow is None or not series.names:
            return
        width, height, png = picture(series.flow.cells)
        event = self._event()
        tag = f"gradient_flow{self._suffix(series.table)}"
        event.image(tag, (width, height), png, series.names)
        self._write(event, series.last_step)

    # ------------------------------------------------------------------ activations

    def _write_activations(self, sample: ActivationSample) -> None:
        names = [self._call_names.name("", layer.layer) for layer in sample.layers]
        event = self._event()
        add_activations(event, sample, names, histograms=self._histograms)
        self._write(event, sample.step)
        self._flush_if_due()

    # ------------------------------------------------------------------ findings

    @staticmethod
    def _append_incident(directory: Path, finding: Finding) -> None:
        incidents.append_line(
            directory / incidents.FILE_NAME, incidents.json_line(finding, time.time())
        )

    def _write_finding(self, finding: Finding) -> None:
        for series in self._series.values():
            while series.left_out:
                self._keep(series, series.left_out.popleft())
        self._append_incident(self._opened().path.parent, finding)
        self._findings.append(finding)
        event = self._event()
        event.text("gradguard/incidents", incidents.markdown(self._findings))
        event.text(
            schema.finding_tag(len(self._findings) - 1),
            incidents.json_line(finding, time.time()),
            plugin=schema.PLUGIN,
        )
        last = max((s.last_step for s in self._series.values()), default=0)
        self._write(event, max(last, 0) if finding.step is None else finding.step)
        self._flush()


def _key(table: Table) -> tuple[str, tuple[str, ...]]:
    return table.optimizer, tuple(v.path for v in table.variables)
