"""The policy: what happens at which severity, and clear errors at construction."""

import itertools

import pytest

from keras_gradguard.findings import SEVERITIES, Finding
from keras_gradguard.policy import ACTIONS, Policy
from keras_gradguard.vocabulary import SYMPTOMS

# From the mildest up; an action is the milder of what the finding deserves and the policy allows.
STRENGTH = {"ignore": 0, "record": 1, "warn": 2, "stop": 3, "raise": 4}
DESERVES = {"info": "record", "warn": "warn", "raise": "raise"}


def finding(symptom="zero_gradient", severity="raise"):
    return Finding(symptom=symptom, summary="s", severity=severity)


@pytest.mark.parametrize(
    ("symptom", "action", "severity"), list(itertools.product(SYMPTOMS, ACTIONS, SEVERITIES))
)
def test_the_milder_of_severity_and_policy(symptom, action, severity):
    got = Policy(**{symptom: action}).action(finding(symptom, severity))
    assert got == min(action, DESERVES[severity], key=STRENGTH.get)


@pytest.mark.parametrize("symptom", [s for s in SYMPTOMS if s != "vanishing"])
def test_what_cannot_train_raises_by_default(symptom):
    assert Policy().action(finding(symptom)) == "raise"


def test_vanishing_warns_by_default():
    assert Policy().action(finding("vanishing")) == "warn"


@pytest.mark.parametrize(
    ("kwargs", "error", "named"),
    [
        ({"zero_gradient": "explode"}, ValueError, "zero_gradient='explode'"),
        ({"vanishing": None}, ValueError, "vanishing=None"),
        ({"non_finite": True}, ValueError, "non_finite=True"),
        ({"patience": 0}, ValueError, "patience=0"),
        ({"patience": -3}, ValueError, "patience=-3"),
        ({"patience": 2.0}, ValueError, "patience=2.0"),
        ({"patience": True}, ValueError, "patience=True"),
        ({"layer_patience": "8"}, ValueError, "layer_patience='8'"),
        ({"scale_patience": None}, ValueError, "scale_patience=None"),
        ({"ignore": 3}, TypeError, "ignore=3"),
        ({"ignore": ["a", 3]}, TypeError, "ignore="),
        ({"ignore": None}, TypeError, "ignore=None"),
        ({"unknown_symptom": "raise"}, TypeError, "unknown_symptom"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_a_wrong_value_is_refused_at_construction(kwargs, error, named):
    with pytest.raises(error, match=named):
        Policy(**kwargs)


@pytest.mark.parametrize(
    ("ignore", "names", "expected"),
    [
        ((), ("a/kernel", "a"), False),
        ("a", ("a/kernel", "a"), True),
        ("a/*", ("a/kernel", "a"), True),
        ("a/*", ("ab/kernel", "ab"), False),
        ("*/bias", ("a/bias", "a"), True),
        ("*/bias", ("a/kernel", "a"), False),
        (["x", "lora*"], ("lora_1/a", "lora_1"), True),
        ("dense_?", ("dense_1/kernel", "dense_1"), True),
        ("dense_?", ("dense_12/kernel", "dense_12"), False),
        ("A", ("a/kernel", "a"), False),
    ],
)
def test_ignored(ignore, names, expected):
    assert Policy(ignore=ignore).ignored(*names) is expected


def test_a_generator_of_patterns_can_be_asked_twice():
    policy = Policy(ignore=(p for p in ("a", "b")))
    assert policy.ignored("b")
    assert policy.ignored("b")
