"""``assert_trains``: a test that a model can learn, for a project's own test suite."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from keras_gradguard.guard import GradientGuard
from keras_gradguard.policy import Policy


def assert_trains(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    steps: int = 20,
    batch_size: int | None = None,
    sample_weight: Any = None,
    policy: Policy | None = None,
) -> None:
    """Train a few steps and raise when the model does not learn these examples.

    The model's weights and its optimizer's state are put back, whatever happens; random
    generators go on from where they were.

    Args:
        model: A compiled Keras model.
        x: Inputs, as for ``fit``: arrays, or a dataset of ``(x, y)``.
        y: Targets, or None when ``x`` is a dataset or the model needs none.
        steps: Optimizer steps to take. Defaults to 20.
        batch_size: Examples a step. Defaults to Keras' own.
        sample_weight: As for ``fit``.
        policy: What counts as a fault. Defaults to ``Policy()``.

    Raises:
        GradientGuardError: The guard found why the model cannot learn.
        AssertionError: The guard found nothing and the loss did not come down.
        ValueError: ``model`` is not compiled, or ``steps`` is not a positive integer.

    Example:
    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.01), "mse")
    >>> assert_trains(model, np.ones((32, 2), "float32"), 2 * np.ones((32, 1), "float32"))
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` must be an integer of at least 1. Received: steps={steps!r}")
    if not getattr(model, "compiled", False):
        raise ValueError(
            "`model` must be compiled: call model.compile(optimizer, loss) first. "
            f"Received: {model!r}"
        )
    data: dict[str, Any] = {
        "x": x,
        "y": y,
        "sample_weight": sample_weight,
        "batch_size": batch_size,
    }
    # Also builds a model that has not seen data yet, so that there are weights to put back.
    before = _loss(model, data)
    # Keras warns when told to shuffle what brings its own order.
    data["shuffle"] = y is not None
    keep = _State(model)
    guard = GradientGuard(log_dir=None, policy=policy, check_every=min(10, steps))
    try:
        model.fit(
            **data,
            epochs=steps,
            verbose=0,
            callbacks=[guard, _StopAfter(steps)],
        )
        del data["shuffle"]
        after = _loss(model, data)
    finally:
        keep.put_back()
    if not (math.isfinite(after) and after < before):
        raise AssertionError(
            f"The loss of the examples given was {before:.6g} before and {after:.6g} after "
            f"{steps} steps, and no reason was found in the gradients. The learning rate may be "
            "too high or too low, `steps` too few, or the labels carry nothing to learn."
        )


class _StopAfter(keras.callbacks.Callback):
    """Ends ``fit`` after so many optimizer steps, in the middle of an epoch if need be."""

    async_safe = False

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count one execution of the train function, which may hold several steps."""
        del batch, logs
        self._left -= int(getattr(self._model, "steps_per_execution", 1) or 1)
        if self._left <= 0:
            self._model.stop_training = True


class _State:
    """Weights of a model and state of its optimizer, to be put back."""

    def __init__(self, model: Any) -> None:
        self._model = model
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables = [*model.variables, *getattr(optimizer, "variables", ())]
        self._values = [(v, np.array(keras.ops.convert_to_numpy(v))) for v in variables]
        self._stop = getattr(model, "stop_training", False)

    def put_back(self) -> None:
        for variable, value in self._values:
            variable.assign(value)
        self._model.reset_metrics()
        self._model.stop_training = self._stop


def _loss(model: Any, data: dict[str, Any]) -> float:
    result = model.evaluate(**data, verbose=0, return_dict=True)
    return float(result["loss"])
