"""A batch cut to a bearable size, or made up from its shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.diagnosis.context import Batch
from keras_gradguard.diagnosis.data import leaves

MOST_EXAMPLES = 512
MOST_NUMBERS = 4_000_000  # entries of x that one probe looks at
_UNKNOWN_SIZE = 4


def cut(batch: Batch) -> Batch:
    """Return the first examples of a batch, as many as one look at it may cost."""
    counts = []
    for _, item in leaves("x", batch.x):
        shape = np.shape(item)
        if not shape:
            return batch
        each = max(int(np.prod(shape[1:])), 1)
        counts.append(min(shape[0], MOST_EXAMPLES, max(MOST_NUMBERS // each, 2)))
    if not counts:
        return batch
    keep = min(counts)

    def head(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, dict):
            return {k: head(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(head(v) for v in value)
        return value[:keep] if np.ndim(value) else value

    return Batch(
        x=head(batch.x), y=head(batch.y), sample_weight=head(batch.sample_weight),
        size=batch.size,
    )  # fmt: skip


def is_symbolic(value: Any) -> bool:
    """Return True for something with a shape but no numbers."""
    if isinstance(value, tf.TypeSpec):
        return True
    return tf.is_tensor(value) and not hasattr(value, "numpy")


def filled(batch: Batch) -> Batch:
    """Return arrays of zeros in place of symbolic tensors and specs, with their shapes."""
    return Batch(x=_filled(batch.x), y=_filled(batch.y), sample_weight=_filled(batch.sample_weight))


def _filled(structure: Any) -> Any:
    def fill(leaf: Any) -> Any:
        if not is_symbolic(leaf):
            return leaf
        shape = leaf.shape
        sizes = [_UNKNOWN_SIZE if d is None else d for d in shape.as_list()] if shape.rank else []
        dtype = leaf.dtype.as_numpy_dtype
        return np.full(sizes, "" if leaf.dtype == tf.string else 0, dtype=dtype)

    return None if structure is None else tf.nest.map_structure(fill, structure)
