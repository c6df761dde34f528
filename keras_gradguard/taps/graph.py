"""What is added to the graph of a training step: the sentinel's row and, now and then, a sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_gradguard.taps import numbers
from keras_gradguard.taps.branch import stays_whole, when
from keras_gradguard.taps.bundle import Bundle
from keras_gradguard.taps.update import Update, all_moved


class GraphStep:
    """The ops around one ``apply`` in a graph being traced.

    Args:
        update: The call of ``apply``.
        sample_every: Full statistics every so many steps.
        compiled: The step is compiled by XLA, which needs equal shapes on both branches of a
            condition.
    """

    def __init__(self, update: Update, *, sample_every: int, compiled: bool) -> None:
        self.update = update
        self.compiled = compiled
        self.measured = update.optimizer is not None and bool(update.present)
        self._every = sample_every
        self.buffers = update.channel.buffers()
        self.scale = update.scale()
        self.count = self.buffers.count.read_value()
        self._bundle: Bundle | None = None
        if self.measured and not compiled and stays_whole():
            self._bundle = Bundle([(v.dtype, v.shape) for v in update.variables])

    def regular(self) -> Any:
        """Return whether this step's turn to be sampled has come, a bool scalar.

        It depends on no gradient: what waits for it does not wait for the backward pass.
        """
        return tf.equal(self.count % self._every, 0) | (self.count < self.buffers.dense_until)

    def worth_a_look(self, bad: Any) -> Any:
        """Return whether this step is sampled although its turn has not come, a bool scalar.

        Args:
            bad: Bool scalar, a gradient holds a NaN or Inf.
        """
        return bad & (self.buffers.bad_budget > 0)

    def before(self, sample: Any, look: Callable[[], None] | None = None) -> list[Any]:
        """Return the weights before the update on a sampled step, nothing of size otherwise.

        Args:
            sample: Bool scalar.
            look: Called inside the sampled branch, to write what is known before the update.

        Returns:
            Tensors for :meth:`after` or :meth:`measure`.
        """

        def take() -> list[Any]:
            at = self._slot()
            self.buffers.sample_step.scatter_nd_update(at, [self.count])
            self.buffers.sample_rate.scatter_nd_update(at, [self.update.learning_rate()])
            if look is not None:
                look()
            if not self.measured:
                return []
            # The update writes to new memory as long as somebody holds the old values.
            weights = self.update.weights()
            return weights if self._bundle is None else self._bundle.tied(weights)

        def leave() -> list[Any]:
            if not self.measured:
                return []
            if self._bundle is not None:
                return self._bundle.empty()
            if self.compiled:
                return [tf.zeros(v.shape, v.dtype) for v in self.update.variables]
            # One of each kind does for all: tracing takes its time for every operation.
            kinds = [(v.dtype, len(v.shape)) for v in self.update.variables]
            empty = {kind: tf.zeros([0] * kind[1], kind[0]) for kind in set(kinds)}
            return [empty[kind] for kind in kinds]

        return list(tf.nest.flatten(when(sample, take, leave)))

    def after(self, sample: Any, bad: Any, before: Sequence[Any], look: Callable[[], None]) -> None:
        """Write the statistics of a sampled step, and of one with NaN or Inf, after the update.

        The optimizer has not waited for them, and could use each gradient as soon as it was
        there.

        Args:
            sample: Bool scalar, what :meth:`regular` returned.
            bad: Bool scalar, a gradient holds a NaN or Inf.
            before: What :meth:`before` returned.
            look: Called inside the branch, to write all but the change of the weights.
        """

        def seen() -> Any:
            look()
            # Of a step whose turn had not come nobody knows where it began.
            tf.cond(sample, lambda: self._compare(before), self._not_compared)
            self.buffers.taken.assign_add(1)
            return tf.zeros([])

        when(sample | self.worth_a_look(bad), seen, lambda: tf.zeros([]))

    def look(self, values: Sequence[Any], grads: Sequence[Any], *, scaled: bool) -> None:
        """Write histogram and largest entry of each gradient. Called inside the sampled branch.

        Args:
            values: What :func:`numbers.dense_values` made of the gradients, None for None.
            grads: The gradients.
            scaled: They are still multiplied by the loss scale.
        """
        flat = [
            None if v is None else numbers.magnitudes(v, g)
            for v, g in zip(values, grads, strict=True)
        ]
        if scaled:
            flat = [None if v is None else v / self.scale for v in flat]
        tops = [tf.zeros([]) if v is None else numbers.largest(v) for v in flat]
        lows = tf.fill([len(flat)], 0.0 if self.measured else float("nan"))
        at = self._slot()
        self.buffers.histogram.scatter_nd_update(at, [numbers.all_exponent_counts(flat)])
        self.buffers.stats.scatter_nd_update(at, [tf.stack([tf.stack(tops), lows, lows], axis=1)])

    def measure(self, sample: Any, before: Sequence[Any]) -> None:
        """On a sampled step write how far the weights really moved, the last of its sample.

        Args:
            sample: Bool scalar.
            before: What :meth:`before` returned.
        """

        def compare() -> Any:
            self._compare(before)
            self.buffers.taken.assign_add(1)
            return tf.zeros([])

        when(sample, compare, lambda: tf.zeros([]))

    def _compare(self, before: Sequence[Any]) -> Any:
        update, buffers = self.update, self.buffers
        if not self.measured:
            return tf.zeros([])
        at = self._slot()
        old = list(before) if self._bundle is None else self._bundle.untied(before)
        columns = tf.scatter_nd(
            [[i] for i in update.present],
            all_moved(update.weights(), old),
            [len(update.grads), 2],
        )
        largest = tf.gather(buffers.stats, at[0, 0])[:, :1]
        buffers.stats.scatter_nd_update(at, [tf.concat([largest, columns], axis=1)])
        return tf.zeros([])

    def _not_compared(self) -> Any:
        at, unknown = self._slot(), tf.constant(float("nan"))
        self.buffers.sample_step.scatter_nd_update(at, [self.count])
        self.buffers.sample_rate.scatter_nd_update(at, [unknown])
        if self.measured:
            largest = tf.gather(self.buffers.stats, at[0, 0])[:, :1]
            moved = tf.fill([len(self.update.grads), 2], unknown)
            self.buffers.stats.scatter_nd_update(at, [tf.concat([largest, moved], axis=1)])
        return tf.zeros([])

    def push(self, row: Any) -> None:
        """Write the sentinel's row: loss, loss scale, half the sum of squares a variable."""
        index = self.count % self.buffers.ring_size
        self.buffers.ring.scatter_update(tf.IndexedSlices(row, index))
        self.buffers.count.assign_add(1)

    def _slot(self) -> Any:
        """Return where this step's sample goes, as indices; inside the branches, of each its own.

        Outside they would be computed on every step.
        """
        return tf.reshape(self.buffers.taken.read_value() % self.buffers.slots, [1, 1])


def compiling_with_xla() -> bool:
    """Return True while a function with ``jit_compile=True`` is being traced on this thread."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and getattr(owner, "_jit_compile", None) is True:
            return True
        frame = frame.f_back
    return False
