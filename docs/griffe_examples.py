"""Griffe extension: examples that stand at a docstring's margin become code blocks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|meth|func|mod|data):(`[^`]+`)")


def fenced(text: str) -> str:
    """Fence each run of lines from a prompt to a blank line; turn roles into plain code."""
    lines: list[str] = []
    inside = ""
    for line in _ROLE.sub(r"\1", text).splitlines():
        margin = line[: len(line) - len(line.lstrip())]
        if not inside and line.lstrip().startswith(">>>"):
            lines += ["", f"{margin}```pycon"]
            inside = f"{margin}```"
        elif inside and not line.strip():
            lines.append(inside)
            inside = ""
        lines.append(line)
    return "\n".join([*lines, inside] if inside else lines)


class Examples(Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the examples of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
