"""The learning rate: at this step, ahead, at 0, too high."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_gradguard.findings import Cause, Evidence
from keras_gradguard.records import Row, Sample

_LOOK_AHEAD = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000, 100000)


def inner(optimizer: Any) -> Any:
    """Return the optimizer that a loss-scale wrapper holds, or ``optimizer`` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate_at(optimizer: Any, ahead: int = 0) -> float | None:
    """Return the learning rate ``ahead`` steps from now.

    Args:
        optimizer: A Keras optimizer, or anything with ``learning_rate``.
        ahead: Steps into the future; only a schedule can tell more than now.

    Returns:
        The rate, or None when it cannot be told.
    """
    optimizer = inner(optimizer)
    if _shares_out(optimizer):
        # Its own rate is 0 and means nothing; when the largest of its parts is 0, all are.
        rates = [learning_rate_at(part, ahead) for part in optimizer.optimizers]
        return max((r for r in rates if r is not None), default=None)
    rate = getattr(optimizer, "_learning_rate", getattr(optimizer, "learning_rate", None))
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        steps = getattr(optimizer, "_iterations", getattr(optimizer, "iterations", 0))
        rate = rate(np.asarray(int(np.asarray(steps)) + ahead, dtype="int64"))
    elif callable(rate) and not hasattr(rate, "numpy"):
        rate = rate()
    try:
        return float(np.asarray(rate))
    except (TypeError, ValueError):
        return None


def _shares_out(optimizer: Any) -> bool:
    """Return True for Keras' ``MultiOptimizer``, which gives each variable to one of several."""
    several = getattr(keras.optimizers, "MultiOptimizer", None)  # Keras 3.14 and newer
    return several is not None and isinstance(optimizer, several)


def is_scheduled(optimizer: Any) -> bool:
    """Return True when the learning rate comes from a schedule."""
    if _shares_out(inner(optimizer)):
        return any(is_scheduled(part) for part in inner(optimizer).optimizers)
    rate = getattr(inner(optimizer), "_learning_rate", None)
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


def warms_up(optimizer: Any) -> int | None:
    """Return after how many steps a learning rate that is 0 now becomes positive, else None."""
    if not is_scheduled(optimizer) or learning_rate_at(optimizer) != 0:
        return None
    for ahead in _LOOK_AHEAD:
        rate = learning_rate_at(optimizer, ahead)
        if rate:
            return ahead
    return None


def learning_rate_zero(optimizer: Any, samples: Sequence[Sample] = ()) -> Cause | None:
    """Return the cause ``learning_rate_zero`` when the rate is 0 now and stays 0.

    Args:
        optimizer: The Keras optimizer.
        samples: History, for the first sampled step that had a rate of 0.
    """
    rate = learning_rate_at(optimizer)
    if rate is None or rate != 0 or warms_up(optimizer) is not None:
        return None
    name = type(inner(optimizer)).__name__
    step = int(np.asarray(getattr(inner(optimizer), "iterations", 0)))
    zero_since = next((s.step for s in samples if s.learning_rate == 0), None)
    schedule = getattr(inner(optimizer), "_learning_rate", None)
    if is_scheduled(optimizer):
        what = f"the schedule {type(schedule).__name__} gives 0.0 at step {step} and ever after"
        decay = getattr(schedule, "decay_steps", None)
        if decay is not None:
            what += f" (decay_steps={_plain(decay)})"
        fix = (
            f"{type(schedule).__name__} counts optimizer steps, not epochs: set decay_steps to "
            "epochs * steps_per_epoch, or give it a final value above 0 (alpha, "
            "end_learning_rate)."
        )
    else:
        what = f"the learning rate of {name} is 0.0"
        fix = (
            "Give the optimizer a learning rate above 0; a callback (ReduceLROnPlateau, "
            "LearningRateScheduler) may have set it to 0."
        )
    if zero_since is not None:
        what += f", seen first at step {zero_since}"
    return Cause(
        name="learning_rate_zero",
        score=0.98,
        where=("optimizer",),
        evidence=(Evidence(name="learning_rate", value=0.0, text=what),),
        fix=fix,
    )


def _plain(value: Any) -> Any:
    try:
        number = float(np.asarray(value))
    except (TypeError, ValueError):
        return value
    return int(number) if number.is_integer() else number


def _global_norms(rows: Sequence[Row]) -> NDArray[np.float64]:
    return np.array([math.sqrt(float(np.nansum(np.square(r.norm, dtype="float64")))) for r in rows])


def learning_rate_too_high(
    rows: Sequence[Row], optimizer: Any = None, losses: Sequence[float] = ()
) -> Cause | None:
    """Return the cause ``learning_rate_too_high`` when loss and gradient grow step by step.

    Args:
        rows: History of the sentinel.
        optimizer: For the learning rate to say.
        losses: Losses of a few trial steps on one and the same batch, when there are any.
    """
    rate = learning_rate_at(optimizer) if optimizer is not None else None
    evidence: list[Evidence] = []
    score = 0.0
    norms = _global_norms(rows)
    finite = norms[np.isfinite(norms) & (norms > 0)]
    if finite.size >= 3 and finite.max() > 100 * finite[0]:
        growth = (finite.max() / finite[0]) ** (1 / max(int(finite.argmax()), 1))
        evidence.append(
            Evidence(
                name="gradient_growth",
                value=float(growth),
                text=f"the gradient norm went from {finite[0]:.3g} to {finite.max():.3g} in "
                f"{int(finite.argmax())} steps (x{growth:.3g} a step)",
            )
        )
        score = 0.85
    seen = [r.loss for r in rows if r.loss is not None and math.isfinite(r.loss)]
    if len(seen) >= 3 and abs(seen[0]) > 0 and max(seen) > 10 * abs(seen[0]):
        evidence.append(
            Evidence(
                name="loss_growth",
                value=max(seen) / abs(seen[0]),
                text=f"the loss went from {seen[0]:.4g} to {max(seen):.4g}",
            )
        )
        score = max(score + 0.05, 0.8)
    if len(losses) >= 2 and losses[0] > 0:
        good = [v for v in losses if math.isfinite(v)]
        rising = all(b > 2 * a for a, b in itertools.pairwise(losses)
                     if math.isfinite(a) and math.isfinite(b))  # fmt: skip
        if rising and (len(good) < len(losses) or (len(good) > 2 and good[-1] > 10 * good[0])):
            told = ", ".join(f"{v:.3g}" for v in losses[:4])
            evidence.append(
                Evidence(
                    name="trial_losses",
                    value=good[-1] / losses[0] if good else math.inf,
                    text=f"the loss on one and the same batch rises with every step: {told}",
                )
            )
            score = max(score, 0.9)
    if not evidence:
        return None
    said = f" (now {rate:.3g})" if rate is not None else ""
    return Cause(
        name="learning_rate_too_high",
        score=min(score, 0.95),
        where=("optimizer",),
        evidence=tuple(evidence),
        fix=f"Lower the learning rate{said} by 10 to 1000 times, bring the inputs to about unit "
        "size (keras.layers.Rescaling or Normalization), or set clipnorm=1.0 on the optimizer.",
    )
