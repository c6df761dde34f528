"""What DynamicRepeatDense accepts as a number of repeats, and what becomes of a bad one."""

from __future__ import annotations

import numbers
import warnings
from typing import Any

import tensorflow as tf

Tensor = Any


class ClipCounter:
    """How many lengths were clipped in training; neither a weight nor saved.

    The variable hides in this object so that it does not become part of the
    model's state: it says something about a training run, not about the model.

    Args:
        name: Of the layer.
        max_repeats: Of the layer.
    """

    def __init__(self, name: str, max_repeats: int) -> None:
        self._name = name
        self._max_repeats = max_repeats
        self._reported = False
        with tf.init_scope():
            self._variable = tf.Variable(
                0,
                dtype="int64",
                trainable=False,
                name="clipped_repeats",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    def see(self, clipped: Tensor, count: bool) -> None:
        """Take note of clipped examples, ``[batch]`` bool; count them if it is training."""
        if not count and not tf.executing_eagerly():
            return
        number = tf.reduce_sum(tf.cast(clipped, "int64"))
        if count:
            self._variable.assign_add(number)
        if tf.executing_eagerly() and int(number):
            self._warn(int(number))

    def read(self) -> int:
        """Return the count so far."""
        return int(self._variable.numpy())

    def report(self) -> None:
        """Warn once, on the host, if anything was clipped."""
        if tf.executing_eagerly() and not self._reported:
            count = self.read()
            if count:
                self._warn(count)

    def _warn(self, count: int) -> None:
        if self._reported:
            return
        self._reported = True
        warnings.warn(
            f"Layer '{self._name}': n was outside [0, max_repeats={self._max_repeats}] and was "
            f"clipped for {count} example(s) so far. A clipped n gets no gradient from the "
            "values. Raise `max_repeats`, or add a LengthLoss on the returned lengths. "
            "(Reported once; see `clipped_repeats` for the count.)",
            stacklevel=2,
        )


def refuse_bad(lengths: Tensor, name: str, units: int, max_rows: int, max_values: int) -> Tensor:
    """Return lengths ``[batch]``, checked to be finite, not negative and not huge.

    Raises:
        ValueError: In eager mode; in graph mode the run raises ``InvalidArgumentError``.
    """
    batch = tf.cast(tf.maximum(tf.size(lengths), 1), lengths.dtype)
    limit = tf.minimum(float(max_rows), max_values / (batch * units))
    fits = tf.logical_and(lengths >= 0.0, lengths <= limit)  # False for NaN
    message = (
        f"`repeats` of layer '{name}' must be finite, not negative and small enough "
        f"for at most {max_rows} rows and {max_values} values. Make n "
        "positive (e.g. a Dense(1, activation='softplus')), or set `max_repeats`, which "
        "clips it. Received: repeats="
    )
    if tf.executing_eagerly():
        if not bool(tf.reduce_all(fits)):
            raise ValueError(f"{message}{lengths.numpy()[:8].tolist()}")
        return lengths
    check = tf.debugging.Assert(tf.reduce_all(fits), [message, lengths], summarize=8)
    with tf.control_dependencies([check]):
        return tf.identity(lengths)


def whole_number(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int, refusing anything else than a whole number >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number of at least {least}. Received: {name}={value!r}"
        )
    return int(value)


def match_repeats(name: str, leading: tuple[Any, ...], repeats: tuple[Any, ...]) -> int:
    """Return the rank of ``leading``; refuse ``repeats`` that are not one per example."""
    rank = len(leading)
    given = repeats[:-1] if len(repeats) == rank + 1 and repeats[-1] == 1 else repeats
    fits = len(given) == rank and all(
        a is None or b is None or a == b for a, b in zip(given, leading, strict=True)
    )
    if repeats == () or fits:
        return rank
    shape = list(leading)
    raise ValueError(
        f"`repeats` of layer '{name}' must hold one n per example: shape {shape} or "
        f"{[*shape, 1]}. Received: repeats of shape {list(repeats)}"
    )
