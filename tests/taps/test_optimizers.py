"""What is read off a Keras optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard.taps import optimizers

SGD, Scaled = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
Schedules = keras.optimizers.schedules


def applied(optimizer, times):
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer.build([variable])
    for _ in range(times):
        optimizer.apply([tf.ones(2)], [variable])
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "steps"), [(SGD(), 1), (SGD(gradient_accumulation_steps=4), 4),
                             (Scaled(SGD(gradient_accumulation_steps=3)), 3)]
)  # fmt: skip
def test_accumulation_steps(optimizer, steps):
    assert optimizers.accumulation_steps(optimizer) == steps


def test_raw_iterations_count_micro_batches():
    assert optimizers.raw_iterations(applied(SGD(), 5)) == 5
    accumulating = applied(SGD(gradient_accumulation_steps=4), 5)
    assert optimizers.raw_iterations(accumulating) == 5
    assert int(accumulating.iterations) == 1


def test_raw_iterations_can_be_asked_while_tracing():
    optimizer = applied(SGD(), 3)
    found = []

    @tf.function
    def step():
        found.append(optimizers.raw_iterations(optimizer))
        return tf.zeros([])

    step()
    assert found == [3]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (SGD(), 1.0),
        (SGD(loss_scale_factor=8.0), 8.0),
        (Scaled(SGD(), initial_scale=256.0), 256.0),
    ],
)
def test_loss_scale(optimizer, expected):
    assert float(optimizers.loss_scale(optimizer)) == expected


def test_loss_scale_once_built_is_the_one_in_force():
    optimizer = Scaled(SGD(), initial_scale=256.0)
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer.build([variable])
    optimizer.apply([tf.constant([np.inf, 1.0])], [variable])
    assert float(optimizers.loss_scale(optimizer)) == 128.0
    assert optimizers.inner(optimizer) is optimizer.inner_optimizer


@pytest.mark.parametrize(
    ("rate", "ahead"),
    [
        (0.0, 0.0),
        (0.1, 0.1),
        (Schedules.PolynomialDecay(0.0, 100, 0.5), 0.5),
        (Schedules.PiecewiseConstantDecay([500], [0.0, 0.2]), 0.2),
        (Schedules.PiecewiseConstantDecay([0], [0.2, 0.0]), 0.0),
    ],
)
def test_learning_rate_ahead(rate, ahead):
    assert optimizers.learning_rate_ahead(SGD(rate)) == pytest.approx(ahead)


def test_of_model_finds_those_in_attributes_once():
    class Gan(keras.Model):
        pass

    model = Gan()
    g, d, listed, wrapped = SGD(), SGD(), SGD(), Scaled(SGD())
    model.compile(optimizer=g)
    model.g_optimizer, model.d_optimizer = g, d
    model.others = [listed, {"x": wrapped}]
    model.bare = wrapped.inner_optimizer
    found = optimizers.of_model(model)
    assert [id(f) for f in found] == [id(o) for o in (g, d, listed, wrapped)]


def test_of_a_model_that_is_not_compiled():
    assert optimizers.of_model(keras.Sequential()) == []
