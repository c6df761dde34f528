"""The corpus of faults and healthy look-alikes: detected in time, for the right reason."""

import pytest

from keras_gradguard import GradientGuardError
from tests.cases_runner import CHECK_EVERY, case_files, load, run_case

META = {path.stem: load(path).META for path in case_files()}
PATHS = {path.stem: path for path in case_files()}

# The corpus describes these symptoms in words of its own.
SYMPTOM = {"zero_loss_nonzero_gradient": "bad_contract"}
# Not judged by the guard: the program is right, Keras rescues it, or Keras itself refuses it.
CAUSE_IS_JUDGED = {"raise", "warn"}


def names(severity):
    return [n for n, meta in META.items() if meta["severity"] in severity]


def deadline(meta):
    late = CHECK_EVERY if meta["kind"] == "fit" else 0
    return meta["fatal_by_step"] + late


def is_named(where, told):
    """Return True when one of the names the corpus gives as the place is among those told.

    The corpus speaks freely ("discriminator" for a model named "disc"): a name also counts when a
    word begins with it.
    """
    for sign in "(),'/":
        where = where.replace(sign, " ")
    spoken = {part for name in told for part in (name, *name.split("/"))}
    return any(w in spoken or (len(w) > 3 and w.startswith(s)) for w in where.split()
               for s in spoken if len(s) > 3 or s == w)  # fmt: skip


@pytest.mark.parametrize("name", names({"raise"}))
def test_a_fault_raises_in_time_with_symptom_cause_and_place(name):
    meta, outcome = run_case(PATHS[name])
    assert isinstance(outcome.error, GradientGuardError), outcome
    finding = outcome.finding
    assert finding.symptom == SYMPTOM.get(meta["expected"], meta["expected"])
    assert finding.step <= deadline(meta)
    assert finding.cause == meta["root_cause"], finding.message
    assert is_named(meta["where"], finding.where), (meta["where"], finding.where)
    assert max(map(len, finding.message.splitlines())) <= 100


@pytest.mark.parametrize("name", [n for n in names({"raise"}) if META[n]["kind"] == "loop"])
def test_handed_over_gradients_alone_raise_in_time(name):
    meta, outcome = run_case(PATHS[name], how="check")
    assert isinstance(outcome.error, GradientGuardError), outcome
    assert outcome.finding.symptom == meta["expected"]
    assert outcome.finding.step <= deadline(meta)


@pytest.mark.parametrize("name", names({"warn"}))
def test_what_is_unusual_warns_and_does_not_raise(name):
    meta, outcome = run_case(PATHS[name])
    assert outcome.error is None
    assert outcome.told.symptom == SYMPTOM.get(meta["expected"], meta["expected"])
    assert outcome.told.cause == meta["root_cause"]
    assert outcome.told.step <= deadline(meta)


@pytest.mark.parametrize("name", names({"none", "info"}))
def test_a_healthy_program_is_left_alone(name):
    meta, outcome = run_case(PATHS[name])
    assert outcome.error is None
    assert outcome.warned == []
    assert all(f.severity == "info" for f in outcome.findings)
    if meta["severity"] == "none":
        assert outcome.findings == ()


@pytest.mark.parametrize("name", names({"keras"}))
def test_keras_own_error_comes_through(name):
    _, outcome = run_case(PATHS[name])
    assert isinstance(outcome.error, ValueError)
    assert "No loss to compute" in str(outcome.error)


def test_every_case_is_judged():
    judged = names({"raise", "warn", "none", "info", "keras"})
    assert sorted(judged) == sorted(META)
    assert len(names({"raise"})) >= 32
