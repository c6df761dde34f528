import keras
import numpy as np
import pytest

from keras_gradguard import trying
from keras_gradguard.errors import GradientGuardError, ZeroGradientError
from keras_gradguard.policy import Policy
from keras_gradguard.trying import assert_trains


def regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    return x, x @ rng.normal(size=(4, 1)).astype("float32")


def make(last=None, optimizer=None, **compiled):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, last)]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", **compiled)
    return model


def state(model):
    return [np.array(v) for v in [*model.trainable_variables, *model.optimizer.variables]]


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, id="graph"),
        pytest.param({"run_eagerly": True}, id="eager"),
        pytest.param({"steps_per_execution": 4}, id="steps_per_execution"),
    ],
)
def test_a_model_that_trains_passes_and_is_left_alone(kwargs):
    model = make(**kwargs)
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    assert_trains(model, *regression())
    after = state(model)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.stop_training is False


def test_a_dataset():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(regression()).batch(16)
    assert_trains(make(), dataset)


def test_it_takes_as_many_steps_as_asked(monkeypatch):
    taken = []
    counted = trying._StopAfter.on_train_batch_end

    def count(self, batch, logs=None):
        taken.append(batch)
        counted(self, batch, logs)

    monkeypatch.setattr(trying._StopAfter, "on_train_batch_end", count)
    assert_trains(make(), *regression(), steps=13, batch_size=16)
    assert len(taken) == 13


def test_a_dead_model_raises_what_the_guard_found_and_is_left_alone():
    model = make(last="relu")
    model.layers[-1].bias.assign([-100.0])
    x, y = regression()
    before = state(model)[:4]
    with pytest.raises(ZeroGradientError):
        assert_trains(model, x, np.abs(y))
    after = state(model)[:4]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_loss_that_does_not_come_down_is_an_assertion_error():
    # A step that is far too long makes the loss grow; gradients are there and finite.
    model = make(optimizer=keras.optimizers.SGD(0.9))
    x, y = regression()
    lenient = Policy(exploding="record", vanishing="record", zero_gradient="record")
    with pytest.raises(AssertionError, match="before and"):
        assert_trains(model, 10 * x, 30 * y, steps=3, policy=lenient)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_must_be_a_positive_integer(steps):
    with pytest.raises(ValueError, match="`steps` must be"):
        assert_trains(make(), *regression(), steps=steps)


def test_a_model_without_compile():
    with pytest.raises(ValueError, match="compiled"):
        assert_trains(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), *regression())


def test_guard_errors_are_not_assertion_errors():
    assert not issubclass(GradientGuardError, AssertionError)
