"""Run a configuration plain and guarded, and tell what differs."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings

import keras

from keras_gradguard.guard import GradientGuard
from tests.soak.configurations import CALLBACKS, build, feed
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


def _train(config, guarded):
    before = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_dtype_policy(config.precision)
    seen = None
    try:
        with tempfile.TemporaryDirectory() as directory:
            callbacks = [CALLBACKS[name](directory) for name in config.callbacks]
            if guarded:
                seen = GradientGuard(
                    log_dir=directory,
                    sample_every=config.sample_every,
                    check_every=config.check_every,
                    skip_non_finite=config.skip_non_finite,
                )
                callbacks.insert(0 if config.guard_first else len(callbacks), seen)
            model = build(config)
            arguments, named = feed(config)
            fitted = model.fit(*arguments, epochs=EPOCHS, verbose=0, callbacks=callbacks, **named)
    finally:
        keras.config.set_dtype_policy(before[0])
    return model, fitted.history, seen


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
                    refused=f"{type(error).__name__}: {str(error)[:120]}",
                    difference="" if same else f"guarded raised {type(ours).__name__}: {ours}",
                )
            return Outcome(refused=str(error)[:120], difference="guarded did not raise")
        try:
            guarded = _train(config, guarded=True)
        except Exception as error:
            return Outcome(difference=f"guarded raised {type(error).__name__}: {str(error)[:400]}")
    outcome = Outcome(steps=guarded[2].steps_seen)
    outcome.alarms = tuple(f"{f.symptom} ({f.severity}) {f.where}" for f in guarded[2].findings)
    left, right = unnamed(state(plain[0])), unnamed(state(guarded[0]))
    if len(left) != len(right):
        outcome.difference = f"{len(left)} variables became {len(right)}"
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a.tobytes() != b.tobytes():
            outcome.difference = f"variable {i} of {len(left)}"
            break
    if repr(plain[1]) != repr(guarded[1]):
        outcome.difference = outcome.difference or f"history {plain[1]} became {guarded[1]}"
    outcome.leftovers = tuple(
        name
        for p, g in ((plain[0], guarded[0]), (plain[0].optimizer, guarded[0].optimizer))
        for name in set(vars(g)) - set(vars(p))
    )
    return outcome
