"""The user's own line: which frames of a stack are theirs, and how a line is named."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of the user's code.

    Args:
        file: Path as Python knows it.
        line: Line number, 1 for the first.
        function: Name of the function, ``"<module>"`` at the top of a script.
    """

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The line as ``"file.py:32"``."""
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        """Return ``"file.py:32 in function"``."""
        return f"{self.short} in {self.function}"


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.add(str(Path(__file__).resolve().parents[1]))
    return tuple(f"{Path(r)}/" for r in roots)


@functools.cache
def is_user_file(filename: str) -> bool:
    """Return True when ``filename`` is the user's code and no library.

    Args:
        filename: As in a code object, e.g. ``"/home/me/train.py"``.

    Returns:
        False for the standard library, site-packages, this package, and for the
        temporary files that autograph generates.

    Example:

    >>> is_user_file("/home/me/train.py"), is_user_file(functools.__file__)
    (True, False)
    """
    if not filename or (filename.startswith("<") and not filename.startswith("<ipython")):
        return False
    if "site-packages" in filename or "dist-packages" in filename:
        return False
    if "__autograph_generated_file" in filename:
        return False
    return not filename.startswith(_library_roots())


def user_frames(entries: Iterable[Any] | None) -> tuple[Frame, ...]:
    """Keep the user's frames of a traceback of an operation.

    Args:
        entries: Items with ``filename``, ``lineno`` and ``name``, outermost first (what
            TensorFlow keeps with a graph operation), or None.

    Returns:
        The user's frames, outermost first.
    """
    if entries is None:
        return ()
    return tuple(
        Frame(e.filename, e.lineno, e.name) for e in entries if is_user_file(e.filename)
    )


def stack_frames(frame: FrameType | None = None, limit: int = 200) -> tuple[Frame, ...]:
    """Return the user's frames of the running Python stack, outermost first.

    Args:
        frame: Where to start. Defaults to the caller.
        limit: How many frames to look at, the innermost first.

    Returns:
        The user's frames, outermost first.
    """
    frame = frame or sys._getframe(1)
    found: list[Frame] = []
    while frame is not None and limit > 0:
        code = frame.f_code
        if is_user_file(code.co_filename):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
        limit -= 1
    return tuple(reversed(found))


def traceback_frames(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """Return the user's frames of an exception's traceback, outermost first."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found.append(Frame(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return tuple(found)
