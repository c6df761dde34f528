"""The device side of layer outputs: statistics of one step, and of every example of a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.records import ActivationSample, ActivationStats
from keras_gradguard.taps import numbers
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.channel import fetched

# A unit counts as dead or constant when it is so for every example of this many samples, and
# of those of the window before, so that a window that has just begun covers enough.
WINDOW = 8
FLAT = 1e-7  # distance from the end of a bounded activation at which float32 has no slope left

_SAMPLE_BYTES = 16 * 2**20
_BY_CLASS = {
    "ReLU": "relu", "LeakyReLU": "leaky_relu", "ELU": "elu", "Softmax": "softmax",
}  # fmt: skip
BY_OP = {
    "Relu": "relu", "Relu6": "relu6", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softmax": "softmax",
    "LeakyRelu": "leaky_relu", "Elu": "elu", "Selu": "selu", "Softplus": "softplus",
    "Softsign": "softsign", "Erf": "erf",
}  # fmt: skip
# Columns of the statistics of one step.
_ZERO, _FLAT_SHARE, _BAD, _LOW, _HIGH, _DEAD, _CONSTANT, _EXAMPLES = range(8)


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of a layer.

    Args:
        layer: The layer.
        tensor: ``[batch, ..., units]``, what it returned.
    """

    layer: Any
    tensor: Any


class Gauge:
    """Holds the statistics of one list of layer calls between two reads.

    Args:
        seen: The calls, in their order; tensors of any batch size.
        cadence: How much to hold.
        last: Names of the layers that make an output of the model.
    """

    def __init__(self, seen: Sequence[Seen], cadence: Cadence, last: Collection[str] = ()) -> None:
        count = len(seen)
        self.names = _names([str(s.layer.name) for s in seen])
        self.last = [s.layer.name in last for s in seen]
        self.kinds = [kind_of(s) for s in seen]
        self.units = [int(s.tensor.shape[-1]) for s in seen]
        self.slots = cadence.slots_within(_SAMPLE_BYTES, count * numbers.BINS * 4)
        self._read = 0

        def variable(value: Any, name: str) -> Any:
            return tf.Variable(value, trainable=False, name=f"gradguard_{name}")

        self.taken = variable(tf.zeros([], tf.int64), "taken")
        self.steps = variable(tf.zeros([self.slots], tf.int64), "steps")
        self.stats = variable(tf.zeros([self.slots, count, 8]), "stats")
        self.histogram = variable(tf.zeros([self.slots, count, numbers.BINS], tf.int32), "counts")
        # [this window and the one before, lowest and highest, units]
        empty = [np.stack([_blank(n), _blank(n)]) for n in self.units]
        self.ends = [variable(tf.constant(e), "ends") for e in empty]
        self.examples = variable(tf.zeros([2, count]), "examples")

    def measure(self, tensors: Sequence[Any], step: Any) -> None:
        """Write the statistics of one step.

        Args:
            tensors: One a call, ``[batch, ..., units]``.
            step: Its number, int64 scalar.
        """
        slot = [[self.taken % self.slots]]
        begins = tf.equal(self.taken % WINDOW, 0)
        rows, counts = [], []
        batches = tf.stack([tf.cast(tf.shape(t)[0], tf.float32) for t in tensors])
        before = self.examples.read_value()
        examples = tf.where(
            begins,
            tf.stack([batches, before[0]]),
            tf.stack([before[0] + batches, before[1]]),
        )
        for i, tensor in enumerate(tensors):
            values = tf.cast(tensor, tf.float32)
            axes = list(range(values.shape.rank - 1))
            low, high = tf.reduce_min(values, axes), tf.reduce_max(values, axes)
            dead, constant = self._window(i, low, high, begins)
            rows.append(
                tf.stack(
                    [
                        _share(tf.equal(values, 0)),
                        flat_share(values, self.kinds[i]),
                        tf.reduce_sum(tf.cast(~tf.math.is_finite(values), tf.float32)),
                        tf.reduce_min(low),
                        tf.reduce_max(high),
                        dead,
                        constant,
                        tf.reduce_sum(examples[:, i]),
                    ]
                )
            )
            counts.append(numbers.exponent_counts(tf.reshape(values, [-1])))
        self.examples.assign(examples)
        self.stats.scatter_nd_update(slot, [tf.stack(rows)])
        self.histogram.scatter_nd_update(slot, [tf.stack(counts)])
        self.steps.scatter_nd_update(slot, [tf.cast(step, tf.int64)])
        self.taken.assign_add(1)

    def _window(self, i: int, low: Any, high: Any, begins: Any) -> tuple[Any, Any]:
        """Take a step's lowest and highest values in; return the dead and the constant share."""
        old = self.ends[i].read_value()
        now = tf.stack([low, high])
        kept = tf.stack([tf.minimum(old[0, 0], low), tf.maximum(old[0, 1], high)])
        new = tf.where(begins, tf.stack([now, old[0]]), tf.stack([kept, old[1]]))
        self.ends[i].assign(new)
        lowest, highest = tf.reduce_min(new[:, 0], axis=0), tf.reduce_max(new[:, 1], axis=0)
        dead = _share(tf.equal(lowest, 0) & tf.equal(highest, 0))
        return dead, _share(tf.equal(lowest, highest))

    def read(self, base: int) -> list[ActivationSample]:
        """Fetch what is new since the last read, oldest first.

        Args:
            base: Added to the numbers of the steps.
        """
        taken = int(fetched(self.taken))
        new = min(taken - self._read, self.slots)
        self._read = taken
        if new <= 0:
            return []
        slots = np.arange(taken - new, taken) % self.slots
        steps = fetched(self.steps)[slots]
        stats = tf.gather(self.stats, slots).numpy()
        counts = tf.gather(self.histogram, slots).numpy()
        return [
            ActivationSample(
                step=base + int(steps[k]), layers=self._rows(stats[k]), histogram=counts[k]
            )
            for k in range(new)
        ]

    def _rows(self, stats: Any) -> tuple[ActivationStats, ...]:
        return tuple(
            ActivationStats(
                layer=name,
                kind=kind,
                units=units,
                examples=int(row[_EXAMPLES]),
                dead_fraction=float(row[_DEAD]),
                saturated_fraction=float(row[_FLAT_SHARE]),
                constant_fraction=float(row[_CONSTANT]),
                zero_fraction=float(row[_ZERO]),
                min=float(row[_LOW]),
                max=float(row[_HIGH]),
                output=output,
                nonfinite=int(row[_BAD]),
            )
            for name, kind, units, output, row in zip(
                self.names, self.kinds, self.units, self.last, stats, strict=True
            )
        )


def kind_of(seen: Seen) -> str:
    """Return the name of the activation that made an output, ``""`` where none did.

    In a graph the operation tells; in eager mode the layer's own ``activation`` does.
    """
    if not hasattr(seen.tensor, "numpy"):
        return BY_OP.get(seen.tensor.op.type, "")
    found = getattr(seen.layer, "activation", None)
    name = getattr(found, "__name__", "") if not hasattr(seen.layer, "cell") else ""
    name = _BY_CLASS.get(type(seen.layer).__name__, name)
    return name if name in BY_OP.values() else ""


def flat_share(values: Any, kind: str) -> Any:
    """Return the share of entries at an end of a bounded activation, 0 for any other kind.

    Args:
        values: ``[batch, ..., units]`` float32.
        kind: Name of the activation.
    """
    if kind in ("tanh", "softsign", "erf"):
        return _share(1 - tf.abs(values) < FLAT)
    if kind in ("sigmoid", "softmax"):
        return _share((values < FLAT) | (1 - values < FLAT))
    return tf.zeros([])


def _share(flags: Any) -> Any:
    return tf.reduce_mean(tf.cast(flags, tf.float32))


def _blank(units: int) -> Any:
    return np.stack([np.full(units, np.inf), np.full(units, -np.inf)]).astype(np.float32)


def _names(names: Sequence[str]) -> list[str]:
    """Tell several calls of one layer apart: ``dense``, ``dense (2)``."""
    count: Counter[str] = Counter()
    found = []
    for name in names:
        count[name] += 1
        found.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return found
