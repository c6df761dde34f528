"""Runs that are long, and models that are large."""

import keras
import numpy as np
import pytest
from keras import layers

from benchmarks.long_run import run
from tests.modes.twice import assert_unchanged, compiled, fitted, shows

pytestmark = pytest.mark.slow


@shows("Faults", "a model of 2000 variables")
def test_two_thousand_variables():
    def make():
        # In blocks: Keras walks through a functional model by recursion, a call a layer.
        def block(count):
            return keras.Sequential(
                [
                    keras.Input((6,)),
                    *(layers.Dense(6, kernel_initializer="identity") for _ in range(count)),
                ]
            )

        blocks = [block(count) for count in (*[100] * 9, 99)]
        return keras.Sequential([keras.Input((6,)), *blocks, layers.Dense(3, activation="softmax")])

    def train(guards):
        model = compiled(make, lambda: keras.optimizers.SGD(1e-5), jit_compile=False)
        return model, fitted(model, guards, epochs=1)

    *_, seen = assert_unchanged(train, steps=3, diagnose=False)
    assert len(seen._sessions[0].observer.tap.streams()[0].table.variables) == 2000


@shows("Faults", "a long run: memory and open files level, the log within its bytes", same=None)
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_long_run(limit):
    rows = run(40_000, limit, epochs=10)
    early, late = rows[2], rows[-1]
    assert late["handles"] <= early["handles"]
    assert late["resident_mb"] < early["resident_mb"] + 30
    if limit is None:
        per_step = [r["written_mb"] / r["steps"] for r in rows]
        np.testing.assert_allclose(per_step, per_step[-1], rtol=0.2)
    else:
        assert late["written_mb"] <= 1.05 * limit / 1e6
