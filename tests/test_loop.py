"""Custom loops: alarms before the weights are touched, clear words, nothing left behind."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard.errors import (
    GradientGuardError,
    GradientGuardWarning,
    NoneGradientError,
    NonFiniteError,
    ZeroGradientError,
    ZeroUpdateError,
)
from keras_gradguard.guard import GradientGuard
from keras_gradguard.policy import Policy

MODES = ["eager", "graph", "xla"]


def watcher(**kwargs):
    kwargs = {"log_dir": None, "check_every": 2, "diagnose": False, **kwargs}
    return GradientGuard(**kwargs)


def mlp(name=None, bias=0.0):
    constant = keras.initializers.Constant(bias)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", name="h1"),
            layers.Dense(1, activation="relu", name="out", bias_initializer=constant),
        ],
        name=name,
    )


def compiled_as(step, mode):
    return {
        "eager": lambda: step,
        "graph": lambda: tf.function(step),
        "xla": lambda: tf.function(step, jit_compile=True),
    }[mode]()


def plain_step(model, optimizer, loss_of=None):
    loss_of = loss_of or (lambda y, p: tf.reduce_mean(tf.square(y - p)))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def data(steps=12, size=8):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(size, 4)).astype("float32")
        yield tf.constant(x), tf.constant(x[:, :1] + 2)


def values(*things):
    return [np.array(v) for t in things for v in t.variables]


def assert_equal(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def built(seed=0, optimizer=None, **kwargs):
    keras.utils.set_random_seed(seed)
    model = mlp(**kwargs)
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return model, optimizer


# ------------------------------------------------------------------ the same training


@pytest.mark.shows("Training steps", "a custom loop, eager and in a graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
    ],
    ids=["sgd", "adam", "adamw", "accumulation"],
)
def test_weights_and_state_are_bit_for_bit_those_without_a_guard(mode, optimizer):
    results = []
    for guarded in (False, True):
        model, opt = built(optimizer=optimizer(), bias=3.0)
        step = compiled_as(plain_step(model, opt), mode)
        guard = watcher(sample_every=3)
        if guarded:
            with guard.watch(model, opt):
                losses = []
                for batch in data():
                    losses.append(step(*batch))
                    guard.step(losses[-1])
            assert guard.steps_seen == 12
        else:
            losses = [step(*batch) for batch in data()]
        results.append([*values(model, opt), *map(np.array, losses)])
    assert_equal(*results)


@pytest.mark.shows("Training steps", "a custom loop under XLA", same="up to rounding")
def test_under_xla_the_training_is_the_same_up_to_rounding():
    results = []
    for guarded in (False, True):
        model, opt = built(bias=3.0)
        step = compiled_as(plain_step(model, opt), "xla")
        guard = watcher()
        if guarded:
            with guard.watch(model, opt):
                for batch in data():
                    guard.step(step(*batch))
            assert guard.steps_seen == 12
        else:
            for batch in data():
                step(*batch)
        results.append(values(model))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_is_not_built_yet(mode):
    keras.utils.set_random_seed(0)
    model, opt, guard = mlp(bias=3.0), keras.optimizers.Adam(0.01), watcher()
    if mode == "xla":
        opt.build(model.trainable_variables)
    step = compiled_as(plain_step(model, opt), mode)
    with guard.watch(model, opt):
        for batch in data(5):
            guard.step(step(*batch))
    assert guard.steps_seen == 5
    assert guard.findings == ()


# ------------------------------------------------------------------ before the weights are touched


def test_non_finite_raises_before_the_weights_are_touched():
    model, opt = built()
    step, guard = plain_step(model, opt), watcher()
    batches = list(data())
    with pytest.raises(NonFiniteError) as caught, guard.watch(model, opt):
        for i, (x, y) in enumerate(batches):
            before = values(model, opt)
            guard.step(step(x, y * (np.nan if i == 7 else 1.0)))
    assert caught.value.finding.step == 7
    assert_equal(before, values(model, opt))


def test_all_zero_raises_before_the_weights_are_touched():
    model, opt = built(bias=-100.0)
    step, guard = plain_step(model, opt), watcher(policy=Policy(patience=4))
    with pytest.raises(ZeroGradientError) as caught, guard.watch(model, opt):
        for x, y in data():
            before = values(model, opt)
            guard.step(step(x, y))
    assert caught.value.finding.step == 3
    assert_equal(before, values(model, opt))


@pytest.mark.parametrize("mode", MODES)
def test_none_raises_at_the_first_step_before_keras_speaks(mode):
    model, opt = built()
    loss_of = lambda y, p: tf.reduce_mean(tf.cast(tf.cast(p, tf.int32), tf.float32) - y)  # noqa: E731
    step, guard = compiled_as(plain_step(model, opt, loss_of), mode), watcher()
    before = values(model, opt)
    with pytest.raises(NoneGradientError) as caught, guard.watch(model, opt):
        guard.step(step(*next(data())))
    assert caught.value.finding.step == 0
    assert_equal(before, values(model, opt))


def test_none_raises_when_the_loss_left_tensorflow():
    model, opt = built()
    loss_of = lambda y, p: tf.reduce_mean(y - np.tanh(p.numpy()))  # noqa: E731
    with pytest.raises(NoneGradientError), watcher().watch(model, opt):
        plain_step(model, opt, loss_of)(*next(data()))


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("fault", ["nan", "dead"])
def test_in_a_graph_it_raises_within_check_every(mode, fault):
    model, opt = built(bias=-100.0 if fault == "dead" else 3.0)
    step, guard = compiled_as(plain_step(model, opt), mode), watcher(check_every=3)
    error = NonFiniteError if fault == "nan" else ZeroGradientError
    taken = 0
    with pytest.raises(error) as caught, guard.watch(model, opt):
        for i, (x, y) in enumerate(data(20)):
            loss = step(x, y * (np.nan if (i >= 4 and fault == "nan") else 1.0))
            taken += 1
            guard.step(loss)
    assert caught.value.finding.step == 4
    assert taken <= 5 + 3


def test_leaving_watch_looks_a_last_time():
    model, opt = built(bias=-100.0)
    step, guard = tf.function(plain_step(model, opt)), watcher(check_every=1000)
    with pytest.raises(ZeroGradientError), guard.watch(model, opt):
        for batch in data(8):
            guard.step(step(*batch))


# ------------------------------------------------------------------ nothing left behind


def traces_of_a_guard(model, optimizer):
    return (
        set(vars(model)),
        set(vars(optimizer)),
        tf.GradientTape.gradient,
        type(model).call,
        [v.path for v in (*model.variables, *optimizer.variables)],
    )


class BoomError(Exception):
    """Raised by the user's own code."""


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("way", ["normally", "user", "interrupt", "guard"])
def test_nothing_is_left_behind(way, mode):
    model, opt = built(bias=-100.0 if way == "guard" else 3.0)
    step, guard = compiled_as(plain_step(model, opt), mode), watcher()
    before = traces_of_a_guard(model, opt)
    error = {
        "normally": (),
        "user": BoomError,
        "interrupt": KeyboardInterrupt,
        "guard": GradientGuardError,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientGuardWarning)
        try:
            with guard.watch(model, opt):
                for i, batch in enumerate(data()):
                    guard.step(step(*batch))
                    if i == 3 and way in ("user", "interrupt"):
                        raise error[way]
        except error[way]:
            assert way != "normally"
        else:
            assert way == "normally"
    assert traces_of_a_guard(model, opt) == before
    # A plain step works as ever.
    plain_step(model, opt)(*next(data()))


def test_the_users_own_exception_is_not_replaced_by_a_finding():
    model, opt = built(bias=-100.0)
    step, guard = tf.function(plain_step(model, opt)), watcher(check_every=1000)
    with pytest.raises(BoomError), guard.watch(model, opt):
        for batch in data(8):
            guard.step(step(*batch))
        raise BoomError


def test_a_second_watch_starts_anew():
    model, opt = built(bias=3.0)
    guard = watcher(policy=Policy(non_finite="warn"))
    with pytest.warns(GradientGuardWarning), guard.watch(model, opt):
        x, y = next(data())
        plain_step(model, opt)(x, y * np.nan)
    assert [f.symptom for f in guard.findings] == ["non_finite"]
    model, opt = built(bias=3.0)
    with guard.watch(model, opt):
        for batch in data(3):
            guard.step(plain_step(model, opt)(*batch))
    assert guard.findings == ()
    assert guard.steps_seen == 3


def test_a_watch_inside_a_watch_is_refused():
    model, opt = built()
    guard = watcher()
    with guard.watch(model, opt):
        with pytest.raises(ValueError, match="already watching"), guard.watch(model, opt):
            pass
        guard.step(plain_step(model, opt)(*next(data())))
    assert guard.steps_seen == 1


def test_two_guards_watch_one_loop():
    model, opt = built(bias=3.0)
    one, two = watcher(), watcher()
    before = traces_of_a_guard(model, opt)
    with one.watch(model, opt), two.watch(model, opt):
        for batch in data(4):
            loss = plain_step(model, opt)(*batch)
            one.step(loss)
            two.step(loss)
    assert one.steps_seen == two.steps_seen == 4
    assert traces_of_a_guard(model, opt) == before


# ------------------------------------------------------------------ it says when it sees nothing


def test_a_step_traced_before_watch_is_told():
    model, opt = built(bias=3.0)
    step, guard = tf.function(plain_step(model, opt)), watcher()
    batches = list(data(12))
    step(*batches[0])
    with pytest.warns(GradientGuardWarning, match="no optimizer step") as caught:
        with guard.watch(model, opt):
            for batch in batches:
                guard.step(step(*batch))
    told = [str(w.message) for w in caught if issubclass(w.category, GradientGuardWarning)]
    assert len(told) == 1
    assert "inside `with guard.watch" in told[0]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_optimizer_that_is_never_applied_raises(mode):
    model, opt = built(bias=3.0)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        tape.gradient(loss, model.trainable_variables)
        return loss

    step, guard = compiled_as(step, mode), watcher()
    with pytest.raises(ZeroUpdateError) as caught, guard.watch(model, opt):
        for batch in data(12):
            guard.step(step(*batch))
    assert caught.value.finding.cause == "apply_missing"


def test_another_optimizer_than_the_one_watched_is_told():
    model, opt = built(bias=3.0)
    other = keras.optimizers.Adam(0.01)
    guard = watcher()
    with pytest.warns(GradientGuardWarning, match="the optimizer that is applied"):
        with guard.watch(model, opt):
            for batch in data(12):
                guard.step(plain_step(model, other)(*batch))


def test_gradients_for_a_model_go_to_the_one_the_optimizer_was_built_on():
    old, opt = built(bias=3.0)
    model = keras.models.clone_model(old)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        opt.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    for mode in ("eager", "graph"):
        run, guard = compiled_as(step, mode), watcher()
        with pytest.raises(ZeroUpdateError) as caught, guard.watch(model, opt):
            for batch in data(20):
                guard.step(run(*batch))
        assert caught.value.finding.cause == "optimizer_built_for_other_variables"


def test_first_order_meta_learning_is_no_misdirection():
    """Gradients of fast weights, applied to slow ones on purpose; the fast follow the slow."""
    slow, opt = built(bias=3.0)
    fast = keras.models.clone_model(slow)
    guard = watcher()
    with guard.watch([slow, fast], opt):
        for x, y in data(20):
            fast.set_weights(slow.get_weights())
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - fast(x)))
            grads = tape.gradient(loss, fast.trainable_variables)
            opt.apply_gradients(zip(grads, slow.trainable_variables, strict=True))
            guard.step(loss)
    assert guard.findings == ()


def test_a_layer_made_in_every_call_is_found():
    class Net(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.out = layers.Dense(1, name="out")

        def call(self, x):
            return self.out(layers.Dense(3, activation="relu")(x))

    model, opt, guard = Net(), keras.optimizers.SGD(0.01), watcher()
    with pytest.raises(ZeroUpdateError) as caught, guard.watch(model, opt):
        for batch in data():
            guard.step(plain_step(model, opt)(*batch))
    assert caught.value.finding.cause == "layer_created_in_call"
    assert caught.value.finding.where[0] == "net"
    assert caught.value.finding.step == 2


def test_variables_of_ones_own_in_every_step_are_no_such_layer():
    """Adversarial training makes a new perturbation at every step."""
    model, opt = built(bias=3.0)
    guard = watcher()
    with guard.watch(model, opt):
        for x, y in data():
            delta = tf.Variable(tf.zeros_like(x))
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(y - model(x + delta)))
            tape.gradient(loss, delta)
            grads = tape.gradient(loss, model.trainable_variables)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            guard.step(loss)
    assert guard.findings == ()


# ------------------------------------------------------------------ several models, odd tapes


@pytest.mark.shows("Training steps", "a custom loop with two optimizers", same=None)
@pytest.mark.parametrize("mode", MODES)
def test_a_gan_with_two_optimizers(mode):
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input((3,)), layers.Dense(4)], name="gen")
    judge = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(1)], name="judge"
    )
    g_opt, d_opt = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
    g_opt.build(generator.trainable_variables)
    d_opt.build(judge.trainable_variables)

    def step(real, z):
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            fake = generator(z)
            d_loss = tf.reduce_mean(tf.nn.softplus(-judge(real)) + tf.nn.softplus(judge(fake)))
            g_loss = tf.reduce_mean(tf.nn.softplus(-judge(fake)))
        d, g = judge.trainable_variables, generator.trainable_variables
        d_opt.apply_gradients(zip(d_tape.gradient(d_loss, d), d, strict=True))
        g_opt.apply_gradients(zip(g_tape.gradient(g_loss, g), g, strict=True))
        return d_loss

    step, guard = compiled_as(step, mode), watcher(policy=Policy(non_finite="record"))
    with guard.watch([generator, judge], [g_opt, d_opt]):
        for i, (x, _) in enumerate(data(10)):
            guard.step(step(x, x[:, :3] * (np.nan if i == 8 else 1.0)))
    assert guard.steps_seen == 20
    names = {f.optimizer for f in guard.findings}
    assert {f.symptom for f in guard.findings} == {"non_finite"}
    assert names == {g_opt.name, d_opt.name}


@pytest.mark.shows("Training steps", "persistent and nested tapes", same=None)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_persistent_and_nested_tapes(mode):
    model, opt = built(bias=3.0)

    def step(x, y):
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = model(x, training=True)
            slope = inner.gradient(p, x)
            loss = tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.square(slope))
        variables = model.trainable_variables
        first = outer.gradient(loss, variables[:2])
        rest = outer.gradient(loss, variables[2:])
        opt.apply_gradients(zip([*first, *rest], variables, strict=True))
        return loss

    plain, plain_opt = built(bias=3.0)
    step, guard = compiled_as(step, mode), watcher(policy=Policy(zero_gradient="record"))
    with guard.watch(model, opt):
        for batch in data(6):
            guard.step(step(*batch))
    assert guard.steps_seen == 6
    assert guard.findings == ()
    del plain, plain_opt


@pytest.mark.parametrize("call", ["apply", "apply_gradients", "apply without variables"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_every_way_to_apply(mode, call):
    model, opt = built(bias=3.0)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        if call == "apply":
            opt.apply(grads, variables)
        elif call == "apply_gradients":
            opt.apply_gradients(zip(grads, variables, strict=True))
        else:
            opt.apply(grads)
        return loss

    step, guard = compiled_as(step, mode), watcher()
    with guard.watch(model, opt):
        for batch in data(5):
            guard.step(step(*batch))
    assert guard.steps_seen == 5
    assert opt.iterations == 5


def test_train_on_batch_inside_watch():
    results = []
    for guarded in (False, True):
        keras.utils.set_random_seed(0)
        model = mlp(bias=3.0)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        guard = watcher()
        if guarded:
            with guard.watch(model):
                for x, y in data(6):
                    model.train_on_batch(x, y)
                    guard.step()
            assert guard.steps_seen == 6
            assert guard.findings == ()
            assert "apply" not in vars(model.optimizer)
        else:
            for x, y in data(6):
                model.train_on_batch(x, y)
        results.append(values(model, model.optimizer))
    assert_equal(*results)


def test_train_on_batch_of_a_dead_model_raises():
    model = mlp(bias=-100.0)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    guard = watcher()
    with pytest.raises(ZeroGradientError), guard.watch(model):
        for x, y in data(12):
            model.train_on_batch(x, y)
            guard.step()


# ------------------------------------------------------------------ check


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x)))
    return tape.gradient(loss, model.trainable_variables), loss


@pytest.mark.parametrize(
    "as_number", [float, np.float32, np.array, tf.constant], ids=lambda f: f.__name__
)
def test_check_without_watch_takes_any_loss(as_number):
    model = mlp(bias=-100.0)
    guard = watcher()
    with pytest.raises(ZeroGradientError) as caught:
        for i, (x, y) in enumerate(data()):
            grads, loss = gradients(model, x, y)
            guard.check(
                grads, model.trainable_variables, loss=as_number(loss.numpy()), step=100 + i
            )
    assert caught.value.finding.step == 104


def test_check_without_loss_only_warns_of_zeros():
    model = mlp(bias=-100.0)
    guard = watcher()
    with pytest.warns(GradientGuardWarning, match="exactly zero"):
        for x, y in data():
            guard.check(gradients(model, x, y)[0], model.trainable_variables)


def test_check_finds_an_update_that_never_comes():
    model = mlp(bias=3.0)
    guard = watcher()
    with pytest.raises(ZeroUpdateError):
        for x, y in data():
            grads, loss = gradients(model, x, y)
            guard.check(grads, model.trainable_variables, loss=loss)


@pytest.mark.shows("Training steps", "an optimizer that is not Keras', with guard.check", same=None)
def test_check_of_an_optimizer_of_ones_own():
    model, guard = mlp(bias=3.0), watcher()
    for x, y in data():
        grads, loss = gradients(model, x, y)
        guard.check(grads, model.trainable_variables, loss=loss)
        for g, v in zip(grads, model.trainable_variables, strict=True):
            v.assign_sub(0.01 * g)
    assert guard.findings == ()
    assert guard.steps_seen == 12


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_check_in_a_graph_raises_from_the_next_step(mode):
    model, guard = mlp(bias=-100.0), watcher()

    def step(x, y):
        grads, loss = gradients(model, x, y)
        guard.check(grads, model.trainable_variables, loss=loss)
        for g, v in zip(grads, model.trainable_variables, strict=True):
            v.assign_sub(0.01 * g)
        return loss

    step = compiled_as(step, mode)
    with pytest.raises(ZeroGradientError):
        for batch in data(20):
            step(*batch)
            guard.step()


def test_check_beside_watch_counts_once():
    model, opt = built(bias=3.0)
    guard = watcher()
    with guard.watch(model, opt):
        for x, y in data(6):
            grads, loss = gradients(model, x, y)
            guard.check(grads, model.trainable_variables, loss=loss)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            guard.step(loss)
    assert guard.steps_seen == 6
    assert guard.findings == ()


@pytest.mark.parametrize("way", ["never", "another model"])
def test_check_beside_watch_sees_what_happens_to_the_gradients(way):
    old, opt = built(bias=3.0)
    model = keras.models.clone_model(old)
    guard = watcher()
    with pytest.raises(ZeroUpdateError) as caught, guard.watch(model, opt):
        for x, y in data():
            grads, loss = gradients(model, x, y)
            guard.check(grads, model.trainable_variables, loss=loss)
            if way == "another model":
                opt.apply(grads)
    causes = {"never": "apply_missing", "another model": "optimizer_built_for_other_variables"}
    assert caught.value.finding.cause == causes[way]


def test_check_beside_watch_with_updates_by_hand_says_nothing(recwarn):
    model, opt = built(bias=3.0)
    guard = watcher()
    with guard.watch(model, opt):
        for x, y in data():
            grads, loss = gradients(model, x, y)
            guard.check(grads, model.trainable_variables, loss=loss)
            for g, v in zip(grads, model.trainable_variables, strict=True):
                v.assign_sub(0.01 * g)
            guard.step(loss)
    assert guard.findings == ()
    assert not [w for w in recwarn if issubclass(w.category, GradientGuardWarning)]


# ------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda g, m, o: g.watch(m, "adam"), ValueError, "`optimizer` must be"),
        (lambda g, m, o: g.watch("model", o), ValueError, "`model` must be"),
        (lambda g, m, o: g.watch(m), ValueError, "`optimizer` is missing"),
        (lambda g, m, o: g.watch(m, [o, None]), ValueError, "`optimizer` must be"),
        (lambda g, m, o: g.watch(o, m), ValueError, "must be a"),
        (lambda g, m, o: g.watch(None, None), ValueError, "model"),
        (lambda g, m, o: g.watch([], o), ValueError, "model"),
    ],
    ids=[
        "text optimizer",
        "text model",
        "no optimizer",
        "None in list",
        "swapped",
        "nothing",
        "no model",
    ],
)
def test_watch_names_what_is_wrong(call, error, named):
    model, opt = built()
    with pytest.raises(error, match=named), call(watcher(), model, opt):
        pass


@pytest.mark.parametrize(
    ("grads", "variables"),
    [([], []), ([1.0], []), ([], [1.0]), ([1.0, 2.0], [1.0])],
)
def test_check_wants_pairs(grads, variables):
    with pytest.raises(ValueError, match="same length"):
        watcher().check(grads, variables)


def test_step_outside_of_everything():
    with pytest.raises(RuntimeError, match=r"guard\.watch"):
        watcher().step()


# ------------------------------------------------------------------ skip_non_finite


@pytest.mark.parametrize("mode", MODES)
def test_skipping_leaves_weights_and_state_as_they_were(mode):
    model, opt = built(bias=3.0)
    step = compiled_as(plain_step(model, opt), mode)
    guard = watcher(skip_non_finite=True, policy=Policy(non_finite="warn"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with guard.watch(model, opt):
            for i, (x, y) in enumerate(data(9)):
                before = values(model, opt)
                guard.step(step(x, y * (np.nan if i == 4 else 1.0)))
                after = values(model, opt)
                same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
                assert same == (i == 4)
    assert all(np.isfinite(v).all() for v in values(model))
    assert guard.steps_seen == 9
    assert [f.symptom for f in guard.findings] == ["non_finite"]
    assert len([w for w in caught if issubclass(w.category, GradientGuardWarning)]) == 1


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [
        (lambda: keras.optimizers.SGD(0.0), "learning_rate_zero"),
        (lambda: keras.optimizers.SGD(1e-12), "unknown"),
    ],
    ids=["rate 0", "below precision"],
)
@pytest.mark.parametrize("mode", MODES)
def test_updates_that_are_lost(mode, optimizer, cause):
    model, opt = built(optimizer=optimizer(), bias=3.0)
    model.layers[0].bias.assign(np.ones(5))
    step, guard = compiled_as(plain_step(model, opt), mode), watcher()
    with pytest.raises(ZeroUpdateError) as caught, guard.watch(model, opt):
        for batch in data(12):
            guard.step(step(*batch))
    assert caught.value.finding.cause == cause
    assert caught.value.finding.first_step == 0


def test_a_module_that_is_no_keras_model():
    class Line(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(tf.ones([4, 1]), name="w")

        def __call__(self, x, training=False):
            return tf.matmul(x, self.w)

    model, opt, guard = Line(), keras.optimizers.SGD(0.01), watcher()
    with guard.watch(model, opt):
        for batch in data(4):
            guard.step(plain_step(model, opt)(*batch))
    assert guard.steps_seen == 4
    assert guard.findings == ()


def test_two_models_watched_in_another_order_than_they_train():
    (a, _), (b, _) = built(), built()
    # Not built yet: the function is traced twice, and the first trace's tensors are gone.
    opt_a, opt_b = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01)
    x, y = next(data(1))
    x = np.asarray(x)

    def step(model, opt):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    both = tf.function(lambda: step(a, opt_a) + step(b, opt_b))
    guard = watcher()
    with guard.watch([b, a], [opt_b, opt_a]):
        for _ in range(3):
            guard.step(both())
    assert guard.steps_seen == 6
    assert guard.findings == ()


def test_the_second_tape_of_a_traced_step_is_heard_too():
    """In a GAN the generator's gradient comes after the discriminator's optimizer has run."""
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="g")], name="gen")
    discriminator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="dis")
    optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]
    bce = keras.losses.BinaryCrossentropy(from_logits=True)
    x = tf.ones((4, 2))

    @tf.function
    def step():
        for model, optimizer in zip((discriminator, generator), optimizers[::-1], strict=True):
            with tf.GradientTape() as tape:
                loss = bce(tf.ones((4, 1)), discriminator(tf.round(generator(x))))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    guard = GradientGuard(log_dir=None)
    with pytest.raises(NoneGradientError) as caught:
        with guard.watch([generator, discriminator], optimizers, loss=bce):
            guard.step(step())
    finding = caught.value.finding
    assert finding.cause == "non_differentiable_op"
    assert finding.source is None or "test_loop.py" in finding.source
    assert "Round" in finding.message
    assert "outside_tape" not in [c.name for c in finding.causes]


def test_a_diagnosis_of_a_loop_sees_targets_and_inputs_of_one_step():
    # 100 examples: more than the kept batch holds. The targets are those of the recorded step.
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu", bias_initializer="zeros"),
            keras.layers.Dense(
                1, activation="relu", bias_initializer=keras.initializers.Constant(-50)
            ),
        ]
    )
    optimizer, loss_fn = keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError()
    rng = np.random.default_rng(1)
    guard = GradientGuard(log_dir=None)
    with pytest.raises(GradientGuardError) as caught, guard.watch(model, optimizer, loss=loss_fn):
        for _ in range(20):
            x = rng.normal(size=(100, 4)).astype("float32")
            y = rng.uniform(size=(100, 1)).astype("float32")
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            guard.step(loss)
    finding = caught.value.finding
    assert finding.cause == "dead_relu_output"
    assert not any("made up" in note for note in finding.notes), finding.notes
    assert "all 100 examples" in finding.causes[0].evidence[0].text
