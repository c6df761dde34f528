"""Writes docs/support.md from the tests: each row is a test that carries the mark ``shows``.

    python docs/build_support.py
    python docs/build_support.py --check  # changes nothing; fails when the page is out of date

``@pytest.mark.shows(group, feature)`` stands on a test or on a row of its table. ``same`` says
how the weights compare with those of a run without the guard (None: they are not compared),
``refused`` who refuses the feature and how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
GROUPS = (
    "Execution",
    "Precision",
    "Optimizers",
    "Models",
    "Training steps",
    "Data",
    "Callbacks",
    "Distribution",
    "Faults",
)
HEAD = """\
<!-- Written by docs/build_support.py from the tests; change those. -->
# What is supported

Every row is a test. "Bit for bit" means: the same weights, optimizer state and history as without
the guard, to the last bit; no alarm; every step recorded; nothing left on the model or the
optimizer. XLA compiles a watched step into other fused kernels, so there the last bits differ.
"""
SOAK = """\
## Random configurations

Beside these rows a seeded generator draws models, optimizers, precisions, data and callbacks, and
trains each of them with the guard and without it:

```console
$ make soak SECONDS=1800 SEED=0
```

{figures}
"""

VERSIONS = """
## Versions

`make matrix` runs the quick tests that depend on versions. The middle sets have the libraries of
another set, so they run only what the Python itself decides: lines of source, warnings, AutoGraph,
threads, signals. The newest libraries on Python 3.11 (NumPy 2.4.6) run all tests in `make test`.
The last runs:

| set | Python | TensorFlow | Keras | NumPy | TensorBoard | tests | passed | failed | skipped |
|---|---|---|---|---|---|---|---|---|---|
{rows}

Skipped: ragged tensors, which do not compile under XLA, and on Keras 3.7 the optimizers it lacks
(`ScheduleFreeAdamW`, `MultiOptimizer`). The core sets were run in parts, before the last changes to
`taps/`, after which `tests/taps`, `test_bit_identity.py` and `test_guard_fit.py` passed again on
py3.11-oldest (252 tests). One test failed on py3.11-oldest and two on py3.13-newest: faults of the
tests, which were mended and passed when run again in their files. The part that the Python decides
was not run to its end on py3.11-oldest and is not counted there.
The corpus, most of the diagnosis and the distributed tests are no part of the matrix.
"""


@dataclasses.dataclass
class Shown:
    """One row of the page."""

    same: str | None
    refused: str | None
    tests: list[str]


class Collector:
    """A pytest plugin that notes the marks of everything collected."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Shown] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Take the marks, once collected."""
        for item in session.items:
            for mark in item.iter_markers("shows"):
                group, feature = mark.args
                if group not in GROUPS:
                    raise ValueError(f"{item.nodeid}: unknown group {group!r}")
                same = mark.kwargs.get("same", "bit for bit")
                row = Shown(same, mark.kwargs.get("refused"), [])
                row = self.rows.setdefault((group, feature), row)
                row.tests.append(item.nodeid)


def collected() -> dict[tuple[str, str], Shown]:
    """Return every row, in the order of the tests."""
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "shows" in p.read_text()]
    collector, said = Collector(), io.StringIO()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with contextlib.redirect_stdout(said):
        code = pytest.main([*arguments, f"--rootdir={ROOT}", *map(str, files)], plugins=[collector])
    if code != 0:
        raise SystemExit(said.getvalue())
    return collector.rows


def shown_by(tests: list[str]) -> str:
    """Return the one test, or the function that all of several belong to."""
    short = tests[0] if len(tests) == 1 else tests[0].split("[", 1)[0]
    return f"`{short.removeprefix('tests/')}`"


def page(rows: dict[tuple[str, str], Shown]) -> str:
    """Return the page."""
    parts = [HEAD]
    for group in GROUPS:
        own = {feature: row for (g, feature), row in rows.items() if g == group}
        lines = [f"## {group}\n", "| | supported | weights | test |", "|---|---|---|---|"]
        for feature, row in own.items():
            supported = f"no. {row.refused}" if row.refused else "yes"
            weights = "" if row.refused else (row.same or "")
            lines.append(f"| {feature} | {supported} | {weights} | {shown_by(row.tests)} |")
        parts.append("\n".join(lines) + "\n")
    from tests.soak.measured import FIGURES
    from tests.soak.measured import VERSIONS as RUNS

    parts.append(SOAK.format(figures=FIGURES).rstrip("\n"))
    rows = "\n".join(f"| {' | '.join(map(str, run))} |" for run in RUNS)
    parts.append(VERSIONS.format(rows=rows))
    return "\n".join(parts)


def main() -> None:
    """Write the page, or compare it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    text = page(collected())
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        raise SystemExit("docs/support.md is out of date: run python docs/build_support.py")


if __name__ == "__main__":
    main()
