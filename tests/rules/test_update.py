"""Updates that are lost, judged on samples of real steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradguard import rules
from keras_gradguard.policy import Policy
from keras_gradguard.rules.update import zero_update
from tests.histories import history, sample

POLICY = Policy(patience=3)


def made(updates, norms=None, *, rate=0.01, every=1, **kwargs):
    """Return a history of ``updates`` ``[S, V]``, sampled every so many steps."""
    updates = np.asarray(updates, np.float32)
    rates = rate if isinstance(rate, list) else [rate] * len(updates)
    samples = [
        sample(every * i, u, rate=r) for i, (u, r) in enumerate(zip(updates, rates, strict=True))
    ]
    steps = every * (len(updates) - 1) + 1
    norms = np.ones((steps, updates.shape[1])) if norms is None else norms
    return history(norms, samples=samples, **kwargs)


STILL = [[0.0, 0.0]]
NAN = float("nan")


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        pytest.param(made(STILL * 2), None, id="not yet"),
        pytest.param(made(STILL * 3), (2, 0), id="patience"),
        pytest.param(made(STILL * 3, every=50), (100, 0), id="counted in samples"),
        pytest.param(made([[1, 1], *STILL * 3]), (3, 1), id="later"),
        pytest.param(made([*STILL * 2, [1, 1], *STILL * 2]), None, id="interrupted"),
        pytest.param(made([[1, 1]] * 9), None, id="healthy"),
        pytest.param(made([[NAN, NAN]] * 9), None, id="unknown"),
        pytest.param(made(STILL * 9, np.zeros((9, 2))), None, id="gradient zero too"),
        pytest.param(made(STILL * 9, np.full((9, 2), np.inf)), None, id="gradient not finite"),
        pytest.param(made(STILL * 9, due=False), None, id="no update due"),
        pytest.param(
            made(STILL * 9, due=[False, False, True] * 3), (8, 2), id="gradient accumulation"
        ),
        pytest.param(made(STILL * 9, skipped=True), None, id="skipped by loss scaling"),
        pytest.param(made(STILL * 9, rate=0.0, rate_rises=True), None, id="warm-up"),
        pytest.param(made(STILL * 9, rate=0.0, rate_rises=False), (2, 0), id="rate 0 for good"),
        pytest.param(made(STILL * 9, rate=0.0, rate_rises=None), (2, 0), id="rate 0, not asked"),
        pytest.param(
            made(STILL * 6, rate=[0.0] * 3 + [0.01] * 3, rate_rises=True),
            (5, 3),
            id="still after the warm-up",
        ),
        pytest.param(made([[0, 1]] * 3), (2, 0), id="one variable"),
        pytest.param(made([[0, 1], [1, 0], [0, 1], [1, 0]]), None, id="in turns"),
        pytest.param(
            made(STILL * 9, np.concatenate([[[1e3, 1e3]], np.full((8, 2), 1e-3)])),
            None,
            id="converged: far below its own peak",
        ),
        pytest.param(
            made([[1, 0]] * 9, np.tile([1.0, 1e-6], (9, 1))), None, id="far below the others"
        ),
        pytest.param(made(STILL * 9, np.full((9, 2), 1e-9), loss=0.5), None, id="rounding noise"),
        pytest.param(made(STILL * 9, np.full((9, 2), 1e-9), loss=None), (2, 0), id="loss unknown"),
    ],
)
def test_zero_update(given_, expected):
    found = zero_update(given_, POLICY)
    if expected is None:
        assert found == ()
        return
    (finding,) = found
    assert (finding.step, finding.first_step) == expected
    assert (finding.symptom, finding.severity) == ("zero_update", "raise")


def test_the_cause_is_known_when_the_rate_is_zero():
    (finding,) = zero_update(made(STILL * 3, rate=0.0, rate_rises=False), POLICY)
    assert finding.cause == "learning_rate_zero"
    assert finding.where[0] == "optimizer"
    (finding,) = zero_update(made(STILL * 3), POLICY)
    assert finding.cause == "unknown"


def test_only_the_variable_that_stands_still_is_named():
    (finding,) = zero_update(made([[0, 1]] * 3), POLICY)
    assert finding.where == ("v0",)
    assert zero_update(made([[0, 1]] * 3), Policy(patience=3, ignore="v0")) == ()


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 1.0])] * 2), min_size=1, max_size=12))
def test_against_counting_by_hand(updates):
    """Equal gradients everywhere: some variable was still in each of three samples in a row."""
    expected = None
    for end in range(2, len(updates)):
        window = updates[end - 2 : end + 1]
        if any(all(u[i] == 0 for u in window) for i in range(2)):
            expected = end
            break
    found = zero_update(made(updates), POLICY)
    assert (found[0].step if found else None) == expected


@pytest.mark.parametrize(
    ("update", "norm", "due", "expected"),
    [
        ([0, 1], [1, 1], True, True),
        ([1, 1], [1, 1], True, False),
        ([0, 1], [0, 1], True, False),
        ([0, 1], [1, 1], False, False),
    ],
)
def test_a_lost_update_in_the_last_sample_asks_for_a_closer_look(update, norm, due, expected):
    assert rules.suspicious(made([update], [norm], due=due)) is expected


def test_nothing_is_suspicious_without_samples():
    assert rules.suspicious(history([[1, 1]])) is False
