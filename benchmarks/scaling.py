"""How the guard's cost grows: with parameters, with variables, with the cadence of the samples.

    python benchmarks/scaling.py [--rounds 9] [--picture docs/images/cost-scaling.png]

Prints one line of JSON a point, and draws them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from _fits import PausedFit
from _measure import ratios, seconds
from _workloads import CLASSES, Workload, deep, mlp, of_shape
from keras import layers

from keras_gradguard import GradientGuard

WIDTHS = (64, 256, 1024, 2048)
DEPTHS = (5, 20, 60)
CADENCES = (1, 2, 5, 10, 50)
HERE = Path(__file__).parent


def wide(width: int) -> Workload:
    """Two hidden layers of some width: six variables, whatever the number of parameters."""
    stack = [layers.Dense(width, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((width,)), *stack, layers.Dense(CLASSES)])
    return of_shape(model, (width,), 64, 40 if width < 1024 else 12)


def compare(
    make: Callable[[], Workload], settings: dict[str, dict[str, Any]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Measure guards with different settings against no guard."""
    with tempfile.TemporaryDirectory() as log_dir:
        found = {"plain": PausedFit(make().compiled(), [])}
        found["plain"].warm_up(1)
        for number, (name, arguments) in enumerate(settings.items()):
            guard = GradientGuard(log_dir=f"{log_dir}/{number}", **arguments)
            found[name] = PausedFit(make().compiled(), [guard])
            found[name].warm_up(60)
        found["plain"].warm_up(20)
        rows = ratios(seconds(found, rounds), found["plain"].steps)
        for fit in found.values():
            fit.close()
    return {row["contestant"]: row for row in rows}


def point(series: str, x: int, row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return one point as it is printed."""
    return {
        "benchmark": "scaling",
        "series": series,
        "x": x,
        "wall": row["wall"],
        "cpu": row["cpu"],
        "plain_ms_a_step": plain["ms_a_step"],
        "added_cpu_us_a_step": round(1e3 * (row["cpu_ms_a_step"] - plain["cpu_ms_a_step"]), 1),
    }


def points(rounds: int) -> list[dict[str, Any]]:
    """Measure all of them, printing as they come."""
    found = []

    def add(series: str, x: int, row: dict[str, Any], plain: dict[str, Any]) -> None:
        found.append(point(series, x, row, plain))
        print(json.dumps(found[-1]), flush=True)

    for series, make, sizes in (("parameters", wide, WIDTHS), ("variables", deeper, DEPTHS)):
        for size in sizes:
            rows = compare(lambda make=make, size=size: make(size), {"guard": {}}, rounds)
            model = make(size).model
            x = model.count_params() if series == "parameters" else len(model.trainable_variables)
            add(series, x, rows["guard"], rows["plain"])
    settings = {str(every): {"sample_every": every} for every in CADENCES}
    rows = compare(mlp, settings, rounds)
    for every in CADENCES:
        add("sample_every", every, rows[str(every)], rows["plain"])
    return found


def deeper(depth: int) -> Workload:
    """Four variables a layer of depth."""
    return deep(12, depth)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel a series."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {
        "parameters": "parameters (6 variables)",
        "variables": "variables (32 units a layer)",
        "sample_every": "sample_every (MLP 256 x 4)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    for axis, (series, title) in zip(axes, titles.items(), strict=True):
        chosen = [p for p in found if p["series"] == series]
        x = [p["x"] for p in chosen]
        for kind, colour in (("wall", "#b0481c"), ("cpu", "#1c5fb0")):
            low, middle, high = ([p[kind][k] for p in chosen] for k in ("low", "median", "high"))
            axis.plot(x, middle, "o-", color=colour, label=f"{kind} seconds")
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axhline(1.0, color="#888888", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel(title)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("guarded / plain")
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--picture", type=Path, default=HERE.parent / "docs" / "images" / "cost-scaling.png"
    )
    options = parser.parse_args()
    draw(points(options.rounds), options.picture)


if __name__ == "__main__":
    main()
