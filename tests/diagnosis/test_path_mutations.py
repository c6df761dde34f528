"""Mutations of cut paths and NaN makers: other sizes, depths, styles, names, ways to train.

A fixed number of programs is drawn from a fixed seed. Each has one fault in one place; the
cause and the place that the analyses name first are compared with what was put in.
"""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_gradguard.diagnosis.eager import EagerRecorder
from keras_gradguard.diagnosis.nonfinite import non_finite
from keras_gradguard.diagnosis.path import none_gradient
from keras_gradguard.diagnosis.trace import trace_step
from keras_gradguard.diagnosis.untracked import untracked
from keras_gradguard.diagnosis.zero import zero_gradient

LOWEST_SHARE = 0.95

CUTS = {
    "round": (lambda h: ops.round(h), "non_differentiable_op"),
    "floor": (lambda h: tf.floor(h), "non_differentiable_op"),
    "cast": (lambda h: tf.cast(tf.cast(h, tf.int32), tf.float32), "non_differentiable_op"),
    "compare": (lambda h: ops.cast(ops.greater(h, 0.0), "float32"), "non_differentiable_op"),
    "argmax": (
        lambda h: ops.one_hot(ops.argmax(h, -1), h.shape[-1]),
        "non_differentiable_op",
    ),
    "stop": (lambda h: ops.stop_gradient(h), "stop_gradient"),
    "numpy": (
        lambda h: tf.ensure_shape(tf.numpy_function(np.abs, [h], tf.float32), h.shape),
        "leaves_tensorflow",
    ),
}
ZEROS = {
    "sign": (lambda h: ops.sign(h), "zero_gradient_op"),
    "clip": (lambda h: ops.clip(h - 100.0, 0.0, 1.0), "clip_in_forward"),
    "while": (
        lambda h: tf.while_loop(
            lambda i, a: i < 2, lambda i, a: (i + 1, tf.round(a)), (tf.constant(0), h)
        )[1],
        "non_differentiable_op",
    ),
}
NANS = {
    "log": (lambda h: ops.log(h * 0.0), "log_of_zero"),
    "sqrt": (lambda h: ops.sqrt(ops.square(h * 0.0)), "sqrt_gradient_at_zero"),
    "norm": (lambda h: h + tf.norm(h * 0.0), "sqrt_gradient_at_zero"),
    "divide": (lambda h: h / ops.sum(h * 0.0), "division_by_zero"),
    "exp": (lambda h: ops.exp(ops.square(h) + 200.0), "exp_overflow"),
    "where": (
        lambda h: ops.where(h * 0.0 > 0.0, tf.math.log(h * 0.0), 0.0) + h,
        "where_double_branch",
    ),
}
GROUPS = {"cut": CUTS, "zero": ZEROS, "nan": NANS}


class Fault(layers.Layer):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, h):
        return self.function(h)

    def compute_output_shape(self, shape):
        return shape


class Stack(keras.Model):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def assemble(style, width, parts):
    """Put layers together in one of four styles."""
    if style == "sequential":
        return keras.Sequential([keras.Input((width,)), *parts])
    if style == "nested":
        half = len(parts) // 2
        inner = keras.Sequential(parts[:half], name="inner_block")
        return keras.Sequential([keras.Input((width,)), inner, *parts[half:]])
    if style == "functional":
        i = h = keras.Input((width,))
        for part in parts:
            h = part(h)
        return keras.Model(i, h)
    model = Stack(parts)
    model(np.zeros((2, width), "float32"))
    return model


def draw(number):
    """Draw one program: what is wrong, where, and everything around it."""
    rng = random.Random(number)
    group = rng.choice(list(GROUPS))
    name = rng.choice(list(GROUPS[group]))
    return {
        "group": group,
        "fault": name,
        "in_loss": rng.random() < 0.35,
        "style": rng.choice(["sequential", "functional", "subclassed", "nested"]),
        "width": rng.choice([2, 3, 7, 20]),
        "rows": rng.choice([2, 5, 32]),
        "below": rng.randint(1, 5),
        "above": rng.randint(0, 3),
        "activation": rng.choice(["tanh", "gelu", "softplus", "sigmoid", "elu"]),
        "norm": rng.random() < 0.3,
        "loss": rng.choice(["mse", "mae", "keras", "tf", "ops"]),
        "how": rng.choice(["fit", "loop"]),
        "seed": rng.randint(0, 9),
        "label": rng.choice(["danger", "my_layer", "head_2", "Quantise"]),
    }


def losses(kind):
    return {
        "mse": "mse",
        "mae": "mae",
        "keras": keras.losses.Huber(),
        "tf": lambda t, p: tf.reduce_mean(tf.square(t - p)),
        "ops": lambda t, p: ops.mean(ops.abs(t - p)),
    }[kind]


def program(spec):
    """Make model, batch and loss of a drawn program."""
    keras.utils.set_random_seed(spec["seed"])
    rng = np.random.default_rng(spec["seed"])
    function, cause = GROUPS[spec["group"]][spec["fault"]]
    parts = []
    for i in range(spec["below"]):
        parts.append(layers.Dense(spec["width"] + 1, spec["activation"], name=f"low{i}"))
        if spec["norm"] and spec["rows"] > 2:
            parts.append(layers.BatchNormalization(name=f"norm{i}"))
    if not spec["in_loss"]:
        parts.append(Fault(function, name=spec["label"]))
    parts += [
        layers.Dense(spec["width"] + 2, spec["activation"], name=f"up{i}")
        for i in range(spec["above"])
    ]
    parts.append(layers.Dense(3, name="out"))
    model = assemble(spec["style"], spec["width"], parts)
    base = losses(spec["loss"])
    loss = base
    if spec["in_loss"]:

        def loss(y_true, y_pred):
            return tf.reduce_mean(tf.square(y_true - function(y_pred)))

    x = rng.normal(size=(spec["rows"], spec["width"])).astype("float32")
    y = rng.normal(size=(spec["rows"], 3)).astype("float32")
    return model, x, y, loss, cause


def diagnosed(spec):
    """Return (cause expected, place expected, first cause found)."""
    model, x, y, loss, cause = program(spec)
    place = "loss" if spec["in_loss"] else spec["label"]
    if spec["group"] == "cut" and spec["how"] == "loop":
        with EagerRecorder() as recorder:
            with tf.GradientTape() as tape:
                call = keras.losses.get(loss) if isinstance(loss, str) else loss
                value = tf.reduce_mean(call(y, model(x, training=True)))
            tape.gradient(value, model.trainable_variables)
        return cause, place, none_gradient(recorder.recording, model=model, loss=value)
    if spec["how"] == "fit":
        model.compile("sgd", loss)
        trace = trace_step(model, x, y)
    else:
        trace = trace_step(model, x, y, loss=loss)
    analysis = {"cut": none_gradient, "zero": zero_gradient, "nan": non_finite}[spec["group"]]
    return cause, place, analysis(trace)


@pytest.mark.parametrize("many", [24, pytest.param(60, marks=pytest.mark.slow)])
def test_mutations_keep_cause_and_place(many):
    missed = []
    for number in range(many):
        spec = draw(number)
        cause, place, found = diagnosed(spec)
        if not found or found[0].name != cause or place not in found[0].where[:2]:
            first = (found[0].name, found[0].where[:3]) if found else None
            missed.append((number, cause, place, first, spec))
    assert len(missed) <= (1 - LOWEST_SHARE) * many, "\n".join(map(str, missed))


@pytest.mark.parametrize("number", range(16))
def test_mutations_without_a_fault_have_no_cause(number):
    spec = draw(1000 + number)
    spec.update(group="healthy", fault="none", in_loss=False)
    GROUPS["healthy"] = {"none": (lambda h: ops.tanh(h) + ops.relu(h), "")}
    try:
        model, x, y, loss, _ = program(spec)
    finally:
        del GROUPS["healthy"]
    model.compile("sgd", loss)
    trace = trace_step(model, x, y)
    for analysis in (none_gradient, zero_gradient, non_finite, untracked):
        assert analysis(trace) == ()
