"""Which cause comes first."""

import pytest

from keras_gradguard.diagnosis.ranking import confirmed, ranked
from keras_gradguard.findings import Cause


def cause(name, score, where=("a",)):
    return Cause(name=name, score=score, where=where)


@pytest.mark.parametrize(
    ("given", "order"),
    [
        pytest.param(
            [("dead_relu", 0.9), ("zero_init", 0.95)], ["zero_init", "dead_relu"], id="score"
        ),
        pytest.param(
            [("input_scale", 0.9), ("dead_relu", 0.8)],
            ["dead_relu", "input_scale"],
            id="the reason before its consequence",
        ),
        pytest.param([("input_scale", 0.2)], [], id="too weak to say"),
        pytest.param([], [], id="nothing"),
        pytest.param(
            [("log_of_zero", 0.7), ("division_by_zero", 0.7)],
            ["log_of_zero", "division_by_zero"],
            id="two that cannot be told apart are both said",
        ),
    ],
)
def test_order(given, order):
    assert [c.name for c in ranked([cause(*g) for g in given])] == order


def test_same_cause_at_the_same_place_is_said_once():
    twice = [cause("dead_relu", 0.8), cause("dead_relu", 0.9), cause("dead_relu", 0.7, ("b",))]
    assert [(c.score, c.where[0]) for c in ranked(twice)] == [(0.9, "a"), (0.7, "b")]


def test_a_rate_and_data_that_cannot_be_told_apart_name_both_places():
    rate = cause("learning_rate_too_high", 0.9, ("optimizer", "h1/kernel"))
    scale = cause("input_scale", 0.6, ("data", "x"))
    first, second = ranked([scale, rate])
    assert (first.name, first.where) == (
        "learning_rate_too_high", ("optimizer", "h1/kernel", "data", "x")
    )  # fmt: skip
    assert (second.name, second.where) == ("input_scale", ("data", "x"))


def test_a_rate_that_is_too_high_is_said_once():
    rate = [cause("learning_rate_too_high", 0.9, ("optimizer",)),
            cause("learning_rate_too_high", 0.8, ("loss",))]  # fmt: skip
    assert [c.where for c in ranked(rate)] == [("optimizer",)]


def test_what_comes_from_the_scale_alone_names_the_data_alone():
    ranks = ranked([cause("dead_relu", 0.9, ("h1",)), cause("input_scale", 0.6, ("data",))])
    assert [c.where for c in ranks] == [("h1",), ("data",)]


def test_confirmed():
    assert confirmed([cause("dead_relu", 0.9)])
    assert not confirmed([cause("dead_relu", 0.6)])
    assert not confirmed([])
