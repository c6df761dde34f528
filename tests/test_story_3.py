"""Story 3: the original formulation gives no gradient, the cured one learns n."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from keras_gradguard import GradientGuard

EXAMPLE = Path(__file__).parents[1] / "examples" / "story_3_length_from_dense.py"


@pytest.fixture(scope="module")
def story():
    return runpy.run_path(str(EXAMPLE))


def test_the_original_formulation_has_no_gradients(story):
    assert "No gradients provided for any variable" in story["faulty"]()


def test_a_guard_says_where_the_gradient_ends_and_what_to_use(story):
    told = story["faulty"](GradientGuard(log_dir=None))
    assert told.startswith("NoneGradientError")
    assert "non_differentiable_op" in told
    assert "story_3_length_from_dense.py" in told
    assert "DynamicRepeatDense" in told
    assert "LengthLoss" in told


def test_the_cured_one_learns_n_in_fit_and_in_a_custom_loop(story):
    figures = story["cured"]()
    for how in ("fit", "loop"):
        assert figures[f"{how}: last loss"] < 0.05 * figures[f"{how}: first loss"]
        assert figures[f"{how}: held-out accuracy"] > 0.85  # guessing gives 0.1
