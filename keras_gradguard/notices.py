"""What a person reads beside the progress bar: warnings at their own line, and a last line."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from types import FrameType

from keras_gradguard.errors import GradientGuardWarning
from keras_gradguard.findings import Finding

_logger = logging.getLogger("keras_gradguard")


class Console:
    """Keras' output of one ``fit``, and what is said beside it.

    Args:
        verbose: As given to ``fit``: 0 is silent, 1 and ``"auto"`` draw a progress bar, 2 writes
            a line an epoch.
        interactive: Keras prints to the standard output; False when it was told to use logging.
    """

    def __init__(self, verbose: int | str = 0, *, interactive: bool = True) -> None:
        self._silent = not verbose
        self._interactive = interactive
        self._has_bar = interactive and verbose in (1, "auto")
        self._drawn = False

    def bar_drawn(self) -> None:
        """Note that a batch of the epoch is done: the cursor stands behind an open bar."""
        self._drawn = True

    def bar_closed(self) -> None:
        """Note that the epoch is over: Keras has ended the bar's line."""
        self._drawn = False

    def make_room(self) -> None:
        """End the line of an open bar, so that what comes next has a line of its own.

        Keras draws the bar anew on the line below.
        """
        if self._has_bar and self._drawn:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._drawn = False

    def say(self, text: str) -> None:
        """Print a line where Keras prints, unless ``fit`` is to be silent."""
        if self._silent:
            return
        if not self._interactive:
            _logger.info("%s", text)
            return
        self.make_room()
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def summary(steps: int, findings: Sequence[Finding], skipped: int = 0) -> str:
    """Return the one line that ends a guarded ``fit``.

    Args:
        steps: Optimizer steps recorded.
        findings: What was found.
        skipped: Steps left out for a NaN or Inf.

    Example:
    >>> summary(4690, ())
    'GradGuard: 4 690 steps seen, 0 findings'
    """
    symptoms = Counter(f.symptom for f in findings)
    listed = ", ".join(f"{name} x {n}" if n > 1 else name for name, n in symptoms.items())
    text = f"GradGuard: {_counted(steps, 'step')} seen, {_counted(len(findings), 'finding')}"
    if listed:
        text += f" ({listed})"
    if skipped:
        text += f", {_counted(skipped, 'step')} skipped"
    return text


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}".replace(",", " ")


def warn(warning: GradientGuardWarning) -> None:
    """Issue a warning at the user's own line: their call of ``fit``, their line of the loop.

    ``stacklevel`` would have to count frames of Keras and TensorFlow, which change from version
    to version.

    Args:
        warning: What to say.
    """
    frame = _user_frame(sys._getframe(1))
    if frame is None:
        warnings.warn(warning, stacklevel=2)
        return
    space = frame.f_globals
    warnings.warn_explicit(
        warning,
        category=type(warning),
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=space.get("__name__") or "unknown",
        registry=space.setdefault("__warningregistry__", {}),
        module_globals=space,
    )


def _user_frame(frame: FrameType | None) -> FrameType | None:
    from keras_gradguard.diagnosis.source import is_user_file

    while frame is not None:
        file = frame.f_code.co_filename
        if file in ("<string>", "<stdin>") or is_user_file(file):
            return frame
        frame = frame.f_back
    return None
