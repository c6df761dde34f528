"""Colour for a terminal; plain text everywhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[36m"
_GREEN: Final = "\x1b[32m"
_OFF: Final = "\x1b[0m"
# What `keras_gradguard.findings.text` lays out: a title, then labelled paragraphs.
_TITLE: Final = re.compile(r"^(?P<margin>[ #\d]*)(?P<title>\S.*)$(?=\n +what  )", re.MULTILINE)
_LABEL: Final = re.compile(r"^( +)(what|where|seen|why|or|note|raised)(?=  )", re.MULTILINE)
_FIX: Final = re.compile(r"^( +)(fix)(?=  )", re.MULTILINE)
_CAUSE: Final = re.compile(r"(?<=^)( +\S*(?:why|or)\S* +)(\w+)(?=:)", re.MULTILINE)


def wants_color(stream: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True for a terminal, unless NO_COLOR is set or it can do nothing.

    Args:
        stream: Where the text goes.
        environment: Environment variables. FORCE_COLOR colours what is piped, too.
    """
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return bool(stream.isatty()) and environment.get("TERM") != "dumb"


def colored(text: str) -> str:
    r"""Return findings with bold titles and causes, and labels that step back.

    Args:
        text: One or several findings as :mod:`keras_gradguard.findings` writes them.

    Example:

    >>> colored("Zero\n  what    All of it.").count("\x1b[0m")
    2
    """
    text = _CAUSE.sub(rf"\1{_BOLD}\2{_OFF}", text)
    text = _TITLE.sub(rf"\g<margin>{_BOLD}\g<title>{_OFF}", text)
    text = _LABEL.sub(rf"\1{_DIM}\2{_OFF}", text)
    return _FIX.sub(rf"\1{_GREEN}\2{_OFF}", text)
