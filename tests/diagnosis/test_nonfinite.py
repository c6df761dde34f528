"""NaN and Inf: the first operation that makes one, and which classic it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_gradguard.diagnosis.nonfinite import non_finite
from keras_gradguard.diagnosis.trace import trace_step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 1)).astype("float32")
ZERO = np.zeros_like(X)


def net(activation="relu", units=1, **options):
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activation=activation, name="low"),
            layers.Dense(units, name="top", **options),
        ]
    )


LOSSES = {
    # name: (loss of p, inputs, cause)
    "log of 0": (lambda t, p: tf.reduce_mean(tf.math.log(p * 0.0)), X, "log_of_zero"),
    "log of a negative": (
        lambda t, p: ops.mean(ops.log(-ops.square(p) - 1.0)),
        X,
        "log_of_zero",
    ),
    "exp": (lambda t, p: tf.reduce_mean(tf.exp(tf.square(p) + 100.0)), X, "exp_overflow"),
    "keras exp": (lambda t, p: ops.mean(ops.exp(1e3 + p)), X, "exp_overflow"),
    "division by 0": (lambda t, p: tf.reduce_mean(p / (t - t)), X, "division_by_zero"),
    "0 / 0": (lambda t, p: ops.mean((p * 0) / ops.sum(p * 0)), X, "division_by_zero"),
    "reciprocal": (
        lambda t, p: tf.reduce_mean(tf.math.reciprocal(p)),
        ZERO,
        "division_by_zero",
    ),
    "sqrt": (lambda t, p: tf.reduce_mean(tf.sqrt(tf.square(p))), ZERO, "sqrt_gradient_at_zero"),
    "keras sqrt": (
        lambda t, p: ops.mean(ops.sqrt(ops.sum(ops.square(p), -1))),
        ZERO,
        "sqrt_gradient_at_zero",
    ),
    "norm": (lambda t, p: tf.norm(p), ZERO, "sqrt_gradient_at_zero"),
    "keras norm": (lambda t, p: ops.mean(ops.norm(p, axis=-1)), ZERO, "sqrt_gradient_at_zero"),
    "power": (lambda t, p: tf.reduce_mean(p**0.5), ZERO, "sqrt_gradient_at_zero"),
    "standard deviation": (lambda t, p: tf.math.reduce_std(p), ZERO, "sqrt_gradient_at_zero"),
    "where log": (
        lambda t, p: tf.reduce_mean(tf.where(tf.abs(p) > 0.0, tf.math.log(tf.square(p)), 0.0)),
        ZERO,
        "where_double_branch",
    ),
    "where division": (
        lambda t, p: tf.reduce_mean(tf.where(p != 0.0, 1.0 / p, 0.0)),
        ZERO,
        "where_double_branch",
    ),
    "keras where log": (
        lambda t, p: ops.mean(ops.where(p > 0.0, p * ops.log(p), 0.0)),
        ZERO,
        "where_double_branch",
    ),
    "sqrt in a tf.function": (
        tf.function(lambda t, p: tf.reduce_mean(tf.sqrt(tf.square(p)))),
        ZERO,
        "sqrt_gradient_at_zero",
    ),
    "log in a tf.function": (
        tf.function(lambda t, p: tf.reduce_mean(tf.math.log(p))),
        ZERO,
        "log_of_zero",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_classic_in_the_loss(name):
    loss, x, cause = LOSSES[name]
    found = non_finite(trace_step(net(None), x, Y, loss=loss))
    assert found[0].name == cause
    assert found[0].where[0] == "loss"
    assert found[0].source.startswith("test_nonfinite.py:")
    assert found[0].fix


@pytest.mark.parametrize("name", LOSSES)
def test_classic_in_a_layer(name):
    loss, x, cause = LOSSES[name]
    layer = layers.Lambda(lambda h: h * 0 + loss(h[:, :1] * 0, h), name="danger")
    low = layers.Dense(3, name="low")
    model = keras.Sequential([keras.Input((4,)), low, layer, layers.Dense(1, name="top")])
    found = non_finite(trace_step(model, x, Y, loss="mse"))
    assert found[0].name == cause
    assert found[0].where[0] == "danger"


def test_the_classic_behind_a_healthy_network_is_found_under_deep_layers():
    first = [layers.Lambda(lambda h: ops.sqrt(ops.square(h)), name="root")]
    deep = [layers.Dense(8, activation="tanh", name=f"d{i}") for i in range(30)]
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="low"), *first, *deep, layers.Dense(1)]
    )
    found = non_finite(trace_step(model, ZERO, Y, loss="mse"))
    assert (found[0].name, found[0].where[0]) == ("sqrt_gradient_at_zero", "root")


def test_safe_ops_are_finite():
    from keras_gradguard.ops import safe_divide, safe_log, safe_norm, safe_sqrt

    def loss(t, p):
        return ops.mean(safe_sqrt(p) + safe_log(ops.square(p)) + safe_divide(1.0, p)) + ops.mean(
            safe_norm(p, axis=-1)
        )

    assert non_finite(trace_step(net(None), ZERO, Y, loss=loss)) == ()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 3])
def test_bad_input_column(value, column):
    x = X.copy()
    x[2, column] = value
    found = non_finite(trace_step(net(), x, Y, loss="mse"))
    assert [c.name for c in found] == ["nan_input"]
    assert found[0].where == ("data", "x")
    assert f"column {column}" in found[0].evidence[1].text
    assert found[0].evidence[0].value == 1


def test_bad_target_and_named_inputs():
    y = Y.copy()
    y[0] = np.nan
    assert non_finite(trace_step(net(), X, y, loss="mse"))[0].where == ("data", "y")
    p, q = keras.Input((4,), name="p"), keras.Input((4,), name="q")
    model = keras.Model({"p": p, "q": q}, layers.Dense(1)(layers.Add()([p, q])))
    found = non_finite(trace_step(model, {"p": X, "q": X * np.nan}, Y, loss="mse"))
    assert found[0].where == ("data", "x['q']")


def test_float16_overflow_names_the_layer():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="low", dtype="mixed_float16"),
            layers.Dense(3, name="mid", dtype="mixed_float16", kernel_initializer="ones"),
            layers.Dense(1, name="top", dtype="float32"),
        ]
    )
    model.layers[0].kernel.assign(tf.fill((4, 3), 3000.0))
    found = non_finite(trace_step(model, np.abs(X) * 5, Y, loss="mse"))
    assert (found[0].name, found[0].where[0]) == ("float16_overflow", "low")


def test_a_loss_scale_that_is_too_high_is_only_that():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype="mixed_float16")])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=2.0**24
    )
    model.compile(optimizer, "mse")
    found = non_finite(trace_step(model, X, Y))
    assert [(c.name, c.where) for c in found] == [("float16_overflow", ("optimizer",))]
    assert found[0].score < 0.5


def test_label_without_a_unit():
    model = net(units=3, activation=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = non_finite(trace_step(model, X, np.arange(16) % 5, loss=loss))
    assert (found[0].name, found[0].where) == ("label_out_of_range", ("data", "y"))


def test_index_without_an_embedding_row():
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            layers.Embedding(5, 3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    found = non_finite(trace_step(model, np.full((16, 2), 9), Y, loss="mse"))
    assert (found[0].name, found[0].where) == ("label_out_of_range", ("data", "x"))


def test_weights_that_grew_out_of_bounds():
    model = net(None)
    model.layers[0].kernel.assign(tf.fill((4, 3), 1e25))
    found = non_finite(trace_step(model, X, Y, loss="mse"))
    assert found[0].name == "learning_rate_too_high"
    assert found[0].where[0] == "optimizer"
    assert "low/kernel" in found[0].where


def broken(model):
    for variable in model.trainable_variables:
        variable.assign(tf.fill(variable.shape, np.float32("nan")))
    return model


def test_weights_that_are_nan_already_do_not_hide_the_classic():
    def loss(t, p):
        return tf.reduce_mean(tf.sqrt(tf.square(p)))

    found = non_finite(trace_step(broken(net(None)), ZERO, Y, loss=loss))
    assert [c.name for c in found] == ["sqrt_gradient_at_zero", "learning_rate_too_high"]


def test_weights_that_are_nan_with_nothing_else_wrong():
    found = non_finite(trace_step(broken(net()), X, Y, loss="mse"))
    assert [c.name for c in found] == ["learning_rate_too_high"]


def test_weights_that_are_nan_and_a_log_of_a_sigmoid():
    def loss(t, p):
        p = tf.sigmoid(p)
        return -tf.reduce_mean(t * tf.math.log(p) + (1 - t) * tf.math.log(1 - p))

    found = non_finite(
        trace_step(broken(net()), X, Y > 0, loss=lambda t, p: loss(tf.cast(t, tf.float32), p))
    )
    assert found[0].name == "log_of_zero"
    assert found[0].score < 0.9


def test_variables_are_left_as_they_are():
    model = broken(net())
    non_finite(trace_step(model, X, Y, loss="mse"))
    assert all(np.isnan(np.asarray(v)).all() for v in model.trainable_variables)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "softplus", "swish", None])
@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "log_cosh", "cosine_similarity"])
def test_healthy_networks_have_no_cause(activation, loss):
    assert non_finite(trace_step(net(activation), X, Y, loss=loss)) == ()
