"""Colour changes nothing of the text, and is only for a terminal."""

import io
import re

import pytest
from hypothesis import given

from keras_gradguard import cli
from keras_gradguard.terminal import colored, wants_color

from .test_findings import FINDING, plain


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "wanted"),
    [
        pytest.param(Terminal(), {"TERM": "xterm"}, True, id="terminal"),
        pytest.param(Terminal(), {}, True, id="terminal of unknown kind"),
        pytest.param(io.StringIO(), {"TERM": "xterm"}, False, id="piped"),
        pytest.param(Terminal(), {"TERM": "dumb"}, False, id="dumb"),
        pytest.param(Terminal(), {"NO_COLOR": "1"}, False, id="NO_COLOR"),
        pytest.param(Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, id="both"),
        pytest.param(Terminal(), {"NO_COLOR": ""}, True, id="NO_COLOR empty"),
        pytest.param(io.StringIO(), {"FORCE_COLOR": "1"}, True, id="FORCE_COLOR"),
    ],
)
def test_who_gets_colour(stream, environment, wanted):
    assert wants_color(stream, environment) is wanted


@given(FINDING)
def test_colour_adds_codes_and_nothing_else(finding):
    assert re.sub(r"\x1b\[\d+m", "", colored(finding.message)) == finding.message


def test_title_and_labels_stand_out():
    text = colored(f"head\n\n{plain(notes=('look',)).message}")
    assert "\x1b[1mGradient is exactly zero\x1b[0m" in text
    for label in ("what", "where", "why", "note"):
        assert f"\x1b[36m{label}\x1b[0m" in text
    assert "\x1b[32mfix\x1b[0m" in text
    assert text.startswith("head\n")


def test_show_is_coloured_on_a_terminal_only(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    (tmp_path / "incidents.jsonl").write_text(plain().to_json() + "\n", encoding="utf-8")
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "\x1b[1mGradient is exactly zero\x1b[0m" in capsys.readouterr().out
