"""``skip_non_finite``: a bad step leaves no trace but a warning and a count."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradguard import GradientGuard, GradientGuardWarning, NonFiniteError, Policy

X = np.random.default_rng(0).normal(size=(48, 5)).astype("float32")
Y = X.sum(1, keepdims=True)


def model(**kwargs):
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )
    made.compile(keras.optimizers.Adam(0.01), "mse", **kwargs)
    return made


def spoiled(rows):
    y = Y.copy()
    y[rows] = np.nan
    return y


@pytest.mark.shows(
    "Precision", "skip_non_finite=True: a batch with NaN is as if it had not been", same=None
)
@pytest.mark.parametrize("kwargs", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_a_bad_batch_is_as_if_it_had_not_been(kwargs):
    with_bad, without = model(**kwargs), model(**kwargs)
    guard = GradientGuard(log_dir=None, skip_non_finite=True)
    with pytest.warns(GradientGuardWarning, match="left out"):
        with_bad.fit(
            X, spoiled(slice(16, 32)), batch_size=16, shuffle=False, verbose=0, callbacks=[guard]
        )
    good = np.r_[0:16, 32:48]
    without.fit(X[good], Y[good], batch_size=16, shuffle=False, verbose=0)
    for a, b in zip(with_bad.weights, without.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(with_bad.optimizer.iterations) == int(without.optimizer.iterations) == 2
    assert guard.steps_skipped == 1
    assert [f.severity for f in guard.findings] == ["warn"]
    assert "nan_input" in [c.name for c in guard.findings[0].causes]


@pytest.mark.filterwarnings("ignore::keras_gradguard.GradientGuardWarning")
def test_nothing_but_bad_batches_raises_after_a_while():
    guard = GradientGuard(log_dir=None, skip_non_finite=True, policy=Policy(scale_patience=6))
    with pytest.raises(NonFiniteError, match="Nothing is being learned"):
        model().fit(X, spoiled(slice(None)), batch_size=8, epochs=9, verbose=0, callbacks=[guard])
