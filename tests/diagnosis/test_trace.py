"""Tracing a step: what it sees, and that it changes nothing."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.trace import TraceError, as_loss, trace_step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 1)).astype("float32")


def make_mlp():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation="relu", name="a"), layers.Dense(1, name="b")]
    )


def numpy_gradient(model, x, y):
    """Mean squared error of a two-layer ReLU net, differentiated by hand."""
    w1, b1, w2, b2 = (np.asarray(v, "float64") for v in model.trainable_variables)
    h = x @ w1 + b1
    r = np.maximum(h, 0)
    d = 2 * (r @ w2 + b2 - y) / len(x)
    dr = (d @ w2.T) * (h > 0)
    return [x.T @ dr, dr.sum(0), r.T @ d, d.sum(0)]


def test_gradients_are_those_of_the_model():
    model = make_mlp()
    trace = trace_step(model, X, Y, loss="mse")
    for got, want in zip(run(trace, trace.gradients), numpy_gradient(model, X, Y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("mse", id="name"),
        pytest.param(keras.losses.MeanSquaredError(), id="keras loss"),
        pytest.param(lambda t, p: tf.reduce_mean(tf.square(t - p)), id="tf function"),
        pytest.param(lambda t, p: ops.mean(ops.square(t - p), axis=-1), id="one per example"),
    ],
)
def test_every_form_of_loss_gives_the_same_number(loss):
    model = make_mlp()
    trace = trace_step(model, X, Y, loss=loss)
    want = np.mean((np.asarray(model(X)) - Y) ** 2)
    np.testing.assert_allclose(run(trace, [trace.loss])[0], want, rtol=1e-5)


def test_compiled_loss_sample_weight_and_regularizer():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5))]
    )
    model.compile("sgd", "mse")
    weight = np.linspace(0, 1, 16).astype("float32")
    trace = trace_step(model, X, Y, sample_weight=weight)
    kernel = np.asarray(model.layers[0].kernel)
    want = np.mean(weight * np.mean((np.asarray(model(X)) - Y) ** 2, -1)) + 0.5 * np.sum(kernel**2)
    np.testing.assert_allclose(run(trace, [trace.loss])[0], want, rtol=1e-4)


def test_dictionaries_in_and_out():
    p, q = keras.Input((4,), name="p"), keras.Input((4,), name="q")
    h = layers.Dense(3, name="shared")(layers.Concatenate()([p, q]))
    model = keras.Model(
        {"p": p, "q": q}, {"o": layers.Dense(1, name="o")(h), "r": layers.Dense(2, name="r")(h)}
    )
    model.compile("sgd", {"o": "mse", "r": "mse"})
    trace = trace_step(model, {"p": X, "q": X}, {"o": Y, "r": np.zeros((16, 2))})
    assert all(g is not None for g in trace.gradients)
    assert set(trace.y_pred) == {"o", "r"}


def test_layer_calls_are_nested_as_in_the_model():
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="deep")], name="block")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a"), inner], name="top")
    trace = trace_step(model, X, np.zeros((16, 2)), loss="mse")
    calls = {c.name: c.parents for c in trace.layers}
    assert calls["deep"] == ("top", "block")
    assert calls["a"] == ("top",)
    matmuls = [op for op in trace.ops.ops if op.type == "MatMul"]
    assert [op.layer for op in matmuls] == ["a", "deep"]


class OwnStep(keras.Model):
    """Two tapes, an attribute left on self, and apply."""

    def __init__(self):
        super().__init__()
        self.net = make_mlp()
        self.history_of_losses = []

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = tf.reduce_sum(self(x, training=True))
            slope = inner.gradient(total, x)
            loss = tf.reduce_mean((self(x) - y) ** 2) + tf.reduce_mean(slope**2)
        self.last = outer.gradient(loss, self.trainable_variables)
        self.history_of_losses.append(loss)
        self.optimizer.apply_gradients(zip(self.last, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_custom_step_records_each_tape_and_applies_nothing():
    model = OwnStep()
    model.compile("adam")
    model(X)
    before = [np.array(v) for v in model.variables]
    trace = trace_step(model, X, Y)
    assert trace.custom_step
    assert len(trace.records) == 2
    assert len(trace.applies) == 1
    assert len(trace.gradients) == 4
    assert not hasattr(model, "last")
    assert model.history_of_losses == []
    assert not model.optimizer.built
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_step_without_apply_has_no_applies():
    class Net(OwnStep):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            tape.gradient(loss, self.trainable_variables)
            return {"loss": loss}

    model = Net()
    model.compile("adam")
    assert trace_step(model, X, Y).applies == ()


def make_stateful():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activity_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def weights_after(model, look):
    for _ in range(4):
        model.train_on_batch(X, Y)
        if look:
            trace = trace_step(model, X, Y)
            run(trace, [trace.loss, *trace.gradients])
    return [np.array(v) for v in model.variables]


def test_training_is_bit_identical_with_traces_in_between():
    quiet = weights_after(make_stateful(), look=False)
    watched = weights_after(make_stateful(), look=True)
    for mine, theirs in zip(watched, quiet, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_python_and_numpy_random_state_and_names_are_put_back():
    class Draws(layers.Layer):
        def call(self, x):
            return layers.Dense(2)(x) * random.random() * np.random.rand()  # noqa: NPY002

    model = keras.Sequential([keras.Input((4,)), Draws()])
    trace_step(model, X, Y, loss="mse")  # builds what is not built yet
    name_before = layers.Dense(1).name
    random.seed(1)
    want = random.random()
    random.seed(1)
    trace_step(model, X, Y, loss="mse")
    assert random.random() == want
    name_after = layers.Dense(1).name
    assert int(name_after.rsplit("_", 1)[-1]) == int("0" + name_before.rsplit("_", 1)[-1]) + 1


def test_variables_that_are_assigned_are_put_back_after_a_run():
    class Counts(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x):
            self.count.assign(self.count + 1.0)
            return x * self.count

    model = keras.Sequential([keras.Input((4,)), Counts(), layers.Dense(1)])
    trace = trace_step(model, X, Y, loss="mse")
    run(trace, [trace.loss])
    assert float(model.layers[0].count) == 0.0


def test_run_can_use_other_values_for_a_variable():
    model = make_mlp()
    trace = trace_step(model, X, Y, loss="mse")
    bias = model.layers[1].bias
    run(trace, [trace.loss], instead={trace.key(bias): tf.constant([100.0])})
    moved = run(trace, [trace.y_pred], instead={trace.key(bias): tf.constant([100.0])})[0]
    np.testing.assert_allclose(moved, np.asarray(model(X)) + 100.0, rtol=1e-5)
    assert float(bias[0]) == 0.0


def test_run_refuses_what_does_not_fit():
    trace = trace_step(make_mlp(), X, Y, loss="mse")
    with pytest.raises(ValueError, match="limit_bytes=4"):
        run(trace, [trace.y_pred], limit_bytes=4)


class Host(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        h = self.dense(x)
        return h * float(tf.reduce_mean(h).numpy())


def test_code_that_cannot_run_in_a_graph_is_told_with_its_line():
    model = Host()
    model(X)
    with pytest.raises(TraceError, match="numpy") as caught:
        trace_step(model, X, Y, loss="mse")
    assert caught.value.frames[-1].function == "call"
    assert caught.value.frames[-1].file == __file__


def test_bad_loss_and_bad_data_are_refused():
    with pytest.raises(TypeError, match="Received: loss=3"):
        as_loss(3)
    with pytest.raises(TraceError, match="dtype object"):
        trace_step(make_mlp(), np.array([["a", None]], dtype=object), Y, loss="mse")


def test_mixed_precision_and_loss_scale():
    policy = "mixed_float16"
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype=policy)])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
    model.compile(optimizer, "mse")
    trace = trace_step(model, X, Y)
    loss, scaled = run(trace, [trace.loss, trace.scaled_loss])
    np.testing.assert_allclose(scaled, 64 * loss, rtol=1e-3)
    assert not model.optimizer.inner_optimizer.built
