"""What a custom loop handed to its loss, judged against what the model put out."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.findings import Cause, Evidence, Finding


def swapped_arguments(loss: Any, first: Any, second: Any, output: Any) -> Finding | None:
    """Report a loss that got the prediction where it expects the target.

    Args:
        loss: The loss function ``loss(y_true, y_pred)``.
        first: What it got as first argument in the loop.
        second: What it got as second argument.
        output: What the model returned in that step.

    Returns:
        A finding, or None when the order is right or does not matter for this loss.
    """
    if first is not output or second is output:
        return None
    try:
        as_called, other_way = (
            float(np.mean(loss(*args))) for args in ((first, second), (second, first))
        )
    except (ValueError, TypeError, tf.errors.OpError):
        return None  # shapes that fit one way only say by themselves which way is meant
    if np.isclose(as_called, other_way, rtol=1e-5, equal_nan=True):
        return None
    name = getattr(loss, "name", None) or getattr(loss, "__name__", "loss")
    cause = Cause(
        name="loss_arguments_swapped",
        score=0.95,
        where=("loss",),
        evidence=(
            Evidence(
                name="loss_value",
                value=as_called,
                text=f"the first argument of {name} is the model's own output; the loss is "
                f"{as_called:.4g} this way and {other_way:.4g} with (y_true, y_pred)",
            ),
        ),
        fix=f"Call {name}(y_true, y_pred): the labels first, the prediction second.",
    )
    return Finding(
        symptom="bad_contract",
        summary="The loss gets its arguments the wrong way round.",
        where=("loss",),
        severity="raise",
        causes=(cause,),
    )
