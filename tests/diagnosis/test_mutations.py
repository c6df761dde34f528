"""Faults and healthy programs in many forms: found, explained, and no false alarm.

``GRADGUARD_MUTATIONS=10`` takes ten forms of every family instead of one.
"""

import os

import pytest

from tests.diagnosis.mutations import FAULTS, HEALTHY, run

FORMS = int(os.environ.get("GRADGUARD_MUTATIONS", "1"))
# Not every single form must be told: what counts is the rate. See `test_rate`.
RATE = 0.95
OUTCOMES = {}


def outcome(kind, name, seed):
    key = (kind, name, seed)
    if key not in OUTCOMES:
        OUTCOMES[key] = run({"fault": FAULTS, "healthy": HEALTHY}[kind][name], seed)
    return OUTCOMES[key]


def right(name, told):
    return bool(told.causes) and told.causes[0] == name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_rate(every):
    asked = [(name, seed) for name in list(FAULTS)[::every] for seed in range(FORMS)]
    wrong = [
        f"{name} seed {seed}: {told.causes or told.error or 'silent'}"
        for name, seed in asked
        if not right(name, told := outcome("fault", name, seed))
    ]
    assert 1 - len(wrong) / len(asked) >= RATE, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name):
    for seed in range(FORMS):
        told = outcome("healthy", name, seed)
        assert told.error is None, (seed, told)
        assert told.causes == (), (seed, told)
