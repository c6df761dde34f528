"""A seeded generator of ways to train with Keras, each small enough to run twice in seconds."""

from __future__ import annotations

import dataclasses
import random

import keras
import numpy as np
import tensorflow as tf

from tests.soak.models import (
    CLASSES,
    FEATURES,
    MODELS,
    OwnStep,
    Subclassed,
    one_head,
    two_in_two_out,
)

EXAMPLES = 36
BATCH = 8
BATCHES = -(-EXAMPLES // BATCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to train. Every field names an entry of a table below, or is a number."""

    seed: int
    model: str
    driver: str
    optimizer: str
    clipping: str
    averaging: str
    accumulation: int
    loss_scale: float | None
    precision: str
    mode: str
    steps_per_execution: int
    feeding: str
    weighting: str
    loss: str
    metrics: bool
    callbacks: tuple[str, ...]
    guard_at: int
    validation_freq: int
    sample_every: int
    check_every: int
    skip_non_finite: bool


OPTIMIZER_NAMES = (
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
    "ScheduleFreeAdamW",
)
OPTIMIZERS = {
    name: getattr(keras.optimizers, name)
    for name in OPTIMIZER_NAMES
    if hasattr(keras.optimizers, name)
}
# XLA rounds differently when a step is watched, and a sign or a division by a tiny number
# would make much of the last bit: there the comparison is up to rounding, with these.
SMOOTH = ("SGD", "RMSprop", "Adam", "Adagrad", "Ftrl")
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
    "backup": lambda d: keras.callbacks.BackupAndRestore(f"{d}/backup", save_freq=2),
    "reduce_rate": lambda d: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0),
    "schedule": lambda d: keras.callbacks.LearningRateScheduler(lambda e, r: r * 0.9),
    "csv": lambda d: keras.callbacks.CSVLogger(f"{d}/log.csv"),
    "tensorboard": lambda d: keras.callbacks.TensorBoard(f"{d}/tb", histogram_freq=1),
    "lambda": lambda d: keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: None),
    "nan": lambda d: keras.callbacks.TerminateOnNaN(),
    "swap_ema": lambda d: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
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
    kind = pick.choice(["functional"] * 7 + ["subclassed", "own_step", "two_in_two_out"])
    model = pick.choice(list(MODELS)) if kind == "functional" else kind
    mode = pick.choice(["graph"] * 5 + ["auto", "eager", "eager", "jit"])
    driver = "fit"
    if kind in ("functional", "subclassed") and mode != "jit":
        driver = pick.choice(["fit"] * 6 + ["train_on_batch", "loop"])
    fit = driver == "fit"
    averaging = pick.choice(["none", "none", *AVERAGING])
    weighting = "none"
    if fit and kind != "own_step":
        weighting = pick.choice(WEIGHTING)
    if kind == "two_in_two_out" and weighting == "class_weight":
        weighting = "none"  # Keras takes no class weights for several outputs
    # Keras wants averages to swap, and a built model to restore.
    wanting = {"swap_ema": averaging == "none", "backup": kind == "subclassed"}
    named = [c for c in CALLBACKS if not wanting.get(c)]
    callbacks = tuple(pick.sample(named, pick.choice([0, 0, 1, 2, 4]))) if fit else ()
    precision = pick.choice(PRECISIONS)
    return Configuration(
        seed=seed,
        model=model,
        driver=driver,
        optimizer=pick.choice(SMOOTH if mode == "jit" else list(OPTIMIZERS)),
        clipping=pick.choice(["none", *CLIPPING]),
        averaging=averaging,
        accumulation=pick.choice([0, 0, 0, 2, 3]),
        loss_scale=pick.choice([None, None, None, 64.0]),
        precision="float32" if mode == "jit" else precision,
        mode=mode,
        steps_per_execution=pick.choice([1, 1, 1, 2, 7]) if fit and mode != "eager" else 1,
        feeding="arrays" if weighting == "sample_weight" else pick.choice(FEEDING),
        weighting=weighting,
        loss=pick.choice(LOSSES),
        metrics=pick.random() < 0.4,
        callbacks=callbacks,
        guard_at=pick.randint(0, len(callbacks)),
        validation_freq=pick.choice([0, 0, 1, 2]) if fit else 0,
        sample_every=pick.choice([1, 2, 5, 50]),
        check_every=pick.choice([1, 3, 10]),
        skip_non_finite=pick.random() < 0.15,
    )


def build(config: Configuration):
    """Return the compiled model of a configuration, from a fixed seed."""
    keras.utils.set_random_seed(config.seed % 1000)
    if config.model == "subclassed":
        model = Subclassed()
    elif config.model == "two_in_two_out":
        model = two_in_two_out()
    else:
        inputs = keras.Input((FEATURES,))
        body = MODELS["mlp" if config.model == "own_step" else config.model]
        kind = OwnStep if config.model == "own_step" else keras.Model
        model = kind(inputs, one_head(body(inputs)))
    kwargs = {**CLIPPING[config.clipping], **AVERAGING[config.averaging]}
    if config.accumulation:
        kwargs["gradient_accumulation_steps"] = config.accumulation
    if config.loss_scale:
        kwargs["loss_scale_factor"] = config.loss_scale
    rate = 0.5 if config.optimizer == "Adadelta" else 0.005
    several = config.model == "two_in_two_out"
    model.compile(
        OPTIMIZERS[config.optimizer](rate, **kwargs),
        {"left": config.loss, "right": config.loss} if several else config.loss,
        loss_weights={"left": 1.0, "right": 0.5} if several else None,
        metrics=["accuracy"] if config.metrics and not several else None,
        run_eagerly=config.mode == "eager",
        jit_compile={"jit": True, "auto": "auto"}.get(config.mode, False),
        steps_per_execution=config.steps_per_execution,
    )
    return model


class _Sequence(keras.utils.PyDataset):
    """Batches by number, with worker threads."""

    def __init__(self, batches, workers):
        super().__init__(workers=workers)
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, i):
        return self._batches[i]


def arrays(config: Configuration):
    """Return the inputs and labels of a configuration in the structure of its model."""
    rng = np.random.default_rng(config.seed)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    labels = rng.integers(0, CLASSES, EXAMPLES)
    y = labels if config.loss.startswith("sparse") else np.eye(CLASSES, dtype="float32")[labels]
    if config.model == "two_in_two_out":
        return {"a": x, "b": x[::-1].copy()}, {"left": y, "right": y}
    return x, y


def batches(config: Configuration):
    """Return the batches of one epoch, the last one a partial one."""
    x, y = arrays(config)

    def part(i):
        return tf.nest.map_structure(lambda a: a[i * BATCH : (i + 1) * BATCH], (x, y))

    return [part(i) for i in range(BATCHES)]


def feed(config: Configuration):
    """Return the positional and named arguments of ``fit`` that bring the data."""
    x, y = arrays(config)
    rng = np.random.default_rng(config.seed + 1)
    kwargs = {}
    if config.validation_freq:
        kwargs["validation_data"] = batches(config)[0]
        kwargs["validation_freq"] = config.validation_freq
    if config.weighting == "class_weight":
        kwargs["class_weight"] = {0: 1.0, 1: 0.5, 2: 2.0}
    if config.weighting == "sample_weight":
        weights = rng.uniform(0.5, 1.5, EXAMPLES).astype("float32")
        kwargs["sample_weight"] = tf.nest.map_structure(lambda _: weights, y)
    if config.feeding == "arrays":
        return (x, y), {"batch_size": BATCH, **kwargs}
    if config.feeding == "tf_data":
        return (tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),), kwargs
    if config.feeding == "py_dataset":
        return (_Sequence(batches(config), 1 + config.seed % 2),), {"shuffle": False, **kwargs}

    def stream():
        while True:
            yield from batches(config)

    return (stream(),), {"steps_per_epoch": BATCHES, **kwargs}
