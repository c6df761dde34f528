"""Every case of the corpus, looked at with ``diagnose`` alone: the right cause, no false alarm."""

import contextlib
import importlib.util
import warnings
from pathlib import Path

import pytest

from keras_gradguard.diagnosis import diagnose

CASES = sorted((Path(__file__).parent.parent / "cases").glob("case_*.py"))
# What these need lies outside one batch and one loss: how the loop calls things.
LOOP_ONLY = {"020", "056", "063"}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared(case):
    """Return the case's parts after as many steps as its fault needs."""
    onset = case.META["onset"]
    if onset and case.META["id"] != "041":
        return case.run(steps=onset + 4)
    return case.build()


def looked_at(case):
    parts = prepared(case)
    x, y = parts["data"]
    size = 1 if case.META["root_cause"] == "batchnorm_batch_one" else len(x)
    x = [a[:size] for a in x] if isinstance(x, list) else x[:size]
    y = None if y is None else y[:size]
    weight = parts.get("sample_weight")
    if case.META["kind"] == "loop":
        return diagnose(parts["model"], x, y, loss=parts["loss_fn"], optimizer=parts["optimizer"])
    parts["model"].compile(optimizer=parts["optimizer"], loss=parts["loss_fn"])
    return diagnose(parts["model"], x, y, sample_weight=weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem[5:8])
def test_cause(path):
    case = load(path)
    if case.build()["data"][0] is None:
        pytest.skip("the loop makes its own inputs")
    if case.META["id"] in LOOP_ONLY:
        pytest.skip("the fault is in how the loop calls the model")
    with warnings.catch_warnings(), contextlib.suppress(StopIteration):
        warnings.simplefilter("ignore")
        report = looked_at(case)
    wanted = case.META["root_cause"]
    if wanted.startswith("healthy") or case.META["severity"] == "info":
        assert report.ok, str(report)
        return
    assert report.findings, "nothing found"
    first = report.findings[0]
    assert first.cause == wanted, str(report)
    severity = {"keras": "raise"}.get(case.META["severity"], case.META["severity"])
    assert first.severity == severity, str(report)
    expected = case.META["expected"]
    if expected in ("zero_gradient", "none_gradient", "zero_update", "non_finite", "vanishing"):
        assert expected in {f.symptom for f in report.findings}, str(report)
