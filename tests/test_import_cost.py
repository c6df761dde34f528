"""Importing the package imports nothing that only some runs need."""

import subprocess
import sys

import pytest

NOT_NEEDED = ("tensorboard", "matplotlib", "sklearn", "IPython", "rich")


def loaded(statement: str) -> list[str]:
    """Run a statement in a fresh interpreter and return the packages it loaded beyond Keras."""
    program = (
        "import sys, keras\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(new))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("import keras_gradguard", id="package"),
        pytest.param("from keras_gradguard import GradientGuard, Policy", id="guard"),
        pytest.param("import keras_gradguard.layers, keras_gradguard.losses", id="layers"),
    ],
)
def test_import_is_light(statement):
    packages = loaded(statement)
    assert "keras_gradguard" in packages
    assert set(packages).isdisjoint(NOT_NEEDED)


def test_the_check_can_fail():
    assert "tensorboard" in loaded("import tensorboard, keras_gradguard")
