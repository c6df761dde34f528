"""Runs a program of the corpus under the guard, as its user would."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import keras

from keras_gradguard import GradientGuard, GradientGuardError, GradientGuardWarning

CASES = Path(__file__).parent / "cases"
CHECK_EVERY = 10


def case_files(folder=CASES):
    return sorted(folder.glob("case_*.py"))


def load(path):
    """Import a case file anew, so that no state of an earlier run is left in it."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Outcome:
    """What a guarded run gave."""

    error: Exception | None
    warned: list
    findings: tuple

    @property
    def finding(self):
        return getattr(self.error, "finding", None)

    @property
    def told(self):
        """The finding that raised, else the first warning's."""
        return self.finding or next((f for f in self.warned if f is not None), None)


def run_case(path, *, how="watch", **settings):
    """Run a case under a guard.

    Args:
        path: The case's file.
        how: For loops: ``"watch"`` (model, optimizer and loss are known) or ``"check"`` (only
            gradients are handed over).
        **settings: Arguments of GradientGuard.
    """
    module = load(path)
    guard = GradientGuard(**{"log_dir": None, "check_every": CHECK_EVERY, **settings})
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if module.META["kind"] == "fit":
                module.run(callbacks=[guard])
            elif how == "check":
                module.run(hook=lambda step, g, v, loss: guard.check(g, v, loss=loss, step=step))
            else:
                _watch(module, guard)
        except GradientGuardError as raised:
            error = raised
        except Exception as raised:
            error = raised
    warned = [w.message.finding for w in caught if issubclass(w.category, GradientGuardWarning)]
    return module.META, Outcome(error=error, warned=warned, findings=guard.findings)


def _watch(module, guard):
    program = module.build()
    module.build = lambda: program
    models = [program["model"]]
    models += [m for m in program.values() if isinstance(m, keras.Model) and m is not models[0]]
    with guard.watch(models, program["optimizer"], loss=program["loss_fn"]):
        module.run(
            hook=lambda step, grads, variables, loss: guard.check(grads, variables, loss=loss)
        )
