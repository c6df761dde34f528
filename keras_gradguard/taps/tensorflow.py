"""The TensorFlow tap: sees every gradient that reaches ``optimizer.apply`` while it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.records import Row, Sample
from keras_gradguard.taps import names, numbers, optimizers
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.keeper import BatchKeeper, all_reachable
from keras_gradguard.taps.channel import TensorFlowChannel
from keras_gradguard.taps.tape import TapeRecord, TapeWatch, scalar_loss

Listener = Callable[[TensorFlowChannel, TapeRecord | None, list[Any], list[Any]], None]


def executing_eagerly() -> bool:
    """Return True outside any graph being traced."""
    return bool(tf.executing_eagerly())


def raw(variable: Any) -> Any:
    """Return the ``tf.Variable`` behind a Keras variable (or the thing itself)."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def identity_of(variable: Any) -> int:
    """Return a key that is the same for a Keras variable and its ``tf.Variable``."""
    return id(raw(variable))


class TensorFlowTap:
    """Wraps ``apply`` on optimizer instances and records what passes, changing nothing.

    Args:
        cadence: How often to sample and how much to hold.
        prefixes: Path prefixes to strip from variable names.
        on_gradients: Called with ``(channel, record, gradients, variables)`` whenever a step
            is traced into a graph, and on each eager step, before the optimizer runs. It may
            raise: the weights are untouched then.
        on_row: Called with ``(channel, row)`` on each eager step, before the optimizer runs.
            It may raise.
        skip_non_finite: Leave weights and optimizer state as they are on a step whose
            gradients hold a NaN or Inf.
    """

    def __init__(
        self,
        cadence: Cadence,
        *,
        prefixes: Sequence[str] = (),
        on_gradients: Listener | None = None,
        on_row: Callable[[TensorFlowChannel, Row], None] | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        self.cadence = cadence
        self.prefixes = tuple(prefixes)
        self.on_gradients = on_gradients
        self.on_row = on_row
        self.skip_non_finite = skip_non_finite
        self.channels: dict[tuple[int, ...], TensorFlowChannel] = {}
        self.tape = TapeWatch()
        self.keepers: list[BatchKeeper] = [BatchKeeper()]
        self.seen = 0  # calls of apply, traced or eager
        self.wrapping = 0  # optimizers wrapped at the moment
        self._hand_delivered: tuple[int, ...] = ()

    # ------------------------------------------------------------------ installing

    @contextlib.contextmanager
    def installed(self, targets: Sequence[Any]) -> Iterator[None]:
        """Wrap ``apply`` of ``targets`` and watch the tape for the time of a ``with`` block.

        Args:
            targets: Keras optimizers. Their instance dictionaries are afterwards what they
                were before, however the block is left.
        """
        with contextlib.ExitStack() as stack:
            for optimizer in targets:
                stack.enter_context(self._wrapped(optimizer))
            stack.enter_context(self.tape.installed())
            self.wrapping += len(targets)
            try:
                yield
            finally:
                self.wrapping -= len(targets)

    @contextlib.contextmanager
    def _wrapped(self, optimizer: Any) -> Iterator[None]:
        own = vars(optimizer)
        missing = object()
        previous = own.get("apply", missing)
        original = optimizer.apply
        alive = True

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            if not alive:
                return original(grads, trainable_variables)
            return self._apply(optimizer, original, grads, trainable_variables)

        # Straight into the dictionary: the attribute machinery of Keras would track it.
        own["apply"] = apply
        try:
            yield
        finally:
            alive = False
            if own.get("apply") is apply:
                if previous is missing:
                    del own["apply"]
                else:
                    own["apply"] = previous

    # ------------------------------------------------------------------ one call of apply

    def _apply(self, optimizer: Any, original: Any, grads: Any, variables: Any) -> Any:
        grads = list(grads)
        passed = None if variables is None else list(variables)
        watched = list(optimizer._trainable_variables) if passed is None else passed
        if not grads or len(grads) != len(watched):
            return original(grads, passed)
        graph = not tf.executing_eagerly()
        compiled = graph and (self.cadence.jit_compile or compiling_with_xla())
        if compiled and not optimizer.built and passed is not None:
            # Keras builds it inside the traced step; with conditions around the update XLA
            # cannot lift those variables out.
            with tf.init_scope():
                optimizer.build(passed)
        self.seen += 1
        picked = [
            i for i, v in enumerate(watched) if not getattr(v, "overwrite_with_gradient", False)
        ]
        some_grads = [grads[i] for i in picked]
        some_vars = [watched[i] for i in picked]
        if not picked:
            return original(grads, passed)
        record = self.tape.find(some_grads)
        channel = self.channel(optimizer, some_grads, some_vars)
        channel.note_none(some_grads)
        run = _Update(optimizer, original, grads, passed, channel, some_grads, some_vars)
        if graph:
            if self.on_gradients is not None:
                self.on_gradients(channel, record, some_grads, some_vars)
            return self._in_graph(run, record)
        delivered, self._hand_delivered = self._hand_delivered, ()
        if delivered != _ids(some_grads) and self.on_gradients is not None:
            self.on_gradients(channel, record, some_grads, some_vars)
        try:
            return self._eagerly(run, record, recorded=delivered == _ids(some_grads))
        finally:
            self.tape.forget()

    def channel(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
    ) -> TensorFlowChannel:
        """Return the channel of one list of variables, made on first sight."""
        key = tuple(identity_of(v) for v in variables)
        found = self.channels.get(key)
        if found is None:
            infos = names.describe(variables, grads, self.prefixes)
            name = "check" if optimizer is None else str(optimizer.name)
            found = TensorFlowChannel(optimizer, name, infos, self.cadence)
            self.channels[key] = found
        elif found.optimizer is None and optimizer is not None:
            found.adopt(optimizer)
        return found

    # ------------------------------------------------------------------ graph mode

    def _in_graph(self, run: _Update, record: TapeRecord | None) -> Any:
        buffers = run.channel.buffers()
        loss = None if record is None else _reachable(record.target)
        buffers.has_loss = buffers.has_loss or loss is not None
        scale = tf.cast(optimizers.loss_scale(run.optimizer), tf.float32)
        zero = tf.zeros([])
        # Once, outside the conditions below: they read the same copies.
        values = [None if g is None else numbers.dense_values(g) for g in run.grads]
        halves = [zero if v is None else numbers.half_square(v) for v in values]
        lead = [tf.constant(float("nan")) if loss is None else loss, scale]
        row = tf.stack([*lead, *halves])
        count = buffers.count.read_value()
        bad = ~tf.math.is_finite(tf.reduce_sum(row[len(lead) :]))
        sample = (
            tf.equal(count % self.cadence.sample_every, 0)
            | (count < buffers.dense_until)
            | (bad & (buffers.bad_budget > 0))
        )
        slot = buffers.taken % buffers.slots
        full = self.cadence.jit_compile or compiling_with_xla()
        measured = run.optimizer is not None and bool(run.present)

        def take() -> list[Any]:
            flat = [
                None if v is None else numbers.magnitudes(v, g)
                for v, g in zip(values, run.grads, strict=True)
            ]
            counts = [
                tf.zeros([numbers.BINS], tf.int32) if v is None else numbers.exponent_counts(v)
                for v in flat
            ]
            tops = [zero if v is None else numbers.largest(v) for v in flat]
            at = [[slot]]
            buffers.histogram.scatter_nd_update(at, [tf.stack(counts)])
            lows = tf.fill([len(flat)], 0.0 if measured else float("nan"))
            buffers.stats.scatter_nd_update(at, [tf.stack([tf.stack(tops), lows, lows], axis=1)])
            buffers.sample_step.scatter_nd_update(at, [count])
            buffers.sample_rate.scatter_nd_update(at, [run.learning_rate()])
            buffers.bad_budget.assign_sub(tf.cast(bad, tf.int64))
            for keeper in self.keepers:
                keeper.save(compiled=full)
            if not measured:
                buffers.taken.assign_add(1)
                return []
            return [tf.identity(v) for v in run.weights()]

        def leave() -> list[Any]:
            if not measured:
                return []
            return [
                tf.zeros(v.shape if full else [0] * len(v.shape), v.dtype) for v in run.weights()
            ]

        before = tf.nest.flatten(tf.cond(sample, take, leave))
        # No control dependencies here: on the operations of the update they would keep TensorFlow
        # from regrouping products as it does without a guard. The automatic ones of a function
        # order the reads above before the assignments.
        result = self._update(run, bad)

        def measure() -> Any:
            pairs = [_moved(a, b) for a, b in zip(run.weights(), before, strict=True)]
            columns = tf.scatter_nd(
                [[i] for i in run.present], tf.stack(pairs), [len(run.grads), 2]
            )
            old = tf.gather(buffers.stats, slot)[:, :1]
            buffers.stats.scatter_nd_update([[slot]], [tf.concat([old, columns], axis=1)])
            buffers.taken.assign_add(1)
            return tf.zeros([])

        if measured:
            tf.cond(sample, measure, lambda: tf.zeros([]))
        index = count % buffers.ring_size
        buffers.ring.scatter_nd_update([[index]], [row])
        buffers.count.assign_add(1)
        return result

    def _update(self, run: _Update, bad: Any) -> Any:
        if not self.skip_non_finite:
            return run.original(run.all_grads, run.passed)

        def apply() -> Any:
            run.original(run.all_grads, run.passed)
            return tf.zeros([])

        tf.cond(bad, lambda: tf.zeros([]), apply)
        return None

    # ------------------------------------------------------------------ eager mode

    def _eagerly(self, run: _Update, record: TapeRecord | None, *, recorded: bool) -> Any:
        channel = run.channel
        wanted = channel.wants_sample()
        loss = None if record is None else _number(record.target)
        halves = np.zeros(len(run.grads), np.float32)
        if not recorded:
            halves = self._record(channel, run.grads, loss)
        finite = bool(np.all(np.isfinite(halves)))
        if self.skip_non_finite and not finite:
            return None
        if not wanted and finite:
            return run.original(run.all_grads, run.passed)
        before = [tf.identity(v) for v in run.weights()]
        rate = run.learning_rate()
        result = run.original(run.all_grads, run.passed)
        pairs = [_moved(a, b) for a, b in zip(run.weights(), before, strict=True)]
        channel.complete_sample(run.present, np.asarray(pairs), float(rate))
        return result

    def _record(self, channel: TensorFlowChannel, grads: Sequence[Any], loss: Any) -> Any:
        """Take the numbers of one eager step to the host, and let the guard judge them."""
        zero = tf.zeros([])
        halves = tf.stack(
            [
                zero if g is None else numbers.half_square(numbers.dense_values(g))
                for g in grads
            ]
        ).numpy()
        wanted = channel.wants_sample() or not np.all(np.isfinite(halves))
        optimizer = channel.optimizer
        scale = 1.0 if optimizer is None else float(tf.cast(optimizers.loss_scale(optimizer), tf.float32))
        row = channel.push(halves, loss, scale)
        if wanted:
            for keeper in self.keepers:
                keeper.save(compiled=False)
            values = [
                None if g is None else numbers.magnitudes(numbers.dense_values(g), g)
                for g in grads
            ]
            blank = np.zeros(numbers.BINS, np.int32)
            unknown = np.full(len(values), np.nan, np.float32)
            channel.push_sample(
                Sample(
                    step=row.step,
                    histogram=np.stack(
                        [blank if v is None else numbers.exponent_counts(v).numpy() for v in values]
                    ),
                    max_abs=np.asarray(
                        [0.0 if v is None else float(numbers.largest(v)) for v in values],
                        np.float32,
                    ),
                    update=unknown,
                    weight=unknown.copy(),
                )
            )
        if self.on_row is not None:
            self.on_row(channel, row)
        return halves

    # ------------------------------------------------------------------ by hand

    def check(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        loss: Any = None,
        step: int | None = None,
    ) -> TensorFlowChannel:
        """Record gradients that were handed over, in a graph being traced or eagerly.

        Args:
            grads: What ``tape.gradient`` returned: tensors, ``tf.IndexedSlices`` or None.
            variables: The variables, in the same order.
            loss: The loss of this batch, a tensor or a number, or None.
            step: The user's own step number, or None to count on.

        Returns:
            The channel of these variables.
        """
        record = self.tape.find(list(grads))
        key = tuple(identity_of(v) for v in variables)
        existing = self.channels.get(key)
        channel = self.channel(existing.optimizer if existing else None, grads, variables)
        channel.note_none(grads)
        if step is not None and tf.executing_eagerly():
            channel.base = int(step) - channel.eager_steps
        if self.on_gradients is not None:
            self.on_gradients(channel, record, list(grads), list(variables))
        if loss is None and record is not None:
            loss = record.target
        run = _Update(None, _nothing, [], None, channel, list(grads), list(variables))
        if tf.executing_eagerly():
            self._since_last_check(run)
            self._record(channel, grads, _number(loss))
            self._hand_delivered = _ids(grads)
        elif not self.wrapping:
            # Where optimizers are wrapped, their `apply` records this step, with its update.
            self._in_graph(run, TapeRecord(loss, [], [], None))
        return channel

    def _since_last_check(self, run: _Update) -> None:
        """Measure the update between two hand-delivered steps that no `apply` was seen for."""
        channel = run.channel
        if channel.held and channel.held[0] == channel.eager_steps and not self.wrapping:
            pairs = [_moved(a, b) for a, b in zip(run.weights(), channel.held[1], strict=True)]
            channel.complete_sample(run.present, np.asarray(pairs), float("nan"))
        channel.held = []
        if channel.wants_sample() and not self.wrapping:
            weights = [tf.identity(v) for v in run.weights()]
            channel.held = [channel.eager_steps + 1, weights]


class _Update:
    """One call of ``apply``: the optimizer, its real method and the lists, paired up."""

    def __init__(
        self,
        optimizer: Any,
        original: Callable[..., Any],
        all_grads: list[Any],
        passed: list[Any] | None,
        channel: TensorFlowChannel,
        grads: list[Any],
        variables: list[Any],
    ) -> None:
        self.optimizer = optimizer
        self.original = original
        self.all_grads = all_grads
        self.passed = passed
        self.channel = channel
        self.grads = grads
        self.present = [i for i, g in enumerate(grads) if g is not None]
        self.variables = [raw(variables[i]) for i in self.present]

    def weights(self) -> list[Any]:
        """Read the variables that have a gradient."""
        return [tf.convert_to_tensor(v) for v in self.variables]

    def learning_rate(self) -> Any:
        """Return the learning rate of this step as a float32 scalar, NaN without optimizer."""
        if self.optimizer is None:
            return tf.constant(float("nan"))
        return tf.cast(optimizers.learning_rate(self.optimizer), tf.float32)


def compiling_with_xla() -> bool:
    """Return True while a function with ``jit_compile=True`` is being traced on this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and getattr(owner, "_jit_compile", None) is True:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _nothing(grads: Any, variables: Any) -> None:
    """Stand in for an optimizer that does not exist."""


def _ids(grads: Sequence[Any]) -> tuple[int, ...]:
    return tuple(id(g) for g in grads if g is not None)


def _moved(after: Any, before: Any) -> Any:
    """Return half the sum of squares of the change and of the old value, ``[2]`` float32."""
    old = numbers.dense_values(before)
    new = numbers.dense_values(after)
    return tf.stack([numbers.half_square(new - old), numbers.half_square(old)])


def _number(loss: Any) -> float | None:
    """Return a loss as a Python float, or None when it cannot be read on the host."""
    if loss is None or isinstance(loss, (int, float)):
        return None if loss is None else float(loss)
    parts = tf.nest.flatten(loss)
    if any(tf.is_tensor(p) and not hasattr(p, "numpy") for p in parts):
        return None
    scalar = scalar_loss([tf.convert_to_tensor(p) for p in parts])
    return None if scalar is None else float(scalar)


def _reachable(target: Any) -> Any:
    """Return the loss as a scalar of the graph being traced, or None when it is in another one."""
    parts = [t for t in tf.nest.flatten(target) if tf.is_tensor(t)]
    return scalar_loss(parts) if all_reachable(parts) else None
