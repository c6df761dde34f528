"""Story 3: the original formulation gives no gradient, the cured one learns n."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "story_3_length_from_dense.py"


@pytest.fixture(scope="module")
def story():
    return runpy.run_path(str(EXAMPLE))


def test_the_original_formulation_has_no_gradients(story):
    assert "No gradients provided for any variable" in story["faulty"]()


def test_the_cured_one_learns_n_in_fit_and_in_a_custom_loop(story):
    figures = story["cured"]()
    for how in ("fit", "loop"):
        assert figures[f"{how}: last loss"] < 0.05 * figures[f"{how}: first loss"]
        assert figures[f"{how}: held-out accuracy"] > 0.85  # guessing gives 0.1
