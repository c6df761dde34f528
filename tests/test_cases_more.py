"""Programs for the causes that the corpus lacks: found, in time, with symptom, cause and place."""

from pathlib import Path

import pytest

from keras_gradguard import GradientGuard, GradientGuardError
from tests.cases_runner import CHECK_EVERY, case_files, load, run_case

PATHS = {p.stem: p for p in case_files(Path(__file__).parent / "cases_more")}
META = {name: load(path).META for name, path in PATHS.items()}

# What merely is unusual (a scale, a convention) warns; training may still get somewhere.
WARNS = {
    "case_224_label_out_of_range",
    "case_225_labels_one_and_two",
    "case_239_double_softmax_loop",
}
KERAS = {name for name, meta in META.items() if "keras" in meta["severity"]}


def _further_forms():
    """Return the cases whose causes the corpus, or a case before them, shows in another form."""
    shown = {load(path).META["root_cause"] for path in case_files()}
    further = set()
    for name, meta in META.items():
        causes = set(meta["root_cause"].split(","))
        if causes <= shown:
            further.add(name)
        shown |= causes
    return further


FURTHER = _further_forms()


def once_a_cause(names):
    return [pytest.param(n, marks=pytest.mark.slow if n in FURTHER else ()) for n in names]


@pytest.mark.parametrize("name", once_a_cause(sorted(set(PATHS) - WARNS - KERAS)))
def test_a_fault_raises_in_time(name):
    meta, outcome = run_case(PATHS[name])
    assert isinstance(outcome.error, GradientGuardError), outcome
    finding = outcome.finding
    assert finding.symptom in meta["expected"].split(",")
    assert finding.step <= meta["fatal_by_step"] + CHECK_EVERY
    assert finding.cause in meta["root_cause"].split(","), finding.message
    spoken = {part for name in finding.where for part in (name, *name.split("/"))}
    assert spoken & set(meta["where"].split(",")), (meta["where"], finding.where)


@pytest.mark.parametrize(
    "name", once_a_cause(n for n, m in META.items() if m["kind"] == "loop" and n not in WARNS)
)
def test_a_watched_loop_raises_without_check(name):
    module = load(PATHS[name])
    program = module.build()
    module.build = lambda: program
    guard = GradientGuard(log_dir=None, diagnose=True)
    with pytest.raises(GradientGuardError) as caught:
        with guard.watch(program["model"], program["optimizer"], loss=program["loss_fn"]):
            module.run(hook=lambda step, grads, variables, loss: guard.step(loss))
    assert caught.value.finding.symptom in module.META["expected"].split(",")
    assert caught.value.finding.cause in module.META["root_cause"].split(",")


@pytest.mark.parametrize("name", once_a_cause(sorted(WARNS)))
def test_what_is_unusual_warns(name):
    meta, outcome = run_case(PATHS[name])
    assert outcome.error is None
    told = [(f.symptom, f.cause) for f in outcome.warned if f is not None]
    assert (meta["expected"], meta["root_cause"]) in told


@pytest.mark.parametrize("name", sorted(KERAS))
def test_what_keras_refuses_keeps_its_error(name):
    _, outcome = run_case(PATHS[name])
    assert outcome.error is not None
    assert not isinstance(outcome.error, GradientGuardError)
