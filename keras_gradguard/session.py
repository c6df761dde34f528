"""One guarded run: numbers from the channels in, findings acted on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_gradguard import notices, rules
from keras_gradguard.errors import GradientGuardWarning, error_for
from keras_gradguard.findings import Finding
from keras_gradguard.plotting import Panel
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import Recorder
from keras_gradguard.records import ActivationSample, ActivationStats, Row, Sample, Table
from keras_gradguard.taps.base import Channel

logger = logging.getLogger("keras_gradguard")

_WAIT = 1.0  # seconds that ordinary rows may wait for their curves


class Writer(Protocol):
    """Where numbers and findings are written: TensorBoard's event file, or nowhere."""

    def begin(self, tables: Sequence[Table], *, step: int | None = None) -> None:
        """Announce the tables of a run and its first step, before anything is written."""

    def write_rows(self, table: Table, rows: tuple[Row, ...]) -> None:
        """Write sentinel rows."""

    def write_sample(self, table: Table, sample: Sample) -> None:
        """Write the full statistics of one step."""

    def write_activations(self, sample: ActivationSample) -> None:
        """Write what the layers put out at one step."""

    def write_finding(self, finding: Finding) -> None:
        """Write an incident, at once."""

    def flush(self) -> None:
        """Hand everything to the operating system."""

    def close(self) -> None:
        """Flush and release the file."""


class Run:
    """Judges what the channels bring and does what the policy says.

    Args:
        policy: What to do about each symptom.
        writer: Where to write, or None.
        sample_every: Cadence of the samples that are written.
        explain: Adds causes to a finding, given the run's recorder of its channel (None when
            the finding has no numbers). Never raises.
        on_finding: The user's own function, called with each finding that is reported.
        opening: Returns the tables and the first step of the run, asked before the first write.
        make_room: Called before an error or a warning, so that it starts on a line of its own.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        writer: Writer | None = None,
        sample_every: int = 50,
        explain: Callable[[Finding, Recorder | None], Finding] | None = None,
        on_finding: Callable[[Finding], None] | None = None,
        opening: Callable[[], tuple[list[Table], int | None]] | None = None,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        self.policy = policy
        self._writer = writer
        self._opening = opening
        self._make_room = make_room
        self.findings: list[Finding] = []
        self.recorders: dict[int, Recorder] = {}
        self.activations: tuple[ActivationStats, ...] = ()
        self.stop_requested = False
        self._explain = explain
        self._on_finding = on_finding
        self._sample_every = sample_every
        self._known: set[tuple[str, str, tuple[str, ...]]] = set()

    @property
    def writer(self) -> Writer | None:
        """Where to write, announced."""
        if self._writer is not None and self._opening is not None:
            opening, self._opening = self._opening, None
            tables, step = opening()
            self._writer.begin(tables, step=step)
        return self._writer

    @property
    def steps_seen(self) -> int:
        """Optimizer steps recorded, over all channels."""
        return sum(r.seen + r.waiting for r in self.recorders.values() if r.table.judged)

    @property
    def steps_skipped(self) -> int:
        """Steps left out for a NaN or Inf, by the guard or by a loss-scale optimizer."""
        return sum(r.skipped for r in self.recorders.values() if r.table.judged)

    def panels(self) -> list[Panel]:
        """Return the gradient flow of each judged channel, for a picture."""
        return [
            Panel(
                title=r.table.optimizer,
                names=tuple(v.path for v in r.table.variables),
                steps=r.flow.steps,
                norms=r.flow.norms,
                none=r.table.none,
                marks=tuple(
                    (f.step, f.symptom)
                    for f in self.findings
                    if f.step is not None and f.optimizer in (None, r.table.optimizer)
                ),
            )
            for r in self.recorders.values()
            if r.table.judged and len(r.flow.steps)
        ]

    def recorder(self, channel: Channel) -> Recorder:
        """Return the recorder of a channel, made on first sight."""
        found = self.recorders.get(id(channel))
        if found is None:
            found = self.recorders[id(channel)] = Recorder(table=channel.table)
        return found

    def take(
        self,
        channel: Channel,
        *,
        rate_rises: Callable[[], bool] | None = None,
        final: bool = True,
    ) -> None:
        """Read a channel, write what is new and act on what the rules find.

        Args:
            channel: What to read.
            final: Read everything. Otherwise rows that are ordinary at a glance may wait on the
                device, a second at most.
            rate_rises: Tells whether the learning rate will rise soon; asked only when a
                sample shows a learning rate of 0.

        Raises:
            GradientGuardError: A finding whose policy is ``"raise"``.
        """
        recorder = self.recorder(channel)
        if not final and self._can_wait(channel, recorder):
            return
        table = channel.table
        reading = channel.read()
        recorder.read_at = time.monotonic()
        recorder.add(reading.rows, reading.samples, lost=reading.lost, table=table)
        if reading.lost:
            logger.warning("%d steps were overwritten before they could be read", reading.lost)
        if self.writer is not None:
            if reading.rows:
                self.writer.write_rows(table, reading.rows)
            for sample in reading.samples:
                if sample.step % self._sample_every == 0:
                    self.writer.write_sample(table, sample)
        if not reading.rows or not table.judged:
            return
        asked = any(s.learning_rate == 0 for s in recorder.samples[-self.policy.patience :])
        rises = rate_rises() if asked and rate_rises is not None else None
        history = recorder.history(rate_rises=rises)
        if rules.suspicious(history):
            channel.sample_next(2 * self.policy.patience)
        for finding in rules.judge(history, self.policy):
            self.report(finding, recorder)

    def _can_wait(self, channel: Channel, recorder: Recorder) -> bool:
        """Return True when what is new is ordinary, so that rows can be made of it later.

        The rules see every row; only what merely warns, and the curves, come later by this.
        """
        if not recorder.settled or time.monotonic() - recorder.read_at > _WAIT:
            return False
        glance = channel.glance()
        if glance is None:
            return False
        loss = glance.loss if glance.loss_known else None
        present = recorder.table.present
        if not rules.ordinary(glance.half_squares[:, present], loss, recorder.first_loss):
            return False
        recorder.waiting = glance.waiting
        return True

    def take_activations(self, samples: Sequence[ActivationSample]) -> None:
        """Write what the layers put out, and keep the latest for the diagnosis.

        Args:
            samples: New ones, oldest first.
        """
        for sample in samples:
            self.activations = sample.layers
            if self.writer is not None and sample.step % self._sample_every == 0:
                self.writer.write_activations(sample)

    def drain(self, channel: Channel) -> None:
        """Record what a channel still holds without judging it.

        Args:
            channel: What to read.
        """
        reading = channel.read()
        self.recorder(channel).add(
            reading.rows, reading.samples, lost=reading.lost, table=channel.table
        )
        if self.writer is not None and reading.rows:
            self.writer.write_rows(channel.table, reading.rows)

    def report(self, finding: Finding, recorder: Recorder | None = None) -> None:
        """Explain a finding, write it down and act on it; once per symptom and place.

        Args:
            finding: What was found.
            recorder: The numbers behind it, for the diagnosis.

        Raises:
            GradientGuardError: When the policy says ``"raise"``.
        """
        if self.policy.action(finding) == "ignore":
            return
        key = (finding.symptom, finding.severity, finding.where)
        if key in self._known:
            return
        self._known.add(key)
        if self._explain is not None:
            finding = self._explain(finding, recorder)
        if finding.causes:
            # The place of the cause is where the user has to look; what it does to, comes after.
            places = dict.fromkeys((*finding.causes[0].where, *finding.where))
            finding = finding.replace(where=tuple(places))
        if finding.severity == "info" and not finding.causes:
            # Nothing confirmed it, or it was recognised as healthy: there is nothing to tell.
            logger.debug("%s", finding.message)
            return
        action = self.policy.action(finding)
        self.findings.append(finding)
        if self.writer is not None:
            self.writer.write_finding(finding)
        if self._on_finding is not None:
            self._on_finding(finding)
        if self._make_room is not None and action in ("raise", "warn", "stop"):
            self._make_room()
        if action == "raise":
            raise error_for(finding)
        if action == "stop":
            self.stop_requested = True
        if action in ("warn", "stop"):
            notices.warn(GradientGuardWarning(finding))
        else:
            logger.info("%s", finding.message)

    def say(self, text: str) -> None:
        """Warn about the guard itself (not a finding), e.g. that it cannot see anything."""
        notices.warn(GradientGuardWarning(text))


def context_of(recorder: Recorder | None) -> dict[str, Any]:
    """Return the fields of a diagnosis context that a recorder can fill."""
    if recorder is None:
        return {}
    return {"table": recorder.table, "rows": recorder.rows, "samples": recorder.samples}
