"""Imports point down only, and a backend is named only where it has to be."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "keras_gradguard"

# From the bottom up. A unit is a module or a subpackage; it may import units below its own
# line, and none of its own line or above.
FLOORS = (
    (
        "vocabulary",
        "records",
        "_registration",
        "plotting",
        "terminal",
    ),  # the words and records that all speak
    ("findings", "flow"),
    ("errors", "policy"),
    ("settings", "statistics"),
    ("taps", "ops"),
    ("recorder",),
    ("rules",),
    ("layers",),
    ("losses",),
    ("diagnosis",),
    ("tensorboard",),
    ("notices",),
    ("session", "strays"),
    ("observer", "explaining"),
    ("fitting", "loop"),
    ("guard",),
    ("trying", "unmodified"),
    ("cli",),
    ("__init__",),
    ("__main__",),
)
FLOOR = {unit: height for height, units in enumerate(FLOORS) for unit in units}

BACKENDS = {"tensorflow", "keras", "jax", "torch"}
NAME_TENSORFLOW = {"taps", "diagnosis", "layers", "losses", "ops"}
# Keras' public classes are subclassed here; nothing of TensorFlow.
NAME_KERAS = NAME_TENSORFLOW | {"guard", "cli", "trying"}
OPTIONAL = {"matplotlib", "sklearn", "IPython", "rich"}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, and whether the import runs with the file itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            late |= {id(inner) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module == "keras_gradguard":
                names = [f"keras_gradguard.{alias.name}" for alias in node.names]
            found += [(name, id(node) not in late) for name in names]
    return found


def graph(files: list[Path]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for path in files:
        for name, _ in imported(path):
            parts = name.split(".")
            if parts[0] == "keras_gradguard" and len(parts) > 1 and parts[1] != unit_of(path):
                edges[unit_of(path)].add(parts[1])
    return edges


def upward(edges: dict[str, set[str]]) -> list[str]:
    return [
        f"{low} -> {high}"
        for low, targets in edges.items()
        for high in targets
        if high in FLOOR and FLOOR[high] >= FLOOR[low]
    ]


FILES = sorted(PACKAGE.rglob("*.py"))
BY_NAME = {path.relative_to(PACKAGE).as_posix(): path for path in FILES}


def test_every_unit_has_a_floor():
    assert {unit_of(path) for path in FILES} <= set(FLOOR)


def test_imports_point_down():
    # The lazy public names of __init__ are reached from the command line only.
    assert upward(graph(FILES)) == []


def test_an_upward_import_would_be_seen():
    assert upward({"taps": {"guard"}, "guard": {"taps"}}) == ["taps -> guard"]


@pytest.mark.parametrize("name", BY_NAME)
def test_backends_are_named_only_where_allowed(name):
    path = BY_NAME[name]
    roots = {module.split(".")[0] for module, _ in imported(path)}
    allowed = set()
    if unit_of(path) in NAME_KERAS:
        allowed = {"keras"}
    if unit_of(path) in NAME_TENSORFLOW:
        allowed = BACKENDS
    assert roots & BACKENDS <= allowed


@pytest.mark.parametrize("name", BY_NAME)
def test_optional_packages_are_imported_late(name):
    path = BY_NAME[name]
    early = {module.split(".")[0] for module, at_once in imported(path) if at_once}
    optional = OPTIONAL if unit_of(path) == "tensorboard" else OPTIONAL | {"tensorboard"}
    assert early & optional == set()


@pytest.mark.parametrize("name", BY_NAME)
def test_every_file_says_what_it_is(name):
    text = BY_NAME[name].read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))
