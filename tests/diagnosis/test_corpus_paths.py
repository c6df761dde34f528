"""The cases of the corpus whose cause is a cut path, a non-finite value or an untracked weight."""

import importlib.util
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_gradguard.diagnosis.eager import EagerRecorder
from keras_gradguard.diagnosis.nonfinite import non_finite
from keras_gradguard.diagnosis.path import none_gradient
from keras_gradguard.diagnosis.trace import TraceError, trace_step
from keras_gradguard.diagnosis.untracked import untracked
from keras_gradguard.diagnosis.zero import zero_gradient

CASES = Path(__file__).parents[1] / "cases"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one(number):
    (path,) = CASES.glob(f"case_{number}_*.py")
    return load(path)


def first_rows(data, rows=16):
    return None if data is None else keras.tree.map_structure(lambda a: a[:rows], data)


def traced(module, parts):
    model, (x, y) = parts["model"], parts["data"]
    loss = parts["loss_fn"] if module.META["kind"] == "loop" else None
    if loss is None and getattr(model, "optimizer", None) is None:
        model.compile(optimizer=parts["optimizer"], loss=parts["loss_fn"])
    return trace_step(model, first_rows(x), first_rows(y), loss=loss)


class EnoughError(Exception):
    """Stops a loop."""


def loop_until(module, stop):
    """Run a case's loop until ``stop(step, grads, loss)``; return its parts and the loss."""
    kept, build = {}, module.build

    def keeping():
        kept.update(build())
        return dict(kept)

    def hook(step, grads, variables, loss):
        kept["loss"] = loss
        if stop(step, grads, loss):
            raise EnoughError

    module.build = keeping
    with pytest.raises(EnoughError):
        module.run(hook=hook)
    return kept


NONE_IN_FIT = ["003", "014", "018", "024", "059"]
NONE_IN_LOOPS = ["020", "021", "056"]


@pytest.mark.parametrize("number", NONE_IN_FIT)
def test_none_in_fit(number):
    module = one(number)
    found = none_gradient(traced(module, module.build()))[0]
    assert found.name == module.META["root_cause"]
    assert any(word in module.META["where"] for word in found.where)


@pytest.mark.parametrize("number", NONE_IN_LOOPS)
def test_none_in_loops(number):
    module = one(number)
    with EagerRecorder() as recorder:
        parts = loop_until(module, lambda *_: True)
    found = none_gradient(recorder.recording, model=parts["model"], loss=parts["loss"])[0]
    assert found.name == module.META["root_cause"]
    assert any(word in module.META["where"] for word in found.where)


@pytest.mark.parametrize("number", ["035", "038", "040"])
@pytest.mark.parametrize("trained", [False, True])
def test_non_finite_in_fit(number, trained):
    module = one(number)
    parts = module.run() if trained else module.build()
    found = non_finite(traced(module, parts))[0]
    assert found.name == module.META["root_cause"]
    assert any(word in module.META["where"] for word in found.where)


def test_log_of_zero_in_a_loop():
    module = one("036")
    parts = loop_until(
        module, lambda _s, grads, _l: not all(np.isfinite(np.asarray(g)).all() for g in grads)
    )
    found = non_finite(traced(module, parts))[0]
    assert (found.name, found.where[0]) == ("log_of_zero", "loss")


def test_divergence():
    module = one("041")
    found = non_finite(traced(module, module.run()))[0]
    assert (found.name, found.where[0]) == ("learning_rate_too_high", "optimizer")


@pytest.mark.parametrize("number", ["016", "045"])
def test_zero(number):
    module = one(number)
    found = zero_gradient(traced(module, module.build()))[0]
    assert found.name == module.META["root_cause"]
    assert any(word in module.META["where"] for word in found.where)


def test_untracked():
    module = one("022")
    found = untracked(traced(module, module.build()))
    assert [(c.name, c.where) for c in found] == [("untracked_variable", ("gate", "gate_w"))]


OTHERS = sorted(
    path.stem
    for path in CASES.glob("case_*.py")
    if path.stem[5:8]
    not in {
        *NONE_IN_FIT,
        *NONE_IN_LOOPS,
        "016",
        "022",
        "035",
        "038",
        "040",
        "045",
        "067",
        "104",
        "109",
    }
)


@pytest.mark.parametrize("stem", OTHERS)
def test_no_other_case_is_blamed_on_its_path(stem):
    module = load(CASES / f"{stem}.py")
    trace = traced(module, module.build())
    assert none_gradient(trace) == ()
    assert zero_gradient(trace) == ()
    assert untracked(trace) == ()
    assert non_finite(trace) == ()


def test_a_model_compiled_without_a_loss_is_told():
    module = one("067")
    with pytest.raises(TraceError, match="No loss to compute"):
        traced(module, module.build())
