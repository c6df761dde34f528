"""Runs the reproduction of every page in docs/causes and writes what it prints into the page.

    python docs/build_causes.py            # all pages
    python docs/build_causes.py dead_relu  # some

The text between "## What the guard prints" and "## The cure" is generated; everything else is
written by hand. ``--check`` changes nothing and fails when a page is out of date.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

CAUSES = Path(__file__).parent / "causes"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(
    r"(?<=## What the guard prints\n\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL
)


def blocks(page: str) -> tuple[str, str]:
    """Return (reproduction, cure) of a page, each with the line numbers it has there."""
    reproduction, cure = (
        "\n" * page.count("\n", 0, m.start(1)) + m[1] for m in BLOCK.finditer(page)
    )
    return reproduction, cure


def run(code: str, name: str, space: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Run code and return what it printed and its namespace."""
    fresh = space is None
    space = {"__name__": "__main__"} if space is None else space
    out = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")
        import keras

        if fresh:
            keras.utils.clear_session()  # automatic names begin anew on every page
        keras.utils.set_random_seed(1)
        exec(compile(code, f"docs/causes/{name}.md", "exec"), space)
    return out.getvalue(), space


def cause_of(space: dict[str, Any], printed: str) -> str | None:
    """Return the first cause that a reproduction found: of its report, or of what it printed."""
    report = space.get("report")
    if report is not None:
        return report.findings[0].cause if report.findings else None
    found = re.search(r"^  why\s+(\w+):", printed, re.MULTILINE)
    return found[1] if found else None


def tidy(printed: str) -> str:
    """Return the text as it stands in a page."""
    return printed.strip("\n").rstrip() + "\n"


def main(arguments: list[str]) -> int:
    """Bring the pages up to date, or check that they are."""
    check = "--check" in arguments
    names = [a for a in arguments if not a.startswith("-")]
    stale = []
    for path in sorted(CAUSES.glob("*.md")):
        if path.stem == "index" or (names and path.stem not in names):
            continue
        page = path.read_text()
        printed, _ = run(blocks(page)[0], path.stem)
        old = PRINTED.search(page)
        new = page[: old.start()] + tidy(printed) + page[old.end() :]
        if new != page:
            stale.append(path.stem)
            if not check:
                path.write_text(new)
    sys.stdout.write(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'none'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main(sys.argv[1:]))
