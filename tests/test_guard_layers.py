"""The guard and the package's own layers: probes recorded, a loss that does not fit refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from keras_gradguard import BadContractError, GradientGuard, GradientProbe, LogitsOutput

X = np.random.default_rng(0).normal(size=(32, 5)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def probed(**kwargs):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4, activation="tanh"),
            GradientProbe(name="middle"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", **kwargs)
    return model


def upstream_norm(model, x, y):
    """The slow way: split the model at the probe and differentiate by the middle value."""
    first, _, last = model.layers
    middle = tf.constant(first(x))
    with tf.GradientTape() as tape:
        tape.watch(middle)
        loss = tf.reduce_mean(tf.square(last(middle) - y))
    return float(tf.norm(tape.gradient(loss, middle)))


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=["graph", "eager", "xla", "steps_per_execution"],
)
def test_a_probe_shows_its_upstream_gradient(tmp_path, kwargs):
    expected = upstream_norm(probed(), X[:16], Y[:16])
    guard = GradientGuard(tmp_path, sample_every=1)
    model = probed(**kwargs)
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[guard])
    assert vars(model.layers[1])["_gradguard_sink"] is None
    events = EventAccumulator(str(tmp_path / "gradguard"), size_guidance={"tensors": 0})
    events.Reload()
    tag = next(
        t for t in events.Tags()["tensors"] if t.startswith("gradient_norm/") and "middle" in t
    )
    points = {e.step: tensor_util.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)}
    assert sorted(points) == [0, 1]
    assert points[0] == pytest.approx(expected, rel=1e-5)
    assert guard.steps_seen == 2
    assert guard.findings == ()


def test_a_probe_changes_no_bit():
    models = []
    for callbacks in ([], [GradientGuard(log_dir=None, sample_every=2)]):
        model = probed()
        model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
        models.append([np.array(v) for v in model.variables])
    for plain, guarded in zip(*models, strict=True):
        np.testing.assert_array_equal(plain, guarded)


def logits(loss):
    model = keras.Sequential(
        [keras.Input((5,)), LogitsOutput(layers.Dense(1, activation="sigmoid"))]
    )
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(
    "loss", ["binary_crossentropy", keras.losses.BinaryCrossentropy()], ids=["name", "object"]
)
def test_a_compiled_probability_loss_on_logits_is_refused_before_training(loss):
    model = logits(loss)
    before = [np.array(v) for v in model.variables]
    with pytest.raises(BadContractError, match=r"from_logits=True|LogitsOutput") as caught:
        model.fit(X, Y, verbose=0, callbacks=[GradientGuard(log_dir=None)])
    assert caught.value.finding.cause == "missing_activation"
    for a, b in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_matching_loss_passes():
    model = logits(keras.losses.BinaryCrossentropy(from_logits=True))
    guard = GradientGuard(log_dir=None)
    model.fit(X, Y, verbose=0, callbacks=[guard])
    assert guard.findings == ()


def test_a_watched_loop_refuses_it_too():
    model, loss = logits("mse"), keras.losses.BinaryCrossentropy()
    guard = GradientGuard(log_dir=None)
    with pytest.raises(BadContractError), guard.watch(model, keras.optimizers.SGD(), loss=loss):
        raise AssertionError("the loop must not begin")
