"""Makes programs with one known fault (or none) in many forms: what varies is not what is wrong.

Sizes, depth, optimizer, hidden activation, names, the way the model is written (Sequential,
functional, subclassed), the way it is trained (``fit``, a loop) and the form of the loss (Keras',
raw TensorFlow's) are drawn from a seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from keras_gradguard import GradientGuard, GradientGuardError, GradientGuardWarning

STYLES = ("sequential", "functional", "subclassed")
WORDS = ("enc", "mlp", "body", "trunk", "block", "tower", "net", "stem", "proj", "feat")


@dataclass
class Program:
    """One training program.

    Args:
        make: Returns the model (built when it is called the first time).
        x: Inputs.
        y: Targets, or None.
        loss: What compile() or the loop uses.
        optimizer: A fresh optimizer.
        how: ``"fit"`` or ``"loop"``.
        batch: Batch size.
        steps: Training steps.
        weight: Sample weights, or None.
    """

    model: Any
    x: Any
    y: Any
    loss: Any
    optimizer: Any
    how: str = "fit"
    batch: int = 16
    steps: int = 24
    weight: Any = None
    before: Callable[[Any], None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Draw:
    """Random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.features = int(self.rng.integers(3, 12))
        self.units = int(self.rng.integers(4, 24))
        self.depth = int(self.rng.integers(1, 4))
        self.style = str(self.rng.choice(STYLES))
        self.how = str(self.rng.choice(["fit", "loop"]))
        self.raw = bool(self.rng.integers(2))
        self.name = f"{self.rng.choice(WORDS)}_{seed % 97}"
        self.activation = str(self.rng.choice(["relu", "tanh", "gelu", "elu", "leaky_relu"]))
        self.examples = 64

    def optimizer(self, rate: float = 0.003) -> Any:
        kind = self.rng.choice(["sgd", "momentum", "adam", "adamw", "rmsprop"])
        kinds = {
            "sgd": lambda: keras.optimizers.SGD(rate),
            "momentum": lambda: keras.optimizers.SGD(rate, momentum=0.9),
            "adam": lambda: keras.optimizers.Adam(rate),
            "adamw": lambda: keras.optimizers.AdamW(rate),
            "rmsprop": lambda: keras.optimizers.RMSprop(rate),
        }
        return kinds[str(kind)]()

    def x(self) -> np.ndarray:
        return self.rng.normal(size=(self.examples, self.features)).astype("float32")

    def hidden(self, activation: str | None = None, **options: Any) -> list[Any]:
        return [
            layers.Dense(
                self.units, activation=activation or self.activation, name=f"{self.name}_{i}",
                **options,
            )
            for i in range(self.depth)
        ]  # fmt: skip

    def model(self, stack: list[Any], features: int | None = None) -> Any:
        size = (features or self.features,)
        if self.style == "sequential":
            return keras.Sequential([keras.Input(size), *stack])
        if self.style == "functional":
            inputs = keras.Input(size)
            value = inputs
            for layer in stack:
                value = layer(value)
            return keras.Model(inputs, value)
        return Stacked(stack)


class Stacked(keras.Model):
    """A subclassed model that calls its layers in order."""

    def __init__(self, stack: list[Any]) -> None:
        super().__init__()
        self.stack = stack

    def call(self, x: Any) -> Any:
        for layer in self.stack:
            x = layer(x)
        return x


def column(x: np.ndarray) -> np.ndarray:
    """Return a target that a linear model can learn."""
    return x.sum(axis=1, keepdims=True).astype("float32")


def classes(x: np.ndarray) -> np.ndarray:
    """Return two classes as a column."""
    return (x[:, :1] > 0).astype("float32")


def raw_mse(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(y, p.dtype) - p))


def raw_bce_logits(y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=z))


def mse(d: Draw) -> Any:
    return raw_mse if d.raw else keras.losses.MeanSquaredError()


# ---- faults --------------------------------------------------------------------------


def double_activation(d: Draw) -> Program:
    x = d.x()
    out = layers.Dense(3, activation="sigmoid", name=f"{d.name}_out")
    y = np.zeros((len(x), 3), "float32")
    stack = [*d.hidden(), out, *([layers.Reshape((3, 1)), layers.Flatten()] if not d.raw else [])]
    loss = raw_bce_logits if d.raw else keras.losses.BinaryCrossentropy(from_logits=True)
    return Program(d.model(stack), x, y, loss, d.optimizer(), d.how)


def dead_relu(d: Draw) -> Program:
    x = d.x()
    dead = layers.Dense(d.units, activation="relu", name=f"{d.name}_off",
                        bias_initializer=keras.initializers.Constant(-200.0))  # fmt: skip
    stack = [*d.hidden()[:-1], dead, layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


def dead_relu_output(d: Draw) -> Program:
    x = d.x()
    out = layers.Dense(1, activation="relu", name=f"{d.name}_out",
                       bias_initializer=keras.initializers.Constant(-300.0))  # fmt: skip
    return Program(d.model([*d.hidden(), out]), x, 5 + abs(column(x)), mse(d), d.optimizer(), d.how)


def saturated_activation(d: Draw) -> Program:
    x = 4000 + 1000 * abs(d.x())
    kind = str(d.rng.choice(["tanh", "sigmoid"]))
    wide = layers.Dense(d.units, activation=kind, kernel_initializer="ones", name=f"{d.name}_flat")
    stack = [wide, layers.Dense(1, name="out")]
    return Program(d.model(stack), x, np.ones((len(x), 1), "float32"), mse(d), d.optimizer(), d.how)


def softmax_over_one_unit(d: Draw) -> Program:
    x = d.x()
    out = layers.Dense(1, activation="softmax", name=f"{d.name}_out")
    return Program(d.model([*d.hidden(), out]), x, classes(x), mse(d), d.optimizer(), d.how)


def missing_activation(d: Draw) -> Program:
    x = 200 * d.x()
    out = layers.Dense(1, name=f"{d.name}_out", bias_initializer=keras.initializers.Constant(-5000))
    loss = keras.losses.BinaryCrossentropy()
    d.activation = "relu"
    return Program(d.model([*d.hidden(), out]), x, classes(x), loss, d.optimizer(), d.how)


class Sign(layers.Layer):
    def call(self, x: Any) -> Any:
        return ops.sign(x)


class TfSign(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.sign(x)


def zero_gradient_op(d: Draw) -> Program:
    x = d.x()
    step = TfSign(name="binary") if d.raw else Sign(name="binary")
    stack = [*d.hidden(), step, layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


class Detach(layers.Layer):
    def call(self, x: Any) -> Any:
        return ops.stop_gradient(x)


def stop_gradient(d: Draw) -> Program:
    x = d.x()
    stack = [*d.hidden(), Detach(name="detach"), layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


class Step(layers.Layer):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, x: Any) -> Any:
        if self.kind == "round":
            return ops.round(x)
        if self.kind == "cast":
            return ops.cast(ops.cast(x, "int32"), "float32")
        if self.kind == "compare":
            return ops.cast(x > 0, "float32")
        return ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1])


def non_differentiable_op(d: Draw) -> Program:
    x = d.x()
    kind = str(d.rng.choice(["round", "cast", "compare", "argmax"]))
    stack = [*d.hidden(), Step(kind, name="steps"), layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


def leaves_tensorflow(d: Draw) -> Program:
    x = d.x()

    def loss(y: Any, p: Any) -> Any:
        out = tf.numpy_function(lambda a, b: np.abs(a - b).astype("float32"), [y, p], tf.float32)
        out.set_shape(p.shape)
        return tf.reduce_mean(out)

    model = d.model([*d.hidden(), layers.Dense(1, name="out")])
    return Program(model, x, column(x), loss, d.optimizer(), d.how)


def zero_init(d: Draw) -> Program:
    x = d.x()
    d.depth = max(d.depth, 1)
    stack = [*d.hidden("relu", kernel_initializer="zeros"),
             layers.Dense(1, kernel_initializer="zeros", name="out")]  # fmt: skip
    return Program(d.model(stack), x, column(x) + 1, mse(d), d.optimizer(), d.how)


def zero_sample_weight(d: Draw) -> Program:
    x = d.x()
    model = d.model([*d.hidden(), layers.Dense(1, name="out")])
    return Program(model, x, column(x), keras.losses.MeanSquaredError(), d.optimizer(), "fit",
                   weight=np.zeros(len(x), "float32"))  # fmt: skip


def learning_rate_zero(d: Draw) -> Program:
    x = d.x()
    schedules = keras.optimizers.schedules
    steps = int(d.rng.integers(2, 6))
    rate = [
        schedules.CosineDecay(0.01, steps),
        schedules.PolynomialDecay(0.01, steps, 0.0),
        schedules.PiecewiseConstantDecay([steps], [0.01, 0.0]),
    ][int(d.rng.integers(3))]
    kind = [keras.optimizers.Adam, keras.optimizers.SGD][int(d.rng.integers(2))]
    model = d.model([*d.hidden(), layers.Dense(1, name="out")])
    return Program(model, x, column(x), mse(d), kind(rate), d.how)


def update_below_precision(d: Draw) -> Program:
    x = d.x().astype("float16")
    ones = keras.initializers.RandomUniform(0.5, 1.0, seed=1)
    stack = [
        layers.Dense(d.units, dtype="float16", use_bias=False, kernel_initializer=ones, name="h"),
        layers.Dense(1, dtype="float16", use_bias=False, kernel_initializer=ones, name="out"),
    ]
    d.style = "sequential"
    model = keras.Sequential([keras.Input((d.features,), dtype="float16"), *stack])
    return Program(model, x, column(x).astype("float16"), keras.losses.MeanSquaredError(),
                   keras.optimizers.SGD(1e-7), "fit")  # fmt: skip


def constraint_projects_update(d: Draw) -> Program:
    x = abs(d.x())
    out = layers.Dense(1, use_bias=False, kernel_initializer="zeros", kernel_constraint="non_neg",
                       name=f"{d.name}_pos")  # fmt: skip
    return Program(d.model([out]), x, -1 - column(x), mse(d), keras.optimizers.SGD(0.01), d.how)


def nan_input(d: Draw) -> Program:
    x = d.x()
    x[:, int(d.rng.integers(d.features))] = np.nan
    model = d.model([*d.hidden(), layers.Dense(1, name="out")])
    return Program(model, x, np.ones((len(x), 1), "float32"), mse(d), d.optimizer(), d.how)


def learning_rate_too_high(d: Draw) -> Program:
    x = (50 + 50 * d.rng.random((d.examples, d.features))).astype("float32")
    model = d.model([layers.Dense(1, name=f"{d.name}_line")])
    return Program(model, x, column(x), mse(d), keras.optimizers.SGD(0.01), d.how, steps=40)


class Forgetful(keras.Model):
    def __init__(self, units: int, name_: str) -> None:
        super().__init__()
        self.used = layers.Dense(units, name=f"{name_}_used")
        self.spare = layers.Dense(units, name=f"{name_}_spare")
        self.out = layers.Dense(1, name="out")

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.spare.build((None, self.used.units))
        self.out.build((None, self.used.units))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.out(self.used(x))


def unused_layer(d: Draw) -> Program:
    x = d.x()
    return Program(Forgetful(d.units, d.name), x, column(x), mse(d), d.optimizer(), d.how)


class Bare(layers.Layer):
    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = tf.Variable(tf.ones([size]), name="factor")

    def call(self, x: Any) -> Any:
        return x * self.factor


def untracked_variable(d: Draw) -> Program:
    x = d.x()
    stack = [Bare(d.features, name=f"{d.name}_bare"), *d.hidden(), layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), "fit")


def trainable_flag(d: Draw) -> Program:
    x = d.x()
    model = d.model([*d.hidden(), layers.Dense(1, name="out")])
    model(x[:2])
    model.trainable = False
    return Program(model, x, column(x), mse(d), d.optimizer(), "fit")


def clip_in_forward(d: Draw) -> Program:
    x = d.x()
    bound = float(d.rng.uniform(2, 20))
    out = layers.Dense(1, name="out", bias_initializer=keras.initializers.Constant(50 * bound))

    def loss(y: Any, z: Any) -> Any:
        z = tf.clip_by_value(z, -bound, bound) if d.raw else ops.clip(z, -bound, bound)
        return tf.reduce_mean(tf.square(y - z))

    return Program(d.model([*d.hidden(), out]), x, column(x), loss, d.optimizer(), d.how)


def vanishing_depth(d: Draw) -> Program:
    x = d.x()
    depth = int(d.rng.integers(9, 13))
    stack = [layers.Dense(16, activation="sigmoid", name=f"{d.name}_{i}") for i in range(depth)]
    model = d.model([*stack, layers.Dense(1, name="out")])
    return Program(model, x, column(x), mse(d), keras.optimizers.SGD(0.05), d.how)


def batchnorm_batch_one(d: Draw) -> Program:
    x = d.x()
    stack = [layers.Dense(d.units, name=f"{d.name}_in"), layers.BatchNormalization(name="bn"),
             layers.Activation("tanh"), layers.Dense(1, name="out")]  # fmt: skip
    return Program(d.model(stack), x, column(x), mse(d), keras.optimizers.SGD(0.01), d.how, batch=1)


def log_of_zero(d: Draw) -> Program:
    x = d.x()
    out = layers.Dense(1, activation="sigmoid", name="out",
                       bias_initializer=keras.initializers.Constant(60.0))  # fmt: skip

    def loss(y: Any, p: Any) -> Any:
        return -tf.reduce_mean(y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p))

    y = np.zeros((len(x), 1), "float32")
    return Program(d.model([*d.hidden(), out]), x, y, loss, d.optimizer(), d.how)


class Norm(layers.Layer):
    def call(self, x: Any) -> Any:
        return ops.sqrt(ops.sum(ops.square(x - x[:1]), axis=-1, keepdims=True))


def sqrt_gradient_at_zero(d: Draw) -> Program:
    x = d.x()
    stack = [layers.Dense(d.units, name="emb"), Norm(name="norm")]
    return Program(d.model(stack), x, np.ones((len(x), 1), "float32"), mse(d), d.optimizer(), d.how)


FAULTS: dict[str, Callable[[Draw], Program]] = {
    f.__name__: f
    for f in (
        double_activation, dead_relu, dead_relu_output, saturated_activation,
        softmax_over_one_unit, missing_activation, zero_gradient_op, stop_gradient,
        non_differentiable_op, leaves_tensorflow, zero_init, zero_sample_weight,
        learning_rate_zero, update_below_precision, constraint_projects_update, nan_input,
        learning_rate_too_high, unused_layer, untracked_variable, trainable_flag,
        clip_in_forward, vanishing_depth, batchnorm_batch_one, log_of_zero,
        sqrt_gradient_at_zero,
    )
}  # fmt: skip


# ---- healthy -------------------------------------------------------------------------


def regression(d: Draw) -> Program:
    x = d.x()
    stack = [*d.hidden(), layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


def binary(d: Draw) -> Program:
    x = d.x()
    stack = [*d.hidden(), layers.Dense(1, activation="sigmoid", name="out")]
    loss = keras.losses.BinaryCrossentropy()
    return Program(d.model(stack), x, classes(x), loss, d.optimizer(), d.how)


def logits(d: Draw) -> Program:
    x = d.x()
    loss = raw_bce_logits if d.raw else keras.losses.BinaryCrossentropy(from_logits=True)
    stack = [*d.hidden(), layers.Dense(1, name="out")]
    return Program(d.model(stack), x, classes(x), loss, d.optimizer(), d.how)


def sparse_classes(d: Draw) -> Program:
    x = d.x()
    y = np.argmax(x[:, :3], axis=1)
    loss = keras.losses.SparseCategoricalCrossentropy()
    stack = [*d.hidden(), layers.Dense(3, activation="softmax", name="out")]
    return Program(d.model(stack), x, y, loss, d.optimizer(), d.how)


def normalised(d: Draw) -> Program:
    x = d.x()
    norm = layers.BatchNormalization() if d.raw else layers.LayerNormalization()
    stack = [*d.hidden(), norm, layers.Dropout(0.3), layers.Dense(1, name="out")]
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


def frozen_base(d: Draw) -> Program:
    x = d.x()
    base = keras.Sequential([keras.Input((d.features,)), *d.hidden()], name="base")
    base.trainable = False
    return Program(d.model([base, layers.Dense(1, name="head")]), x, column(x), mse(d),
                   d.optimizer(), d.how)  # fmt: skip


def sparse_relu(d: Draw) -> Program:
    x = d.x()
    off = keras.initializers.RandomUniform(-3.0, 0.6, seed=1)
    stack = [layers.Dense(32, activation="relu", bias_initializer=off, name="h"),
             layers.Dense(1, name="out")]  # fmt: skip
    return Program(d.model(stack), x, column(x), mse(d), d.optimizer(), d.how)


def accumulated(d: Draw) -> Program:
    x = d.x()
    opt = keras.optimizers.Adam(0.003, gradient_accumulation_steps=int(d.rng.integers(2, 6)))
    return Program(d.model([*d.hidden(), layers.Dense(1, name="out")]), x, column(x), mse(d), opt,
                   d.how)  # fmt: skip


def warm_up(d: Draw) -> Program:
    x = d.x()
    rate = keras.optimizers.schedules.CosineDecay(0.0, 200, warmup_target=0.01, warmup_steps=20)
    return Program(d.model([*d.hidden(), layers.Dense(1, name="out")]), x, column(x), mse(d),
                   keras.optimizers.Adam(rate), d.how)  # fmt: skip


HEALTHY: dict[str, Callable[[Draw], Program]] = {
    f.__name__: f
    for f in (
        regression, binary, logits, sparse_classes, normalised, frozen_base, sparse_relu,
        accumulated, warm_up,
    )
}  # fmt: skip


# ---- running -------------------------------------------------------------------------


@dataclass
class Told:
    """What the guard said about one program."""

    raised: Any
    causes: tuple[str, ...]
    severities: tuple[str, ...]
    error: BaseException | None = None


def train(program: Program, guard: GradientGuard) -> None:
    """Train under a guard, as a user would."""
    model, n = program.model, len(program.x)
    if program.how == "fit":
        model.compile(optimizer=program.optimizer, loss=program.loss)
        per_epoch = -(-n // program.batch)
        model.fit(
            program.x, program.y, sample_weight=program.weight, batch_size=program.batch,
            epochs=-(-program.steps // per_epoch), callbacks=[guard], verbose=0,
        )  # fmt: skip
        return
    model(program.x[: program.batch])
    with guard.watch(model, program.optimizer, loss=program.loss):
        for step in range(program.steps):
            at = (step * program.batch) % n
            xb, yb = program.x[at : at + program.batch], program.y[at : at + program.batch]
            with tf.GradientTape() as tape:
                loss = program.loss(yb, model(xb, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            program.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            guard.step(loss)


def run(family: Callable[[Draw], Program], seed: int) -> Told:
    """Make one mutation and run it guarded."""
    keras.utils.set_random_seed(seed)
    program = family(Draw(seed))
    guard = GradientGuard(log_dir=None, check_every=10)
    raised, error = None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradientGuardWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        try:
            train(program, guard)
        except GradientGuardError as stopped:
            raised = stopped.finding
        except Exception as broken:  # a fault may also stop in Keras itself
            error = broken
    findings = list(guard.findings)
    if raised is not None and raised not in findings:
        findings.append(raised)
    loud = [f for f in findings if f.severity != "info"]
    if raised is not None:
        loud = [raised, *[f for f in loud if f is not raised]]
    return Told(
        raised=raised,
        causes=tuple(f.cause for f in loud),
        severities=tuple(f.severity for f in loud),
        error=error,
    )
