"""Gradient flow as matplotlib figures. Without pyplot: no global state, any backend."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_ZERO: Final = "#e0144c"
_BAD: Final = "#000000"
_NONE: Final = "#b0b0b0"
_LIVE: Final = "#34608c"
_MOST_LABELS: Final = 60
_ROW_INCHES: Final = 0.24
_TALLEST: Final = 16.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """The gradient norms of one optimizer's variables over a run.

    Args:
        title: What stands above it, e.g. the optimizer's name.
        names: One a variable.
        steps: ``[T]``, the first step of each column.
        norms: ``[T, V]`` float32, L2 norms; NaN and Inf as measured.
        none: Indices of variables that have no gradient.
        marks: Steps to mark, with a word each.
    """

    title: str
    names: tuple[str, ...]
    steps: NDArray[np.int64]
    norms: NDArray[np.float32]
    none: frozenset[int] = frozenset()
    marks: tuple[tuple[int, str], ...] = ()


def flow_figure(panels: Sequence[Panel], figure: Any = None) -> Any:
    """Draw the gradient flow of a run: every variable over its steps, and its usual size.

    Args:
        panels: One an optimizer, at least one.
        figure: A matplotlib figure to draw into. Defaults to a new one.

    Returns:
        The ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    heights = [_height(len(panel.names)) for panel in panels]
    figure = _sized(figure, 11.0, sum(heights))
    axes = figure.subplots(
        len(panels),
        2,
        sharey="row",
        squeeze=False,
        width_ratios=(3, 1),
        height_ratios=heights,
    )
    for panel, (left, right) in zip(panels, axes, strict=True):
        _heat_map(figure, left, panel)
        _sizes(right, panel)
    return figure


def sizes_figure(
    names: Sequence[str], norms: Sequence[float | None], title: str, figure: Any = None
) -> Any:
    """Draw the size of each variable's gradient in one batch.

    Args:
        names: One a variable.
        norms: L2 norms; None where there is no gradient.
        title: What stands above it.
        figure: A matplotlib figure to draw into. Defaults to a new one.

    Returns:
        The ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _sized(figure, 9.0, _height(len(names)))
    axis = figure.subplots()
    values = np.array([np.nan if n is None else n for n in norms], np.float64)
    live = np.isfinite(values) & (values > 0)
    rows = np.arange(len(names))
    axis.set_xscale("log")
    axis.barh(rows[live], values[live], color=_LIVE, height=0.7)
    low, high = (values[live].min(), values[live].max()) if live.any() else (0.1, 10.0)
    axis.set_xlim(low / 3, high * 3)
    for row, norm in enumerate(norms):
        if norm is None:
            word, color = "None", _NONE
        elif not np.isfinite(norm):
            word, color = str(norm), _BAD
        elif norm == 0:
            word, color = "0", _ZERO
        else:
            continue
        axis.barh(row, high * 3, color=color, height=0.7, alpha=0.35)
        axis.text(low / 2.5, row, word, va="center", color=_BAD)
    _name_rows(axis, names)
    axis.set_xlabel("L2 norm of the gradient")
    axis.set_title(title)
    return figure


def _heat_map(figure: Any, axis: Any, panel: Panel) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    shown = panel.norms.T.astype(np.float64)
    none = np.zeros(shown.shape, bool)
    none[list(panel.none)] = True
    bad = ~np.isfinite(shown) & ~none
    zero = (shown == 0) & ~none
    live = ~(none | bad | zero)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.ma.masked_where(~live, np.log10(np.where(live, shown, 1.0)))
    last = panel.steps[-1] + max(
        1, int(np.median(np.diff(panel.steps))) if shown.shape[1] > 1 else 1
    )
    edges = np.append(panel.steps, last)
    rows = np.arange(len(panel.names) + 1) - 0.5
    if live.any():
        mesh = axis.pcolormesh(edges, rows, exponents, cmap="viridis", rasterized=True)
        figure.colorbar(mesh, ax=axis, label="log10 of the gradient's L2 norm", pad=0.02)
    patches = []
    for mask, color, word in ((zero, _ZERO, "0"), (bad, _BAD, "NaN, Inf"), (none, _NONE, "None")):
        if mask.any():
            layer = np.ma.masked_where(~mask, mask.astype(float))
            axis.pcolormesh(edges, rows, layer, cmap=ListedColormap([color]), rasterized=True)
            patches.append(Patch(color=color, label=word))
    for step, word in panel.marks:
        axis.axvline(step, color=_ZERO, linestyle="--", linewidth=1.2)
        axis.annotate(
            word, (step, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 2),
            textcoords="offset points", color=_ZERO, fontsize="small",
        )  # fmt: skip
    if patches:
        axis.legend(
            handles=patches,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(patches),
            fontsize="small",
            frameon=False,
        )
    _name_rows(axis, panel.names)
    axis.set_xlabel("optimizer step")
    axis.set_title(panel.title, loc="left", pad=16 if panel.marks else 6)


def _sizes(axis: Any, panel: Panel) -> None:
    axis.set_xscale("log")
    for row, norms in enumerate(panel.norms.T):
        live = norms[np.isfinite(norms) & (norms > 0)]
        if row not in panel.none and len(live):
            low, middle, high = np.percentile(live, [5, 50, 95])
            axis.plot([low, high], [row, row], color=_LIVE, linewidth=2, alpha=0.5)
            axis.plot(middle, row, "o", color=_LIVE, markersize=4)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("median norm, 5 to 95 %")


def _name_rows(axis: Any, names: Sequence[str]) -> None:
    every = -(-len(names) // _MOST_LABELS)
    axis.set_yticks(range(0, len(names), every), list(names)[::every], fontsize="small")
    axis.set_ylim(len(names) - 0.5, -0.5)  # the input side on top, as in a summary of the model


def _height(rows: int) -> float:
    return min(1.6 + _ROW_INCHES * rows, _TALLEST)


def _sized(figure: Any, width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed. Install it with: "
            "pip install 'keras-gradguard[plot]'"
        ) from error
    if figure is not None:
        return figure

    class GradientFigure(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    return GradientFigure(figsize=(width, height), layout="constrained")
