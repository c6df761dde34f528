"""The numbers of one optimizer over one list of variables: on the device and on the host."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_gradguard.records import Row, Sample, Table, VariableInfo
from keras_gradguard.taps import numbers, optimizers
from keras_gradguard.taps.base import Cadence, Glance, Reading
from keras_gradguard.taps.threads import alone

# The sampled histograms are the only large buffers; this bounds them per channel.
_SAMPLE_BYTES = 32 * 2**20
_LEAD = 2  # columns of the ring before the variables': loss, loss scale
_LARGE = 1e30  # below, a row and the sum over it are finite
BAD_BUDGET = 2  # steps with NaN or Inf that are sampled between two reads


class TensorFlowChannel:
    """Rows and samples of one list of variables, gathered in graph mode and in eager mode.

    In a graph the numbers go into ``tf.Variable`` buffers that :meth:`read` fetches; in eager
    mode they come to the host at once.

    Args:
        optimizer: The Keras optimizer, or None for gradients handed over by hand.
        name: What to call it in tables.
        infos: One entry a variable.
        cadence: How often to sample and how much to hold.
        judged: The rules apply to it.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str,
        infos: Sequence[VariableInfo],
        cadence: Cadence,
        *,
        judged: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.cadence = cadence
        self.base = 0 if optimizer is None else optimizers.raw_iterations(optimizer)
        self.first_step = self.base
        self.eager_steps = 0
        self._judged = judged
        self._name = name
        self._infos = tuple(infos)
        self._none: frozenset[int] = frozenset()
        self._table: Table | None = None
        self._rows: list[Row] = []
        self._samples: list[Sample] = []
        self._open: Sample | None = None
        self.held: list[Any] = []  # weights at the last hand-delivered sample
        self._dense_until = cadence.dense
        self._graph: _Buffers | None = None
        self._read_rows = 0
        self._glanced = 0
        self._read_samples = 0
        self._accumulated = self.base
        self._every = optimizers.accumulation_steps(optimizer) if optimizer is not None else 1

    @property
    def table(self) -> Table:
        """The columns, with those whose gradient was None in the latest trace."""
        if self._table is None:
            self._table = Table(
                optimizer=self._name,
                variables=self._infos,
                none=self._none,
                skips=self.cadence.skip_non_finite,
                judged=self._judged,
            )
        return self._table

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self._infos)

    def note_none(self, gradients: Sequence[Any]) -> None:
        """Remember which columns have no gradient in the step being traced or run."""
        none = frozenset(i for i, g in enumerate(gradients) if g is None)
        if none != self._none:
            self._none, self._table = none, None

    def buffers(self) -> _Buffers:
        """Return the device buffers, made outside any graph on first use."""
        if self._graph is None:
            # In a thread of their own: a function that makes variables while it is traced, even
            # outside its graph, is traced twice; a strategy would make one of each a replica.
            made = functools.partial(_Buffers, self.size, self.cadence, self._dense_until)
            self._graph = alone(made)
        return self._graph

    def sample_next(self, steps: int) -> None:
        """Sample each of the next ``steps`` steps."""
        if self._graph is not None:
            until = int(self._graph.count.numpy()) + steps
            self._graph.dense_until.assign(until)
            self._graph.sampled_until = until
        self._dense_until = self.eager_steps + steps

    def wants_sample(self) -> bool:
        """Return True when the eager step to come is to be sampled."""
        step = self.eager_steps
        return step % self.cadence.sample_every == 0 or step < self._dense_until

    def push(self, norms: Any, loss: float | None, scale: float) -> Row:
        """Append the sentinel row of an eager step and return it."""
        halves = np.asarray(norms)[np.newaxis]
        (row,) = self._made(self.base + self.eager_steps, halves, [loss], [scale])
        self._rows.append(row)
        self.eager_steps += 1
        return row

    def push_sample(self, sample: Sample) -> None:
        """Keep the sample of an eager step, open until the update is known."""
        self._close_sample()
        self._open = sample

    def complete_sample(self, present: Sequence[int], pairs: Any, rate: float) -> None:
        """Fill the update and the weights into the sample of the eager step just applied.

        Args:
            present: Columns that have a gradient.
            pairs: ``[len(present), 2]``, half the sums of squares of change and old value.
            rate: Learning rate of the step, NaN when unknown.
        """
        if self._open is None:
            return
        update, weight = self._open.update.copy(), self._open.weight.copy()
        if present:
            update[list(present)] = np.sqrt(2.0 * pairs[:, 0])
            weight[list(present)] = np.sqrt(2.0 * pairs[:, 1])
        self._open = dataclasses.replace(
            self._open,
            update=update,
            weight=weight,
            learning_rate=None if np.isnan(rate) else rate,
        )
        self._close_sample()

    def _close_sample(self) -> None:
        if self._open is not None:
            self._samples.append(self._open)
            self._open = None

    def adopt(self, optimizer: Any) -> None:
        """Take the optimizer that turned out to train variables first seen by hand."""
        self.optimizer = optimizer
        self._name, self._table = str(optimizer.name), None
        self._every = optimizers.accumulation_steps(optimizer)

    def next_step(self) -> int:
        """Return the number of the step to come."""
        with tf.init_scope():
            traced = 0 if self._graph is None else int(self._graph.count.numpy())
        return self.base + self.eager_steps + traced

    def rebase(self) -> None:
        """Start a new run: forget what was not read, take the optimizer's own step count."""
        self.read()
        self._close_sample()
        self._samples = []
        if self.optimizer is not None:
            done = self.next_step() - self.base
            self.base = optimizers.raw_iterations(self.optimizer) - done
            self._accumulated = self.base + done
        self.first_step = self.next_step()

    def note_loss(self, loss: Any) -> None:
        """Take the loss of the batch that ends, for rows that could not see it themselves."""
        if self._rows and self._rows[-1].loss is None and isinstance(loss, (int, float)):
            self._rows[-1] = dataclasses.replace(self._rows[-1], loss=float(loss))

    def glance(self) -> Glance | None:
        """Look at the rows since the last look, and leave them on the device.

        Returns:
            The rows, or None when they have to be read: one of them may have been sampled, there
            is no room for as many again, or they came in eager mode.
        """
        buffers = self._graph
        if buffers is None or self._rows or self._samples:
            return None
        since = max(self._glanced, self._read_rows)
        total, ring = buffers.rows(since)
        waiting = total - self._read_rows
        full = waiting + len(ring) > buffers.ring_size
        if full or total - since > len(ring) or buffers.sampled(since, ring):
            return None
        self._glanced = total
        return Glance(
            half_squares=ring[:, _LEAD:],
            loss=ring[:, 0],
            loss_known=buffers.has_loss,
            waiting=waiting,
        )

    def read(self) -> Reading:
        """Fetch what is new since the last read."""
        lost = 0
        if self._graph is not None:
            lost = self._fetch(self._graph)
        reading = Reading(rows=tuple(self._rows), samples=tuple(self._samples), lost=lost)
        self._rows, self._samples = [], []
        return reading

    def _fetch(self, buffers: _Buffers) -> int:
        total, ring = buffers.rows(self._read_rows)
        since = self._read_rows
        lost = total - since - len(ring)
        self._accumulated += lost
        if len(ring):
            step = self.base + self.eager_steps + total - len(ring)
            losses = [
                None if np.isnan(value) and not buffers.has_loss else value
                for value in ring[:, 0].tolist()
            ]
            self._rows += self._made(step, ring[:, _LEAD:], losses, ring[:, 1].tolist())
        self._read_rows = total
        if not lost and not buffers.sampled(since, ring):
            return lost
        taken, samples = buffers.samples(self._read_samples)
        self._read_samples = taken
        for index, rate, histogram, stats in samples:
            self._samples.append(
                Sample(
                    step=self.base + self.eager_steps + index,
                    histogram=histogram,
                    max_abs=stats[:, 0],
                    update=np.sqrt(2.0 * stats[:, 1]),
                    weight=np.sqrt(2.0 * stats[:, 2]),
                    learning_rate=None if np.isnan(rate) else rate,
                )
            )
        return lost

    def _made(
        self,
        first: int,
        half_squares: NDArray[Any],
        losses: Sequence[float | None],
        scales: Sequence[float],
    ) -> list[Row]:
        """Make rows of consecutive steps from half the sums of squares, ``[rows, V]``."""
        factors = np.asarray(scales, np.float64)[:, np.newaxis]
        norms = np.sqrt(2.0 * half_squares.astype(np.float64)) / factors
        norms = norms.astype(np.float32)
        finite: list[bool] = np.asarray(np.isfinite(norms).all(axis=1)).tolist()
        if self._none:
            norms[:, list(self._none)] = np.nan
        rows = []
        for offset, (norm, loss, scale) in enumerate(zip(norms, losses, scales, strict=True)):
            skipped = bool(
                not finite[offset]
                and self.optimizer is not None
                and (self.cadence.skip_non_finite or optimizers.scales_loss(self.optimizer))
            )
            if not skipped:
                self._accumulated += 1
            due = not skipped and self._accumulated % self._every == 0
            rows.append(
                Row(
                    step=first + offset,
                    norm=norm,
                    loss=loss,
                    scale=scale,
                    skipped=skipped,
                    update_due=due,
                )
            )
        return rows


def fetched(variable: Any) -> NDArray[Any]:
    """Return the whole of a variable on the host."""
    # Without what reading a variable does for tapes and name scopes, which takes as long again.
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    array: NDArray[Any] = value.numpy()
    return array


class _Buffers:
    """The device side of a channel. Created outside graphs; belongs to no model."""

    def __init__(self, size: int, cadence: Cadence, dense: int) -> None:
        self.slots = cadence.slots_within(_SAMPLE_BYTES, max(1, size) * numbers.BINS * 4)
        self.ring_size = cadence.ring
        self.has_loss = False
        self._ring: tuple[int, NDArray[np.float32]] | None = None  # as it was at that count
        self.sampled_until = dense
        self.replicated = False  # a replica may have met a NaN that the row does not show
        self._every = cadence.sample_every

        def variable(value: Any, name: str) -> Any:
            return tf.Variable(value, trainable=False, name=f"gradguard_{name}")

        self.ring = variable(tf.zeros([cadence.ring, _LEAD + size]), "ring")
        self.count = variable(tf.zeros([], tf.int64), "count")
        self.dense_until = variable(tf.constant(dense, tf.int64), "dense_until")
        self.bad_budget = variable(tf.constant(BAD_BUDGET, tf.int64), "bad_budget")
        self.taken = variable(tf.zeros([], tf.int64), "taken")
        self.histogram = variable(tf.zeros([self.slots, size, numbers.BINS], tf.int32), "histogram")
        self.stats = variable(tf.zeros([self.slots, size, 3]), "stats")
        self.sample_step = variable(tf.zeros([self.slots], tf.int64), "sample_step")
        self.sample_rate = variable(tf.zeros([self.slots]), "sample_rate")
        self.pending = variable(tf.zeros([size]), "pending")

    def rows(self, since: int) -> tuple[int, Any]:
        total = int(fetched(self.count))
        new = min(total - since, self.ring_size)
        if new <= 0:
            return total, np.zeros([0, self.ring.shape[1]], np.float32)
        if self._ring is None or self._ring[0] != total:
            self._ring = total, fetched(self.ring)
        return total, self._ring[1][np.arange(total - new, total) % self.ring_size]

    def sampled(self, since: int, ring: NDArray[np.float32]) -> bool:
        """Return False when none of the steps after ``since`` can have been sampled.

        Args:
            since: Number of the first of them.
            ring: Their rows.
        """
        until = since + len(ring)
        regular = -(-since // self._every) * self._every < until
        if regular or since < self.sampled_until or self.replicated:
            return True
        seen = ring if self.has_loss else ring[:, 1:]
        return not bool((np.abs(seen) < _LARGE).all())

    def samples(self, since: int) -> tuple[int, list[tuple[int, float, Any, Any]]]:
        taken = int(fetched(self.taken))
        new = min(taken - since, self.slots)
        if new <= 0:
            return taken, []
        slots = np.arange(taken - new, taken) % self.slots
        steps = fetched(self.sample_step)
        rates = fetched(self.sample_rate)
        histograms = tf.gather(self.histogram, slots).numpy()
        stats = tf.gather(self.stats, slots).numpy()
        self.bad_budget.assign(BAD_BUDGET)
        return taken, [
            (int(steps[s]), float(rates[s]), histograms[i], stats[i]) for i, s in enumerate(slots)
        ]
