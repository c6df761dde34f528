"""What is in the wheel, and what its metadata says."""

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build sdist and wheel as they would be released."""
    target = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module_and_nothing_else(wheel):
    inside = {n for n in wheel.namelist() if ".dist-info/" not in n}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "keras_gradguard").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == wanted
    assert "keras_gradguard/py.typed" in inside
    plugin = "keras_gradguard/tensorboard/plugin/"
    assert {f"{plugin}{name}" for name in ("loader.py", "plugin.py", "static/index.js")} <= inside
    assert {f"{plugin}static/style.css", f"{plugin}static/heatmap.js"} <= inside


def test_wheel_holds_no_tests_and_no_leftovers(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    version = PROJECT["project"]["version"]
    assert tops == {"keras_gradguard", f"keras_gradguard-{version}.dist-info"}
    assert not [n for n in wheel.namelist() if "test" in n or n.endswith((".pyc", ".ipynb", ".md"))]


def test_wheel_metadata(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith("/METADATA")]
    fields = email.message_from_bytes(wheel.read(name))
    assert fields["Name"] == "keras-gradguard"
    assert fields["Version"] == PROJECT["project"]["version"]
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["License-File"] == "LICENSE"
    assert fields["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(
        fields.get_all("Classifier")
    )
    assert "GradientGuard" in fields.get_payload()
    assert any(n.endswith("/licenses/LICENSE") for n in wheel.namelist())


def test_wheel_entry_points(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith("/entry_points.txt")]
    text = wheel.read(name).decode()
    assert "gradguard = keras_gradguard.cli:main" in text
    for target in re.findall(r"= (keras_gradguard[\w.]*):", text):
        assert f"{target.replace('.', '/')}.py" in wheel.namelist()


def test_sdist_can_be_tested(built):
    import tarfile

    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "CHANGELOG.md"} <= names
    assert "tests/test_packaging.py" in names
    assert "examples/my_model_does_not_learn.ipynb" in names
    assert "keras_gradguard/py.typed" in names


def test_installed_version_is_the_one_in_pyproject():
    import keras_gradguard

    assert keras_gradguard.__version__ == PROJECT["project"]["version"]
    assert metadata.version("keras-gradguard") == PROJECT["project"]["version"]


def test_changelog_and_citation_know_this_version():
    version = PROJECT["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_changelog_is_in_order():
    """Newest first, sections of Keep a Changelog in its order, no empty one but Unreleased."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    numbers = [tuple(map(int, v.split("."))) for v in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[2:]:
        sections = re.findall(r"^### (.+)$", part, re.MULTILINE)
        assert sections == [s for s in order if s in sections]
        assert sections
        assert re.search(r"^- ", part, re.MULTILINE)


def test_the_changelog_names_every_public_name():
    import keras_gradguard

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    errors = {n for n in keras_gradguard.__all__ if n.endswith("Error")} - {"GradientGuardError"}
    words = set(re.findall(r"\w+", text))
    assert sorted(set(keras_gradguard.__all__) - errors - words) == []


def test_lower_bounds_are_what_the_matrix_installs():
    matrix = (ROOT / "tests" / "matrix.sh").read_text(encoding="utf-8")
    for requirement in PROJECT["project"]["dependencies"]:
        name, bound = requirement.split(">=")
        assert re.search(rf"{name}=={re.escape(bound)}(\.\d+)*\b", matrix), requirement
