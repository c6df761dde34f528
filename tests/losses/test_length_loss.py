"""LengthLoss against the formula, for every form of target."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.losses import LengthLoss

LENGTHS = np.array([3, 0, 1, 2])
PADDED = np.zeros((4, 5, 2), "float32")
for b, n in enumerate(LENGTHS):
    PADDED[b, :n] = b + 1.0
MASK = np.arange(5) < LENGTHS[:, None]
RAGGED = tf.ragged.constant([[1.0, 2, 3], [], [1], [5, 6]])
PRED = np.array([2.5, 0.5, 1.0, 4.0], "float32")
EXPECTED = np.mean((PRED - LENGTHS) ** 2)

FORMS = [
    pytest.param(LENGTHS, {}, id="lengths"),
    pytest.param(LENGTHS.astype("float32")[:, None], {}, id="column"),
    pytest.param(MASK, {}, id="bool-mask"),
    pytest.param(MASK.astype("int32"), {"target": "mask"}, id="int-mask"),
    pytest.param(PADDED, {}, id="padded"),
    pytest.param(PADDED[..., 0], {}, id="padded-flat"),
    pytest.param(np.where(MASK, PADDED[..., 0], -1), {"pad_value": -1.0}, id="pad-value"),
    pytest.param(RAGGED, {}, id="ragged"),
]


@pytest.mark.parametrize(("y_true", "arguments"), FORMS)
@pytest.mark.parametrize("column", [False, True])
def test_every_form_of_target(y_true, arguments, column):
    pred = PRED[:, None] if column else PRED
    np.testing.assert_allclose(LengthLoss(**arguments)(y_true, pred), EXPECTED, rtol=1e-6)


@pytest.mark.parametrize(("y_true", "arguments"), FORMS)
@pytest.mark.parametrize("jit", [False, True])
def test_every_form_of_target_in_fit(y_true, arguments, jit):
    if y_true is RAGGED and jit:
        pytest.skip("ragged tensors do not compile under XLA")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", LengthLoss(**arguments), jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    expected = np.mean((model(x).numpy()[:, 0] - LENGTHS) ** 2)
    np.testing.assert_allclose(model.evaluate(x, y_true, verbose=0), expected, rtol=1e-5)
    before = model.get_weights()
    model.fit(x, y_true, verbose=0)
    assert all((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(-5, 50)), min_size=1, max_size=5),
    st.sampled_from(["mse", "huber"]),
    st.floats(0.25, 4),
)
def test_value_and_gradient_equal_the_formula(pairs, base, delta):
    true, pred = (tf.constant(column, "float64") for column in zip(*pairs, strict=True))
    loss = LengthLoss(base, delta=delta, reduction="sum", dtype="float64")
    with tf.GradientTape() as tape:
        tape.watch(pred)
        value = loss(true, pred)
    expected, slopes = 0.0, []
    for t, p in pairs:
        e = p - t
        if base == "mse":
            expected, slope = expected + e**2, 2 * e
        elif abs(e) <= delta:
            expected, slope = expected + e**2 / 2, e
        else:
            expected, slope = expected + delta * (abs(e) - delta / 2), delta * np.sign(e)
        slopes.append(slope)
    np.testing.assert_allclose(value, expected, atol=1e-9)
    np.testing.assert_allclose(tape.gradient(value, pred), slopes, atol=1e-9)


@pytest.mark.parametrize("base", ["mse", "huber"])
def test_gradient_equals_central_differences(base):
    loss = LengthLoss(base, dtype="float64")
    pred = tf.constant([2.5, 0.5, 1.2, 7.0], "float64")
    theoretical, numerical = tf.test.compute_gradient(lambda p: loss(LENGTHS, p), [pred])
    np.testing.assert_allclose(theoretical[0], numerical[0], atol=1e-6)
    assert (theoretical[0] != 0).all()


def test_weights_and_reductions_as_in_keras():
    weights = np.array([1.0, 0.0, 2.0, 0.5])
    keras_loss = keras.losses.MeanSquaredError
    for reduction in ("sum_over_batch_size", "sum", "none", None):
        ours = LengthLoss(reduction=reduction)(LENGTHS, PRED, sample_weight=weights)
        theirs = keras_loss(reduction=reduction)(LENGTHS[:, None], PRED[:, None], weights)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_config_round_trip():
    loss = LengthLoss("huber", delta=2.0, target="mask", pad_value=-1.0, reduction="sum", name="n")
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is LengthLoss
    assert again.get_config() == loss.get_config()
    assert keras.saving.serialize_keras_object(loss)["registered_name"] == (
        "keras_gradguard>LengthLoss"
    )


REFUSED = [
    pytest.param(LENGTHS, np.ones((4, 2)), {}, "`y_pred` of LengthLoss", id="two-a-row"),
    pytest.param(LENGTHS[:3], PRED, {}, "3 target and 4 predicted", id="batch"),
    pytest.param(LENGTHS[:1], PRED, {}, "1 target and 4 predicted", id="no-broadcast"),
    pytest.param(MASK, PRED, {"target": "lengths"}, "must be lengths", id="mask-as-lengths"),
    pytest.param(
        LENGTHS, PRED, {"target": "padded"}, r"\[batch, time, ...\]", id="lengths-as-padded"
    ),
    pytest.param(PADDED, PRED, {"target": "mask"}, "must be a mask", id="padded-as-mask"),
]


@pytest.mark.parametrize(("y_true", "y_pred", "arguments", "message"), REFUSED)
def test_bad_shapes_are_refused(y_true, y_pred, arguments, message):
    with pytest.raises(ValueError, match=message):
        LengthLoss(**arguments)(y_true, y_pred)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"base": "l3"}, "`base`"), ({"target": "x"}, "`target`"), ({"delta": 0}, "`delta`")],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LengthLoss(**arguments)


def test_what_only_the_run_knows_is_checked_there():
    loss = LengthLoss()
    spec = tf.TensorSpec([None])
    run = tf.function(lambda t, p: loss(t, p), input_signature=[spec, spec], autograph=False)
    np.testing.assert_allclose(run(LENGTHS.astype("float32"), PRED), EXPECTED, rtol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(tf.ones(1), PRED)
    unknown = tf.function(lambda t: loss(t, PRED), input_signature=[tf.TensorSpec([None, None])])
    with pytest.raises(ValueError, match="target='lengths'"):
        unknown(tf.ones((4, 1)))
