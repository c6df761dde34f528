"""DynamicRepeatDense: values, masks and gradients against a loop; bad n; nesting; training."""

from __future__ import annotations

import math
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.layers import DynamicRepeatDense
from keras_gradguard.losses import LengthLoss, PaddedSequenceLoss

RNG = np.random.default_rng(1)
X = RNG.normal(size=(4, 3)).astype("float32")


def oracle(layer, x, repeats):
    """One example, one row, one number at a time."""
    kernel = layer.kernel.numpy().astype("float64")
    bias = layer.bias.numpy() if layer.use_bias else np.zeros(layer.units)
    whole = layer.length_gradient == "none" or np.issubdtype(repeats.dtype, np.integer)
    lengths = [float(np.round(n)) if whole else float(n) for n in repeats]
    lengths = [max(n, layer.min_repeats) for n in lengths]
    if layer.max_repeats is not None:
        lengths = [min(n, layer.max_repeats) for n in lengths]
    rows = layer.max_repeats or max((math.ceil(n) for n in lengths), default=0)
    values = np.zeros((len(x), rows, layer.units))
    mask = np.zeros((len(x), rows), bool)
    for b, n in enumerate(lengths):
        previous = np.zeros(layer.units)
        for i in range(math.ceil(n)):
            features = np.concatenate([x[b], previous]) if layer.feedback else x[b]
            row = features @ kernel + bias
            row = np.tanh(row) if layer.activation is keras.activations.tanh else row
            values[b, i] = row * min(max(n - i, 0), 1)
            mask[b, i] = True
            previous = row
    return values, mask


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 4),
    features=st.integers(1, 3),
    units=st.integers(1, 3),
    repeats=st.lists(st.floats(0, 5, width=16), min_size=4, max_size=4),
    dtype=st.sampled_from(["float16", "float32", "float64", "int32", "int64", "uint8"]),
    column=st.booleans(),
    feedback=st.booleans(),
    max_repeats=st.sampled_from([None, 6, 3]),
    min_repeats=st.integers(0, 2),
    length_gradient=st.sampled_from(["boundary", "none"]),
    use_bias=st.booleans(),
)
def test_values_and_mask_equal_a_slow_loop(
    batch, features, units, repeats, dtype, column, feedback, max_repeats, min_repeats,
    length_gradient, use_bias,
):  # fmt: skip
    x = RNG.normal(size=(batch, features)).astype("float32")
    n = np.asarray(repeats[:batch]).astype(dtype)
    layer = DynamicRepeatDense(
        units, max_repeats, min_repeats, "tanh", use_bias, feedback, length_gradient,
        bias_initializer="normal",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = layer(x, repeats=n[:, None] if column else n)
    expected, mask = oracle(layer, x, n)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_array_equal(values._keras_mask, mask)
    np.testing.assert_array_equal(layer.compute_mask(x, repeats=n), mask)


@pytest.mark.parametrize("max_repeats", [None, 5])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_gradients_equal_central_differences(own, feedback, max_repeats):
    layer = DynamicRepeatDense(
        2, max_repeats, activation="tanh", feedback=feedback, return_lengths=True, dtype="float64"
    )
    x = tf.constant(X, "float64")
    n = tf.constant([0.3, 2.5, 1.75, 3.6], "float64")
    run = (lambda x, n: layer(x)) if own else (lambda x, n: layer(x, repeats=n))
    run(x, n)
    assert len(layer.trainable_variables) == (4 if own else 2)
    weight = tf.constant(RNG.normal(size=(4, 5, 2)))

    def loss(x, n, *variables):
        for variable, value in zip(layer.trainable_variables, variables, strict=True):
            variable.assign(value)
        values, _ = run(x, n)
        return tf.reduce_sum(values * weight[:, : values.shape[1]])

    start = [v.numpy() for v in layer.trainable_variables]
    points = [x.numpy(), n.numpy(), *start]
    with tf.GradientTape() as tape:
        tape.watch([x, n])
        values, _ = run(x, n)
        total = tf.reduce_sum(values * weight[:, : values.shape[1]])
    found = tape.gradient(total, [x, n, *[v.value for v in layer.trainable_variables]])
    for k, (point, gradient) in enumerate(zip(points, found, strict=True)):
        if own and k == 1:
            assert gradient is None  # n was not used
            continue
        numeric = np.zeros_like(point)
        for index in np.ndindex(point.shape):
            h = 1e-6
            for sign in (1, -1):
                moved = [p.copy() for p in points]
                moved[k][index] += sign * h
                numeric[index] += sign * float(loss(*map(tf.constant, moved))) / (2 * h)
        loss(*map(tf.constant, points))
        np.testing.assert_allclose(gradient, numeric, atol=1e-6)
        assert np.abs(numeric).max() > 1e-3


@pytest.mark.parametrize(
    ("length_gradient", "dtype"), [("none", "float32"), ("boundary", "int32"), ("none", "int32")]
)
def test_whole_rows_give_no_gradient_to_n(length_gradient, dtype):
    layer = DynamicRepeatDense(2, length_gradient=length_gradient)
    n = tf.constant([1.6, 2.2, 0.4, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(n)
        values = layer(X, repeats=tf.cast(n, dtype))
    assert tape.gradient(values, n) is None
    rows = n.numpy().astype(int) if dtype == "int32" else np.round(n.numpy())
    np.testing.assert_array_equal(values._keras_mask.numpy().sum(1), rows)
    head = DynamicRepeatDense(2, length_gradient="none")
    with tf.GradientTape() as tape:
        _, lengths = head(X)
    assert np.abs(tape.gradient(lengths, head.length_head.kernel.value).numpy()).max() > 0


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("max_repeats", [None, 4])
@pytest.mark.parametrize("n", [[0, 0, 0, 0], [0, 3, 0, 1]], ids=["all-zero", "some-zero"])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_zero_rows(n, max_repeats, feedback, mode):
    layer = DynamicRepeatDense(2, max_repeats, feedback=feedback)
    layer(X, repeats=np.ones(4, "float32"))

    def step(x, n):
        with tf.GradientTape() as tape:
            tape.watch(n)
            values = layer(x, repeats=n)
            loss = tf.reduce_sum(values**2)
        return values, tape.gradient(loss, [n, layer.kernel.value])

    if mode == "xla" and max_repeats is None:
        assert not layer.supports_jit
        return
    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla")
    values, gradients = step(tf.constant(X), tf.constant(n, "float32"))
    assert values.shape == (4, max_repeats or max(n), 2)
    assert np.count_nonzero(np.abs(values.numpy()).sum(-1)) == sum(n)
    assert all(np.isfinite(tf.convert_to_tensor(g)).all() for g in gradients)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e9], ids=str)
def test_bad_n_is_refused_without_max_repeats(bad):
    layer = DynamicRepeatDense(2)
    n = tf.constant([1.0, bad, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"`repeats` of layer .* must be finite.*max_repeats"):
        layer(X, repeats=n)
    graph = tf.function(lambda n: layer(X, repeats=n), autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
        graph(n)
    assert graph(tf.ones(4)).shape == (4, 1, 2)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("length_gradient", ["boundary", "none"])
def test_bad_n_with_max_repeats_is_clipped_and_nan_is_seen(mode, length_gradient):
    layer = DynamicRepeatDense(2, max_repeats=3, length_gradient=length_gradient)
    layer(X, repeats=np.ones(4, "float32"))

    def run(n):
        values = layer(X, repeats=n, training=True)
        return values, values._keras_mask

    if mode != "eager":
        run = tf.function(run, autograph=False, jit_compile=mode == "xla")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values, mask = run(tf.constant([-1.0, 1e9, math.nan, 2.0]))
        run(tf.constant([1e9, 1.0, 1.0, 1.0]))
        assert layer.metrics == []
        assert layer.metrics == []
    np.testing.assert_array_equal(mask.numpy().sum(1), [0, 3, 3, 2])
    np.testing.assert_array_equal(np.isnan(values.numpy()).all((1, 2)), [0, 0, 1, 0])
    assert layer.clipped_repeats == 3
    assert [str(w.message).split(":")[0] for w in caught] == [f"Layer '{layer.name}'"]


@pytest.mark.parametrize("jit", [False, True])
def test_clipping_is_reported_once_by_fit(jit):
    inputs = keras.Input((3,))
    n = keras.Input(())
    model = keras.Model([inputs, n], DynamicRepeatDense(1, max_repeats=2)(inputs, n))
    model.compile("sgd", PaddedSequenceLoss(), jit_compile=jit)
    data = [X, np.array([1, 5, 1, 7], "float32")], np.ones((4, 2, 1))
    with pytest.warns(UserWarning, match=r"clipped for 2 example\(s\)") as caught:
        model.fit(*data, verbose=0, epochs=3)
    assert len(caught) == 1
    assert model.layers[-1].clipped_repeats == 6
    assert list(model.history.history) == ["loss"]


ERRORS = [
    pytest.param({"length_gradient": "soft"}, r"'boundary', 'none'", id="length-gradient"),
    pytest.param({"units": 0}, "`units` must be a whole number", id="units-zero"),
    pytest.param({"units": 2.5}, "Received: units=2.5", id="units-fraction"),
    pytest.param({"max_repeats": 0}, "`max_repeats` must be", id="max-zero"),
    pytest.param({"min_repeats": -1}, "`min_repeats` must be", id="min-negative"),
    pytest.param(
        {"min_repeats": 3, "max_repeats": 2}, "min_repeats=3, max_repeats=2", id="min-above-max"
    ),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicRepeatDense(**{"units": 2, **arguments})


@pytest.mark.parametrize(
    "repeats",
    [np.ones(3, "float32"), np.ones((4, 2), "float32"), np.ones((4, 1, 1), "float32"),
     np.ones(4, bool), np.ones(4, "complex64")],
    ids=["batch", "two-a-row", "rank", "bool", "complex"],
)  # fmt: skip
def test_repeats_that_are_not_one_per_example_are_refused(repeats):
    with pytest.raises(ValueError, match="`repeats` of layer"):
        DynamicRepeatDense(2)(X, repeats=repeats)


def test_one_number_serves_all_examples():
    layer = DynamicRepeatDense(2)
    assert layer(X, repeats=3).shape == (4, 3, 2)
    assert layer(X[:1], repeats=[1.5]).shape == (1, 2, 2)
    assert layer.length_head is None


def test_head_is_made_only_when_needed():
    layer = DynamicRepeatDense(2)
    layer(X, repeats=1.0)
    with pytest.raises(ValueError, match="predict_repeats=True"):
        layer(X)
    both = DynamicRepeatDense(2, predict_repeats=True)
    assert both(X, repeats=1.0).shape == (4, 1, 2)
    values, lengths = both(X)
    assert values.shape[0] == lengths.shape[0] == 4
    assert len(both.weights) == 4


def test_predicted_n_is_positive_and_in_float32_under_half_precision():
    for policy in ("mixed_float16", "mixed_bfloat16"):
        layer = DynamicRepeatDense(2, min_repeats=2, dtype=policy)
        values, lengths = layer(X * 100)
        assert lengths.dtype == "float32"
        assert values.dtype == policy.removeprefix("mixed_")
        assert (lengths.numpy() >= 2).all()
        given = layer(X, repeats=tf.constant([0.0, 0.0, 0.0, 9.3]))
        last = given.numpy()[3].astype("float32")
        np.testing.assert_allclose(last[9] / last[0], 0.3, rtol=0.02)  # bfloat16(9.3) is 9.3125


def test_first_axes_may_be_many_and_the_layer_may_be_nested():
    sequence = RNG.normal(size=(2, 4, 3)).astype("float32")
    n = RNG.uniform(0, 3, size=(2, 4)).astype("float32")
    layer = DynamicRepeatDense(2, max_repeats=3)
    direct = layer(sequence, repeats=n)
    assert direct.shape == (2, 4, 3, 2)
    assert direct._keras_mask.shape == (2, 4, 3)
    for b in range(2):
        np.testing.assert_allclose(direct[b], layer(sequence[b], repeats=n[b]), atol=1e-6)

    inner_input = keras.Input((3,))
    values, _ = DynamicRepeatDense(2, max_repeats=20, feedback=True)(inner_input)
    inner = keras.Model(inner_input, values)
    for steps in (4, None):
        outer_input = keras.Input((steps, 3))
        outer = keras.Model(outer_input, keras.layers.TimeDistributed(inner)(outer_input))
        expected = np.stack([inner(sequence[:, t]) for t in range(4)], axis=1)
        np.testing.assert_allclose(outer.predict(sequence, verbose=0), expected, atol=1e-6)
        outer.compile("sgd", "mse")
        before = [w.copy() for w in outer.get_weights()]
        outer.fit(sequence, np.ones((2, 4, 20, 2)), verbose=0)
        assert all((a != b).any() for a, b in zip(before, outer.get_weights(), strict=True))


def test_twice_in_one_model_shares_weights_and_sums_gradients():
    layer = DynamicRepeatDense(2, feedback=True)
    a, b = keras.Input((3,)), keras.Input((3,))
    n = keras.Input(())
    model = keras.Model([a, b, n], [layer(a, n), layer(b, n)])
    assert len(model.weights) == 2
    lengths = np.array([1.0, 2.5, 0.0, 2.0], "float32")
    with tf.GradientTape(persistent=True) as tape:
        one, two = model([X, -X, lengths])
        first, second = tf.reduce_sum(one**2), tf.reduce_sum(two**3)
        total = first + second
    kernel = layer.kernel.value
    parts = tape.gradient(first, kernel) + tape.gradient(second, kernel)
    np.testing.assert_allclose(tape.gradient(total, kernel), parts, rtol=1e-5)


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.repeat = DynamicRepeatDense(1, max_repeats=4)

    def call(self, inputs):
        values, lengths = self.repeat(self.hidden(inputs))
        return {"values": values, "lengths": lengths}


def _functional():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    values, lengths = DynamicRepeatDense(1, max_repeats=4)(hidden)
    return keras.Model(inputs, {"values": values, "lengths": lengths})


@pytest.mark.parametrize("make", [Subclassed, _functional])
@pytest.mark.parametrize("how", ["graph", "eager", "xla"])
def test_trains_in_fit(make, how):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(
        keras.optimizers.Adam(0.05),
        {"values": PaddedSequenceLoss(), "lengths": LengthLoss()},
        run_eagerly=how == "eager",
        jit_compile=how == "xla",
    )
    y = {"values": np.ones((4, 3, 1)), "lengths": np.array([1.0, 2.0, 3.0, 3.0])}
    losses = model.fit(X, y, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]


def test_sequential_ends_in_values_and_lengths():
    model = keras.Sequential([keras.Input((3,)), DynamicRepeatDense(2)])
    values, lengths = model(X)
    assert values.shape[::2] == (4, 2)
    assert lengths.shape == (4,)


def test_the_mask_reaches_the_next_layers():
    inputs, n = keras.Input((3,)), keras.Input(())
    rows = DynamicRepeatDense(4, max_repeats=4)(inputs, n)
    model = keras.Model([inputs, n], keras.layers.LSTM(2)(rows))
    lengths = np.array([1.0, 2.0, 3.0, 4.0], "float32")
    longer = keras.Model(
        [inputs, n], keras.layers.LSTM(2)(DynamicRepeatDense(4, max_repeats=9)(inputs, n))
    )
    longer.set_weights(model.get_weights())
    np.testing.assert_allclose(model([X, lengths]), longer([X, lengths]), atol=1e-6)
