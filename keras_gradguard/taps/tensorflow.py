"""The TensorFlow tap: sees every gradient that reaches ``optimizer.apply``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.records import Row, Sample
from keras_gradguard.taps import names, numbers, optimizers, replicas
from keras_gradguard.taps.activations import ActivationTap
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.channel import BAD_BUDGET, TensorFlowChannel
from keras_gradguard.taps.graph import GraphStep, compiling_with_xla
from keras_gradguard.taps.installing import Installed, StandIn
from keras_gradguard.taps.keeper import BatchKeeper, all_reachable
from keras_gradguard.taps.probes import ProbeTap
from keras_gradguard.taps.tape import TapeRecord, TapeWatch, scalar_loss
from keras_gradguard.taps.threads import alone
from keras_gradguard.taps.update import Update, identity_of, moved

Listener = Callable[[TensorFlowChannel, TapeRecord | None, list[Any], list[Any]], None]


def executing_eagerly() -> bool:
    """Return True outside any graph being traced."""
    return bool(tf.executing_eagerly())


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
        self.probes: ProbeTap | None = None
        self.activations: ActivationTap | None = None
        self.seen = 0  # calls of apply, traced or eager
        self.wrapping = 0  # optimizers wrapped at the moment
        self._hand_delivered: tuple[TensorFlowChannel, tuple[int, ...]] | None = None
        self._stand_ins: dict[int, StandIn] = {}

    # ------------------------------------------------------------------ installing

    def installed(self, targets: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Wrap ``apply`` of ``targets`` and watch the tape for the time of a ``with`` block.

        Args:
            targets: Keras optimizers. Their instance dictionaries are afterwards what they
                were before, however the block is left.
        """
        return Installed(self, targets)

    def stand_in(self, optimizer: Any) -> StandIn:
        """Return what stands in for ``apply`` of an optimizer, made on first sight."""
        found = self._stand_ins.get(id(optimizer))
        if found is None:

            def seen(original: Any, grads: Any, trainable_variables: Any = None) -> Any:
                return self._apply(optimizer, original, grads, trainable_variables)

            found = self._stand_ins[id(optimizer)] = StandIn(optimizer, "apply", seen)
        return found

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """See no call of a model or layer for the time of a ``with`` block: a diagnosis runs."""
        watching: list[Any] = [
            *self.keepers,
            *([] if self.activations is None else [self.activations]),
        ]
        for watcher in watching:
            watcher.paused = True
        try:
            yield
        finally:
            for watcher in watching:
                watcher.paused = False

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
        run = Update(optimizer, original, grads, passed, channel, some_grads, some_vars)
        told = replicas.inside() and not replicas.is_first()
        if graph:
            if self.on_gradients is not None and not told:
                self.on_gradients(channel, record, some_grads, some_vars)
            self._push_probes(record)
            return self._in_graph(run, record)
        if replicas.inside():
            if self.on_gradients is not None and not told:
                self.on_gradients(channel, record, some_grads, some_vars)
            return self._eagerly_in_replica(run, record)
        delivered, self._hand_delivered = self._hand_delivered, None
        known = delivered == (channel, _ids(some_grads))
        if not known and self.on_gradients is not None:
            self.on_gradients(channel, record, some_grads, some_vars)
        self._push_probes(record)
        try:
            return self._eagerly(run, record, recorded=known)
        finally:
            self.tape.forget()
            if self.activations is not None:
                self.activations.forget()

    def _push_probes(self, record: TapeRecord | None) -> None:
        if self.probes is None or replicas.inside():
            return
        reach = _number if tf.executing_eagerly() else _reachable
        self.probes.push(None if record is None else reach(record.target))

    def streams(self) -> list[TensorFlowChannel]:
        """Return every channel: those of the optimizers, then that of the probes."""
        extra = [] if self.probes is None else [self.probes.channel]
        return [*self.channels.values(), *extra]

    def channel(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
    ) -> TensorFlowChannel:
        """Return the channel of one list of variables, made on first sight."""
        key = tuple(identity_of(v) for v in variables)
        found = self.channels.get(key)
        if found is None:
            infos = names.describe(variables, grads, self.prefixes)
            name = "check" if optimizer is None else str(optimizer.name)
            made = functools.partial(TensorFlowChannel, optimizer, name, infos, self.cadence)
            found = alone(made) if replicas.inside() else made()
            self.channels[key] = found
        elif found.optimizer is None and optimizer is not None:
            found.adopt(optimizer)
        return found

    # ------------------------------------------------------------------ graph mode

    def _in_graph(self, run: Update, record: TapeRecord | None) -> Any:
        loss = None if record is None else _reachable(record.target)
        compiled = self.cadence.jit_compile or compiling_with_xla()
        buffers = run.channel.buffers()
        buffers.has_loss = buffers.has_loss or loss is not None
        if run.optimizer is not None and replicas.inside():
            return replicas.in_graph(
                run,
                loss,
                sample_every=self.cadence.sample_every,
                skip_non_finite=self.skip_non_finite,
            )
        step = GraphStep(run, sample_every=self.cadence.sample_every, compiled=compiled)
        zero = tf.zeros([])
        # Once, outside the conditions below: they read the same copies.
        values = [None if g is None else numbers.dense_values(g) for g in run.grads]
        halves = [zero if v is None else numbers.half_square(v) for v in values]
        seen = tf.constant(float("nan")) if loss is None else loss
        if replicas.inside():
            # By hand, in a replica: no gradient is summed for this, only its sum of squares.
            seen, *halves = replicas.summed([seen, *halves])
            if not replicas.is_first():
                return None
        row = tf.stack([seen, step.scale, *halves])
        bad = ~tf.math.is_finite(tf.reduce_sum(row[2:]))

        def look() -> None:
            step.look(values, run.grads, scaled=run.scaled())
            # The batch of the first bad step stays until it was read: the steps after it run on
            # weights that are lost already and say nothing about the reason.
            first = tf.equal(buffers.bad_budget, BAD_BUDGET)
            buffers.bad_budget.assign_sub(tf.cast(bad, tf.int64))
            for keeper in self.keepers:
                keeper.save(compiled=compiled, when=first)
            if self.activations is not None:
                self.activations.save(run.channel, step.count)

        sample = step.regular()
        before = step.before(sample)
        # No control dependencies here: on the operations of the update they would keep TensorFlow
        # from regrouping products as it does without a guard. The automatic ones of a function
        # order what is read before and after the assignments.
        result = self._update(run, bad)
        step.after(sample, bad, before, look)
        step.push(row)
        return result

    def _update(self, run: Update, bad: Any) -> Any:
        if not self.skip_non_finite:
            return run.apply()

        def apply() -> Any:
            run.apply()
            return tf.zeros([])

        tf.cond(bad, lambda: tf.zeros([]), apply)
        return None

    # ------------------------------------------------------------------ eager mode

    def _eagerly(self, run: Update, record: TapeRecord | None, *, recorded: bool) -> Any:
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
            return run.apply()
        before = [tf.identity(v) for v in run.weights()]
        rate = run.learning_rate()
        result = run.apply()
        pairs = [moved(a, b) for a, b in zip(run.weights(), before, strict=True)]
        channel.complete_sample(run.present, np.asarray(pairs), float(rate))
        return result

    def _eagerly_in_replica(self, run: Update, record: TapeRecord | None) -> Any:
        def take(grads: list[Any], loss: float | None, scale: float, on: float) -> None:
            self._record(run.channel, grads, loss, scale=scale, on=on)

        loss = None if record is None else _number(record.target)
        return replicas.eagerly(run, loss, take, skip_non_finite=self.skip_non_finite)

    def _record(
        self,
        channel: TensorFlowChannel,
        grads: Sequence[Any],
        loss: Any,
        *,
        scale: float | None = None,
        on: float | None = None,
    ) -> Any:
        """Take the numbers of one eager step to the host, and let the guard judge them.

        Args:
            channel: Where they go.
            grads: The gradients.
            loss: The loss, with the loss scale on it.
            scale: The loss scale of this step; None asks the optimizer.
            on: The factor that is still on the gradients. Defaults to ``scale``.
        """
        zero = tf.zeros([])
        halves = tf.stack(
            [zero if g is None else numbers.half_square(numbers.dense_values(g)) for g in grads]
        ).numpy()
        wanted = channel.wants_sample() or not np.all(np.isfinite(halves))
        if scale is None:
            optimizer = channel.optimizer
            factor = 1.0 if optimizer is None else optimizers.loss_scale(optimizer)
            scale = float(tf.cast(factor, tf.float32))
        on = scale if on is None else on
        # Rows hold what the loss scale is on, whoever took it off.
        row = channel.push(halves * np.float32((scale / on) ** 2), loss, scale)
        if wanted:
            for keeper in self.keepers:
                keeper.save(compiled=False)
            if self.activations is not None:
                self.activations.save(channel, row.step - channel.base)
            values = [
                None if g is None else numbers.magnitudes(numbers.dense_values(g), g) / on
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

    @tf.autograph.experimental.do_not_convert
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
        run = Update.by_hand(channel, grads, variables)
        if tf.executing_eagerly():
            self._since_last_check(run)
            self._record(channel, grads, _number(loss))
            self._hand_delivered = (channel, _ids(grads))
        elif not self.wrapping:
            # Where optimizers are wrapped, their `apply` records this step, with its update.
            self._in_graph(run, TapeRecord(loss, [], [], None))
        return channel

    def _since_last_check(self, run: Update) -> None:
        """Measure the update between two hand-delivered steps that no `apply` was seen for."""
        channel = run.channel
        if channel.held and channel.held[0] == channel.eager_steps and not self.wrapping:
            pairs = [moved(a, b) for a, b in zip(run.weights(), channel.held[1], strict=True)]
            channel.complete_sample(run.present, np.asarray(pairs), float("nan"))
        channel.held = []
        if channel.wants_sample() and not self.wrapping:
            weights = [tf.identity(v) for v in run.weights()]
            channel.held = [channel.eager_steps + 1, weights]


def _ids(grads: Sequence[Any]) -> tuple[int, ...]:
    return tuple(id(g) for g in grads if g is not None)


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
