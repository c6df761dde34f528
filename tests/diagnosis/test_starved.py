"""Layers behind a dead one put out zeros, too; the place told is that of the dead one."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradguard import diagnose

OFF = keras.initializers.Constant(-100.0)


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_the_place_is_the_layer_that_is_off_by_itself(behind):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu", name="alive"),
            layers.Dense(8, activation="relu", name="off", bias_initializer=OFF),
            *(layers.Dense(8, activation="relu", name=f"starved_{i}") for i in range(behind)),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    report = diagnose(model, rng.normal(size=(32, 4)), np.ones((32, 1)))
    (finding,) = [f for f in report.findings if f.symptom == "zero_gradient"]
    assert finding.cause == "dead_relu"
    assert finding.causes[0].where[0] == "off"
    assert "off (output 0) for all 32 examples" in finding.causes[0].evidence[0].text
    assert "-" in finding.causes[0].evidence[0].text.split("between")[1]
