"""What a guarded step costs, counted and not timed: operations, reads, traces, bytes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard import GradientGuard, session
from keras_gradguard.records import Row
from keras_gradguard.taps import channel
from keras_gradguard.tensorboard.events import EventWriter
from tests.histories import table


def stack(depth):
    """A model of two variables a layer."""
    return keras.Sequential([keras.Input((3,)), *(layers.Dense(3) for _ in range(depth))])


def graph_of(depth, guard=None):
    """Return the traced graph of a custom step, guarded or not."""
    model, optimizer = stack(depth), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    x = tf.ones((2, 3))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    if guard is None:
        return step.get_concrete_function(x).graph
    with guard.watch(model, optimizer):
        return step.get_concrete_function(x).graph


def counts(depth):
    """Return operations that a guard adds: to the step itself, and to its branches."""
    plain, guarded = graph_of(depth), graph_of(depth, GradientGuard(log_dir=None))
    branches = guarded.as_graph_def().library.function
    inside = sum(len(f.node_def) for f in branches) - sum(
        len(f.node_def) for f in plain.as_graph_def().library.function
    )
    return len(guarded.get_operations()) - len(plain.get_operations()), inside


def test_few_operations_a_variable():
    (step_small, inside_small), (step_large, inside_large) = counts(2), counts(6)
    variables = 2 * (6 - 2)
    # On every step: half the sum of squares, and what catches a variable for a branch.
    assert (step_large - step_small) / variables <= 2
    # On sampled steps only, histogram and update; tracing pays for them once.
    assert (inside_large - inside_small) / variables <= 25


def branches(graph):
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
    for op in graph.get_operations():
        if op.type in ("If", "StatelessIf"):
            yield op, functions[op.get_attr("else_branch").name]


def test_a_step_that_is_not_sampled_reads_and_copies_no_weights():
    found = list(branches(graph_of(4, GradientGuard(log_dir=None))))
    assert len(found) == 2
    for op, otherwise in found:
        # As one operation: no switches, and the branch that is not taken is not walked through.
        assert op.get_attr("_lower_using_switch_merge") is False
        kinds = {node.op for node in otherwise.node_def}
        assert "ReadVariableOp" not in kinds
        for node in otherwise.node_def:
            if node.op == "Const":
                assert tf.make_ndarray(node.attr["value"].tensor).size <= 1
            assert node.op not in ("Fill", "ZerosLike")


def upstream(op):
    """Return the operations that have to be done before ``op``."""
    todo, seen = [op], set()
    while todo:
        now = todo.pop()
        for before in [*(t.op for t in now.inputs), *now.control_inputs]:
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return seen


def test_what_catches_the_weights_waits_for_no_gradient():
    graph = graph_of(4, GradientGuard(log_dir=None))
    (first, _), (second, _) = branches(graph)
    assert not any(op.type == "MatMul" for op in upstream(first))
    # The other one needs every gradient, so `upstream` does find them.
    assert any(op.type == "MatMul" for op in upstream(second))
    updates = [op for op in graph.get_operations() if op.type == "AssignSubVariableOp"]
    assert len(updates) == 8
    # Nothing of the guard is awaited by an update, but that the old weights are held.
    for op in updates:
        assert first in upstream(op)
        assert second not in upstream(op)
        assert not any(before.type == "L2Loss" for before in upstream(op))


def test_weights_pass_to_the_second_branch_as_one_tensor():
    (first, _), (second, _) = branches(graph_of(4, GradientGuard(log_dir=None)))
    assert [o.dtype for o in first.outputs] == [tf.variant]
    assert not any(t.dtype == tf.float32 and t.op is first for t in second.inputs)


def test_the_counts_above_can_see_a_switch_and_a_read():
    @tf.function
    def step(flag, v):
        return tf.cond(flag, lambda: v + 1.0, lambda: v.read_value())

    v = tf.Variable(1.0)
    graph = step.get_concrete_function(tf.constant(True), v).graph
    ((op, otherwise),) = branches(graph)
    assert op.get_attr("_lower_using_switch_merge") is True
    assert "ReadVariableOp" in {node.op for node in otherwise.node_def}


@pytest.fixture
def reads(monkeypatch):
    """Count what is fetched from the device through variables."""
    seen = []
    plain = channel.fetched
    monkeypatch.setattr(channel, "fetched", lambda v: seen.append(v.name) or plain(v))
    return seen


def fit(callbacks, *, steps=200, model=None):
    model = stack(2) if model is None else model
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(4 * steps, 3)).astype("float32")
    model.fit(x, x, batch_size=4, verbose=0, callbacks=callbacks)
    return model


def test_few_transfers_for_many_steps(reads):
    fit([GradientGuard(log_dir=None, diagnose=False)], steps=20)  # the start is sampled densely
    begun = len(reads)
    fit([GradientGuard(log_dir=None, diagnose=False)], steps=20)
    start = len(reads) - begun
    begun = len(reads)
    fit([GradientGuard(log_dir=None, diagnose=False)], steps=220)
    more = len(reads) - begun - start
    # 200 steps more: 20 looks of two reads, five readings that count again, and four samples of
    # three.
    assert 20 <= more <= 20 * 2 + 5 + 4 * 3


def test_ordinary_steps_wait_on_the_device(tmp_path, monkeypatch):
    taken, seen, behind = [], [], []
    plain = channel.TensorFlowChannel.read

    def read(self):
        reading = plain(self)
        taken.extend([len(reading.rows)] if reading.rows else [])
        return reading

    monkeypatch.setattr(channel.TensorFlowChannel, "read", read)
    monkeypatch.setattr(session, "_WAIT", float("inf"))  # however slow the machine is
    guard = GradientGuard(log_dir=str(tmp_path), diagnose=False)

    class Watching(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            behind.append(batch + 1 - guard.steps_seen)
            seen.append(guard.steps_seen)

    fit([guard, Watching()], steps=600)
    # Nothing is lost and nobody sees that something waits.
    assert sum(taken) == guard.steps_seen == 600
    assert max(behind) <= 11
    assert seen == sorted(seen)
    # After the first 128 steps the looks between two samples take nothing with them.
    late = taken[-8:-1]
    assert max(late) >= 20
    assert len(taken) <= 14 + 2 * (600 - 128) // 50 + 3


def test_the_step_is_traced_as_often_as_without_a_guard():
    traced = []

    class Counting(keras.Sequential):
        def train_step(self, data):
            traced.append(1)
            return super().train_step(data)

    def traces(callbacks):
        traced.clear()
        model = Counting([keras.Input((3,)), layers.Dense(3)])
        model = fit(callbacks, steps=120, model=model)
        model.fit(np.ones((8, 3)), np.ones((8, 3)), batch_size=4, verbose=0, callbacks=callbacks)
        return len(traced)

    # Without a guard Keras makes Adam's variables in the first trace, and TensorFlow traces again.
    assert traces([GradientGuard(log_dir=None, diagnose=False)]) <= traces([])


def test_bytes_in_the_event_file(tmp_path):
    columns = table(*[f"layer_{i}/kernel" for i in range(20)])
    writer = EventWriter(tmp_path)
    sizes = []
    for start in range(0, 4000, 10):
        norms = np.random.default_rng(start).random((10, 20), np.float32)
        rows = [Row(step=start + i, norm=norm, loss=1.0) for i, norm in enumerate(norms)]
        writer.write_rows(columns, rows)
        if start in (1990, 3990):
            writer.flush()
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))
    writer.close()
    # Four bytes are the number itself.
    assert 4 <= (sizes[1] - sizes[0]) / 2000 / 20 <= 8
