"""What ``compile`` offers: optimizers, clipping, averages, precision, ways to execute."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.modes.twice import SLOW, assert_unchanged, compiled, data, fitted, last_rows, row, shows
from tests.soak.configurations import OPTIMIZER_NAMES

QUICK = ("Adafactor", "ScheduleFreeAdamW")


@pytest.mark.parametrize(
    "name",
    [
        row(
            "Optimizers",
            f"keras.optimizers.{n}",
            n,
            id=n,
            marks=[
                *(() if n in QUICK else SLOW),
                pytest.mark.skipif(
                    not hasattr(keras.optimizers, n), reason=f"this Keras has no {n}"
                ),
            ],
        )
        for n in OPTIMIZER_NAMES
    ],
)
def test_every_optimizer(name):
    def train(guards):
        model = compiled(optimizer=lambda: getattr(keras.optimizers, name)(0.01))
        return model, fitted(model, guards)

    assert_unchanged(train)


def test_no_optimizer_of_keras_is_missing_above():
    base = keras.optimizers.Optimizer
    known = {
        n
        for n, o in vars(keras.optimizers).items()
        if isinstance(o, type) and issubclass(o, base) and o is not base
    }
    assert known - set(OPTIMIZER_NAMES) <= {"LossScaleOptimizer", "MultiOptimizer"}


@shows("Optimizers", "keras.optimizers.MultiOptimizer")
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
@pytest.mark.parametrize("accumulated", [None, 6], ids=["every", "accumulating"])
def test_several_optimizers_in_one(accumulated):
    def optimizer():
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(0.05),
                {
                    ".*/kernel.*": keras.optimizers.Adam(
                        0.01, gradient_accumulation_steps=accumulated
                    )
                },
            )
        )

    def train(guards):
        model = compiled(optimizer=optimizer)
        return model, fitted(model, guards, epochs=8)

    *_, seen = assert_unchanged(train, steps=24)
    # Its own learning rate is 0; the samples have that of the parts.
    (recorder,) = seen._sessions[0].observer.run.recorders.values()
    assert {s.learning_rate for s in recorder.samples} == {np.float32(0.05)}


SETTINGS = [
    row("Optimizers", "clipvalue", {"clipvalue": 0.05}, id="clipvalue", marks=SLOW),
    row("Optimizers", "clipnorm", {"clipnorm": 0.3}, id="clipnorm", marks=SLOW),
    row(
        "Optimizers", "global_clipnorm", {"global_clipnorm": 0.5}, id="global_clipnorm", marks=SLOW
    ),
    row("Optimizers", "weight_decay", {"weight_decay": 0.01}, id="weight_decay", marks=SLOW),
    row(
        "Optimizers",
        "loss_scale_factor",
        {"loss_scale_factor": 64.0},
        id="loss_scale_factor",
        marks=SLOW,
    ),
    row(
        "Optimizers",
        "use_ema, ema_overwrite_frequency",
        {"use_ema": True, "ema_overwrite_frequency": 2},
        id="ema",
    ),
    row(
        "Optimizers",
        "gradient_accumulation_steps",
        {"gradient_accumulation_steps": 2},
        id="accumulation",
    ),
    row(
        "Optimizers",
        "a learning rate schedule",
        {"learning_rate": keras.optimizers.schedules.CosineDecay(0.01, 6)},
        id="schedule",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize("kwargs", SETTINGS)
def test_settings_of_an_optimizer(kwargs):
    def train(guards):
        settings = {"learning_rate": 0.01, **kwargs}
        model = compiled(optimizer=lambda: keras.optimizers.Adam(**settings))
        return model, fitted(model, guards)

    assert_unchanged(train)


EXECUTION = [
    row("Execution", "steps_per_execution=1", {}, 6, id="one", marks=SLOW),
    row("Execution", "steps_per_execution=7", {"steps_per_execution": 7}, 20, id="seven"),
    row("Execution", "run_eagerly=True", {"run_eagerly": True}, 6, id="eager", marks=SLOW),
    row("Execution", 'jit_compile="auto"', {"jit_compile": "auto"}, 6, id="auto"),
    row("Execution", "jit_compile=False", {"jit_compile": False}, 6, id="no_jit", marks=SLOW),
]


@pytest.mark.parametrize(("kwargs", "steps"), EXECUTION)
def test_ways_to_execute(kwargs, steps):
    x, y = data(steps * 16 // 2)

    def train(guards):
        model = compiled(**kwargs)
        return model, fitted(model, guards, x=x, y=y)

    *_, seen = assert_unchanged(train, steps=steps)
    # Every inner step has its own row, in order.
    assert [r.step for r in last_rows(seen)] == list(range(steps))
    assert all(np.isfinite(r.norm).all() and r.loss is not None for r in last_rows(seen))


@pytest.mark.parametrize(
    "steps",
    [
        row("Execution", "jit_compile=True", 1, id="jit", same="up to rounding"),
        row(
            "Execution",
            "jit_compile=True, steps_per_execution=3",
            3,
            id="jit_three",
            marks=SLOW,
            same="up to rounding",
        ),
    ],
)
def test_xla(steps):
    from tests.modes.twice import assert_nothing_left, guard

    models = []
    for guards in ([], [guard()]):
        model = compiled(jit_compile=True, steps_per_execution=steps)
        fitted(model, guards)
        models.append(model)
    assert guards[0].steps_seen == 6
    assert guards[0].findings == ()
    for a, b in zip(models[0].variables, models[1].variables, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-5)
    assert_nothing_left(*models)


PRECISIONS = [
    row("Precision", "mixed_float16 with loss scaling", "mixed_float16", id="mixed_float16"),
    row("Precision", "mixed_bfloat16", "mixed_bfloat16", id="mixed_bfloat16", marks=SLOW),
    row("Precision", "float64", "float64", id="float64", marks=SLOW),
]


@pytest.mark.parametrize("policy", PRECISIONS)
def test_precisions(policy):
    def make():
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu", dtype=policy),
                layers.Dense(3, dtype=policy),
                layers.Activation("softmax", dtype="float32"),
            ]
        )

    def optimizer():
        adam = keras.optimizers.Adam(0.01)
        return keras.optimizers.LossScaleOptimizer(adam) if policy.endswith("float16") else adam

    def train(guards):
        model = compiled(make, optimizer)
        return model, fitted(model, guards)

    *_, seen = assert_unchanged(train)
    if policy == "mixed_float16":
        # The first steps overflow while Keras looks for the scale: healthy, and no finding.
        assert {r.scale for r in last_rows(seen)} != {1.0}


PENALTIES = [
    row(
        "Models",
        "constraints",
        {"kernel_constraint": keras.constraints.UnitNorm(), "bias_constraint": "non_neg"},
        id="constraints",
        marks=SLOW,
    ),
    row(
        "Models",
        "regularisers of weights and outputs",
        {"kernel_regularizer": "l2", "bias_regularizer": "l1", "activity_regularizer": "l2"},
        id="regularisers",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize("kwargs", PENALTIES)
def test_constraints_and_regularisers(kwargs):
    def make():
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="gelu", **kwargs),
                layers.Dense(3, activation="softmax"),
            ]
        )

    def train(guards):
        model = compiled(make)
        return model, fitted(model, guards)

    assert_unchanged(train)


@shows("Execution", "deterministic operations (tf.config.experimental.enable_op_determinism)")
def test_determinism_asked_for():
    tf.config.experimental.enable_op_determinism()
    try:

        def train(guards):
            model = compiled()
            return model, fitted(model, guards)

        assert_unchanged(train)
    finally:
        from tensorflow.python.framework import config

        config.disable_op_determinism()
