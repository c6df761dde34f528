"""All-zero gradients: of the model, of layers, and everything that must not count as such."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradguard.policy import Policy
from keras_gradguard.rules.zero import zero_gradient
from tests.histories import LAYERS, history, info, table

POLICY = Policy(patience=3, layer_patience=5)


def model_zero(steps, width=2):
    return np.zeros((steps, width))


def only(finding):
    assert len(finding) == 1
    return finding[0]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(history(model_zero(2)), None, id="not yet"),
        pytest.param(history(model_zero(3)), (2, 0, "raise"), id="patience"),
        pytest.param(history(model_zero(9)), (2, 0, "raise"), id="certain at the third"),
        pytest.param(
            history([[1, 1], [0, 0], [0, 0], [0, 0]]), (3, 1, "raise"), id="after a start"
        ),
        pytest.param(history([[0, 0], [0, 0], [1, 0], [0, 0]]), None, id="interrupted"),
        pytest.param(history(model_zero(9), loss=None), (2, 0, "warn"), id="loss unknown"),
        pytest.param(history(model_zero(9), due=False), None, id="no update due"),
        pytest.param(
            history(model_zero(9), due=[False, False, True] * 3), (8, 0, "raise"), id="accumulation"
        ),
        pytest.param(history(model_zero(9), skipped=True), None, id="skipped by loss scaling"),
        pytest.param(history(model_zero(2), loss=0.0), None, id="loss 0 from the start, short"),
        pytest.param(history(model_zero(5), loss=0.0), (4, 0, "raise"), id="loss 0 from the start"),
        pytest.param(
            history([[1, 1], *[[0, 0]] * 9], loss=[1.0] + [0.0] * 9), None, id="learned to 0"
        ),
        pytest.param(
            history([[1, 1], *[[0, 0]] * 9], loss=[1.0] + [1.2e-7] * 9), None, id="at Keras' floor"
        ),
        pytest.param(
            history([[1, 1], *[[0, 0]] * 4], loss=[1, 1, 0, 1, 1]),
            (4, 1, "raise"),
            id="rows at the floor count neither way",
        ),
        pytest.param(history(model_zero(9), new=2), (7, 0, "raise"), id="still so"),
        pytest.param(history(model_zero(9), new=7), (2, 0, "raise"), id="first new row"),
        pytest.param(
            history(model_zero(9), columns=table("a/kernel", "a/bias", none=(0, 1))),
            None,
            id="all None",
        ),
        pytest.param(
            history(model_zero(9), columns=table("a/kernel", "a/bias", none=(0,))),
            (2, 0, "raise"),
            id="the rest is None",
        ),
        pytest.param(history(np.full((9, 2), np.nan)), None, id="NaN is not 0"),
        pytest.param(history(model_zero(9), first=100), (102, 100, "raise"), id="resumed"),
        pytest.param(history(model_zero(5), loss=-1.0), (2, 0, "raise"), id="negative loss"),
        pytest.param(history(model_zero(5), loss=np.nan), (2, 0, "raise"), id="NaN loss"),
    ],
)
def test_of_the_model(made, expected):
    found = zero_gradient(made, POLICY)
    if expected is None:
        assert found == ()
        return
    finding = only(found)
    assert (finding.step, finding.first_step, finding.severity) == expected
    assert finding.symptom == "zero_gradient"


def test_ignored_variables_are_not_judged():
    policy = Policy(patience=3, ignore="v1")
    assert only(zero_gradient(history([[0, 5]] * 5), policy)).where == ("v0",)
    assert zero_gradient(history([[5, 0]] * 5), policy) == ()


def test_loss_zero_from_the_start_is_told_apart():
    found = only(zero_gradient(history(model_zero(9), loss=0.0), POLICY))
    assert "loss_zero_from_start" in {e.name for e in found.evidence}
    found = only(zero_gradient(history(model_zero(9)), POLICY))
    assert "loss_zero_from_start" not in {e.name for e in found.evidence}


def layer_zero(*dead, steps=9):
    norms = np.ones((steps, 6))
    for name in dead:
        norms[:, [2 * "abc".index(name), 2 * "abc".index(name) + 1]] = 0
    return history(norms, columns=LAYERS)


@pytest.mark.parametrize(
    ("dead", "severity"),
    [
        (("a",), "raise"),
        (("a", "b"), "raise"),
        (("b",), "info"),
        (("c",), "info"),
        (("b", "c"), "info"),
        (("a", "c"), "info"),
    ],
    ids="-".join,
)
def test_of_layers_only_an_upstream_prefix_raises(dead, severity):
    finding = only(zero_gradient(layer_zero(*dead), POLICY))
    assert finding.severity == severity
    assert finding.where[: len(dead)] == dead
    assert {f"{name}/kernel" for name in dead} < set(finding.where)
    assert (finding.step, finding.first_step) == (4, 0)


def test_a_layer_is_dead_only_with_all_of_its_variables():
    norms = np.ones((9, 6))
    norms[:, 0] = 0
    assert zero_gradient(history(norms, columns=LAYERS), POLICY) == ()


def test_rows_of_embeddings_and_empty_variables_are_no_layer():
    columns = table(info("emb/table", sparse=True), info("empty/w", shape=(0, 3)), "c/kernel")
    norms = np.ones((9, 3))
    norms[:, :2] = 0
    assert zero_gradient(history(norms, columns=columns), POLICY) == ()


@pytest.mark.parametrize("at_floor", [False, True])
def test_a_layer_waits_for_layer_patience(at_floor):
    norms = np.ones((6, 6))
    norms[:, :2] = 0
    loss = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0] if at_floor else 1.0
    found = zero_gradient(history(norms, columns=LAYERS, loss=loss), POLICY)
    assert only(found).step == (5 if at_floor else 4)
    assert zero_gradient(history(norms[:4], columns=LAYERS), POLICY) == ()


@pytest.mark.parametrize(
    ("norm", "loss", "severity"),
    [
        (1e-8, 0.5, "info"),
        (1e-3, 0.5, None),
        (1e-8, 1e-4, None),
        (1e-8, None, None),
        (1e-8, np.inf, None),
    ],
)
def test_rounding_noise_is_a_note(norm, loss, severity):
    found = zero_gradient(history(np.full((6, 2), norm), loss=loss), POLICY)
    if severity is None:
        assert found == ()
    else:
        assert only(found).severity == severity
        assert only(found).evidence[0].name == "peak_gradient_norm"


def test_rounding_noise_is_judged_from_the_first_step_only():
    norms = np.full((9, 2), 1e-8)
    assert zero_gradient(history(norms, keep=6), POLICY) == ()
    norms[0] = 1.0
    assert zero_gradient(history(norms), POLICY) == ()


ROWS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0]),  # norm of a
        st.sampled_from([0.0, 1.0]),  # norm of b
        st.sampled_from([None, 0.0, 1.0]),  # loss
        st.booleans(),  # due
        st.booleans(),  # skipped
    ),
    min_size=1,
    max_size=14,
)


def slow_model(rows, patience):
    """The first row at which the whole model was 0 for ``patience`` real updates, by hand."""
    losses_when_zero = [lo for a, b, lo, _, _ in rows if a == b == 0]
    never = all(a == b == 0 for a, b, *_ in rows) and all(lo == 0.0 for lo in losses_when_zero)
    patience = patience[1] if never else patience[0]
    count = 0
    for t, (a, b, loss, due, skipped) in enumerate(rows):
        if skipped or (loss == 0.0 and not never):
            continue
        if a == b == 0:
            count += due
            if count >= patience and due:
                return t
        else:
            count = 0
    return None


@given(ROWS)
def test_the_model_against_counting_by_hand(rows):
    norms = [[a, b] for a, b, *_ in rows]
    made = history(
        norms,
        loss=[r[2] for r in rows],
        due=[r[3] for r in rows],
        skipped=[r[4] for r in rows],
    )
    whole = [f for f in zero_gradient(made, POLICY) if "Every gradient" in f.summary]
    expected = slow_model(rows, (3, 5))
    assert (whole[0].step if whole else None) == expected


@given(ROWS, st.integers(1, 14))
def test_reading_in_pieces_finds_the_same(rows, cut):
    """What is found does not depend on when the host looked, only once each."""
    cut = min(cut, len(rows))
    norms = [[a, b] for a, b, *_ in rows]
    kwargs = [{"loss": [r[2] for r in part], "due": [r[3] for r in part],
               "skipped": [r[4] for r in part]} for part in (rows, rows[:cut])]  # fmt: skip
    at_once = zero_gradient(history(norms, **kwargs[0]), POLICY)
    first = zero_gradient(history(norms[:cut], **kwargs[1]), POLICY)
    late = (
        zero_gradient(history(norms, new=len(rows) - cut, **kwargs[0]), POLICY)
        if cut < len(rows)
        else ()
    )
    whole = [f for f in at_once if f.severity != "info" and "Every gradient" in f.summary]
    if whole and not any(
        "loss_zero_from_start" in {e.name for e in f.evidence} for f in (*first, *whole)
    ):
        steps = {f.step for f in (*first, *late) if "Every gradient" in f.summary}
        assert whole[0].step in steps
