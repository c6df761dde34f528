"""BatchNormalization and its kin over a batch of one."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.findings import Cause, Evidence


def batch_of_one(facts: Facts) -> Cause | None:
    """Return ``batchnorm_batch_one`` when a normalisation averages over a single value."""
    trace = facts.trace
    if trace is None:
        return None
    size = facts.context.batch.size if facts.context.batch is not None else None
    for call in trace.layers:
        kind = type(call.layer).__name__
        if kind not in ("BatchNormalization", "LayerNormalization", "GroupNormalization"):
            continue
        if not call.inputs or call.inputs[0].shape.rank is None:
            continue
        shape = call.inputs[0].shape.as_list()
        if kind == "BatchNormalization" and not call.layer.trainable:
            continue
        count = _averaged(call.layer, kind, shape, size)
        if count == 1:
            return _norm_cause(call.name, kind, shape)
    return None


def _averaged(layer: Any, kind: str, shape: list[Any], size: int | None) -> int | None:
    if kind == "GroupNormalization":
        channels = shape[layer.axis]
        if channels is None or not layer.groups or layer.groups < 1:
            return None
        rest = [d for i, d in enumerate(shape) if i not in (0, layer.axis % len(shape))]
        per = channels // max(layer.groups, 1)
        return None if None in rest else per * int(np.prod(rest, dtype=int))
    axis = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    axes = {a % len(shape) for a in axis}
    over = [d for i, d in enumerate(shape) if (i in axes) == (kind == "LayerNormalization")]
    if kind == "BatchNormalization" and size is not None and over:
        over[0] = size
    return None if None in over else int(np.prod(over, dtype=int))


def _norm_cause(name: str, kind: str, shape: list[Any]) -> Cause:
    batch = kind == "BatchNormalization"
    what = (
        f"'{name}' averages over a batch of {shape[0]}: one value per channel"
        if batch
        else f"'{name}' averages over a single feature"
    )
    return Cause(
        name="batchnorm_batch_one",
        score=0.96,
        where=(name,),
        evidence=(
            Evidence(
                name="values_averaged",
                value=1,
                text=f"{what}, so value minus mean is 0 and the output is constant",
            ),
        ),
        fix=f"Use a larger batch_size, or LayerNormalization (GroupNormalization for images) "
        f"instead of '{name}'."
        if batch
        else f"Normalise over more than one value, or leave '{name}' out.",
    )
