"""A run: what the policy says is done, once; everything is written down first."""

import logging
import warnings

import numpy as np
import pytest

from keras_gradguard.errors import GradientGuardWarning, ZeroGradientError
from keras_gradguard.findings import Cause, Finding
from keras_gradguard.policy import ACTIONS, Policy
from keras_gradguard.records import Row
from keras_gradguard.session import Run
from keras_gradguard.taps.base import Glance, Reading
from tests.histories import sample, table

CAUSE = Cause(name="dead_relu", score=0.9, where=("h1",))


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """Undo what a logging configuration of another library does to loggers made before it."""
    logger = logging.getLogger("keras_gradguard")
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)


class FakeChannel:
    """Hands out prepared readings."""

    optimizer = None

    def __init__(self, *readings):
        self.table = table("a/kernel", "a/bias")
        self.readings = list(readings)
        self.asked = []

    def glance(self):
        return None

    def read(self):
        return self.readings.pop(0) if self.readings else Reading()

    def sample_next(self, steps):
        self.asked.append(steps)


class FakeWriter:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def note(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.values()))

        return note

    def names(self):
        return [c[0] for c in self.calls]


def rows(start, stop, norm=1.0, loss=1.0):
    return tuple(
        Row(step=i, norm=np.full(2, norm, np.float32), loss=loss) for i in range(start, stop)
    )


def found(**changes):
    return Finding(symptom="zero_gradient", summary="s", where=("a",), step=3).replace(**changes)


@pytest.mark.parametrize("action", ACTIONS)
def test_actions(action, caplog):
    heard, writer = [], FakeWriter()
    run = Run(Policy(zero_gradient=action), writer=writer, on_finding=heard.append)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        if action == "raise":
            with pytest.raises(ZeroGradientError):
                run.report(found())
        else:
            run.report(found())
    noticed = 0 if action == "ignore" else 1
    assert len(run.findings) == len(heard) == writer.names().count("write_finding") == noticed
    assert run.stop_requested == (action == "stop")
    assert len(caught) == (action in ("warn", "stop"))
    assert all(issubclass(w.category, GradientGuardWarning) for w in caught)
    assert ("zero" in caplog.text) == (action == "record")


def test_a_finding_is_told_once_per_symptom_and_place():
    run = Run(Policy(zero_gradient="record", vanishing="record"))
    for finding in (found(), found(step=9), found(where=("b",)), found(symptom="vanishing")):
        run.report(finding)
    assert [(f.symptom, f.where, f.step) for f in run.findings] == [
        ("zero_gradient", ("a",), 3),
        ("zero_gradient", ("b",), 3),
        ("vanishing", ("a",), 3),
    ]


def test_the_diagnosis_has_the_last_word_on_severity():
    lowered = Run(Policy(), explain=lambda f, r: f.replace(severity="info"))
    lowered.report(found())
    assert lowered.findings == []  # nothing confirmed it: nothing to tell
    doubted = Run(Policy(), explain=lambda f, r: f.replace(severity="info", causes=(CAUSE,)))
    doubted.report(found())
    assert doubted.findings[0].severity == "info"
    raised = Run(Policy(), explain=lambda f, r: f.replace(severity="raise"))
    with pytest.raises(ZeroGradientError):
        raised.report(found(severity="info"))


def test_the_place_of_the_cause_comes_first():
    cause = Cause(name="dead_relu", score=0.9, where=("h1",))
    run = Run(Policy(zero_gradient="record"), explain=lambda f, r: f.replace(causes=(cause,)))
    run.report(found(where=("a", "h1")))
    assert run.findings[0].where == ("h1", "a")


def test_everything_is_written_and_announced_first():
    writer = FakeWriter()
    run = Run(Policy(), writer=writer, sample_every=4, opening=lambda: ([table("a")], 0))
    samples = tuple(sample(i, [1, 1]) for i in range(6))
    run.take(FakeChannel(Reading(rows=rows(0, 6), samples=samples)))
    assert writer.names() == ["begin", "write_rows", "write_sample", "write_sample"]
    assert [c[2].step for c in writer.calls if c[0] == "write_sample"] == [0, 4]
    run.take(FakeChannel())
    assert writer.names().count("write_rows") == 1


def test_rows_are_written_before_the_error():
    writer = FakeWriter()
    run = Run(Policy(), writer=writer)
    with pytest.raises(ZeroGradientError):
        run.take(FakeChannel(Reading(rows=rows(0, 6, norm=0.0))))
    assert writer.names() == ["write_rows", "write_finding"]


def test_lost_rows_are_logged(caplog):
    run = Run(Policy())
    run.take(FakeChannel(Reading(rows=rows(5, 6), lost=5)))
    assert "5 steps were overwritten" in caplog.text
    assert run.steps_seen == 6


def test_a_suspicion_asks_for_closer_samples():
    channel = FakeChannel(Reading(rows=rows(0, 1), samples=(sample(0, [0, 1]),)))
    Run(Policy(patience=5)).take(channel)
    assert channel.asked == [10]


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_schedule_is_asked_only_at_rate_zero(rate):
    asked = []

    def rises():
        asked.append(1)
        return True

    samples = tuple(sample(i, [0, 0], rate=rate) for i in range(2))
    Run(Policy()).take(FakeChannel(Reading(rows=rows(0, 2), samples=samples)), rate_rises=rises)
    assert len(asked) == (rate == 0.0)


def test_samples_that_come_one_row_late_are_judged():
    """As in eager mode: the update of a step is known when the step is over."""
    run = Run(Policy(patience=3))
    readings = [
        Reading(rows=rows(i, i + 1), samples=(sample(i - 1, [0, 0]),) if i else ())
        for i in range(9)
    ]
    channel = FakeChannel(*readings)
    taken = 0
    with pytest.raises(Exception, match="do not change"):
        for _ in readings:
            taken += 1
            run.take(channel)
    assert taken == 4


def test_recorders_are_one_a_channel():
    run = Run(Policy())
    one, two = FakeChannel(Reading(rows=rows(0, 2))), FakeChannel(Reading(rows=rows(0, 3)))
    run.take(one)
    run.take(two)
    assert run.recorder(one).seen == 2
    assert run.recorder(two).seen == 3
    assert run.steps_seen == 5


def test_say_is_a_warning_without_a_finding():
    with pytest.warns(GradientGuardWarning, match="Nothing") as caught:
        Run(Policy()).say("Nothing is being watched.")
    assert caught[0].message.finding is None


@pytest.mark.parametrize(
    ("final", "half", "waits"),
    [(False, 1.0, True), (True, 1.0, False), (False, 0.0, False)],
    ids=["ordinary", "final", "a zero"],
)
def test_ordinary_rows_wait_on_the_device(final, half, waits, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("keras_gradguard.session.time.monotonic", lambda: clock[0])
    channel = FakeChannel(Reading(rows=rows(0, 130)), Reading(rows=rows(130, 140)))
    run = Run(Policy())
    run.take(channel, final=False)  # the first rows are looked at whole
    assert run.steps_seen == 130
    channel.glance = lambda: Glance(
        half_squares=np.full((10, 2), half, np.float32),
        loss=np.ones(10, np.float32),
        loss_known=True,
        waiting=10,
    )
    run.take(channel, final=final)
    assert run.steps_seen == 140
    assert len(channel.readings) == waits
    clock[0] += 2.0  # long enough
    run.take(channel, final=False)
    assert (run.steps_seen, channel.readings) == (140, [])
