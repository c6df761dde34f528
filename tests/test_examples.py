"""Every example runs, and each story shows its fault and its cure."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

# A contract that does not fit warns before the symptom raises; the tests are strict about it.
pytestmark = pytest.mark.filterwarnings("ignore::keras_gradguard.GradientGuardWarning")

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HAS_A_TEST = ("story_1", "story_2", "story_3", "digits_demo")


@pytest.mark.parametrize("script", [s for s in SCRIPTS if not s.stem.startswith(HAS_A_TEST)],
                         ids=lambda s: s.stem)  # fmt: skip
def test_an_example_runs(script, tmp_path, monkeypatch, capsys):
    """Healthy as it stands; its fault (``--faulty``) is in the table of tests/test_cli.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"\d steps .*, 0 findings", out)
    accuracy = re.search(r"accuracy ([\d.]+) on", out)
    assert accuracy is None or float(accuracy[1]) > 0.85
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without outputs
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    rich = [o["data"] for o in shown if o["output_type"] == "execute_result"]
    pages = [data["text/html"] for data in rich if "text/html" in data]
    assert len(pages) == 2  # a report and a finding
    assert all("dead_relu" in page for page in pages)
    assert sum("image/png" in data for data in rich) == 3
    said = "".join(o.get("text", "") for o in shown)
    assert said.count("GradGuard: ") == 2
    assert "1 finding (zero_gradient)" in said
    assert "0 findings" in said


def test_the_demo_stops_the_faulty_autoencoder_within_twenty_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finding = load("digits_demo").main("logs")
    out = capsys.readouterr().out
    assert finding.symptom == "zero_gradient"
    assert finding.cause == "double_activation"
    assert finding.step < 20
    assert "0 findings" in out
    assert finding.message in out
    written = {p.parent.name for p in (tmp_path / "logs" / "classifier").rglob("*tfevents*")}
    assert written == {"gradguard"}


def test_story_1_a_double_sigmoid_and_logits_output():
    story = load("story_1_double_sigmoid")
    finding = story.faulty()
    assert (finding.symptom, finding.cause) == ("zero_gradient", "double_activation")
    assert finding.step < 20
    assert "recon" in finding.where
    loss, error, findings = story.cured()
    assert loss < 0.4  # ln 2 = 0.693 is where the faulty one sits
    assert error < 0.1
    assert findings == ()


def test_story_2_a_frozen_base_and_a_dead_head():
    story = load("story_2_frozen_base")
    finding = story.faulty()
    assert (finding.symptom, finding.cause) == ("zero_gradient", "dead_relu")
    assert "head_relu" in finding.where
    losses, findings = story.cured()
    assert sum(losses[-5:]) < sum(losses[:5])
    assert findings == ()
