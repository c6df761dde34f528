"""Training under ``tf.distribute`` on two logical CPUs."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard.errors import GradientGuardError, NonFiniteError, ZeroGradientError
from keras_gradguard.guard import GradientGuard
from keras_gradguard.policy import Policy
from tests.training import MODELS, assert_same, data, mlp


@functools.cache
def strategy_of(name):
    """Return one strategy a process: two of them would use the same keys for their collectives."""
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    if name == "mirrored_one":
        return tf.distribute.MirroredStrategy(["CPU:0"])
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("CPU:1")
    return tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {
    "mirrored": "MirroredStrategy, fit",
    "mirrored_one": "MirroredStrategy with one device, fit",
    "one_device": "OneDeviceStrategy, fit",
    "central_storage": "CentralStorageStrategy, fit, without averages and loss scaling",
}


def shows(feature, **more):
    return pytest.mark.shows("Distribution", feature, **more)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd_clipped": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    "adamw_ema": lambda: keras.optimizers.AdamW(0.01, clipvalue=0.1, use_ema=True),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10
    ),
}
# What Keras itself does not do with two replicas, in its own words.
REFUSED = {
    "accumulation": (
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        {},
        "merge_call.*called while defining a new graph",
        "gradient_accumulation_steps",
        "RuntimeError, `merge_call` called while defining a new graph or a tf.function",
    ),
    "ema_overwrite": (
        lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
        {},
        "merge_call.*called while defining a new graph",
        "ema_overwrite_frequency",
        "RuntimeError, `merge_call` called while defining a new graph or a tf.function",
    ),
    "steps_per_execution": (
        lambda: keras.optimizers.Adam(0.01),
        {"steps_per_execution": 3},
        "Graph execution error",
        "steps_per_execution above 1",
        "Graph execution error",
    ),
    "jit_compile": (
        lambda: keras.optimizers.Adam(0.01),
        {"jit_compile": True},
        "Graph execution error",
        "jit_compile=True",
        "Graph execution error",
    ),
}


def guard(**kwargs):
    settings = {"log_dir": None, "sample_every": 3, "check_every": 2, **kwargs}
    return GradientGuard(**settings)


def fit(strategy, kind, optimizer, callbacks=(), *, epochs=2, **kwargs):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = MODELS[kind]()
        loss = "sparse_categorical_crossentropy"
        loss = [loss, loss] if kind == "two_heads" else loss
        model.compile(optimizer(), loss, **kwargs)
    x, y = data(kind)
    fitted = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, fitted.history


# Keras itself refuses the others here: it updates their state in a replica, and central storage
# asks for an aggregation then.
CENTRAL = ["adam", "sgd_clipped"]


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        pytest.param(
            s,
            o,
            marks=[
                shows(STRATEGIES[s]),
                *([] if (s, o) == ("mirrored", "adam") else [pytest.mark.slow]),
            ],
            id=f"{s}-{o}",
        )
        for s in STRATEGIES
        for o in OPTIMIZERS
        if s != "central_storage" or o in CENTRAL
    ],
)
def test_the_training_is_the_same(strategy, optimizer):
    make, seen = strategy_of(strategy), guard()
    ours = fit(make, "mlp", OPTIMIZERS[optimizer], [seen])
    assert_same(fit(make, "mlp", OPTIMIZERS[optimizer]), ours)
    assert seen.findings == ()
    assert seen.steps_seen == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent", "two_heads"])
def test_the_training_of_other_models_is_the_same(kind):
    make, seen = strategy_of("mirrored"), guard()
    ours = fit(make, kind, OPTIMIZERS["adam"], [seen])
    assert_same(fit(make, kind, OPTIMIZERS["adam"]), ours)
    assert seen.findings == ()


@pytest.mark.slow
@shows(
    "CentralStorageStrategy with averages or loss scaling",
    refused="Keras: ValueError, You must specify an aggregation method",
)
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - set(CENTRAL)))
def test_what_keras_refuses_with_central_storage(optimizer, guarded):
    with pytest.raises(ValueError, match="You must specify an aggregation method"):
        fit(
            strategy_of("central_storage"),
            "mlp",
            OPTIMIZERS[optimizer],
            [guard()] if guarded else [],
        )


@shows("MirroredStrategy, run_eagerly=True")
def test_run_eagerly_is_the_same():
    make, seen = strategy_of("mirrored"), guard()
    kwargs = {"run_eagerly": True, "epochs": 2}
    ours = fit(make, "mlp", OPTIMIZERS["adam"], [seen], **kwargs)
    assert_same(fit(make, "mlp", OPTIMIZERS["adam"], **kwargs), ours)
    assert seen.steps_seen == 6


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[
                shows(f"MirroredStrategy with {feature}", refused=f"Keras: {error}"),
                pytest.mark.slow,
            ],
            id=case,
        )
        for case, (_, _, _, feature, error) in REFUSED.items()
    ],
)
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_what_keras_refuses(case, guarded):
    optimizer, kwargs, words, *_ = REFUSED[case]
    with pytest.raises(Exception, match=words) as caught:
        fit(strategy_of("mirrored"), "mlp", optimizer, [guard()] if guarded else [], **kwargs)
    assert not isinstance(caught.value, GradientGuardError)


def rows_of(seen):
    recorders = seen._sessions[0].observer.run.recorders.values()
    return next(iter(recorders))


@shows("MirroredStrategy: the numbers are those of the gradient summed over replicas", same=None)
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("loss_scale", marks=pytest.mark.slow)])
def test_the_statistics_are_those_of_the_aggregated_gradient(optimizer, eager):
    def make():
        sgd = keras.optimizers.SGD(0.1)
        if optimizer == "sgd":
            return sgd
        return keras.optimizers.LossScaleOptimizer(sgd, initial_scale=2.0**6)

    keras.utils.set_random_seed(7)
    strategy = strategy_of("mirrored")
    with strategy.scope():
        model = mlp()
        model.compile(make(), "sparse_categorical_crossentropy", run_eagerly=eager)
    x, y = data("mlp")
    x, y = x[:16], y[:16]
    before = [np.array(v) for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
        ) + tf.add_n(model.losses)
    wanted = tape.gradient(loss, [v.value for v in model.trainable_variables])
    seen = guard()
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[seen])
    recorder = rows_of(seen)
    (row,), (sample,) = recorder.rows, recorder.samples
    norms = [np.linalg.norm(np.ravel(g)) for g in wanted]
    np.testing.assert_allclose(row.norm, norms, rtol=1e-4)
    np.testing.assert_allclose(row.loss / row.scale, float(loss), rtol=1e-5)
    np.testing.assert_allclose(sample.max_abs, [np.abs(g).max() for g in wanted], rtol=1e-4)
    assert sample.histogram.sum() == sum(int(np.size(g)) for g in wanted)
    after = [np.array(v) for v in model.trainable_variables]
    steps = [np.linalg.norm(np.ravel(a - b)) for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(sample.update, steps, rtol=1e-4)
    np.testing.assert_allclose(
        sample.weight, [np.linalg.norm(np.ravel(b)) for b in before], rtol=1e-5
    )


def dead_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, activation="relu"),
            layers.Dense(
                1, activation="relu", bias_initializer=keras.initializers.Constant(-100.0)
            ),
        ]
    )


@shows("MirroredStrategy: the alarm comes at the same step as without it", same=None)
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_dead_model_is_stopped_at_the_same_step_as_without_a_strategy(eager):
    steps = []
    for strategy in (tf.distribute.get_strategy(), strategy_of("mirrored")):
        with strategy.scope():
            model = dead_model()
            model.compile("sgd", "mse", run_eagerly=eager)
        x = np.ones((64, 6), "float32")
        with pytest.raises(ZeroGradientError) as caught:
            model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[guard()])
        steps.append((caught.value.finding.step, caught.value.finding.where))
    assert steps[0][0] == steps[1][0]


@shows("MirroredStrategy: NaN in one replica stops all", same=None)
def test_a_nan_in_one_replica_is_seen():
    with strategy_of("mirrored").scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 6), "float32")
    x[30] = np.nan  # the second replica's half of the second batch of 16
    with pytest.raises(NonFiniteError):
        model.fit(x, x[:, :1], batch_size=16, shuffle=False, verbose=0, callbacks=[guard()])


@shows("MirroredStrategy, skip_non_finite=True", same=None)
def test_skipping_non_finite_steps_under_a_strategy():
    with strategy_of("mirrored").scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.ones((64, 6), "float32")
    x[30] = np.nan
    y = np.ones((64, 1), "float32")
    seen = guard(skip_non_finite=True, policy=Policy(non_finite="record"))
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[seen])
    assert all(np.isfinite(np.array(v)).all() for v in model.variables)
    assert int(model.optimizer.iterations.numpy()) == 3
    assert [f.symptom for f in seen.findings] == ["non_finite"]


def loop(strategy, make_model, seen=None, *, steps=6, eager=False):
    """A distributed loop as TensorFlow's guide writes it."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    x = np.random.default_rng(1).normal(size=(16, 6)).astype("float32")
    source = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8).repeat()
    batches = strategy.experimental_distribute_dataset(source)

    def one(inputs):
        a, b = inputs
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(a, training=True) - b), axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=8)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    def step(inputs):
        losses = strategy.run(one, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    call = step if eager else tf.function(step)
    losses = []

    def go():
        for _, batch in zip(range(steps), batches, strict=False):
            losses.append(float(call(batch)))
            if seen is not None:
                seen.step(losses[-1])

    if seen is None:
        go()
    else:
        with seen.watch(model, optimizer):
            go()
        assert "apply" not in vars(optimizer)
    numbers = [np.array(v) for v in [*model.variables, *optimizer.variables]]
    return numbers, losses


@shows("MirroredStrategy, a custom loop, eager and in a graph")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_distributed_loop_is_the_same(eager):
    seen = guard()
    numbers, losses = loop(strategy_of("mirrored"), dead_free, eager=eager)
    ours, our_losses = loop(strategy_of("mirrored"), dead_free, seen, eager=eager)
    assert losses == our_losses
    for a, b in zip(numbers, ours, strict=True):
        np.testing.assert_array_equal(a, b)
    assert seen.steps_seen == 6
    assert seen.findings == ()


def dead_free():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, activation="relu"), layers.Dense(1)]
    )


@shows("MirroredStrategy, a custom loop that cannot learn is stopped", same=None)
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_distributed_loop_is_stopped(eager):
    with pytest.raises(ZeroGradientError):
        loop(strategy_of("mirrored"), dead_model, guard(), steps=30, eager=eager)


@shows("MirroredStrategy, guard.check inside a replica", same=None)
def test_gradients_handed_over_inside_a_replica():
    strategy = strategy_of("mirrored")
    with strategy.scope():
        model = dead_free()
    seen = guard()
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def step(x):
        def one():
            grads = [tf.ones_like(v) for v in variables]
            seen.check(grads, variables, loss=tf.reduce_sum(x))

        strategy.run(one)

    for _ in range(3):
        step(tf.ones([2]))
        seen.step()
    row = rows_of_loop(seen)
    sizes = [np.prod(v.shape) for v in variables]
    np.testing.assert_allclose(row.norm, np.sqrt(2.0 * np.array(sizes)), rtol=1e-6)
    assert row.loss == 4.0


def rows_of_loop(seen):
    seen._loop.observer.judge()
    return rows_of(seen).rows[0]


@shows("MirroredStrategy: one event file, whatever the replicas", same=None)
def test_one_event_file(tmp_path):
    fit(strategy_of("mirrored"), "mlp", OPTIMIZERS["adam"], [guard(log_dir=str(tmp_path))])
    assert len([p for p in tmp_path.rglob("*") if "tfevents" in p.name]) == 1


@pytest.mark.slow
def test_a_second_fit_with_the_same_guard_goes_on():
    strategy, seen = strategy_of("mirrored"), guard()
    with strategy.scope():
        model = mlp()
        model.compile("adam", "sparse_categorical_crossentropy")
    x, y = data("mlp")
    for _ in range(2):
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[seen])
        assert seen.steps_seen == 3
    assert "_distributed_tf_update_step" not in vars(model.optimizer)
    assert "apply" not in vars(model.optimizer)
