"""Gradients that grow over time and that shrink with depth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradguard.policy import Policy
from keras_gradguard.rules.scale import exploding, vanishing
from tests.histories import history, info, sample, table

POLICY = Policy()
GROWING = 10.0 ** np.arange(12)[:, None] * np.ones((1, 2))


@pytest.mark.parametrize(
    ("norms", "loss", "step"),
    [
        pytest.param(GROWING, GROWING[:, 0], 6, id="gradient and loss"),
        pytest.param(GROWING, 1.0, None, id="gradient only"),
        pytest.param(np.ones((12, 2)), GROWING[:, 0], None, id="loss only"),
        pytest.param(GROWING[:5], GROWING[:5, 0], None, id="not far enough"),
        pytest.param(GROWING[::-1], GROWING[::-1, 0], None, id="falling"),
        pytest.param(GROWING, None, None, id="loss unknown"),
        pytest.param(
            np.concatenate([np.ones((6, 2)), [[1e6, 1e6]], np.ones((6, 2))]),
            [1.0] * 6 + [1e6] + [1.0] * 6,
            None,
            id="one spike",
        ),
        pytest.param(
            np.concatenate([np.ones((6, 2)), np.full((9, 2), 1e6)]),
            [1.0] * 6 + [1e6] * 9,
            None,
            id="a jump that does not go on",
        ),
        pytest.param(
            1.5 ** np.arange(60)[:, None] * np.ones((1, 2)), 1.5 ** np.arange(60), 25, id="slow"
        ),
        pytest.param(np.zeros((12, 2)), 1.0, None, id="zero"),
    ],
)
def test_exploding(norms, loss, step):
    found = exploding(history(norms, loss=loss), POLICY)
    if step is None:
        assert found == ()
        return
    (finding,) = found
    assert finding.symptom == "exploding"
    assert abs(finding.step - step) <= 3
    assert finding.severity == "raise"


def test_a_norm_that_left_float32_explodes_though_every_entry_is_finite():
    counts = np.zeros((2, 512), np.int32)
    counts[:, 256 + 230] = 5
    norms = [[1, 1], [1e19, 1], [np.inf, 1]]
    made = history(norms, samples=[sample(2, [1, 1], histogram=counts)])
    (finding,) = exploding(made, POLICY)
    assert finding.step == 2
    assert np.isfinite(finding.evidence[0].value)


@given(
    st.lists(st.floats(-1, 1), min_size=12, max_size=12),
    st.lists(st.floats(-1, 1), min_size=12, max_size=12),
)
def test_noise_of_a_decade_is_no_explosion(norms, losses):
    made = history(10.0 ** np.array([norms, norms]).T, loss=[10.0**x for x in losses])
    assert exploding(made, POLICY) == ()


def stack(depth, ratio, *, steps=5, shape=(4, 4)):
    columns = table(*[info(f"d{i}/kernel", shape) for i in range(depth)])
    rms = ratio ** np.arange(depth - 1, -1, -1.0)
    return np.tile(rms * np.sqrt(np.prod(shape)), (steps, 1)), columns


@pytest.mark.parametrize(
    ("depth", "ratio", "steps", "expected"),
    [
        pytest.param(10, 0.1, 5, True, id="nine decades"),
        pytest.param(8, 0.1, 5, True, id="seven decades"),
        pytest.param(5, 0.03, 5, True, id="shortest stack"),
        pytest.param(4, 0.001, 5, False, id="four kernels"),
        pytest.param(10, 0.5, 5, False, id="half a layer"),
        pytest.param(10, 1.0, 5, False, id="flat"),
        pytest.param(10, 10.0, 5, False, id="growing"),
        pytest.param(10, 0.1, 4, False, id="too few steps"),
        pytest.param(10, 0.0, 5, False, id="exact zeros are another symptom"),
    ],
)
def test_vanishing(depth, ratio, steps, expected):
    norms, columns = stack(depth, ratio, steps=steps)
    found = vanishing(history(norms, columns=columns), POLICY)
    assert bool(found) == expected
    if found:
        assert found[0].severity == "warn"
        assert found[0].cause == "vanishing_depth"
        assert found[0].where[0] == "d0/kernel"
        assert f"d{depth - 1}/kernel" not in found[0].where


def test_one_tiny_layer_is_no_slope():
    norms, columns = stack(10, 1.0)
    norms[:, 0] *= 1e-9
    assert vanishing(history(norms, columns=columns), POLICY) == ()


def test_biases_and_embeddings_are_not_part_of_the_depth():
    norms, columns = stack(10, 0.1, shape=(4,))
    assert vanishing(history(norms, columns=columns), POLICY) == ()
    sparse = table(*[info(f"d{i}/kernel", sparse=True) for i in range(10)])
    norms, _ = stack(10, 0.1)
    assert vanishing(history(norms, columns=sparse), POLICY) == ()


def test_steps_without_update_do_not_count():
    norms, columns = stack(10, 0.1, steps=8)
    assert vanishing(history(norms, columns=columns, due=False), POLICY) == ()
    assert vanishing(history(norms, columns=columns, skipped=True), POLICY) == ()
