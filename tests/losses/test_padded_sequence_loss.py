"""PaddedSequenceLoss against a loop over the rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.losses import PaddedSequenceLoss

RNG = np.random.default_rng(5)


def rows_of(base, true, pred):
    error = pred - true
    if base == "mse":
        return np.mean(error**2)
    if base == "mae":
        return np.mean(np.abs(error))
    size = np.abs(error)
    return np.mean(np.where(size <= 1, error**2 / 2, size - 0.5))


def oracle(base, mismatch, true, true_lengths, pred, pred_lengths, weights=None):
    """Return the mean over the rows that count, one row at a time."""
    total, count = 0.0, 0
    for b, (n, m) in enumerate(zip(true_lengths, pred_lengths, strict=True)):
        for i in range(max(n, m) if mismatch == "pad" else min(n, m)):
            zero = np.zeros(true.shape[2:])
            t = true[b, i] if i < n else zero
            p = pred[b, i] if i < pred.shape[1] else zero
            total += rows_of(base, t, p) * (1 if weights is None else weights[b])
            count += 1
    return total / count if count else 0.0


def sequence(lengths, time, features):
    values = np.zeros((len(lengths), time, features), "float32")
    for b, n in enumerate(lengths):
        values[b, :n] = RNG.normal(size=(n, features)) + 3  # no row of zeros
    return values


def masked(values, lengths):
    tensor = tf.constant(values)
    tensor._keras_mask = tf.constant(np.arange(values.shape[1]) < np.array(lengths)[:, None])
    return tensor


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
    extra=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    features=st.integers(1, 3),
    base=st.sampled_from(["mse", "mae", "huber"]),
    mismatch=st.sampled_from(["pad", "ignore"]),
    weighted=st.booleans(),
)
def test_value_equals_a_loop_over_rows(lengths, extra, features, base, mismatch, weighted):
    n, m = zip(*lengths, strict=True)
    true = sequence(n, max(n) + extra[0], features)
    pred = sequence(m, max(m) + extra[1], features)
    weights = RNG.uniform(size=len(n)).astype("float32") if weighted else None
    found = PaddedSequenceLoss(base, mismatch)(true, masked(pred, m), weights)
    np.testing.assert_allclose(found, oracle(base, mismatch, true, n, pred, m, weights), rtol=1e-4)


def test_without_a_mask_every_predicted_row_counts():
    true, pred = sequence([2, 1], 2, 2), sequence([3, 3], 3, 2)
    found = PaddedSequenceLoss()(true, pred)
    np.testing.assert_allclose(found, oracle("mse", "pad", true, [2, 1], pred, [3, 3]), rtol=1e-5)


def test_ragged_masked_and_filled_targets_are_the_same():
    lengths = [3, 0, 1]
    true, pred = sequence(lengths, 4, 2), masked(sequence([2, 2, 2], 2, 2), [2, 2, 2])
    expected = PaddedSequenceLoss()(true, pred)
    ragged = tf.RaggedTensor.from_tensor(true, lengths=lengths)
    np.testing.assert_allclose(PaddedSequenceLoss()(ragged, pred), expected, rtol=1e-6)
    np.testing.assert_allclose(
        PaddedSequenceLoss()(masked(true, lengths), pred), expected, rtol=1e-6
    )
    filled = np.where(np.arange(4)[None, :, None] < np.array(lengths)[:, None, None], true, -7)
    found = PaddedSequenceLoss(pad_value=-7.0)(filled.astype("float32"), pred)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("base", ["mse", "mae", "huber"])
@pytest.mark.parametrize("mismatch", ["pad", "ignore"])
def test_gradient_equals_central_differences(base, mismatch):
    true = sequence([2, 0, 1], 3, 2)
    pred = tf.constant(sequence([3, 1, 2], 4, 2), "float64")
    loss = PaddedSequenceLoss(base, mismatch, dtype="float64")
    theoretical, numerical = tf.test.compute_gradient(lambda p: loss(true, p), [pred])
    np.testing.assert_allclose(theoretical[0], numerical[0], atol=1e-6)
    assert np.abs(theoretical[0]).max() > 0


def test_no_rows_at_all_is_zero_with_zero_gradient():
    for rows in (0, 3):
        pred = tf.zeros((2, rows, 1))
        with tf.GradientTape() as tape:
            tape.watch(pred)
            tagged = tf.identity(pred)
            tagged._keras_mask = tf.zeros((2, rows), "bool")
            value = PaddedSequenceLoss()(np.zeros((2, 2, 1), "float32"), tagged)
        assert value.numpy() == 0
        assert not np.asarray(tf.convert_to_tensor(tape.gradient(value, pred))).any()


def test_reductions_and_row_weights():
    true, pred = sequence([2, 1], 2, 1), masked(sequence([1, 3], 3, 1), [1, 3])
    rows = PaddedSequenceLoss(reduction=None)(true, pred).numpy()
    assert rows.shape == (2, 3)
    assert (rows[0, 2], rows[0, 1] > 0) == (0, True)
    np.testing.assert_allclose(
        PaddedSequenceLoss(reduction="sum")(true, pred), rows.sum(), rtol=1e-6
    )
    weights = np.array([[1.0, 0.0], [0.5, 2.0]])
    weighted = PaddedSequenceLoss(reduction="none")(true, pred, weights).numpy()
    np.testing.assert_allclose(weighted, rows * np.pad(weights, ((0, 0), (0, 1))), rtol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_graph_mode_and_xla(dynamic, jit):
    true, pred = sequence([2, 1], 2, 2), sequence([3, 3], 3, 2)
    loss = PaddedSequenceLoss()
    shape = [None, None, 2] if dynamic else [2, None, 2]
    specs = [tf.TensorSpec(shape), tf.TensorSpec(shape)]
    run = tf.function(
        lambda t, p: loss(t, p), input_signature=specs, autograph=False, jit_compile=jit
    )
    np.testing.assert_allclose(run(true, pred), loss(true, pred), rtol=1e-5)
    if dynamic and not jit:
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(true[:1], pred)


def test_cross_entropy_of_classes_per_row():
    labels = np.array([[1, 2, 0], [2, 0, 0]])
    logits = RNG.normal(size=(2, 2, 3)).astype("float32")
    base = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = PaddedSequenceLoss(base, mismatch="ignore")
    rows = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:, :2], logits).numpy()
    np.testing.assert_allclose(loss(labels, logits), rows[[0, 0, 1], [0, 1, 0]].mean(), rtol=1e-5)


def absolute(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


@pytest.mark.parametrize(
    "base",
    ["mse", "huber", "log_cosh", keras.losses.MeanAbsoluteError(),
     keras.saving.register_keras_serializable(package="test_padded")(absolute)],
    ids=["mse", "huber", "name", "object", "function"],
)  # fmt: skip
def test_config_round_trip(base):
    loss = PaddedSequenceLoss(base, "ignore", pad_value=2.0, reduction="sum", name="s")
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert again.get_config() == loss.get_config()
    true, pred = sequence([2, 1], 2, 2), sequence([2, 2], 2, 2)
    np.testing.assert_allclose(again(true, pred), loss(true, pred))


REFUSED = [
    pytest.param((2, 3, 1), (3, 3, 1), id="batch"),
    pytest.param((1, 3, 2), (4, 3, 2), id="batch-of-one"),
    pytest.param((2, 3, 1), (2, 3, 2), id="features"),
    pytest.param((2, 3), (2, 3, 2, 2), id="rank"),
    pytest.param((2, 3, 1), (2, 3), id="rank-too-high"),
]


@pytest.mark.parametrize(("true", "pred"), REFUSED)
def test_nothing_is_broadcast(true, pred):
    with pytest.raises(ValueError, match="nothing is broadcast"):
        PaddedSequenceLoss()(np.ones(true, "float32"), np.ones(pred, "float32"))


def test_a_flat_target_is_refused_by_a_regression_on_features():
    with pytest.raises(ValueError, match="nothing is broadcast"):
        PaddedSequenceLoss("mse")(np.ones((3, 3), "float32"), np.ones((3, 3, 3), "float32"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": "no_such_loss"}, "`base`"),
        ({"base": 3}, "`base`"),
        ({"mismatch": "x"}, "`mismatch`"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PaddedSequenceLoss(**arguments)
