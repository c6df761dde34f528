"""Writes ``docs/benchmarks.md`` from the results, and keeps them in ``docs/benchmarks.json``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE, KEPT = DOCS / "benchmarks.md", DOCS / "benchmarks.json"
NOTES = Path(__file__).parent / "notes.md"
MODES = {
    "graph": "Graph mode",
    "xla": "`jit_compile=True`",
    "mirrored": "`MirroredStrategy` of two logical CPUs",
    "loop": "A custom loop in `@tf.function`",
}
Row = dict[str, Any]


@dataclass
class Results:
    """Rows of JSON and other lines by the command that printed them."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    text: dict[str, list[str]] = field(default_factory=dict)

    def replace(self, command: str, rows: list[Row], text: list[str]) -> None:
        """Take a command's results in place of those it had."""
        self.rows[command], self.text[command] = rows, text

    def of(self, benchmark: str) -> list[Row]:
        """Return all rows of one benchmark."""
        return [r for rows in self.rows.values() for r in rows if r.get("benchmark") == benchmark]


def load() -> Results:
    """Return the kept results, none when there are none."""
    if not KEPT.exists():
        return Results()
    content = json.loads(KEPT.read_text())
    return Results(content["rows"], content["text"])


def machine() -> list[str]:
    """Return facts about this machine, one a line."""
    name = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        models = [x for x in cpus.read_text().splitlines() if x.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    memory = ""
    if hasattr(os, "sysconf"):
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        memory = f", {pages * size / 2**30:.0f} GiB of memory"
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    packages = ("tensorflow", "keras", "numpy", "tensorboard")
    return [
        f"- {os.cpu_count()} CPUs ({name}){memory}{load}",
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in packages),
    ]


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return a Markdown table; an empty list when it has no rows."""
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    head = list(head)
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *body, ""] if body else []


def ratio(spread: Row) -> str:
    """Return a median and its quartiles."""
    return f"{spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"


def _fit(results: Results) -> list[str]:
    lines: list[str] = []
    for mode, title in MODES.items():
        rows = [r for r in results.of("fit_overhead") if r["mode"] == mode]
        if rows:
            lines += [f"### {title}", ""]
            lines += table(
                ("workload", "", "wall", "CPU", "ms a step"),
                (
                    (
                        r["workload"],
                        r["contestant"],
                        "1" if r["contestant"] == "plain" else ratio(r["wall"]),
                        "1" if r["contestant"] == "plain" else ratio(r["cpu"]),
                        f"{r['ms_a_step']:.2f}",
                    )
                    for r in rows
                ),
            )
    return lines


def _whole(results: Results) -> list[str]:
    return table(
        (
            "workload",
            "",
            "ms a step",
            "wall",
            "CPU seconds",
            "CPU",
            "peak MB",
            "more MB",
            "MB written",
        ),
        (
            (
                r["workload"],
                r["contestant"],
                f"{r['ms_a_step']:.2f}",
                f"{r['wall_ratio']:.2f}",
                f"{r['cpu_seconds']:.1f}",
                f"{r['cpu_ratio']:.2f}",
                f"{r['peak_mb']:.0f}",
                f"{r['extra_mb']:.0f}",
                f"{r['written_mb']:.1f}",
            )
            for r in results.of("whole_process")
        ),
    )


def _once(results: Results) -> list[str]:
    lines = []
    for r in results.of("import")[:1]:
        loads = "is" if r["imports_tensorboard"] else "is not"
        lines.append(
            f"`import keras_gradguard` after Keras takes {r['milliseconds']:.0f} ms; TensorBoard "
            f"{loads} imported by it."
        )
    return [
        *lines,
        "",
        *table(
            ("first two steps of", "plain, s", "guarded, s", "wall", "CPU"),
            (
                (
                    r["workload"],
                    f"{r['plain_seconds']:.1f}",
                    f"{r['guard_seconds']:.1f}",
                    f"{r['wall_ratio']:.2f}",
                    f"{r['cpu_ratio']:.2f}",
                )
                for r in results.of("first_step")
            ),
        ),
    ]


def _pieces(results: Results) -> list[str]:
    lines = []
    for r in results.of("histogram"):
        lines += [
            f"A gradient of {r['entries']:.0e} entries: norm {r['norm_ms']:.1f} ms, histogram "
            f"{r['histogram_ms']:.1f} ms ({r['against_norm']:.1f} norms), `tf.summary.histogram` "
            f"{r['summary_ms']:.0f} ms ({r['against_summary']:.0f} times ours).",
            "",
        ]
    lines += table(
        ("sparse gradient, rows touched", "of", "all statistics, µs"),
        (
            (r["rows_touched"], f"{r['vocabulary']:,}", f"{r['microseconds']:.0f}")
            for r in results.of("sparse")
        ),
    )
    lines += table(
        ("variables", "bytes in the event file for a step and variable"),
        ((r["variables"], r["bytes_a_row_and_variable"]) for r in results.of("event_file")),
    )
    return lines


def _scaling(results: Results) -> list[str]:
    points = results.of("scaling")
    if not points:
        return []
    return [
        "![Cost against parameters, variables and sample_every](images/cost-scaling.png)",
        "",
        *table(
            ("", "", "wall", "CPU", "added CPU, µs a step"),
            (
                (
                    r["series"],
                    f"{r['x']:,}",
                    ratio(r["wall"]),
                    ratio(r["cpu"]),
                    f"{r['added_cpu_us_a_step']:.0f}",
                )
                for r in points
            ),
        ),
    ]


def _others(results: Results) -> list[str]:
    lines: list[str] = []
    for command, text in results.text.items():
        if any(line.strip() for line in text):
            lines += [f"`python benchmarks/{command}`", "", "```text", *text, "```", ""]
    return lines


SECTIONS: tuple[tuple[str, str, Callable[[Results], list[str]]], ...] = (
    (
        "A step",
        "Ratio of a step to that of plain training: contestants take turns an epoch each, in one "
        "process; median over the rounds, with quartiles. Tracing is not part of it. CPU is the "
        "seconds of all threads: it tells what is added even where other programs run.",
        _fit,
    ),
    (
        "A whole process",
        "One process a contestant, from its start to its end, tracing and imports included; the "
        "time of a step is a median over the epochs after the first. `check_numerics` is "
        "`tf.debugging.enable_check_numerics()`, the dump is that of TensorBoard's Debugger V2.",
        _whole,
    ),
    ("Once a run", "", _once),
    ("Pieces", "", _pieces),
    ("How it grows", "", _scaling),
    ("Layers, XLA, the tab", "", _others),
)


def page(results: Results) -> str:
    """Return the page as Markdown."""
    commands = [f"python benchmarks/{c}" for c in results.rows]
    lines = [
        "# What it costs",
        "",
        "Written by `make bench`, which runs the commands at the end; `make bench-quick` prints "
        "the ratios of the first three workloads, one line of JSON each.",
        "",
        *machine(),
        "",
    ]
    for title, text, section in SECTIONS:
        body = section(results)
        if any(body):
            lines += [f"## {title}", "", *([text, ""] if text else []), *body]
    notes = NOTES.read_text().rstrip() if NOTES.exists() else ""
    lines += [notes, "", "## Commands", "", "```console", *(f"$ {c}" for c in commands), "```", ""]
    return "\n".join(lines)


def write(results: Results) -> None:
    """Write the page and the results behind it."""
    KEPT.write_text(json.dumps({"rows": results.rows, "text": results.text}, indent=1) + "\n")
    PAGE.write_text(page(results))
