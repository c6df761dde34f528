"""Train plain, train guarded, and assert everything that a guard promises about healthy runs."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_gradguard.guard import GradientGuard
from tests.training import assert_same, mlp

LOSS = "sparse_categorical_crossentropy"
# Rows that the random configurations, which run with every test, also draw.
SLOW = (pytest.mark.slow,)


def shows(group, feature, **more):
    """Mark a test as the one that shows a feature, for the table in ``docs/support.md``."""
    return pytest.mark.shows(group, feature, **more)


def row(group, feature, *values, id, marks=(), **more):
    """Return a row of a table of cases that shows a feature."""
    return pytest.param(*values, id=id, marks=[shows(group, feature, **more), *marks])


def guard(**kwargs):
    return GradientGuard(**{"log_dir": None, "sample_every": 3, "check_every": 2, **kwargs})


def data(n=40, features=6, classes=3):
    """Return two whole batches of 16 and a partial one."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(n, features)).astype("float32"), rng.integers(0, classes, n)


def compiled(make=mlp, optimizer=None, loss=LOSS, **kwargs):
    """Return a compiled model, always with the same weights."""
    keras.utils.set_random_seed(7)
    model = make()
    model.compile(keras.optimizers.Adam(0.01) if optimizer is None else optimizer(), loss, **kwargs)
    return model


def fitted(model, callbacks=(), *, x=None, y=None, **kwargs):
    """Fit and return the history."""
    if x is None:
        x, y = data()
    settings = {"batch_size": 16, "epochs": 2, "verbose": 0, **kwargs}
    if not hasattr(x, "shape") and not isinstance(x, (dict, list)):
        del settings["batch_size"]
        settings.setdefault("shuffle", False)
    return model.fit(x, y, callbacks=list(callbacks), **settings).history


def assert_unchanged(train, *, steps=6, **settings):
    """Assert that training is the same with a guard, and that nothing but numbers is left.

    Args:
        train: ``train(guards) -> (model, history)``: called with an empty list, then with a guard.
        steps: Steps that have to be recorded.
        **settings: Of the guard.

    Returns:
        The guarded model, its history and the guard.
    """
    seen = guard(**settings)
    plain, ours = train([]), train([seen])
    assert_same(plain, ours)
    assert seen.findings == ()
    assert seen.steps_seen == steps
    assert_nothing_left(plain[0], ours[0])
    return (*ours, seen)


def assert_nothing_left(plain, guarded):
    """Assert that a guarded model has the attributes of a plain one, and no variable of ours."""
    for a, b in ((plain, guarded), (plain.optimizer, guarded.optimizer)):
        assert set(vars(b)) - set(vars(a)) == set()
        names = [getattr(v, "path", v.name) for v in b.variables]
        assert not [n for n in names if "gradguard" in n]


def last_rows(seen):
    """Return the rows that a guard's first channel kept."""
    return next(iter(seen._sessions[0].observer.run.recorders.values())).rows
