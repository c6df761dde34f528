"""What ``gradguard show logs/`` prints: the incidents and a small table of gradient flow.

Reads the guard's own files only, without TensorFlow and without a TensorBoard server.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.tensorboard import incidents, schema
from keras_gradguard.tensorboard.naming import printable
from keras_gradguard.tensorboard.record_file import read_records
from keras_gradguard.tensorboard.summaries import protos

_BARS: Final = "▁▂▃▄▅▆▇█"
_CELLS: Final = 24
_MOST: Final = 60
_NAME_WIDTH: Final = 36


@dataclass(slots=True)
class _Series:
    table: dict[str, Any]
    blocks: list[schema.RowBlock] = field(default_factory=list)
    ratio: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableFlow:
    """One variable over a whole run.

    Args:
        name: Its name in tags.
        first: Norm of its gradient at the first step, None when the gradient is None.
        last: The same at the last step.
        zero_steps: Steps at which the whole gradient was exactly 0.
        nonfinite_steps: Steps at which it held NaN or Inf.
        update_ratio: Size of the last sampled step against the weights, or None.
        cells: Largest norm in each of at most 24 equal stretches of the run; NaN where one of
            its steps was not finite, None where there is no gradient.
    """

    name: str
    first: float | None
    last: float | None
    zero_steps: int
    nonfinite_steps: int
    update_ratio: float | None
    cells: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesFlow:
    """One optimizer's variables over a run."""

    optimizer: str
    first_step: int
    last_step: int
    steps: int
    variables: tuple[VariableFlow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """One run directory.

    Args:
        directory: Where it is.
        series: One for each list of variables that was trained.
        incidents: The lines of ``incidents.jsonl``.
        unreadable: Lines and tensors that could not be read.
    """

    directory: Path
    series: tuple[SeriesFlow, ...]
    incidents: tuple[dict[str, Any], ...]
    unreadable: int = 0


def overview(log_dir: str | os.PathLike[str]) -> tuple[RunOverview, ...]:
    """Read every guarded run under a directory.

    Args:
        log_dir: A run's directory, or one that holds runs at any depth.

    Returns:
        One entry a run, in the order of their directories' names; empty when there is none.

    Raises:
        NotADirectoryError: ``log_dir`` is not a directory.
    """
    root = Path(log_dir)
    if not root.is_dir():
        raise NotADirectoryError(
            f"`log_dir` must be an existing directory. Received: log_dir={os.fspath(log_dir)!r}"
        )
    found = {path.parent for path in root.rglob("events.out.tfevents.*.gradguard")}
    found |= {path.parent for path in root.rglob(incidents.FILE_NAME)}
    return tuple(_run(directory) for directory in sorted(found))


def as_json(runs: Sequence[RunOverview]) -> str:
    """The overview as one strict JSON document; NaN and Inf are written as text."""
    content = [
        {
            "directory": str(run.directory),
            "incidents": list(run.incidents),
            "unreadable": run.unreadable,
            "series": [
                {
                    "optimizer": series.optimizer,
                    "first_step": series.first_step,
                    "last_step": series.last_step,
                    "steps": series.steps,
                    "variables": [
                        {
                            "name": v.name,
                            "first": _strict(v.first),
                            "last": _strict(v.last),
                            "zero_steps": v.zero_steps,
                            "nonfinite_steps": v.nonfinite_steps,
                            "update_ratio": _strict(v.update_ratio),
                        }
                        for v in series.variables
                    ],
                }
                for series in run.series
            ],
        }
        for run in runs
    ]
    return json.dumps({"runs": content}, allow_nan=False, indent=2)


def as_text(runs: Sequence[RunOverview]) -> str:
    """The overview as a terminal shows it, about 100 columns wide.

    A line of blocks is a variable's norm over the run, all on one logarithmic scale; ``·`` is
    a stretch of exact zeros, ``!`` one with NaN or Inf, a blank one without a gradient.
    """
    if not runs:
        return "No guarded run found here. Train with callbacks=[GradientGuard(log_dir=...)]."
    return "\n\n".join("\n".join(_run_lines(run)) for run in runs)


# ---------------------------------------------------------------------- reading


def _run(directory: Path) -> RunOverview:
    lines, bad = _incident_lines(directory / incidents.FILE_NAME)
    series: dict[int, _Series] = {}
    for path in sorted(directory.glob("events.out.tfevents.*.gradguard")):
        for step, tag, tensor in _tensors(path):
            try:
                _take(series, step, tag, tensor)
            except (ValueError, TypeError, KeyError, IndexError):
                bad += 1
    flows = tuple(_flow(series[n]) for n in sorted(series) if series[n].blocks)
    return RunOverview(directory=directory, series=flows, incidents=tuple(lines), unreadable=bad)


def _incident_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    found, bad = [], 0
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            if isinstance(content, dict):
                found.append(content)
            elif line.strip():
                bad += 1
    return found, bad


def _tensors(path: Path) -> Iterator[tuple[int, str, Any]]:
    from google.protobuf.message import DecodeError

    _, event_pb2 = protos()
    for record in read_records(path):
        try:
            event = event_pb2.Event.FromString(record)
        except DecodeError:
            continue
        for value in event.summary.value:
            if value.tag.startswith("gradguard/") and value.HasField("tensor"):
                yield event.step, value.tag, value.tensor


def _take(series: dict[int, _Series], step: int, tag: str, tensor: Any) -> None:
    _, kind, number, *_ = [*tag.split("/"), ""]
    if kind == "table":
        table = json.loads(tensor.string_val[0])
        if len({"variables", "optimizer"} & set(table)) == 2:
            series[int(number)] = _Series(table)
    elif kind in ("rows", "samples") and int(number) in series:
        shape = [d.size for d in tensor.tensor_shape.dim]
        array = np.frombuffer(tensor.tensor_content, "<f4").reshape(shape)
        one, width = series[int(number)], len(series[int(number)].table["variables"])
        if kind == "rows":
            block = schema.decode_rows(step, array)
            if block.norm.shape[1] != width:
                raise ValueError(f"rows of {block.norm.shape[1]} variables, not {width}")
            one.blocks.append(block)
        elif array.shape == (len(schema.SAMPLE_FIELDS), width):
            one.ratio = array[schema.SAMPLE_FIELDS.index("update_ratio")]


def _flow(series: _Series) -> SeriesFlow:
    norms = np.concatenate([b.norm for b in series.blocks]).astype(np.float64)
    flags = np.concatenate([b.flags for b in series.blocks])
    steps = np.concatenate([b.step for b in series.blocks])
    # A step that loss scaling threw away says nothing about the training.
    kept = norms[(flags & schema.SKIPPED) == 0]
    parts = np.array_split(kept, min(_CELLS, max(len(kept), 1)))
    variables = []
    for i, column in enumerate(series.table["variables"]):
        values = kept[:, i]
        ratio = None if series.ratio is None else float(series.ratio[i])
        variables.append(
            VariableFlow(
                name=str(column["name"]),
                first=_norm(values[0]) if len(values) else None,
                last=_norm(values[-1]) if len(values) else None,
                zero_steps=int((values == 0).sum()),
                nonfinite_steps=int((~np.isfinite(values)).sum()),
                update_ratio=None if ratio is None or math.isnan(ratio) else ratio,
                cells=tuple(_norm(p[:, i].max()) for p in parts if len(p)),
            )
        )
    return SeriesFlow(
        optimizer=str(series.table["optimizer"]),
        first_step=int(steps.min()),
        last_step=int(steps.max()),
        steps=len(steps),
        variables=tuple(variables),
    )


def _norm(value: float) -> float | None:
    return None if value == schema.NONE_NORM else float(value)


def _strict(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


# ---------------------------------------------------------------------- text


def _run_lines(run: RunOverview) -> Iterator[str]:
    count = len(run.incidents)
    yield f"{run.directory}: {count} incident{'' if count == 1 else 's'}"
    for number, incident in enumerate(run.incidents, start=1):
        message = str(incident.get("message") or incident.get("summary") or "")
        lines = [printable(line) for line in message.splitlines()] or [""]
        yield ""
        yield f"  #{number} {lines[0]}"
        yield from (f"    {line}" for line in lines[1:])
    for series in run.series:
        yield ""
        yield from _series_lines(series)
    if run.unreadable:
        yield ""
        yield f"  {run.unreadable} damaged entries were left out."


def _series_lines(series: SeriesFlow) -> Iterator[str]:
    shown, left_out = list(series.variables), 0
    if len(shown) > _MOST:
        # The ones in trouble first, then in the model's order.
        shown.sort(key=lambda v: -(v.nonfinite_steps + v.zero_steps))
        left_out = len(shown) - _MOST
        shown = shown[:_MOST]
    yield (
        f"  {printable(series.optimizer)}: {len(series.variables)} variables, {series.steps} steps "
        f"({series.first_step} to {series.last_step})"
    )
    width = min(max([8, *(len(v.name) for v in shown)]), _NAME_WIDTH)
    yield f"  {'gradient':<{width}}  {'first':>8} {'last':>8} {'zero':>6} {'NaN':>6}  {'update':>8}"
    numbers = [c for v in shown for c in v.cells if c is not None and math.isfinite(c) and c > 0]
    # One wild step must not flatten all the rest.
    low, high = np.percentile(np.log10(numbers), [2, 98]) if numbers else (0.0, 0.0)
    for v in shown:
        name = printable(v.name)
        name = name if len(name) <= width else "…" + name[-(width - 1) :]
        zero = f"{100 * v.zero_steps / series.steps:.0f} %" if v.zero_steps else "-"
        bad = str(v.nonfinite_steps) if v.nonfinite_steps else "-"
        ratio = "-" if v.update_ratio is None else f"{v.update_ratio:.1e}"
        line = "".join(_cell(c, low, high) for c in v.cells)
        yield (
            f"  {name:<{width}}  {_said(v.first):>8} {_said(v.last):>8} {zero:>6} {bad:>6}  "
            f"{ratio:>8}  {line}"
        ).rstrip()
    if left_out:
        yield f"  and {left_out} more with no more zeros or NaN than these"


def _said(norm: float | None) -> str:
    if norm is None:
        return "None"
    return "0" if norm == 0 else f"{norm:.1e}"


def _cell(norm: float | None, low: float, high: float) -> str:
    if norm is None:
        return " "
    if not math.isfinite(norm):
        return "!"
    if norm == 0:
        return "·"
    part = (math.log10(norm) - low) / (high - low) if high > low else 1.0
    return _BARS[min(max(int(part * len(_BARS)), 0), len(_BARS) - 1)]
