"""A finding as HTML for a notebook: no script, no fixed background, all text escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from keras_gradguard.findings import text

if TYPE_CHECKING:
    from keras_gradguard.findings.data import Finding, Report

# Colours that stand out from white and from black alike; the text has the notebook's own.
_EDGE = {"raise": "#e5484d", "warn": "#d28b00", "info": "#3e8ecf"}
_FINE = "#30a46c"
_FRAME = "border-left:4px solid {edge};padding:0.2em 0.9em;margin:0.6em 0;line-height:1.45"
_LABEL = "opacity:0.65;padding:0 0.9em 0 0;text-align:left;vertical-align:top"
_CELL = "padding:0;text-align:left;vertical-align:top;white-space:normal"
_ROW = "background:transparent"


def finding(found: Finding) -> str:
    """Return a finding as a framed table of labels and texts.

    Args:
        found: What to show.

    Returns:
        HTML whose only markup is ours: names and texts of the user's are escaped.
    """
    rows = "".join(_row(label, shown) for label, shown in _rows(found))
    return _framed(
        _EDGE[found.severity],
        f"<strong>{escape(text.title(found))}</strong>"
        f'<table style="border-collapse:collapse;margin:0.3em 0">{rows}</table>',
    )


def report(made: Report) -> str:
    """Return all findings of a report below its title."""
    head = f"<p><strong>{escape(made.title or 'GradGuard report')}</strong></p>"
    body = "".join(finding(f) for f in made.findings) or _framed(_FINE, "Nothing found.")
    notes = "".join(f'<p style="opacity:0.65">Note: {escape(n)}</p>' for n in made.notes)
    return f"<div>{head}{body}{notes}</div>"


def _rows(found: Finding) -> Iterator[tuple[str, str]]:
    yield "what", escape(found.summary)
    source = f" ({escape(found.source)})" if found.source else ""
    if found.where or source:
        names = ", ".join(f"<code>{escape(n)}</code>" for n in found.where[: text.MOST_NAMES])
        yield "where", names + text.more(found.where) + source
    for item in found.evidence:
        yield "seen", escape(item.text)
    for i, cause in enumerate(found.causes[: text.MOST_CAUSES]):
        line = f" ({escape(cause.source)})" if cause.source else ""
        why = f"<strong>{escape(cause.name)}</strong>: {escape(text.reason(cause))}{line}"
        yield "why" if i == 0 else "or", why
    if not found.causes:
        yield "why", escape(text.UNEXPLAINED)
    yield "fix", escape(found.fix)
    for note in found.notes:
        yield "note", escape(note)


def _row(label: str, shown: str) -> str:
    return (
        f'<tr style="{_ROW}"><th style="{_LABEL}">{label}</th><td style="{_CELL}">{shown}</td></tr>'
    )


def _framed(edge: str, inside: str) -> str:
    return f'<div style="{_FRAME.format(edge=edge)}">{inside}</div>'
