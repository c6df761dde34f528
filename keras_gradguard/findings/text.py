"""A finding as the text that a person reads in a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from keras_gradguard.vocabulary import CAUSES, SYMPTOMS

if TYPE_CHECKING:
    from keras_gradguard.findings.data import Cause, Finding, Report

_WIDTH = 88
MOST_CAUSES = 3
MOST_NAMES = 6
UNEXPLAINED = "unknown: measured, but not explained by anything checked."


def _paragraph(label: str, text: str) -> list[str]:
    indent = " " * 10
    lines = textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=f"  {label:<6}  ",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [f"  {label}"]


def _steps(finding: Finding) -> str:
    if finding.step is None:
        return ""
    if finding.first_step is None or finding.first_step == finding.step:
        return f" at step {finding.step}"
    return f" at step {finding.step}, since step {finding.first_step}"


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown + more(names)


def more(names: tuple[str, ...]) -> str:
    """Return how many names are not listed, or nothing when all are."""
    left = len(names) - MOST_NAMES
    return f" and {left} more" if left > 0 else ""


def render(finding: Finding) -> str:
    """Turn a finding into the text that a person reads in a terminal.

    Args:
        finding: What to say.

    Returns:
        Several lines: the symptom, then ``what``, ``where``, ``why`` (best causes
        with their evidence), ``fix``. Wide names are never cut.
    """
    lines = [
        title(finding),
        *_paragraph("what", finding.summary),
    ]
    source = f"  ({finding.source})" if finding.source else ""
    if finding.where or source:
        lines += _paragraph("where", _listed(finding.where) + source)
    for item in finding.evidence:
        lines += _paragraph("seen", item.text)
    best = finding.causes[:MOST_CAUSES]
    for i, cause in enumerate(best):
        line = f"  ({cause.source})" if cause.source and cause.source != finding.source else ""
        lines += _paragraph("why" if i == 0 else "or", f"{cause.name}: {reason(cause)}{line}")
    if not best:
        lines += _paragraph("why", UNEXPLAINED)
    lines += _paragraph("fix", finding.fix)
    for note in finding.notes:
        lines += _paragraph("note", note)
    return "\n".join(lines)


def reason(cause: Cause) -> str:
    """Return what a cause means and the facts that speak for it, as sentences."""
    told = "; ".join(e.text for e in cause.evidence)
    why = CAUSES[cause.name]
    if told:
        why += f". {told[0].upper()}{told[1:]}"
    return f"{why.rstrip('.')}."


def title(finding: Finding) -> str:
    """Return the symptom in words, and the steps."""
    return f"{SYMPTOMS[finding.symptom].title}{_steps(finding)}"


def report(made: Report) -> str:
    """Return all findings of a report below its title."""
    head = made.title or "GradGuard report"
    body = "\n\n".join(f.message for f in made.findings) or "Nothing found."
    notes = "".join(f"\nNote: {n}" for n in made.notes)
    return f"{head}\n\n{body}{notes}"
