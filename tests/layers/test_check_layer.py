"""The table of all layers, and the checks that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_gradguard.layers import (
    DynamicRepeatDense,
    GradientProbe,
    LogitsOutput,
    Probabilities,
    StraightThrough,
)
from tests.layers.check_layer import check_layer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3)).astype("float32")
N = np.array([2.5, 0.0, 1.0, 3.25], "float32")
IMAGE = RNG.normal(size=(2, 5, 5, 2)).astype("float32")
SEQUENCE = RNG.normal(size=(2, 4, 3)).astype("float32")


def _logits(wrapped, **arguments):
    return lambda **kwargs: LogitsOutput(wrapped(**kwargs), **arguments)


LAYERS = [
    pytest.param(
        lambda **k: DynamicRepeatDense(2, **k), {"inputs": X, "repeats": N}, 2, True,
        id="repeat-given",
    ),
    pytest.param(lambda **k: DynamicRepeatDense(2, **k), {"inputs": X}, 4, True, id="repeat-own"),
    pytest.param(
        lambda **k: DynamicRepeatDense(2, max_repeats=3, activation="tanh", **k),
        {"inputs": X, "repeats": np.minimum(N, 3)}, 2, True, id="repeat-given-static",
    ),
    pytest.param(
        lambda **k: DynamicRepeatDense(
            2, max_repeats=5, min_repeats=1, feedback=True, kernel_regularizer="l2",
            bias_constraint="non_neg", activation="softmax", **k),
        {"inputs": X}, 4, True, id="repeat-own-static-feedback",
    ),
    pytest.param(
        lambda **k: DynamicRepeatDense(
            2, feedback=True, use_bias=False, length_gradient="none", return_lengths=True, **k),
        {"inputs": X, "repeats": N[:, None]}, 1, True, id="repeat-given-feedback-none",
    ),
    pytest.param(
        lambda **k: DynamicRepeatDense(2, max_repeats=4, **k),
        {"inputs": SEQUENCE, "repeats": np.arange(8, dtype="int32").reshape(2, 4) % 4}, 2, True,
        id="repeat-two-leading-axes",
    ),
    pytest.param(
        _logits(lambda **k: keras.layers.Dense(1, activation="sigmoid", **k)),
        {"inputs": X}, 2, True, id="logits-dense",
    ),
    pytest.param(
        _logits(lambda **k: keras.layers.Dense(3, **k), activation="softmax"),
        {"inputs": X}, 2, True, id="logits-declared",
    ),
    pytest.param(
        _logits(lambda **k: keras.layers.Conv2D(3, 2, activation="softmax", **k)),
        {"inputs": IMAGE}, 2, True, id="logits-conv",
    ),
    pytest.param(
        _logits(lambda **k: keras.layers.TimeDistributed(
            keras.layers.Dense(3, activation="softmax", **k), **k)),
        {"inputs": SEQUENCE}, 2, True, id="logits-time-distributed",
    ),
    pytest.param(
        _logits(lambda **k: keras.layers.EinsumDense(
            "abc,cd->abd", output_shape=(None, 3), bias_axes="d", activation="sigmoid", **k)),
        {"inputs": SEQUENCE}, 2, True, id="logits-einsum",
    ),
    pytest.param(
        _logits(keras.layers.Softmax), {"inputs": X}, 0, True, id="logits-softmax-layer"
    ),
    pytest.param(
        _logits(lambda **k: keras.layers.Activation("sigmoid", **k)), {"inputs": X}, 0, True,
        id="logits-activation-layer",
    ),
    pytest.param(
        lambda **k: StraightThrough("round", **k), {"inputs": X}, 0, True, id="straight-through"
    ),
    pytest.param(
        lambda **k: StraightThrough("argmax", **k), {"inputs": X}, 0, True,
        id="straight-through-argmax",
    ),
    pytest.param(lambda **k: GradientProbe(**k), {"inputs": X}, 0, False, id="probe"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "data", "weights", "cast"), LAYERS)
def test_layer_keeps_the_keras_contract(make, data, weights, cast, tmp_path):
    keras.utils.set_random_seed(1)
    check_layer(make, data, weights=weights, folder=tmp_path, half_is_cast=cast)


def test_probabilities_layer_is_float32_under_every_policy(tmp_path):
    layer = Probabilities("softmax")
    np.testing.assert_allclose(layer(X).numpy().sum(-1), 1.0, rtol=1e-6)
    half = Probabilities("sigmoid", dtype="mixed_bfloat16")(keras.ops.cast(X, "bfloat16"))
    assert half.dtype == "float32"
    model = keras.Sequential([keras.Input((3,)), layer])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(X), model(X))
    assert Probabilities.from_config(layer.get_config()).get_config() == layer.get_config()
    with pytest.raises(ValueError, match="`activation` must be"):
        Probabilities("tanh")


def test_the_check_itself_finds_a_broken_layer(tmp_path):
    @keras.saving.register_keras_serializable(package="keras_gradguard")
    class Forgetful(StraightThrough):
        def get_config(self):
            return {**super().get_config(), "fn": "sign"}

    with pytest.raises(AssertionError):
        check_layer(lambda **k: Forgetful("round", **k), {"inputs": X}, weights=0, folder=tmp_path)


FRESH = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import sys
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
import keras
import keras_gradguard.layers, keras_gradguard.losses
from keras_gradguard.layers import DynamicRepeatDense, GradientProbe, LogitsOutput, StraightThrough
from keras_gradguard.losses import LengthLoss, PaddedSequenceLoss

x = np.load(sys.argv[1] + "/x.npy")
model = keras.models.load_model(sys.argv[1] + "/model.keras")  # no custom_objects
assert isinstance(model.loss, dict), model.loss
for name, value in zip(("rows", "lengths", "head"), model.predict(x, verbose=0), strict=True):
    np.testing.assert_array_equal(value, np.load(f"{sys.argv[1]}/{name}.npy"))
print("loaded")
if not hasattr(keras.src.losses.loss, "scale_loss_for_distribution"):
    sys.exit()  # this Keras sums the means of the replicas, whatever the loss

def build():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    hidden = GradientProbe()(StraightThrough("round")(hidden))
    rows, lengths = DynamicRepeatDense(2, feedback=feedback, max_repeats=limit)(hidden)
    head = LogitsOutput(keras.layers.Dense(1, activation="sigmoid"))
    model = keras.Model(inputs, [rows, lengths, head(hidden)])
    model.compile("sgd", loss=[PaddedSequenceLoss(reduction="sum"),
                               LengthLoss(), head.loss()])
    return model

rng = np.random.default_rng(0)
x = rng.normal(size=(8, 3)).astype("float32")
y = [np.ones((8, 3, 2), "float32"), np.full(8, 3.0, "float32"), np.ones((8, 1), "float32")]
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
# Two replicas with half a batch each must train as one process with the whole batch.
for feedback, limit in ((False, None), (True, 4)):
    plain = build()
    plain.fit(x, y, batch_size=8, epochs=2, verbose=0)
    with strategy.scope():
        mirrored = build()
    mirrored.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for a, b in zip(plain.get_weights(), mirrored.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert np.abs(plain.get_weights()[0] - build().get_weights()[0]).max() > 1e-4
print("mirrored")
"""


def test_fresh_process_loads_without_custom_objects_and_trains_mirrored(tmp_path):
    from keras_gradguard.losses import LengthLoss, PaddedSequenceLoss

    inputs = keras.Input((3,))
    rows, lengths = DynamicRepeatDense(2, feedback=True, name="repeat")(inputs)
    head = LogitsOutput(keras.layers.Dense(2, activation="softmax"), name="head")
    hidden = GradientProbe()(StraightThrough("sign")(inputs))
    model = keras.Model(inputs, [rows, lengths, head(hidden)])
    model.compile(
        "adam",
        loss={
            model.output_names[0]: PaddedSequenceLoss(),
            model.output_names[1]: LengthLoss("huber"),
            model.output_names[2]: head.loss(),
        },
    )
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    for name, value in zip(("rows", "lengths", "head"), model.predict(X, verbose=0), strict=True):
        np.save(tmp_path / f"{name}.npy", value)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    divides = hasattr(keras.src.losses.loss, "scale_loss_for_distribution")
    assert done.stdout.split() == (["loaded", "mirrored"] if divides else ["loaded"])
