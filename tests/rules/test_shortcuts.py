"""The first looks that spare healthy rows the rest never change what is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard import rules
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import Recorder
from keras_gradguard.records import Row, Sample
from keras_gradguard.rules import finite, scale, update, zero
from tests.histories import table

POLICY = Policy(patience=3, layer_patience=4, scale_patience=6)
SIZE = 6
COLUMNS = table(*[f"layer_{i // 2}/v{i}" for i in range(SIZE)])


def looking_at_everything(monkeypatch):
    """Take the shortcuts out."""
    monkeypatch.setattr(rules, "unremarkable", lambda history: False)
    new = lambda history: range(len(history.step) - history.new, len(history.step))  # noqa: E731
    monkeypatch.setattr(finite, "_odd", lambda history, mask: list(new(history)))
    monkeypatch.setattr(
        scale,
        "_candidates",
        lambda history, mask: [r for r in new(history) if r >= 1 and not history.skipped[r]],
    )
    monkeypatch.setattr(scale, "_near", lambda *_: True)
    monkeypatch.setattr(update, "_stood_still", lambda *_: True)
    monkeypatch.setattr(zero, "_lately", lambda history: np.ones(history.norm.shape[1], bool))


NORMS = st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 1.0, 1.0, 1e6, np.inf, np.nan])


@st.composite
def runs(draw):
    """Rows in readings of different lengths, of a few kinds that each rule knows."""
    kind = draw(st.sampled_from(["any", "slope", "growth", "healthy", "zeros"]))
    length = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    norms = np.exp(0.1 * rng.standard_normal((length, SIZE)))
    losses = np.exp(0.1 * rng.standard_normal(length))
    if kind == "slope":
        norms *= 10.0 ** np.linspace(draw(st.floats(-9, 0)), 0, SIZE)
    if kind == "growth":
        factor = draw(st.floats(0.5, 6)) ** np.arange(length)
        norms, losses = norms * factor[:, None], losses * factor
    if kind == "zeros":
        norms[:, draw(st.lists(st.integers(0, SIZE - 1), max_size=SIZE))] = 0
        norms[draw(st.lists(st.integers(0, length - 1), max_size=8))] = 0
    if kind == "any":
        norms = np.array(draw(st.lists(NORMS, min_size=length, max_size=length)))[:, None] * norms
    odd = rng.random(length) < draw(st.sampled_from([0.0, 0.0, 0.3]))
    losses[odd] = rng.choice([np.nan, np.inf, 0.0], odd.sum())
    skipped = (rng.random(length) < draw(st.sampled_from([0.0, 0.9]))) & ~np.isfinite(norms).all(
        axis=1
    )
    rows = [
        Row(
            step=i,
            norm=norms[i].astype(np.float32),
            loss=None if rng.random() < 0.1 else float(losses[i]),
            skipped=bool(skipped[i]),
            update_due=not skipped[i] and bool(rng.random() < 0.9),
        )
        for i in range(length)
    ]
    still = rng.random(SIZE) < draw(st.sampled_from([0.0, 0.0, 0.4]))
    every = draw(st.integers(1, 6))
    samples = {
        i: Sample(
            step=i,
            histogram=np.zeros((SIZE, 512), np.int32),
            max_abs=norms[i].astype(np.float32),
            update=np.where(still & (rng.random(SIZE) < 0.95), 0, 1e-3).astype(np.float32),
            weight=np.ones(SIZE, np.float32),
            learning_rate=float(rng.choice([1e-3, 0.0], p=[0.9, 0.1])),
        )
        for i in range(0, length, every)
    }
    return rows, samples, draw(st.integers(1, 12))


def found(run):
    rows, samples, reading = run
    recorder = Recorder(table=COLUMNS, keep_rows=16)
    told = []
    for start in range(0, len(rows), reading):
        part = rows[start : start + reading]
        recorder.add(part, [samples[r.step] for r in part if r.step in samples])
        history = recorder.history(rate_rises=False)
        told += [dataclasses.asdict(f) for f in rules.judge(history, POLICY)]
    return repr(told)


SEEN: set[str] = set()


@settings(deadline=None, max_examples=300)
@given(runs())
def test_the_same_is_found_with_and_without_them(run):
    quick = found(run)
    with pytest.MonkeyPatch.context() as monkeypatch:
        looking_at_everything(monkeypatch)
        slow = found(run)
    assert quick == slow
    SEEN.update(s for s in ("non_finite", "exploding", "vanishing", "zero") if s in quick)


def test_the_runs_above_show_every_symptom():
    test_the_same_is_found_with_and_without_them()
    assert {"non_finite", "exploding", "vanishing", "zero"} == SEEN


@settings(deadline=None, max_examples=300)
@given(runs())
def test_what_waits_on_the_device_is_part_of_no_finding(run):
    rows = [r for r in run[0] if not r.skipped]
    recorder = Recorder(table=COLUMNS, keep_rows=4)
    recorder.add([Row(step=i, norm=np.ones(SIZE, np.float32), loss=1.0) for i in range(5)])
    recorder.history()
    for row in rows:
        half = np.square(row.norm.astype(np.float64))[np.newaxis] / 2
        loss = None if row.loss is None else np.array([row.loss])
        with np.errstate(over="ignore"):
            waits = rules.ordinary(half.astype(np.float32), loss, recorder.first_loss)
        recorder.add([row])
        told = [f for rule in (finite.non_finite, scale.exploding, zero.zero_gradient)
                for f in rule(recorder.history(), POLICY)]  # fmt: skip
        if waits:
            assert told == []


@pytest.mark.parametrize(
    ("half", "loss", "waits"),
    [
        pytest.param(1.0, 2.0, True, id="ordinary"),
        pytest.param(1.0, None, True, id="no loss seen"),
        pytest.param(0.0, 2.0, False, id="a zero"),
        pytest.param(np.nan, 2.0, False, id="NaN"),
        pytest.param(np.inf, 2.0, False, id="Inf"),
        pytest.param(1.0, np.nan, False, id="loss NaN"),
        pytest.param(1.0, -np.inf, False, id="loss -Inf"),
        pytest.param(1.0, 1e9, False, id="loss huge against the first"),
    ],
)
def test_what_may_wait(half, loss, waits):
    halves = np.array([[1.0, 1.0], [1.0, half]], np.float32)
    losses = None if loss is None else np.array([1.0, loss], np.float32)
    assert rules.ordinary(halves, losses, 1.5) is waits
