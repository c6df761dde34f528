"""A batch to look at, once a run is over. Never taken from a run that goes on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tensorflow as tf


def batches_of(iterator: Any, *, limit: int = 8, examples: int = 512, seconds: float = 5.0) -> Any:
    """Return a few of the training batches, joined, from the data that ``fit`` was reading.

    Args:
        iterator: What the train function was called with.
        limit: Most batches to take.
        examples: Stop once this many examples are together.
        seconds: Give up after so long; the user's own generator may block.

    Returns:
        ``((x, y, sample_weight), batch_size)`` as NumPy structures, or None when the data
        cannot be read again.
    """
    dataset = getattr(iterator, "_dataset", None)
    if dataset is None:
        return None
    taken: list[Any] = []

    def read() -> None:
        count = 0
        for item in dataset:
            taken.append(item)
            count += _length(item)
            if len(taken) >= limit or count >= examples:
                return

    def quietly() -> None:
        # The user's data may end or fail in any way; the finding must get out all the same.
        try:
            read()
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    failures: list[BaseException] = []
    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
    items = list(taken)
    if not items:
        return None
    size = _length(items[0])
    parts = [_unpack(item) for item in items if _length(item) == size] or [_unpack(items[0])]
    joined = tf.nest.map_structure(lambda *leaves: _join(leaves), *parts)
    return joined, size


def _unpack(item: Any) -> tuple[Any, Any, Any]:
    plain = tf.nest.map_structure(_numpy, item)
    if not isinstance(plain, tuple):
        return plain, None, None
    padded = (*plain, None, None)
    return padded[0], padded[1], padded[2]


def _numpy(leaf: Any) -> Any:
    if isinstance(leaf, tf.experimental.Optional) or leaf is None:
        return None
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf


def _join(leaves: tuple[Any, ...]) -> Any:
    if leaves[0] is None or len(leaves) == 1:
        return leaves[0]
    try:
        return np.concatenate(leaves, axis=0)
    except (ValueError, TypeError):
        return leaves[0]  # ragged from batch to batch: one batch is still worth a look


def _length(item: Any) -> int:
    for leaf in tf.nest.flatten(item):
        shape = getattr(leaf, "shape", None)
        if shape:
            return int(shape[0] or 0)
    return 0
