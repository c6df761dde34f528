"""Every code block in README and docs runs, and every docstring example too.

Blocks of one page run in order in one namespace, in a directory of their own. An HTML
comment on the line before a block says what else is expected of it:

    <!-- raises: ZeroGradientError -->  it must end with this error
    <!-- run: no (reason) -->           it is not run
    <!-- fake: mlflow -->               it is run with a stand-in for this package

Shell commands in `console` blocks are checked against the command line, the Makefile and the
files that are there.
"""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import shlex
import sys
import tomllib
import warnings
from pathlib import Path

import keras
import matplotlib
import pytest
import yaml

import keras_gradguard
from keras_gradguard import cli
from tests import readme_message

matplotlib.use("Agg")
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!--\s*(?P<mark>raises|run|fake):\s*(?P<what>[^>]*?)\s*-->\n)?"
    r"(?P<indent>[ ]*)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text):
    for match in FENCE.finditer(text):
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["code"].splitlines()]
        line_number = text.count("\n", 0, match.start("code"))
        yield match["mark"], match["what"] or "", "\n".join(lines), line_number


@contextlib.contextmanager
def stand_in(name):
    """Let ``import name`` find the package's stand-in in tests/fakes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, importlib.import_module(f"tests.fakes.{name}"))
        yield


def run_page(text, name, namespace=None):
    """Run the python blocks of a page; return how many ran."""
    space = {"__name__": "__main__"} if namespace is None else namespace
    ran = 0
    for mark, what, code, line_number in blocks(text):
        if mark == "run":
            assert re.fullmatch(r"no \(.{10,}\)", what), f"{name}:{line_number}: say why"
            continue
        # Blank lines in front make the line numbers of a traceback those of the page.
        program = compile("\n" * line_number + code, name, "exec")
        ran += 1
        if mark == "fake":
            with stand_in(what):
                exec(program, space)
            continue
        if mark != "raises":
            exec(program, space)
            continue
        raised = None
        try:
            exec(program, space)
        except Exception as error:
            raised = error
        names = [kind.__name__ for kind in type(raised).__mro__]
        assert what in names, f"{name}:{line_number}: {what} expected, got {raised!r}"
    return ran


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    yield
    keras.backend.clear_session()


# The pages of causes have a test of their own, which also compares what they print.
WITH_CODE = [
    p
    for p in PAGES
    if p.parent.name != "causes" and any(True for _ in blocks(p.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.relative_to(ROOT).as_posix())
@pytest.mark.filterwarnings("default::keras_gradguard.errors.GradientGuardWarning")
def test_page_runs(page, elsewhere):
    with contextlib.redirect_stdout(io.StringIO()):
        run_page(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())


def test_a_broken_page_would_fail():
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", "page")
    with pytest.raises(AssertionError):
        run_page("<!-- raises: ValueError -->\n```python\n1 + 1\n```\n", "page")
    with pytest.raises(AssertionError):
        run_page("<!-- raises: ValueError -->\n```python\n1 / 0\n```\n", "page")
    assert run_page("<!-- raises: ArithmeticError -->\n```python\n1 / 0\n```\n", "page") == 1


MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(keras_gradguard.__path__, "keras_gradguard.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("default::keras_gradguard.errors.GradientGuardWarning")
def test_docstring_examples(name, elsewhere):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")


def anchors(path):
    found = set()
    for title in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        slug = re.sub(r"[^\w\s-]", "", title.lower().replace("`", ""))
        found.add(re.sub(r"[\s]+", "-", slug.strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for inline, image in LINK.findall(text):
        target, _, anchor = (inline or image).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


# Read by eye now and then; the tests fetch nothing.
EXTERNAL = {
    "https://arxiv.org/abs/1308.3432",
    "https://keepachangelog.com/en/1.1.0/",
    "https://semver.org/spec/v2.0.0.html",
}


def test_external_links_are_the_ones_listed():
    written = [ROOT / "CHANGELOG.md", *PAGES, *sorted((ROOT / "keras_gradguard").rglob("*.py"))]
    texts = [p.read_text(encoding="utf-8") for p in written]
    found = {u.rstrip(".,;") for t in texts for u in re.findall(r"https?://[^\s)>\"'`]+", t)}
    assert found == EXTERNAL


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(item):
        if isinstance(item, str):
            return {item}
        values = item.values() if isinstance(item, dict) else item
        return set().union(*(leaves(value) for value in values))

    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert pages == leaves(config["nav"])


CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands():
    for page in PAGES:
        for block in CONSOLE.findall(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if line.startswith("$ "):
                    yield pytest.param(line[2:], id=f"{page.stem}: {line[2:]}")


@pytest.mark.parametrize("line", list(commands()))
def test_shell_commands_can_be_typed(line):
    program, *arguments = shlex.split(line, comments=True)
    if program == "gradguard":
        arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
        assert callable(cli._parser().parse_args(arguments).act)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for argument in arguments:
            name, _, value = argument.partition("=")
            known = rf"\$\(or \$\({name}\)" if value else rf"^{name}:"
            assert re.search(known, makefile, re.MULTILINE), argument
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program == "pip":
        assert arguments[0] == "install"
        assert re.fullmatch(r"keras-gradguard(\[plot\])?|\.", arguments[1])
    else:
        assert program in ("tensorboard", "pytest")


def test_findings_reach_the_trackers(elsewhere):
    """The hooks of docs/howto/forwarding.md hand over what they say they do."""
    from tests.fakes import mlflow, wandb

    mlflow.calls.clear()
    wandb.runs.clear()
    page = ROOT / "docs" / "howto" / "forwarding.md"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_gradguard.GradientGuardWarning)
        run_page(page.read_text(encoding="utf-8"), page.name)
    kinds = [call[0] for call in mlflow.calls]
    assert kinds[:3] == ["start_run", "log_dict", "set_tag"]
    assert kinds[-2:] == ["log_metric", "end_run"]
    assert mlflow.calls[1][1].startswith("gradguard/zero_gradient_")
    assert mlflow.calls[1][2]["cause"] == "dead_relu_output"
    assert mlflow.calls[2][1:] == ("gradguard", "dead_relu_output")
    [run] = wandb.runs
    assert run.summary == {"gradguard": "dead_relu_output"}
    assert [title for title, _ in run.alerts] == ["GradGuard: dead_relu_output"]
    assert "exactly zero" in run.alerts[0][1]


def api_entries():
    text = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    "module", ["keras_gradguard", "keras_gradguard.layers", "keras_gradguard.losses",
               "keras_gradguard.ops"],
)  # fmt: skip
def test_every_public_name_has_an_api_entry(module):
    known = [id(pkgutil.resolve_name(entry)) for entry in api_entries()]
    home = importlib.import_module(module)
    public = [name for name in home.__all__ if name not in ("layers", "losses", "ops")]
    assert [name for name in public if id(getattr(home, name)) not in known] == []


@pytest.mark.filterwarnings("default::keras_gradguard.errors.GradientGuardWarning")
def test_the_error_in_the_readme_is_a_real_one(elsewhere):
    """It says what the program above it says; numbers may differ from machine to machine."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def words(message):
        return re.sub(r"\d[\d.e+-]*", "#", message).split()

    assert words(readme_message.shown(text)) == words(readme_message.real(text))


def test_python_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(version in readme for version in versions)
