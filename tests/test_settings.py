"""The guard's arguments: each wrong one is named, with what was received."""

from pathlib import Path

import pytest

from keras_gradguard.guard import GradientGuard, GradientGuardCallback
from keras_gradguard.policy import Policy
from keras_gradguard.settings import Settings


@pytest.mark.parametrize("make", [Settings, GradientGuard], ids=["settings", "guard"])
@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"sample_every": 0}, ValueError),
        ({"sample_every": -1}, ValueError),
        ({"sample_every": 2.5}, ValueError),
        ({"sample_every": True}, ValueError),
        ({"sample_every": None}, ValueError),
        ({"check_every": 0}, ValueError),
        ({"check_every": "10"}, ValueError),
        ({"policy": "raise"}, ValueError),
        ({"policy": {"zero_gradient": "warn"}}, ValueError),
        ({"log_dir": 3}, TypeError),
        ({"log_dir": ["logs"]}, TypeError),
        ({"on_finding": "print"}, TypeError),
        ({"histogram": False}, TypeError),
    ],
    ids=lambda v: str(v)[:30],
)
def test_wrong_arguments_are_named(make, kwargs, error):
    (name,) = kwargs
    with pytest.raises(error, match=name):
        make(**{"log_dir": None, **kwargs})


def test_paths_become_text():
    assert Settings(log_dir=Path("a") / "b").log_dir == str(Path("a", "b"))
    assert Settings(log_dir=None).log_dir is None


def test_defaults():
    settings = GradientGuard().settings
    assert settings.policy == Policy()
    assert (settings.log_dir, settings.sample_every, settings.check_every) == ("logs", 50, 10)


def test_two_names_for_one_class():
    assert GradientGuardCallback is GradientGuard
