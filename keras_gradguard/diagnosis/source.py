"""The user's own line: which frames of a stack are theirs, and how a line is named."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class Stack:
    """Where an operation was made.

    Args:
        frames: The user's lines, innermost last.
        api: The public ``keras.ops`` function that the innermost line called, or None.
    """

    frames: tuple[Frame, ...] = ()
    api: str | None = None


EMPTY = Stack()


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


@functools.cache
def _is_keras_ops(filename: str) -> bool:
    return "/keras/src/ops/" in filename.replace("\\", "/")


def user_stack(entries: Iterable[Any] | None, outer: Sequence[Frame] = ()) -> Stack:
    """Keep the user's frames of a traceback of an operation, and the Keras function called.

    Args:
        entries: Items with ``filename``, ``lineno`` and ``name``, outermost first (what
            TensorFlow keeps with a graph operation), or None.
        outer: Frames around the whole step, outermost first; where the traceback begins
            with the same ones they are left out.
    """
    frames: list[Frame] = []
    api: str | None = None
    for entry in entries or ():
        if is_user_file(entry.filename):
            frames.append(Frame(entry.filename, entry.lineno, entry.name))
            api = None
        elif api is None and _is_api(entry.filename, entry.name):
            api = entry.name
    shared = 0
    while shared < min(len(frames), len(outer)) and frames[shared] == outer[shared]:
        shared += 1
    return Stack(tuple(frames[shared:]), api if shared < len(frames) else None)


def _is_api(filename: str, function: str) -> bool:
    return _is_keras_ops(filename) and not function.startswith("_") and "call" not in function


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


def running_stack(frame: FrameType | None) -> tuple[Stack, tuple[FrameType, ...]]:
    """Return where the running Python code stands, and all its frames, innermost first.

    Args:
        frame: Where to start, innermost.
    """
    walked: list[FrameType] = []
    found: list[Frame] = []
    api: str | None = None
    while frame is not None:
        code = frame.f_code
        walked.append(frame)
        if is_user_file(code.co_filename):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        elif not found and _is_api(code.co_filename, code.co_name):
            api = code.co_name
        frame = frame.f_back
    return Stack(tuple(reversed(found)), api), tuple(walked)


def traceback_frames(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """Return the user's frames of an exception's traceback, outermost first."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found.append(Frame(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return tuple(found)
