"""Training under ``tf.distribute``: the numbers of the gradient that all replicas agree on.

Under a strategy every replica calls ``apply`` with its own gradient. Keras sums them over the
replicas inside, after clipping, and hands the sums to one function that runs once a step, outside
the replicas. The tap looks there, so the statistics are those of the gradient the optimizer uses
and cost no second reduction of gradients. What is added to the traffic is one vector of two
numbers a step: the loss, and whether a replica met a NaN or Inf.

The first replica of a process writes. Each process reads its own copy of the same numbers, so
that all of them raise at the same step and none waits for one that has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.taps import numbers, optimizers
from keras_gradguard.taps.graph import GraphStep
from keras_gradguard.taps.update import Update, moved

_HOOK = "_distributed_tf_update_step"


def inside() -> bool:
    """Return True in a replica of a distribution strategy (not the default one)."""
    return bool(tf.distribute.has_strategy()) and not tf.distribute.in_cross_replica_context()


def is_first() -> bool:
    """Return True in the first replica of this process."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    if tf.is_tensor(number):
        number = tf.get_static_value(number)
    return bool(tf.distribute.get_strategy().extended._get_local_replica_id(int(number)) == 0)


def is_chief(model: Any) -> bool:
    """Return True in the process that writes files for everybody."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy is None or bool(getattr(strategy.extended, "should_save_summary", True))


def refuse_parameter_server(models: Sequence[Any]) -> None:
    """Raise for a strategy that Keras 3 cannot train with.

    Args:
        models: Keras models.

    Raises:
        ValueError: A model was made under ``ParameterServerStrategy``.
    """
    for model in models:
        strategy = getattr(model, "distribute_strategy", None)
        if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
            raise ValueError(
                f"Model '{getattr(model, 'name', model)}' was made under "
                "tf.distribute.ParameterServerStrategy, whose workers update the weights at "
                "different times: there is no one gradient of a step to judge. Keras 3 does not "
                "train with it either (`fit` says: 'To use this dataset, you need to pass this "
                "dataset to ClusterCoordinator.create_per_worker_dataset.'). Use "
                "MirroredStrategy or MultiWorkerMirroredStrategy."
            )


def summed(values: Sequence[Any]) -> list[Any]:
    """Return float32 scalars summed over all replicas, in one small transfer."""
    vector = tf.stack([tf.cast(v, tf.float32) for v in values])
    context = tf.distribute.get_replica_context()
    return list(tf.unstack(context.all_reduce(tf.distribute.ReduceOp.SUM, vector)))


def conditionally(bad: Any, update: Update) -> None:
    """Apply an update unless ``bad``, a bool scalar that is the same in every replica."""

    def nothing() -> Any:
        return tf.zeros([])

    def apply(grads: Any, variables: Any) -> Any:
        update.original(grads, variables)
        return tf.zeros([])

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(bad, nothing, lambda: apply(update.all_grads, update.passed))
        return

    # A condition around an update has to stand outside the replicas.
    def outside(strategy: Any, flag: Any, grads: Any, variables: Any) -> None:
        def run() -> Any:
            strategy.extended.call_for_each_replica(apply, args=(grads, variables))
            return tf.zeros([])

        tf.cond(strategy.experimental_local_results(flag)[0], nothing, run)

    tf.distribute.get_replica_context().merge_call(
        outside, args=(bad, update.all_grads, update.passed)
    )


@contextlib.contextmanager
def reduced(update: Update, seen: Callable[[list[Any]], None]) -> Iterator[None]:
    """Show the gradients summed over replicas to ``seen`` for the time of a ``with`` block.

    Args:
        update: The call of ``apply`` made within the block.
        seen: Called with one gradient a variable, in the order of ``update.grads`` (None where
            there is none), before the optimizer uses them. It may raise.
    """
    core = optimizers.inner(update.optimizer)
    own = vars(core)
    missing = object()
    previous = own.get(_HOOK, missing)
    original = getattr(core, _HOOK)
    places = {id(v): i for i, v in zip(update.present, update.variables, strict=True)}

    def hook(strategy: Any, grads_and_vars: Any, learning_rate: Any) -> Any:
        pairs = list(grads_and_vars)
        if tf.distribute.in_cross_replica_context() or is_first():
            found: list[Any] = [None] * len(update.grads)
            for gradient, variable in pairs:
                place = places.get(id(variable))
                if place is not None and gradient is not None:
                    found[place] = strategy.experimental_local_results(gradient)[0]
            seen(found)
        return original(strategy, pairs, learning_rate)

    own[_HOOK] = hook
    try:
        yield
    finally:
        if own.get(_HOOK) is hook:
            if previous is missing:
                del own[_HOOK]
            else:
                own[_HOOK] = previous


def in_graph(update: Update, loss: Any, *, sample_every: int, skip_non_finite: bool) -> Any:
    """Record one ``apply`` of one replica in the graph being traced.

    Args:
        update: The call of ``apply``.
        loss: This replica's loss, a float32 scalar, or None.
        sample_every: Full statistics every so many steps.
        skip_non_finite: Leave out updates with a NaN or Inf in any replica's gradient.
    """
    # Needed where Keras may not get as far as the reduction.
    local = skip_non_finite or optimizers.scales_loss(update.optimizer)
    zero = tf.zeros([])
    values = [None if g is None or not local else numbers.dense_values(g) for g in update.grads]
    halves = tf.stack([zero if v is None else numbers.half_square(v) for v in values])
    total, trouble = summed([zero if loss is None else loss, tf.reduce_sum(halves)])
    bad = ~tf.math.is_finite(trouble + total)
    broken = ~tf.math.is_finite(trouble)

    def apply() -> Any:
        if skip_non_finite:
            return conditionally(broken, update)
        return update.apply()

    if not is_first():
        return apply()
    step = GraphStep(update, sample_every=sample_every, compiled=False)
    step.buffers.replicated = True
    pending = step.buffers.pending
    pending.assign(halves)
    sample = step.regular() | step.worth_a_look(bad)

    def first_look() -> None:
        step.buffers.bad_budget.assign_sub(tf.cast(bad, tf.int64))
        # What stands there if Keras does not get as far as the reduction.
        step.look(values, update.grads, scaled=update.scaled())

    before = step.before(sample, first_look)

    def seen(gradients: list[Any]) -> None:
        numbers_seen = [None if g is None else numbers.dense_values(g) for g in gradients]
        # Keras took the loss scale off by now; rows hold it, as without a strategy.
        factor = step.scale * step.scale if update.scaled() else tf.ones([])
        pending.assign(
            tf.stack([zero if v is None else numbers.half_square(v) * factor for v in numbers_seen])
        )

        def look() -> Any:
            step.look(numbers_seen, gradients, scaled=False)
            return tf.zeros([])

        tf.cond(sample, look, lambda: tf.zeros([]))

    with reduced(update, seen):
        result = apply()
    step.measure(sample, before)
    head = [tf.constant(float("nan")) if loss is None else total, step.scale]
    step.push(tf.concat([tf.stack(head), pending.read_value()], axis=0))
    return result


def eagerly(
    update: Update,
    loss: float | None,
    record: Callable[[list[Any], float | None, float, float], None],
    *,
    skip_non_finite: bool,
) -> Any:
    """Record one ``apply`` of one replica in eager mode.

    Args:
        update: The call of ``apply``.
        loss: This replica's loss, or None.
        record: Called in the first replica with the gradients, the loss of all replicas, the
            loss scale of this step and the factor still on the gradients. It may raise.
        skip_non_finite: Leave out updates with a NaN or Inf in any replica's gradient.
    """
    zero = tf.zeros([])
    local = [
        zero if g is None else numbers.half_square(numbers.dense_values(g)) for g in update.grads
    ]
    total, trouble = summed([0.0 if loss is None else loss, tf.add_n(local)])
    all_losses = None if loss is None else float(total)
    skip = skip_non_finite and not np.isfinite(float(trouble))
    if not is_first():
        return None if skip else update.apply()
    channel = update.channel
    told: list[bool] = []
    before = [tf.identity(v) for v in update.weights()] if channel.wants_sample() else None
    rate = update.learning_rate()
    scale = float(update.scale()) if update.scaled() else 1.0

    def seen(gradients: list[Any]) -> None:
        # Keras took the loss scale off by now.
        told.append(True)
        record(gradients, all_losses, scale, 1.0)

    result = None
    if not skip:
        with reduced(update, seen):
            result = update.apply()
    if not told:
        record(update.grads, all_losses, scale, scale)
    if before is not None:
        pairs = [moved(a, b) for a, b in zip(update.weights(), before, strict=True)]
        channel.complete_sample(update.present, np.asarray(pairs), float(rate))
    return result
