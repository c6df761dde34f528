"""Findings as a Markdown page for TensorBoard's Text tab and as lines of JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from keras_gradguard.findings import Finding
from keras_gradguard.tensorboard.naming import printable
from keras_gradguard.vocabulary import SYMPTOMS

FILE_NAME: Final = "incidents.jsonl"
_ROWS: Final = 200
_MESSAGES: Final = 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>&~-])")


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, inside a table cell."""
    return _SPECIAL.sub(lambda m: f"&#{ord(m.group())};", printable(text))


def _fence(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _steps(finding: Finding) -> str:
    if finding.step is None:
        return ""
    if finding.first_step is None or finding.first_step == finding.step:
        return str(finding.step)
    return f"{finding.first_step} to {finding.step}"


def markdown(findings: Sequence[Finding]) -> str:
    """All findings of a run as one page: a table, the newest last, then the full messages.

    Args:
        findings: In the order found. Only the last 200 get a row and the last 20 their message,
            so that the page stays readable; all are in ``incidents.jsonl``.

    Returns:
        Markdown. Names are escaped, messages fenced: nothing in them is taken for markup.
    """
    lines = [
        "| # | steps | what | where | why | what to change |",
        "|---|---|---|---|---|---|",
    ]
    numbered = list(enumerate(findings, start=1))
    for number, finding in numbered[-_ROWS:]:
        where = ", ".join(finding.where[:4])
        if len(finding.where) > 4:
            where += f" and {len(finding.where) - 4} more"
        cells = [
            str(number),
            _steps(finding),
            SYMPTOMS[finding.symptom].title,
            where,
            finding.cause.replace("_", " "),  # so that the narrow cell can wrap
            finding.fix,
        ]
        lines.append("| " + " | ".join(_escape(c) if c else " " for c in cells) + " |")
    for number, finding in numbered[-_MESSAGES:]:
        text = "\n".join(printable(line) for line in finding.message.splitlines())
        lines += ["", f"**{number}**", "", _fence(text)]
    return "\n".join(lines)


def json_line(finding: Finding, wall_time: float) -> str:
    """One line of strict JSON: the finding and ``time`` (seconds since 1970)."""
    return json.dumps({"time": round(wall_time, 3), **finding.to_dict()}, allow_nan=False)


def append_line(path: Path, line: str) -> None:
    """Append a line and force it to the disk before returning.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("a", encoding="ascii") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
