"""The public names: listed, sorted, importable, and not more expensive than they have to be."""

import subprocess
import sys

import pytest

import keras_gradguard

RUN = [sys.executable, "-c"]


def run(code):
    return subprocess.run([*RUN, code], capture_output=True, text=True, check=True).stdout.strip()


def test_names_are_sorted_and_there():
    assert sorted(keras_gradguard.__all__) == keras_gradguard.__all__
    for name in keras_gradguard.__all__:
        assert getattr(keras_gradguard, name).__doc__, name
    assert keras_gradguard.GradientGuard is keras_gradguard.GradientGuardCallback
    assert set(keras_gradguard.__all__) < set(dir(keras_gradguard))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Guard'"):
        _ = keras_gradguard.Guard


def test_the_package_alone_imports_no_backend():
    code = "import sys, keras_gradguard; print([m for m in ('keras', 'tensorflow', 'tensorboard') "
    assert run(code + "if m in sys.modules])") == "[]"


@pytest.mark.parametrize(
    "order",
    ["import keras_gradguard, keras", "import keras, keras_gradguard"],
    ids=["before_keras", "after_keras"],
)
def test_importing_the_package_registers_layers_and_losses(order):
    code = (
        f"{order}\n"
        "get = keras.saving.get_registered_object\n"
        "print(get('keras_gradguard>LogitsOutput').__name__, "
        "get('keras_gradguard>LengthLoss').__name__)"
    )
    assert run(code) == "LogitsOutput LengthLoss"


def test_the_import_of_keras_looks_untouched():
    code = (
        "import keras_gradguard, keras, sys\n"
        "print(type(keras.__spec__.loader).__name__, type(keras.__loader__).__name__, "
        "[f for f in sys.meta_path if 'gradguard' in type(f).__module__])"
    )
    assert run(code) == "SourceFileLoader SourceFileLoader []"
