"""What a diagnosis may cost, counted in runs and operations; clocks differ, counts do not."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context as eager_context

from keras_gradguard.diagnosis import Context, execute, explain
from keras_gradguard.diagnosis.blame import find_culprits
from keras_gradguard.diagnosis.context import Batch
from keras_gradguard.diagnosis.cuts import open_values, starts_of, way
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.liveness import liveness
from keras_gradguard.diagnosis.opgraph import READ_OPS
from keras_gradguard.diagnosis.oracle import Oracle
from keras_gradguard.diagnosis.preflight import preflight_of
from keras_gradguard.findings import Finding


def residual(depth, dead=True):
    x = inputs = keras.Input((8, 4))
    for k in range(depth):
        inner = layers.Dense(4, activation="gelu", name=f"inner_{k}")(x)
        x = layers.LayerNormalization(name=f"norm_{k}")(layers.Reshape((8, 4))(x + inner))
    x = layers.GlobalAveragePooling1D()(x)
    off = keras.initializers.Constant(-50.0 if dead else 0.0)
    x = layers.Dense(6, activation="relu", bias_initializer=off, name="off")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def context(model):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, *model.input_shape[1:])).astype("float32")
    batch = Batch(x=x, y=rng.integers(0, 3, 32))
    return Context(model=model, optimizer=model.optimizer, batch=batch, mode="fit")


def around_stops(passes):
    """Return a model whose dead layer also goes through a stop."""
    inputs = keras.Input((4,))
    dead = layers.Dense(5, activation="relu", bias_initializer=keras.initializers.Constant(-50.0))
    hidden = dead(inputs)
    stopped = layers.Lambda(tf.stop_gradient)(hidden)
    wide = layers.Dense(5, name="wide")
    shut = layers.EinsumDense("ab,b->ab", (5,), kernel_initializer="zeros", name="shut")
    off = keras.initializers.Constant(-50.0)
    outs = [
        shut(stopped),  # a factor of 0
        layers.EinsumDense("ab,b->ab", (5,), name="floored")(
            layers.Lambda(lambda t: tf.floor(2.0 * t + 1.0))(stopped)
        ),
        layers.Dense(5, activation="relu", bias_initializer=off, name="second")(stopped),
        wide(inputs) * layers.Lambda(lambda t: tf.where(t > 100.0, t, 1.0))(stopped),
    ]
    joined = layers.Add()([hidden * 0.0, wide(inputs), *outs, *([stopped] if passes else [])])
    model = keras.Model(inputs, layers.Dense(3, name="head")(joined))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture
def functions(monkeypatch):
    """Return a list that gets the number of operations of every function that is run."""
    sizes = []
    original = execute._function

    @contextlib.contextmanager
    def counted(trace, wanted):
        with original(trace, wanted) as name:
            definition = eager_context.context().get_function_def(name)
            sizes.append(len(definition.node_def))
            yield name

    monkeypatch.setattr(execute, "_function", counted)
    return sizes


def explained(model):
    names = tuple(v.path for v in model.trainable_variables)
    return explain(
        Finding(symptom="zero_gradient", summary="Some gradients are 0.", where=names),
        context(model),
    )


def test_one_backward_run_whatever_the_depth(functions, monkeypatch):
    differentiated = []
    original = tf.gradients
    monkeypatch.setattr(
        tf,
        "gradients",
        lambda ys, xs, **kw: differentiated.append(len(xs)) or original(ys, xs, **kw),
    )
    model = residual(4)
    found = explained(model)
    assert found.causes[0].name == "dead_relu", found
    assert "off" in found.causes[0].where
    assert len(functions) <= 3, functions  # all gradients, around the culprits, further up
    assert max(differentiated, default=0) <= 8, differentiated  # the oracle's single operations
    short = max(functions)
    functions.clear()
    explained(residual(8))
    deep = max(functions)
    assert len(functions) <= 3
    assert deep < 2.2 * short  # in proportion to the model, not to its square


def test_a_look_ahead_makes_no_backward_pass():
    model = residual(2, dead=False)
    facts = Facts(context(model), depth="forward")
    assert preflight_of(facts) == ()
    assert facts.trace.gradients == ()
    assert facts.trace.records == ()
    forward = facts.trace.graph.num_operations()
    whole = Facts(context(model)).trace.graph.num_operations()
    assert forward < 0.6 * whole


def told_alive(facts):
    """Return name -> what liveness says, of every value between a variable and the loss."""
    starts = [
        v
        for variable in facts.trace.variables
        for v in starts_of(facts.view.ops, facts.trace.key(variable))[1]
    ]
    alive = liveness(facts, starts)
    between = facts.view.ops.descendants(starts) & facts.reach
    return {
        v.tensor.name: alive(v)
        for v in between
        if v.is_float and (v.op is None or v.op.type not in READ_OPS)
    }


@pytest.mark.parametrize("dead", [True, False])
def test_liveness_of_the_tape_is_that_of_tf_gradients(dead):
    model = residual(2, dead=dead)
    tape, asked = (told_alive(Facts(context(model), depth=d)) for d in ("values", "step"))
    assert tape == asked
    assert len(asked) > 30
    assert (False in asked.values()) == dead


@pytest.mark.parametrize("passes", [True, False])
def test_a_stop_is_named_only_when_something_arrives_at_it(passes):
    model = around_stops(passes)
    tape, step = (Facts(context(model), depth=d) for d in ("values", "step"))
    told = told_alive(tape)
    assert told == told_alive(step)
    stops = [op for op in tape.view.ops.ops if op.type == "StopGradient"]
    assert [told[op.outputs[0].tensor.name] for op in stops] == [passes]
    dead = [n for n, g in tape.gradients.items() if g is not None and not np.any(g)]
    named = {c.op.type for c in find_culprits(tape, dead)}
    assert ("StopGradient" in named) == passes
    # Where the stop is not to blame, the operations behind it are.
    assert ({"Einsum", "Floor", "SelectV2"} <= named) == (not passes)


def test_open_values_say_what_a_walk_from_each_variable_says():
    inputs = keras.Input((8, 4))
    kept = layers.Dense(4, name="kept")(inputs)
    lost = layers.Lambda(tf.stop_gradient)(layers.Dense(4, name="lost")(inputs))
    flat = layers.Lambda(tf.sign)(layers.Dense(4, name="flat")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(kept + lost + flat)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    facts, oracle = Facts(context(model)), Oracle()
    ops, loss = facts.view.ops, facts.view.loss
    told = {}
    for zeros_cut in (False, True):
        found = open_values(ops, oracle, loss, zeros_cut=zeros_cut)
        for variable in facts.trace.variables:
            starts = starts_of(ops, facts.trace.key(variable))[1]
            walked = way(ops, oracle, starts, loss, zeros_cut=zeros_cut).open
            assert (not found.isdisjoint(starts)) == walked
            told[variable.path, zeros_cut] = walked
    assert told["kept/kernel", True]
    assert told["flat/kernel", False]
    assert not told["lost/kernel", False]
    assert not told["flat/kernel", True]
