"""A seeded generator of ways to train with Keras, each small enough to run twice in a second."""

from __future__ import annotations

import dataclasses
import random

import keras
import numpy as np
import tensorflow as tf
from keras import layers

FEATURES = 6
CLASSES = 3
EXAMPLES = 36
BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to train. Every field names an entry of a table below, or is a number."""

    seed: int
    model: str
    optimizer: str
    clipping: str
    averaging: str
    accumulation: int
    precision: str
    mode: str
    steps_per_execution: int
    feeding: str
    weighting: str
    loss: str
    callbacks: tuple[str, ...]
    guard_first: bool
    validation: bool
    sample_every: int
    check_every: int
    skip_non_finite: bool


def _functional(y):
    return layers.Dense(CLASSES, activation="softmax", dtype="float32")(y)


def _mlp(x):
    return layers.Dense(8, activation="relu")(layers.Dense(8, activation="tanh")(x))


def _regularised(x):
    y = layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1", activation="gelu")(x)
    return layers.ActivityRegularization(1e-3)(y)


def _constrained(x):
    return layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0), activation="elu")(x)


def _normalised(x):
    y = layers.BatchNormalization()(layers.Dense(8)(x))
    return layers.Dropout(0.3)(layers.Activation("relu")(y))


def _recurrent(x):
    return layers.GRU(5)(layers.Reshape((3, 2))(x))


def _lstm_bidirectional(x):
    return layers.Bidirectional(layers.LSTM(3))(layers.Reshape((3, 2))(x))


def _attention(x):
    y = layers.Dense(4)(layers.Reshape((3, 2))(x))
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 2)(y, y))
    return layers.Flatten()(y)


def _convolution(x):
    y = layers.Conv1D(4, 2, padding="same", activation="relu")(layers.Reshape((3, 2))(x))
    return layers.Flatten()(layers.MaxPooling1D(2, padding="same")(y))


def _shared(x):
    dense = layers.Dense(FEATURES, activation="tanh")
    return dense(dense(x)) + x


def _nested(x):
    inner = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(4)])
    inner.build((None, FEATURES))
    return inner(x)


def _partly_frozen(x):
    frozen = layers.Dense(8, activation="relu")
    y = frozen(x)
    frozen.trainable = False
    return layers.Dense(8, activation="relu")(y)


def _embedding(x):
    ids = layers.Lambda(lambda t: keras.ops.cast(keras.ops.abs(t) * 10, "int32") % 20)(x)
    return layers.Flatten()(layers.Embedding(20, 3)(ids))


def _seeded_noise(x):
    return layers.GaussianNoise(0.1)(layers.Dense(8, activation="swish")(x))


def _gated(x):
    return layers.Dense(8)(x) * layers.Dense(8, activation="sigmoid")(x)


MODELS = {
    "mlp": _mlp,
    "regularised": _regularised,
    "constrained": _constrained,
    "normalised": _normalised,
    "recurrent": _recurrent,
    "lstm_bidirectional": _lstm_bidirectional,
    "attention": _attention,
    "convolution": _convolution,
    "shared": _shared,
    "nested": _nested,
    "partly_frozen": _partly_frozen,
    "embedding": _embedding,
    "seeded_noise": _seeded_noise,
    "gated": _gated,
}


class Subclassed(keras.Model):
    """Unbuilt until its first batch, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.out = layers.Dense(CLASSES, activation="softmax", dtype="float32")

    def call(self, x):
        y = self.hidden(x)
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float32"))))
        return self.out(y)


class OwnStep(keras.Model):
    """A ``train_step`` that was written by hand, with two updates a step."""

    def train_step(self, data):
        x, y = data[:2]
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(x, y, self(x, training=False))


CLASSES_OF_MODELS = ("functional", "subclassed", "own_step")
OPTIMIZERS = {
    name: getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "RMSprop",
        "Adam",
        "AdamW",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Adafactor",
        "Nadam",
        "Ftrl",
        "Lion",
        "Lamb",
        "Muon",
    )
    if hasattr(keras.optimizers, name)
}
CLIPPING = {
    "none": {},
    "value": {"clipvalue": 0.05},
    "norm": {"clipnorm": 0.3},
    "global": {"global_clipnorm": 0.5},
}
AVERAGING = {
    "none": {},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
    "ema_overwrite": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
}
CALLBACKS = {
    "early_stopping": lambda d: keras.callbacks.EarlyStopping("loss", patience=5),
    "checkpoint": lambda d: keras.callbacks.ModelCheckpoint(
        f"{d}/c.weights.h5", "loss", save_weights_only=True
    ),
    "backup": lambda d: keras.callbacks.BackupAndRestore(f"{d}/backup"),
    "reduce_rate": lambda d: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0),
    "schedule": lambda d: keras.callbacks.LearningRateScheduler(lambda e, r: r * 0.9),
    "csv": lambda d: keras.callbacks.CSVLogger(f"{d}/log.csv"),
    "tensorboard": lambda d: keras.callbacks.TensorBoard(f"{d}/tb", histogram_freq=1),
    "lambda": lambda d: keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: None),
    "nan": lambda d: keras.callbacks.TerminateOnNaN(),
}
PRECISIONS = ("float32", "float32", "float32", "mixed_float16", "mixed_bfloat16", "float64")
FEEDING = ("arrays", "generator", "tf_data", "py_dataset")
WEIGHTING = ("none", "none", "class_weight", "sample_weight")
LOSSES = (
    "sparse_categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "poisson",
    "mse",
)


def draw(seed: int) -> Configuration:
    """Return the configuration of a seed: the same on every machine."""
    pick = random.Random(seed)
    kind = pick.choice(["functional"] * 6 + ["subclassed", "own_step"])
    model = pick.choice(list(MODELS)) if kind == "functional" else kind
    mode = pick.choice(["graph"] * 5 + ["eager"])
    precision = pick.choice(PRECISIONS)
    accumulation = pick.choice([0, 0, 0, 2, 3])
    averaging = pick.choice(["none", "none", *AVERAGING])
    optimizer = pick.choice(list(OPTIMIZERS))
    weighting = "none" if kind == "own_step" else pick.choice(WEIGHTING)
    feeding = pick.choice(FEEDING)
    if weighting == "sample_weight":
        feeding = "arrays"
    return Configuration(
        seed=seed,
        model=model,
        optimizer=optimizer,
        clipping=pick.choice(["none", *CLIPPING]),
        averaging=averaging,
        accumulation=accumulation,
        precision=precision,
        mode=mode,
        steps_per_execution=1 if mode == "eager" else pick.choice([1, 1, 1, 2, 7]),
        feeding=feeding,
        weighting=weighting,
        loss=pick.choice(LOSSES),
        callbacks=tuple(pick.sample(list(CALLBACKS), pick.choice([0, 0, 1, 2, 4]))),
        guard_first=pick.random() < 0.5,
        validation=pick.random() < 0.3,
        sample_every=pick.choice([1, 2, 5, 50]),
        check_every=pick.choice([1, 3, 10]),
        skip_non_finite=pick.random() < 0.15,
    )


def build(config: Configuration):
    """Return the compiled model of a configuration, from a fixed seed."""
    keras.utils.set_random_seed(config.seed % 1000)
    if config.model == "subclassed":
        model = Subclassed()
    else:
        inputs = keras.Input((FEATURES,))
        body = _mlp if config.model == "own_step" else MODELS[config.model]
        kind = OwnStep if config.model == "own_step" else keras.Model
        model = kind(inputs, _functional(body(inputs)))
    kwargs = {**CLIPPING[config.clipping], **AVERAGING[config.averaging]}
    if config.accumulation:
        kwargs["gradient_accumulation_steps"] = config.accumulation
    rate = 0.5 if config.optimizer == "Adadelta" else 0.005
    loss = {"poisson": "poisson", "mse": "mse"}.get(config.loss, config.loss)
    model.compile(
        OPTIMIZERS[config.optimizer](rate, **kwargs),
        loss,
        run_eagerly=config.mode == "eager",
        jit_compile=False,
        steps_per_execution=config.steps_per_execution,
    )
    return model


class _Sequence(keras.utils.PyDataset):
    """Batches by number, with a worker thread."""

    def __init__(self, x, y):
        super().__init__(workers=1)
        self._x, self._y = x, y

    def __len__(self):
        return -(-len(self._x) // BATCH)

    def __getitem__(self, i):
        part = slice(i * BATCH, (i + 1) * BATCH)
        return self._x[part], self._y[part]


def feed(config: Configuration):
    """Return the positional and named arguments of ``fit`` that bring the data."""
    rng = np.random.default_rng(config.seed)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    labels = rng.integers(0, CLASSES, EXAMPLES)
    y = labels if config.loss.startswith("sparse") else np.eye(CLASSES, dtype="float32")[labels]
    kwargs = {}
    if config.validation:
        kwargs["validation_data"] = (x[:8], y[:8])
    if config.weighting == "class_weight":
        kwargs["class_weight"] = {0: 1.0, 1: 0.5, 2: 2.0}
    if config.weighting == "sample_weight":
        kwargs["sample_weight"] = rng.uniform(0.5, 1.5, EXAMPLES).astype("float32")
    if config.feeding == "arrays":
        return (x, y), {"batch_size": BATCH, **kwargs}
    if config.feeding == "tf_data":
        return (tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),), kwargs
    if config.feeding == "py_dataset":
        return (_Sequence(x, y),), {"shuffle": False, **kwargs}

    def stream():
        while True:
            for start in range(0, EXAMPLES, BATCH):
                yield x[start : start + BATCH], y[start : start + BATCH]

    return (stream(),), {"steps_per_epoch": -(-EXAMPLES // BATCH), **kwargs}
