"""What the optimizer would do, against the step it really takes."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_gradguard.diagnosis import frozen_update, learning_rate, optimizer
from keras_gradguard.records import Row


def variables(values=(1.0, -2.0, 3.0), dtype="float32", constraint=None):
    dense = layers.Dense(1, use_bias=False, dtype=dtype, kernel_constraint=constraint, name="out")
    dense.build((None, len(values)))
    dense.kernel.assign(np.array(values)[:, None])
    return [dense.kernel]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "with moments"])
def test_a_tried_step_is_the_real_step(name, steps):
    opt, vs = OPTIMIZERS[name](), variables()
    scale = 1.0
    gradient = np.array([[0.5], [-1.0], [2.0]], "float32")
    for _ in range(steps):
        if name == "scaled":
            opt.build(vs)
            scale = float(opt.dynamic_scale)
        opt.apply([keras.ops.convert_to_tensor(scale * gradient)], vs)
    trial = frozen_update.try_step(opt, vs, [gradient], ["out/kernel"])
    before = np.array(vs[0])
    assert (trial.before[0] == before).all()
    if name == "scaled":
        opt.build(vs) if not opt.built else None
        scale = float(opt.dynamic_scale)
    opt.apply([keras.ops.convert_to_tensor(scale * gradient)], vs)
    np.testing.assert_allclose(trial.after[0], np.array(vs[0]), rtol=1e-6, atol=1e-7)


GRADIENT = [np.array([[0.5], [-1.0], [2.0]], "float32")]


@pytest.mark.parametrize(
    ("opt", "vs", "cause"),
    [
        pytest.param(keras.optimizers.SGD(0.1), {}, None, id="healthy"),
        pytest.param(keras.optimizers.SGD(1e-9), {}, "update_below_precision", id="float32"),
        pytest.param(
            keras.optimizers.SGD(1e-5), {"dtype": "float16"}, "update_below_precision", id="float16"
        ),
        pytest.param(keras.optimizers.SGD(0.1, clipnorm=1e-9), {}, "clip_too_small", id="clipnorm"),
        pytest.param(
            keras.optimizers.SGD(0.1, clipvalue=1e-12), {}, "clip_too_small", id="clipvalue"
        ),
        pytest.param(
            keras.optimizers.SGD(0.1, global_clipnorm=1e-9), {}, "clip_too_small", id="global"
        ),
        pytest.param(keras.optimizers.SGD(0.1, clipnorm=0.0), {}, None, id="clipnorm 0 is no clip"),
        pytest.param(
            keras.optimizers.SGD(0.1),
            {"values": (0.0, 0.0, 0.0), "constraint": "non_neg", "up": True},
            "constraint_projects_update",
            id="constraint",
        ),
        pytest.param(keras.optimizers.SGD(0.0), {}, "learning_rate_zero", id="rate 0"),
        pytest.param(keras.optimizers.Adam(1e-3), {}, None, id="adam"),
    ],
)
def test_why_weights_do_not_move(opt, vs, cause):
    up = vs.pop("up", False)
    gradient = [np.abs(GRADIENT[0])] if up else GRADIENT
    found = frozen_update.explain_frozen(opt, variables(**vs), gradient, ["out/kernel"])
    assert [c.name for c in found][:1] == ([cause] if cause else [])


SCHEDULES = keras.optimizers.schedules


@pytest.mark.parametrize(
    ("rate", "iterations", "zero", "warm"),
    [
        pytest.param(0.1, 0, False, False, id="constant"),
        pytest.param(SCHEDULES.CosineDecay(0.1, 5), 0, False, False, id="cosine begins"),
        pytest.param(SCHEDULES.CosineDecay(0.1, 5), 5, True, False, id="cosine ended"),
        pytest.param(SCHEDULES.CosineDecay(0.1, 5, alpha=0.1), 9, False, False, id="with a floor"),
        pytest.param(
            SCHEDULES.CosineDecay(0.0, 50, warmup_target=0.1, warmup_steps=10), 0, False, True,
            id="warm-up",
        ),
        pytest.param(SCHEDULES.PolynomialDecay(0.1, 5, 0.0), 7, True, False, id="polynomial"),
        pytest.param(
            SCHEDULES.PolynomialDecay(0.1, 5, 0.0, cycle=True), 5, False, True, id="cycle"
        ),
    ],
)  # fmt: skip
def test_learning_rate(rate, iterations, zero, warm):
    opt = keras.optimizers.SGD(rate)
    opt.iterations.assign(iterations)
    assert (learning_rate.learning_rate_zero(opt) is not None) is zero
    assert (learning_rate.warms_up(opt) is not None) is warm


def rows(norms, losses):
    return [
        Row(step=i, norm=np.array([n], "float32"), loss=v)
        for i, (n, v) in enumerate(zip(norms, losses, strict=True))
    ]


@pytest.mark.parametrize(
    ("norms", "losses", "found"),
    [
        pytest.param([1, 10, 100, 1e4], [1, 50, 1e3, 1e6], True, id="both grow"),
        pytest.param([1, 1.1, 0.9, 1.0], [1, 0.9, 0.8, 0.7], False, id="healthy"),
        pytest.param([1, 5, 0.5, 2], [1, 3, 0.5, 0.4], False, id="noise"),
        pytest.param([1e-3, 2e-3, 1e-3, 1e-3], [1, 1, 1, 1], False, id="flat"),
    ],
)
def test_learning_rate_too_high(norms, losses, found):
    cause = learning_rate.learning_rate_too_high(rows(norms, losses))
    assert (cause is not None) is found


def test_other_variables():
    opt = keras.optimizers.Adam()
    first = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    second = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    opt.build(first.trainable_variables)
    assert optimizer.frozen_after_build(first, opt) is None
    cause = optimizer.frozen_after_build(second, opt)
    assert cause.name == "optimizer_built_for_other_variables"
    first.trainable = False
    assert optimizer.trainable_flag(first).name == "trainable_flag"
    assert optimizer.trainable_flag(second) is None
    assert optimizer.trainable_flag(keras.Sequential([keras.Input((2,)), layers.Flatten()])) is None
