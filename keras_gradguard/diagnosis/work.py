"""One diagnosis in progress: what was found so far, and the time it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.ranking import ranked
from keras_gradguard.findings import Cause, Finding, Severity

T = TypeVar("T")


SECONDS = 8.0  # of work of the thread that diagnoses


PATIENCE = 30.0  # seconds on the clock, on a machine that has other things to do


class Work:
    """One diagnosis in progress: collects causes, notes what failed, keeps to its time.

    Args:
        finding: What was found.
        facts: Measurements.
    """

    def __init__(self, finding: Finding, facts: Facts) -> None:
        self.finding = finding
        self.facts = facts
        self.causes: list[Cause] = list(finding.causes)
        self.notes: list[str] = []
        self.severity: Severity = finding.severity
        self._until = time.thread_time() + SECONDS, time.monotonic() + PATIENCE

    def spent(self) -> bool:
        """Return True when the time is over. For the loops inside an analysis."""
        return time.thread_time() > self._until[0] or time.monotonic() > self._until[1]

    def attempt(self, what: str, make: Callable[[], T], default: T) -> T:
        """Run one analysis; when it fails, say so in one line and go on."""
        if self.spent():
            self.notes.append(f"The diagnosis stopped after {SECONDS:.0f} s, before: {what}.")
            return default
        try:
            return make()
        except Exception as error:  # the finding must get out whatever a model does
            first = (str(error).strip().splitlines() or [""])[0][:160]
            self.notes.append(f"Could not look at {what} ({type(error).__name__}: {first})")
            return default

    def add(self, what: str, make: Callable[[], Cause | Iterable[Cause] | None]) -> None:
        """Run one analysis and keep the causes that it returns."""
        found = self.attempt(what, make, None)
        if isinstance(found, Cause):
            self.causes.append(found)
        elif found is not None:
            self.causes += list(found)

    def result(self) -> Finding:
        """Return the finding with causes in order, severity and notes."""
        causes = ranked(self.causes)
        source = self.finding.source or next((c.source for c in causes[:1] if c.source), None)
        notes = tuple(dict.fromkeys((*self.finding.notes, *self.facts.notes, *self.notes)))
        return self.finding.replace(
            causes=causes, severity=self.severity, source=source, notes=notes
        )
