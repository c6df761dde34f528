"""Training with the guard is bit for bit what it is without."""

import keras
import pytest

from keras_gradguard.guard import GradientGuard
from tests.training import MODELS, assert_same, train

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw_clip_ema": lambda: keras.optimizers.AdamW(
        0.01, clipnorm=0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10
    ),
}
if hasattr(keras.optimizers, "Muon"):
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)


def guard(**kwargs):
    return GradientGuard(log_dir=None, sample_every=3, check_every=2, **kwargs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_graph_mode_over_optimizers(kind, optimizer):
    make = OPTIMIZERS[optimizer]
    seen = guard()
    assert_same(train(kind, make), train(kind, make, [seen]))
    assert seen.findings == ()


@pytest.mark.parametrize("kind", [k for k in MODELS if k not in ("mlp", "conv")])
def test_graph_mode_over_models(kind):
    make = OPTIMIZERS["adam"]
    seen = guard()
    assert_same(train(kind, make), train(kind, make, [seen]))
    assert seen.findings == ()


@pytest.mark.parametrize("kind", ["mlp", "recurrent", "two_heads"])
def test_eager_mode(kind):
    make = OPTIMIZERS["adam"]
    kwargs = {"run_eagerly": True, "epochs": 2}
    assert_same(train(kind, make, **kwargs), train(kind, make, [guard()], **kwargs))


@pytest.mark.parametrize("steps", [2, 3])
def test_steps_per_execution(steps):
    make = OPTIMIZERS["adam"]
    kwargs = {"steps_per_execution": steps, "epochs": 4}
    assert_same(train("mlp", make, **kwargs), train("mlp", make, [guard()], **kwargs))


def test_skip_non_finite_changes_nothing_on_healthy_training():
    make = OPTIMIZERS["adam"]
    assert_same(train("mlp", make), train("mlp", make, [guard(skip_non_finite=True)]))


def test_the_comparison_can_fail():
    with pytest.raises(AssertionError):
        assert_same(train("mlp", OPTIMIZERS["adam"]), train("mlp", OPTIMIZERS["sgd"]))
