"""The routes of the GradGuard tab. Every argument is checked; a bad one gets 400 and a reason."""

from __future__ import annotations

import gzip
import json
import logging
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.data import provider as provider_lib
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_gradguard.tensorboard import codes, schema
from keras_gradguard.tensorboard.plugin.store import (
    BROKEN,
    EVERYTHING,
    METRICS,
    RunData,
    Series,
    Store,
)
from keras_gradguard.vocabulary import CAUSES, SYMPTOMS

logger = logging.getLogger(__name__)

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css"}
_MAX_WIDTH: Final = 4096
_MAX_CELLS: Final = 3_000_000
_MAX_STEP: Final = 2**62
_MAX_POINTS: Final = 2000


class BadRequestError(Exception):
    """An argument is missing or wrong; the text is the reason that the client gets."""


def _integer(request: Any, name: str, default: int | None, low: int, high: int) -> int:
    text = request.args.get(name)
    if text is None and default is not None:
        return default
    try:
        if text is None or len(text) > 20 or not text.isascii():
            raise ValueError
        value = int(text)
    except ValueError:
        raise BadRequestError(
            f"`{name}` must be an integer. Received: {name}={_short(text)}"
        ) from None
    if not low <= value <= high:
        raise BadRequestError(
            f"`{name}` must be from {low} to {high}. Received: {name}={_short(text)}"
        )
    return value


def _choice(request: Any, name: str, default: str, allowed: tuple[str, ...]) -> str:
    text = request.args.get(name, default)
    if text not in allowed:
        raise BadRequestError(
            f"`{name}` must be one of {', '.join(allowed)}. Received: {name}={_short(text)}"
        )
    return str(text)


def _short(text: Any) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _number(value: Any) -> float | str | None:
    """A number as strict JSON can hold it."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


class GradGuardPlugin(base_plugin.TBPlugin):  # type: ignore[misc, unused-ignore]
    """Heat map of gradients over steps, with incidents.

    Args:
        context: TensorBoard's context; only its data provider is used.
    """

    plugin_name = schema.PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._provider = context.data_provider
        self._store = Store(self._provider)

    def get_plugin_apps(self) -> dict[str, Any]:
        """Return the routes, relative to ``data/plugin/gradguard``."""
        apps: dict[str, Any] = {
            f"/{path.name}": self._static(path)
            for path in sorted(_STATIC.iterdir())
            if path.suffix in _TYPES
        }
        for name in ("runs", "table", "matrix", "cell", "incidents"):
            apps[f"/{name}"] = self._route(getattr(self, f"_{name}"))
        return apps

    def is_active(self) -> bool:
        """Leave it to TensorBoard, which looks for data of this plugin by name."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Say where the page's module is."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="GradGuard")

    # ------------------------------------------------------------------ plumbing

    @staticmethod
    def _static(path: Path) -> Any:
        body = path.read_bytes()

        @wrappers.Request.application
        def serve(request: Any) -> Any:
            return http_util.Respond(request, body, _TYPES[path.suffix])

        return serve

    @staticmethod
    def _route(handler: Callable[[Any, Any, str], Any]) -> Any:
        @wrappers.Request.application
        def serve(request: Any) -> Any:
            try:
                ctx = plugin_util.context(request.environ)
                experiment = plugin_util.experiment_id(request.environ)
                result = handler(request, ctx, experiment)
            except BadRequestError as error:
                return http_util.Respond(request, str(error), "text/plain", code=400)
            except errors.PublicError as error:
                code = error.http_code if error.http_code < 500 else 400
                return http_util.Respond(request, _short(str(error)), "text/plain", code=code)
            if isinstance(result, bytes):
                return http_util.Respond(
                    request, result, "application/octet-stream", content_encoding="gzip"
                )
            body = json.dumps(result, allow_nan=False)
            return http_util.Respond(request, body, "application/json")

        return serve

    def _run_data(self, request: Any, ctx: Any, experiment: str) -> RunData:
        name = request.args.get("run")
        if not name:
            raise BadRequestError("`run` is missing")
        data = self._store.run(ctx, experiment, name)
        if data is None:
            raise BadRequestError(f"no GradGuard data in this run. Received: run={_short(name)}")
        return data

    def _series(self, request: Any, data: RunData) -> Series:
        known = sorted(data.series)
        if not known:
            raise BadRequestError("this run has no gradients yet, only incidents")
        number = _integer(request, "series", known[0], 0, 10**6)
        if number not in data.series:
            raise BadRequestError(f"`series` must be one of {known}. Received: series={number}")
        return data.series[number]

    # ------------------------------------------------------------------ routes

    def _runs(self, request: Any, ctx: Any, experiment: str) -> Any:
        """All runs with data, in order."""
        del request
        return {"runs": self._store.runs(ctx, experiment)}

    def _table(self, request: Any, ctx: Any, experiment: str) -> Any:
        """The series of a run: their variables and the range of steps."""
        data = self._run_data(request, ctx, experiment)
        with data.lock:
            return {
                "series": [_described(data.series[n]) for n in sorted(data.series)],
                "incidents": len(data.findings),
                "unreadable": sorted(data.bad)[:20],
            }

    def _matrix(self, request: Any, ctx: Any, experiment: str) -> bytes:
        """The heat map's cells, pooled to the width asked for.

        The answer is binary: a uint32 with the length of a JSON head, the head padded with
        blanks to a multiple of 4, then int16 codes, variable by variable (little-endian).
        """
        first = _integer(request, "from", 0, 0, _MAX_STEP)
        last = _integer(request, "to", _MAX_STEP, 0, _MAX_STEP)
        width = _integer(request, "width", 1000, 1, _MAX_WIDTH)
        metric = _choice(request, "metric", "norm", METRICS)
        group = _choice(request, "group", "variable", ("variable", "layer"))
        if last <= first:
            raise BadRequestError(f"`to` must be above `from`. Received: from={first}, to={last}")
        data = self._run_data(request, ctx, experiment)
        series = self._series(request, data)
        with data.lock:
            width = max(1, min(width, _MAX_CELLS // max(len(series.names), 1)))
            track = series.track(metric)
            picture = codes.pooled(track.steps, series.codes(metric), first, last, width)
            shown = picture.codes
            if group == "layer":
                shown = codes.by_layer(shown, list(series.groups.values()), metric, series.sizes)
            head = {
                "series": series.number,
                "metric": metric,
                "group": group,
                "pool": picture.pool,
                "rows": shown.shape[1],
                "starts": picture.start.tolist(),
                "end": picture.end,
                "scale": codes.SCALES.get(metric, 1),
                "loss": _loss(series, first, last, width),
                "span": _span(series),
            }
            body = np.ascontiguousarray(shown.T, dtype="<i2").tobytes()
        text = json.dumps(head, allow_nan=False).encode("ascii")
        text += b" " * (-len(text) % 4)
        return gzip.compress(struct.pack("<I", len(text)) + text + body, compresslevel=2, mtime=0)

    def _cell(self, request: Any, ctx: Any, experiment: str) -> Any:
        """One variable: its histogram nearest a step, the sample's numbers and its history."""
        step = _integer(request, "step", None, 0, _MAX_STEP)
        data = self._run_data(request, ctx, experiment)
        series = self._series(request, data)
        if not series.names:
            raise BadRequestError("this series has no variables")
        column = _integer(request, "variable", None, 0, len(series.names) - 1)
        first = _integer(request, "from", 0, 0, _MAX_STEP)
        last = _integer(request, "to", _MAX_STEP, 0, _MAX_STEP)
        if last <= first:
            raise BadRequestError(f"`to` must be above `from`. Received: from={first}, to={last}")
        with data.lock:
            answer = {
                "name": series.names[column],
                "layer": series.layers[column],
                "shape": series.shapes[column],
                "dtype": series.dtypes[column],
                "sample": _nearest_sample(series, column, step),
                "row": _row_at(series, column, step),
                "history": _history(series, column, first, last),
            }
            run, name = request.args["run"], series.names[column]
        answer["histogram"] = self._histogram(ctx, experiment, run, f"gradient_log10/{name}", step)
        return answer

    def _histogram(self, ctx: Any, experiment: str, run: str, tag: str, step: int) -> Any:
        try:
            found = self._provider.read_tensors(
                ctx,
                experiment_id=experiment,
                plugin_name="histograms",
                run_tag_filter=provider_lib.RunTagFilter(runs=[run], tags=[tag]),
                downsample=EVERYTHING,
            )
        except BROKEN as error:
            logger.warning("cannot read %s of run %s: %s", tag, run, error)
            return None
        points = ((found or {}).get(run) or {}).get(tag)
        if not points:
            return None
        nearest = min(points, key=lambda p: abs(p.step - step))
        table = np.asarray(nearest.numpy)
        if table.ndim != 2 or table.shape[1] != 3 or not np.isfinite(table).all():
            return None
        return {"step": nearest.step, "buckets": table.astype(float).round(4).tolist()}

    def _incidents(self, request: Any, ctx: Any, experiment: str) -> Any:
        """All findings of a run, the words of the vocabulary explained."""
        data = self._run_data(request, ctx, experiment)
        with data.lock:
            return {
                "incidents": [
                    {
                        **finding,
                        "title": SYMPTOMS[finding["symptom"]].title
                        if finding["symptom"] in SYMPTOMS
                        else finding["symptom"],
                        "causes": [
                            {**cause, "meaning": CAUSES.get(cause["name"], "")}
                            for cause in finding["causes"]
                        ],
                    }
                    for finding in data.incidents
                ]
            }


def _span(series: Series) -> list[int]:
    """First step and the step after the last, over rows and samples."""
    firsts = [int(t.steps[0]) for t in (series.rows, series.samples) if len(t.step)]
    lasts = [int(t.steps[-1]) for t in (series.rows, series.samples) if len(t.step)]
    return [min(firsts, default=0), max(lasts, default=0) + 1]


def _described(series: Series) -> dict[str, Any]:
    return {
        "series": series.number,
        "label": series.label,
        "optimizer": series.optimizer,
        "span": _span(series),
        "rows": len(series.rows.step),
        "samples": len(series.samples.step),
        "layers": list(series.groups),
        "variables": [
            {"name": name, "path": path, "layer": layer, "shape": shape, "dtype": dtype}
            for name, path, layer, shape, dtype in zip(
                series.names,
                series.paths,
                series.layers,
                series.shapes,
                series.dtypes,
                strict=True,
            )
        ],
    }


def _loss(series: Series, first: int, last: int, width: int) -> dict[str, Any]:
    """The loss over the same steps: of the last step in each column, None where not seen."""
    loss = series.rows.arrays["loss"].view
    blank = np.zeros((len(loss), 0), np.int16)
    place = codes.pooled(series.rows.steps, blank, first, last, min(width, _MAX_POINTS))
    ends = np.minimum(np.arange(place.low, place.high, place.pool) + place.pool, place.high) - 1
    return {
        "starts": place.start.tolist(),
        "end": place.end,
        "values": [float(f"{v:.5g}") if math.isfinite(v) else None for v in loss[ends].tolist()],
    }


def _nearest_sample(series: Series, column: int, step: int) -> dict[str, Any] | None:
    steps = series.samples.steps
    if not len(steps):
        return None
    index = int(np.abs(steps - step).argmin())
    numbers = series.samples.arrays["numbers"].view[index].reshape(len(schema.SAMPLE_FIELDS), -1)
    return {
        "step": int(steps[index]),
        **{
            name: _number(v)
            for name, v in zip(schema.SAMPLE_FIELDS, numbers[:, column], strict=True)
        },
    }


def _row_at(series: Series, column: int, step: int) -> dict[str, Any] | None:
    """Code of the norm at the last step not after ``step``."""
    index = int(np.searchsorted(series.rows.steps, step, side="right")) - 1
    if index < 0:
        return None
    code = int(series.codes("norm")[index, column])
    return {"step": int(series.rows.steps[index]), "code": code}


def _history(series: Series, column: int, first: int, last: int) -> dict[str, Any]:
    """The variable's norm over the steps: the largest and smallest code of each column."""
    steps = series.rows.steps
    values = series.codes("norm")[:, column : column + 1]
    top = codes.pooled(steps, values, first, last, _MAX_POINTS)
    part = values[top.low : top.high, 0]
    cuts = np.arange(0, len(part), top.pool)
    bottom = np.minimum.reduceat(part, cuts) if len(part) else part
    return {
        "starts": top.start.tolist(),
        "end": top.end,
        "high": top.codes[:, 0].tolist(),
        "low": bottom.tolist(),
    }
