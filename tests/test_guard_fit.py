"""The guard in ``fit``: nothing left behind, traces kept, several guards and models."""

import gc
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard.errors import GradientGuardError, ZeroGradientError
from keras_gradguard.guard import GradientGuard
from keras_gradguard.policy import Policy
from keras_gradguard.taps.trainer import GuardedTrainFunction
from tests.training import assert_same, data, mlp, state, train


def adam():
    return keras.optimizers.Adam(0.01)


def guard(**kwargs):
    kwargs = {"log_dir": None, "sample_every": 3, "check_every": 2, "diagnose": False, **kwargs}
    return GradientGuard(**kwargs)


def dead(loss="mse"):
    """Return a compiled model whose ReLU output is off for every example."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, activation="relu", name="hidden"),
            layers.Dense(
                1,
                activation="relu",
                name="out",
                bias_initializer=keras.initializers.Constant(-100.0),
            ),
        ]
    )
    model.compile(adam(), loss)
    return model


class BoomError(Exception):
    """Raised by the user's own code."""


class Raises(keras.callbacks.Callback):
    def __init__(self, hook, error=BoomError):
        super().__init__()
        self._hook, self._error = hook, error
        setattr(self, hook, self._raise)

    def _raise(self, *args, **kwargs):
        raise self._error(self._hook)


HOOKS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
]


def assert_nothing_left(guarded, plain):
    """Assert that model and optimizer have the attributes of those that were never guarded."""
    for ours, theirs in ((guarded, plain), (guarded.optimizer, plain.optimizer)):
        assert set(vars(ours)) - set(vars(theirs)) == set()


def is_plain(function):
    return not isinstance(function, GuardedTrainFunction)


def fresh():
    keras.utils.set_random_seed(7)
    model = mlp()
    model.compile(adam(), "sparse_categorical_crossentropy")
    x, y = data("mlp")
    return model, x, y


CASES = [
    *((hook, first, BoomError) for hook in HOOKS for first in (True, False)),
    *((hook, i % 2 == 0, KeyboardInterrupt) for i, hook in enumerate(HOOKS)),
]


@pytest.mark.shows("Faults", "an error or Ctrl-C in another callback, at any hook")
@pytest.mark.parametrize(("hook", "guard_first", "error"), CASES)
def test_nothing_is_left_after_an_error_in_another_callback(hook, guard_first, error):
    plain, x, y = fresh()
    guarded, _, _ = fresh()
    for model, own in ((plain, []), (guarded, [guard()])):
        callbacks = [*own, Raises(hook, error)] if guard_first else [Raises(hook, error), *own]
        with pytest.raises(error):
            model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks)
    assert_nothing_left(guarded, plain)
    # The next plain fit gives the plain result, with the plain train function.
    first = plain.fit(x, y, batch_size=16, verbose=0).history
    second = guarded.fit(x, y, batch_size=16, verbose=0).history
    assert_same((plain, first), (guarded, second))
    assert is_plain(guarded.train_function)


@pytest.mark.shows("Faults", "an error in the data generator", same=None)
def test_nothing_is_left_after_an_error_inside_a_batch():
    models = []
    for callbacks in ([], [guard()]):
        model, x, y = fresh()

        def stream():
            for i in range(5):
                if i == 3:
                    raise BoomError("data")
                yield x[:8], y[:8]  # noqa: B023

        with pytest.raises(Exception, match="data"):
            model.fit(stream(), verbose=0, callbacks=callbacks)
        models.append(model)
    assert_nothing_left(models[1], models[0])
    assert is_plain(models[1].train_function)


def test_nothing_is_left_after_the_guards_own_error(tmp_path):
    model, twin = dead(), dead()
    for m in (model, twin):
        m.fit(np.ones((4, 6)), np.ones((4, 1)), verbose=0)
    plain = model.train_function
    x, y = np.ones((64, 6), "float32"), np.ones((64, 1), "float32")
    with pytest.raises(ZeroGradientError) as caught:
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[guard()])
    assert caught.value.finding.step < 16
    assert_nothing_left(model, twin)
    assert model.train_function is plain
    model.save(tmp_path / "m.keras")
    names = [v.path for v in keras.models.load_model(tmp_path / "m.keras").variables]
    assert not any("gradguard" in n for n in names)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    saved = tf.train.list_variables(str(tmp_path / "c-1"))
    assert not any("gradguard" in n for n, _ in saved)


@pytest.mark.shows("Training steps", "fit again and again: traced once", same=None)
def test_fifty_fits_trace_once_and_the_plain_function_comes_back():
    traces = []

    class Counting(keras.Sequential):
        def train_step(self, batch):
            traces.append(1)
            return super().train_step(batch)

    model = Counting([keras.Input((6,)), layers.Dense(3, activation="softmax")])
    model.compile(adam(), "sparse_categorical_crossentropy")
    x, y = data("mlp", 32)
    model.fit(x, y, batch_size=16, verbose=0)
    plain, watcher = model.train_function, guard()
    once = len(traces)
    traces.clear()
    for _ in range(50):
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[watcher])
    # Without a guard it is one more: Adam makes its variables in the first trace.
    assert len(traces) == once - 1
    assert model.train_function is plain
    model.fit(x, y, batch_size=16, verbose=0)
    assert len(traces) == once - 1


def test_fifty_fits_give_the_plain_result():
    results = []
    for callbacks in ([], [guard()]):
        model, x, y = fresh()
        for _ in range(5):
            history = model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks).history
        results.append((model, history))
    assert_same(*results)


def test_one_guard_many_models_keeps_no_model_alive():
    watcher, alive = guard(), []
    for _ in range(10):
        model, x, y = fresh()
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[watcher])
        alive.append(weakref.ref(model))
        del model
    handles = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0
    gc.collect()
    assert sum(r() is not None for r in alive) <= 4
    for _ in range(3):
        model, x, y = fresh()
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[watcher])
        del model
    if handles:
        assert len(list(Path("/proc/self/fd").iterdir())) <= handles + 2


def test_two_guards_on_one_model_both_see_every_step():
    first, second = guard(), guard()
    assert_same(train("mlp", adam), train("mlp", adam, [first, second]))
    assert first.steps_seen == second.steps_seen == 9


@pytest.mark.shows("Training steps", "fit inside fit", same=None)
def test_fit_inside_fit():
    inner_guard, outer_guard = guard(), guard()
    x, y = data("mlp")

    class TrainsAnother(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            other, _, _ = fresh()
            other.fit(x, y, batch_size=16, verbose=0, callbacks=[inner_guard])

    result = train("mlp", adam, [outer_guard, TrainsAnother()])
    assert outer_guard.steps_seen == 9
    assert inner_guard.steps_seen == 3
    assert result[0].optimizer.iterations == 9


def test_the_same_guard_inside_and_outside():
    shared = guard()
    x, y = data("mlp")

    class TrainsAnother(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                other, _, _ = fresh()
                other.fit(x, y, batch_size=16, verbose=0, callbacks=[shared])

    plain = train("mlp", adam)
    assert_same(plain, train("mlp", adam, [shared]))
    model, _ = train("mlp", adam, [shared, TrainsAnother()])
    assert model.optimizer.iterations == 9
    assert "apply" not in vars(model.optimizer)


@pytest.mark.shows("Training steps", "a train function made anew in the middle of fit")
def test_a_train_function_made_anew_during_training_stays_guarded():
    class Freezes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self._model.layers[0].trainable = False
                self._model.make_train_function(force=True)

    def run(callbacks):
        keras.utils.set_random_seed(7)
        model = mlp()
        model.compile(adam(), "sparse_categorical_crossentropy")
        x, y = data("mlp")
        history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks).history
        return model, history

    watcher = guard()
    assert_same(run([Freezes()]), run([watcher, Freezes()]))
    assert watcher.steps_seen == 9


def test_findings_are_reset_by_the_next_run():
    watcher = guard(policy=Policy(zero_gradient="warn"))
    model = dead()
    x, y = np.ones((64, 6), "float32"), np.ones((64, 1), "float32")
    with pytest.warns(UserWarning, match="exactly zero"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[watcher])
    assert [f.symptom for f in watcher.findings] == ["zero_gradient"]
    healthy, x, y = fresh()
    healthy.fit(x, y, verbose=0, callbacks=[watcher])
    assert watcher.findings == ()


def test_stop_ends_training_and_keeps_the_history():
    watcher = guard(policy=Policy(zero_gradient="stop"))
    model = dead()
    x, y = np.ones((64, 6), "float32"), np.ones((64, 1), "float32")
    with pytest.warns(UserWarning, match="exactly zero"):
        history = model.fit(x, y, batch_size=4, epochs=9, verbose=0, callbacks=[watcher])
    assert len(history.history["loss"]) == 1


@pytest.mark.parametrize("action", ["record", "ignore"])
def test_record_and_ignore_say_nothing(action, recwarn):
    watcher = guard(policy=Policy(zero_gradient=action))
    model = dead()
    x, y = np.ones((64, 6), "float32"), np.ones((64, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[watcher])
    assert len(watcher.findings) == (action == "record")
    assert not [w for w in recwarn if "exactly zero" in str(w.message)]


def test_on_finding_is_called_before_the_error():
    heard = []
    model = dead()
    x, y = np.ones((64, 6), "float32"), np.ones((64, 1), "float32")
    with pytest.raises(GradientGuardError) as caught:
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[guard(on_finding=heard.append)])
    assert heard == [caught.value.finding]


class Gan(keras.Model):
    """Two optimizers, a train step of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(1)])

    def compile(self):
        super().compile()
        self.g_optimizer = keras.optimizers.Adam(0.01)
        self.d_optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, real):
        z = tf.ones((tf.shape(real)[0], 3))
        with tf.GradientTape() as tape:
            d_loss = tf.reduce_mean(
                tf.nn.softplus(-self.discriminator(real))
                + tf.nn.softplus(self.discriminator(self.generator(z)))
            )
        variables = self.discriminator.trainable_variables
        self.d_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, variables), variables, strict=True)
        )
        with tf.GradientTape() as tape:
            g_loss = tf.reduce_mean(tf.nn.softplus(-self.discriminator(self.generator(z))))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(
            zip(tape.gradient(g_loss, variables), variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


def test_several_optimizers_in_a_train_step_of_ones_own():
    def run(callbacks):
        keras.utils.set_random_seed(7)
        model = Gan()
        model.compile()
        x = data("mlp")[0]
        history = model.fit(x, batch_size=16, epochs=3, verbose=0, callbacks=callbacks).history
        return [np.array(v) for v in model.variables], history

    watcher = guard()
    plain, guarded = run([]), run([watcher])
    for a, b in zip(plain[0], guarded[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert plain[1] == guarded[1]
    assert watcher.steps_seen == 18
    assert watcher.findings == ()


def test_stale_state_is_compared():
    model, x, y = fresh()
    model.fit(x, y, verbose=0)
    assert any("optimizer/" in name for name in state(model))
