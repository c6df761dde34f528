"""GradientProbe: sees the true upstream gradient everywhere, changes nothing."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard.layers import GradientProbe, find_probes

X = np.random.default_rng(3).normal(size=(8, 3)).astype("float32")
Y = X[:, :1] * 2


def build(nested=False):
    keras.utils.set_random_seed(4)
    probe = GradientProbe(name="probe")
    stack = [keras.layers.Dense(5, activation="tanh"), probe, keras.layers.Dense(1)]
    if nested:
        stack = [keras.Sequential([keras.Input((3,)), *stack])]
    return keras.Sequential([keras.Input((3,)), *stack]), probe


class Recorder:
    """Adds the squares of what it is handed, in a variable, as a guard would."""

    def __init__(self):
        self.total = tf.Variable(0.0)
        self.calls = 0

    def __call__(self, upstream):
        self.calls += 1
        return self.total.assign_add(tf.reduce_sum(upstream**2))


def expected_square(model):
    """The upstream gradient from the chain rule, without the probe."""
    weights = model.get_weights()
    hidden = np.tanh(X @ weights[0] + weights[1])
    error = hidden @ weights[2] + weights[3] - Y
    return float(((2 * error / len(X)) @ weights[2].T).__pow__(2).sum())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("how", ["eager", "graph", "xla", "steps"])
def test_the_sink_sees_the_upstream_gradient_and_the_weights_stay_bit_identical(how, nested):
    results = []
    for recorder in (None, Recorder()):
        model, probe = build(nested)
        probe._gradguard_sink = recorder
        expected = expected_square(model)
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            run_eagerly=how == "eager",
            jit_compile=how == "xla",
            steps_per_execution=2 if how == "steps" else 1,
        )
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        if recorder is not None:
            assert recorder.calls >= 1
            np.testing.assert_allclose(recorder.total.numpy(), expected, rtol=1e-5)
        model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for plain, watched in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_without_a_sink_no_operation_is_added():
    model, probe = build()
    layers = [layer for layer in model.layers if layer is not probe]
    bare = keras.Sequential([keras.Input((3,)), *layers])

    def operations(m):
        graph = tf.function(lambda x: m(x), autograph=False).get_concrete_function(tf.constant(X))
        return sorted(op.type for op in graph.graph.get_operations())

    assert operations(model) == operations(bare)
    probe._gradguard_sink = Recorder()
    assert operations(model) != operations(bare)
    x = tf.constant(X)
    probe._gradguard_sink = None
    assert probe(x) is x


def loop(probe, x):
    _, y = tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, 2.0 * probe(y)), (0, x), maximum_iterations=3
    )
    return y


def branch(probe, x):
    return tf.cond(x[0] > 0, lambda: 8.0 * probe(x), lambda: x)


def inner_function(probe, x):
    return tf.function(lambda x: 8.0 * probe(x), autograph=False)(x)


@pytest.mark.parametrize(
    ("forward", "eager_square", "graph_square"),
    # In the loop the upstream gradients of the three turns are, from the last, 2, 4 and 8.
    [(loop, 4 + 16 + 64, 0), (branch, 64, 0), (inner_function, 64, 64)],
)
@pytest.mark.parametrize("graph", [False, True])
def test_inside_control_flow(forward, eager_square, graph_square, graph):
    probe, recorder = GradientProbe(), Recorder()
    probe._gradguard_sink = recorder
    probe.build((3,))
    x = tf.constant([1.0, 2.0, 3.0])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(forward(probe, x))
        return tape.gradient(loss, x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradient = (tf.function(step, autograph=False) if graph else step)(x)
    np.testing.assert_array_equal(gradient, [8.0, 8.0, 8.0])
    seen = graph_square if graph else eager_square
    assert recorder.total.numpy() == 3 * seen
    assert any("cannot be watched" in str(w.message) for w in caught) == (seen == 0)


def test_twice_in_one_model_calls_the_sink_twice():
    probe, recorder = GradientProbe(), Recorder()
    probe._gradguard_sink = recorder
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(3.0 * probe(x)) + tf.reduce_sum(4.0 * probe(x))
    np.testing.assert_array_equal(tape.gradient(loss, x), np.full_like(X, 7.0))
    assert recorder.calls == 2
    assert recorder.total.numpy() == X.size * (9 + 16)


def test_numerical_gradient_and_mask_pass_through():
    probe = GradientProbe()
    probe._gradguard_sink = Recorder()
    x = tf.constant(X, "float64")
    probe._gradguard_sink = lambda upstream: None
    theoretical, numerical = tf.test.compute_gradient(lambda x: probe(x) ** 2, [x])
    np.testing.assert_allclose(theoretical[0], numerical[0], atol=1e-6)
    tokens = keras.layers.Embedding(5, 2, mask_zero=True)(np.array([[1, 0]]))
    np.testing.assert_array_equal(probe(tokens)._keras_mask, [[True, False]])


def test_find_probes_looks_into_nested_models():
    model, probe = build(nested=True)
    assert find_probes(model) == [probe]
