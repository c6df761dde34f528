"""docs/causes: a page for every cause, whose reproduction shows it and whose cure cures it."""

import importlib.util
import re
from pathlib import Path

import pytest

from keras_gradguard.vocabulary import CAUSES

DOCS = Path(__file__).parent.parent.parent / "docs"
_SPEC = importlib.util.spec_from_file_location("build_causes", DOCS / "build_causes.py")
build_causes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build_causes)


def first_line(text):
    """Return the first line, without the number that Keras gives a second model."""
    return re.sub(r"_\d+'", "'", text.strip("\n").splitlines()[0])


def test_every_cause_has_a_page():
    assert {p.stem for p in (DOCS / "causes").glob("*.md")} - {"index"} == set(CAUSES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cause", CAUSES)
def test_page(cause):
    page = (DOCS / "causes" / f"{cause}.md").read_text()
    reproduction, cure = build_causes.blocks(page)
    printed, space = build_causes.run(reproduction, cause)
    assert build_causes.cause_of(space, printed) == cause, printed
    shown = build_causes.PRINTED.search(page)[0]
    assert shown.split()
    assert first_line(shown) == first_line(printed)
    assert f"{cause}:" in shown
    space.pop("report", None)
    build_causes.run(cure, cause, space)
    report = space.get("report")
    assert report is None or report.ok, str(report)
