"""Weights that take part in the forward pass but that no model lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def untracked_variables(
    models: Iterable[Any], watched: Iterable[Any], known: Iterable[Any]
) -> list[tuple[str, str]]:
    """Find raw ``tf.Variable`` attributes of layers that the tape watched and nobody trains.

    Args:
        models: Keras models whose layers are looked at.
        watched: What ``tape.watched_variables()`` returned.
        known: Variables that somebody does train (Keras or ``tf.Variable``).

    Returns:
        ``(layer name, variable name)`` of each. Only variables that a layer holds in its own
        attributes count: a teacher's or a partner's weights are left out on purpose.
    """
    seen = {id(v) for v in watched}
    trained = {id(getattr(v, "value", v)) for v in known} | {id(v) for v in known}
    found = []
    for model in models:
        flatten = getattr(model, "_flatten_layers", None)
        for layer in flatten() if flatten is not None else [model]:
            for value in list(vars(layer).values()):
                items = value if isinstance(value, (list, tuple)) else [value]
                for item in items:
                    if (
                        isinstance(item, tf.Variable)
                        and item.trainable
                        and id(item) in seen
                        and id(item) not in trained
                    ):
                        entry = (str(layer.name), str(item.name).removesuffix(":0"))
                        if entry not in found:
                            found.append(entry)
    return found
