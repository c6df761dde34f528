"""``ParameterServerStrategy``: what Keras says in ``fit``, and what the guard says in a loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.shows(
    "Distribution",
    "ParameterServerStrategy",
    refused="Keras: ValueError, To use this dataset, you need to pass this dataset to "
    "ClusterCoordinator.create_per_worker_dataset; watch: ValueError",
)
def test_it_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "tests.everywhere.parameter_server"],
        cwd=_ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    said = json.loads(lines[0].removeprefix("RESULT "))
    # Keras' own words, with the guard and without it.
    assert said["fit"] == said["guarded"]
    assert said["fit"][0] == "ValueError"
    assert "ClusterCoordinator.create_per_worker_dataset" in said["fit"][1]
    kind, words = said["watch"]
    assert kind == "ValueError"
    assert "ParameterServerStrategy" in words
    assert said["fit"][1].rstrip(".") in words
    assert "Use MirroredStrategy" in words
