"""Run a configuration plain and guarded, and tell what differs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_gradguard.guard import GradientGuard
from keras_gradguard.taps import optimizers
from tests.soak.configurations import CALLBACKS, batches, build, feed
from tests.training import state, unnamed

EPOCHS = 2


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What one configuration showed."""

    refused: str = ""
    difference: str = ""
    alarms: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    steps: int = 0

    @property
    def clean(self):
        return not (self.difference or self.alarms or self.leftovers)


def _fit(config, model, seen, directory):
    callbacks = [CALLBACKS[name](directory) for name in config.callbacks]
    if seen is not None:
        callbacks.insert(config.guard_at, seen)
    arguments, named = feed(config)
    return model.fit(*arguments, epochs=EPOCHS, verbose=0, callbacks=callbacks, **named).history


def _train_on_batch(config, model, seen):
    told = []
    with seen.watch(model) if seen is not None else contextlib.nullcontext():
        for x, y in batches(config) * EPOCHS:
            told.append(float(np.ravel(model.train_on_batch(x, y))[0]))
            if seen is not None:
                seen.step()
    return told


def _loop(config, model, seen):
    loss_fn, optimizer = keras.losses.get(config.loss), model.optimizer
    if not model.built:
        model(batches(config)[0][0])
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(y, model(x, training=True)))
            loss = tf.add_n([loss, *(tf.cast(extra, loss.dtype) for extra in model.losses)])
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    call = step if config.mode == "eager" else tf.function(step, reduce_retracing=True)
    told = []
    with seen.watch(model, loss=loss_fn) if seen is not None else contextlib.nullcontext():
        for x, y in batches(config) * EPOCHS:
            loss = call(tf.constant(x), tf.constant(y))
            told.append(float(loss))
            if seen is not None:
                seen.step(loss)
    return told


def _train(config, guarded):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    seen = None
    try:
        with tempfile.TemporaryDirectory() as directory:
            if guarded:
                seen = GradientGuard(
                    log_dir=directory,
                    sample_every=config.sample_every,
                    check_every=config.check_every,
                    skip_non_finite=config.skip_non_finite,
                )
            model = build(config)
            if config.driver == "fit":
                told = _fit(config, model, seen, directory)
            elif config.driver == "train_on_batch":
                told = _train_on_batch(config, model, seen)
            else:
                told = _loop(config, model, seen)
    finally:
        keras.config.set_dtype_policy(before)
    return model, told, seen


def run(config):
    """Return the outcome of one configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        try:
            plain = _train(config, guarded=False)
        except Exception as error:
            # Keras itself does not do this; with the guard it has to say the same.
            try:
                _train(config, guarded=True)
            except Exception as ours:
                same = type(ours) is type(error)
                return Outcome(
                    refused=f"{type(error).__name__}: {str(error)[:160]}",
                    difference="" if same else f"guarded raised {type(ours).__name__}: {ours}",
                )
            return Outcome(refused=str(error)[:160], difference="guarded did not raise")
        try:
            guarded = _train(config, guarded=True)
        except Exception as error:
            return Outcome(difference=f"guarded raised {type(error).__name__}: {str(error)[:400]}")
    return _compared(config, plain, guarded)


def _compared(config, plain, guarded):
    outcome = Outcome(steps=guarded[2].steps_seen)
    outcome.alarms = tuple(f"{f.symptom} ({f.severity}) {f.where}" for f in guarded[2].findings)
    # Steps that a loss-scale optimizer throws away are recorded, but not counted by Keras.
    wanted, optimizer = optimizers.raw_iterations(plain[0].optimizer), plain[0].optimizer
    missing = wanted - outcome.steps
    if missing > 0 or (missing and not optimizers.scales_loss(optimizer)):
        outcome.difference = f"{outcome.steps} steps were recorded of {wanted}"
    left, right = unnamed(state(plain[0])), unnamed(state(guarded[0]))
    if len(left) != len(right):
        outcome.difference = f"{len(left)} variables became {len(right)}"
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        same = _near(a, b) if config.mode == "jit" else a.tobytes() == b.tobytes()
        if not same:
            outcome.difference = f"variable {i} of {len(left)}"
            break
    if not outcome.difference and config.mode != "jit" and repr(plain[1]) != repr(guarded[1]):
        outcome.difference = f"history {plain[1]} became {guarded[1]}"
    outcome.leftovers = tuple(
        name
        for p, g in ((plain[0], guarded[0]), (plain[0].optimizer, guarded[0].optimizer))
        for name in set(vars(g)) - set(vars(p))
    )
    return outcome


def _near(a, b):
    return np.allclose(a.astype("float64"), b.astype("float64"), rtol=1e-3, atol=1e-4)
