"""Findings: validation, order, strict JSON, text that fits a terminal."""

import html.parser
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradguard.findings import SEVERITIES, Cause, Evidence, Finding, Report
from keras_gradguard.vocabulary import CAUSES, SYMPTOMS

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=60)
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS)
EVIDENCE = st.builds(Evidence, name=WORDS, value=NUMBERS, text=WORDS)
CAUSE = st.builds(
    Cause,
    name=st.sampled_from(sorted(CAUSES)),
    score=st.floats(0, 1),
    where=st.lists(WORDS, max_size=3).map(tuple),
    evidence=st.lists(EVIDENCE, max_size=2).map(tuple),
    fix=WORDS,
    source=st.one_of(st.none(), st.just("train.py:32")),
)
FINDING = st.builds(
    Finding,
    symptom=st.sampled_from(sorted(SYMPTOMS)),
    summary=WORDS,
    where=st.lists(WORDS, max_size=9).map(tuple),
    step=st.one_of(st.none(), st.integers(0, 10**9)),
    first_step=st.one_of(st.none(), st.integers(0, 10**9)),
    severity=st.sampled_from(SEVERITIES),
    causes=st.lists(CAUSE, max_size=5).map(tuple),
    evidence=st.lists(EVIDENCE, max_size=3).map(tuple),
    source=st.one_of(st.none(), st.just("train.py:32")),
    optimizer=st.one_of(st.none(), st.just("adam")),
    notes=st.lists(WORDS, max_size=2).map(tuple),
)


@given(FINDING)
def test_json_is_strict_and_one_line(finding):
    text = finding.to_json()
    assert "\n" not in text

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    back = json.loads(text, parse_constant=refuse)
    assert back["symptom"] == finding.symptom
    assert back["cause"] == finding.cause
    assert back["where"] == list(finding.where)
    assert back["message"] == finding.message == str(finding)


@given(FINDING)
def test_causes_are_ranked_and_the_first_is_the_cause(finding):
    scores = [c.score for c in finding.causes]
    assert scores == sorted(scores, reverse=True)
    assert finding.cause == (finding.causes[0].name if finding.causes else "unknown")


@given(FINDING)
def test_lines_fit_a_terminal_unless_one_word_does_not(finding):
    for line in finding.message.splitlines():
        assert len(line) <= 88 or max(map(len, line.split())) > 88 - 20


@given(FINDING)
def test_there_is_always_something_to_do(finding):
    assert finding.fix
    written = [c.fix for c in finding.causes if c.fix]
    assert finding.fix == (written[0] if written else SYMPTOMS[finding.symptom].first_look)


@given(FINDING)
def test_findings_pickle_and_compare(finding):
    back = pickle.loads(pickle.dumps(finding))
    assert repr(back) == repr(finding)


@given(st.lists(FINDING, max_size=6))
def test_a_report_puts_the_worst_first_and_knows_whether_it_is_fine(findings):
    report = Report(findings=tuple(findings), title="digits")
    order = [SEVERITIES.index(f.severity) for f in report.findings]
    assert order == sorted(order)
    assert report.ok == all(f.severity == "info" for f in findings)
    assert json.loads(report.to_json())["ok"] == report.ok
    assert str(report).startswith("digits\n\n")
    assert ("Nothing found." in str(report)) or findings


def plain(**changes):
    made = Finding(symptom="zero_gradient", summary="All is 0.", where=("h1/kernel",))
    return made.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        pytest.param({"step": 7, "first_step": 2}, "at step 7, since step 2", id="since"),
        pytest.param({"step": 7, "first_step": 7}, "at step 7\n", id="at once"),
        pytest.param({"step": 0}, "at step 0\n", id="step 0"),
        pytest.param({}, "zero\n  what    All is 0.", id="no step"),
        pytest.param({}, "where   h1/kernel", id="where"),
        pytest.param({}, "why     unknown", id="unknown is said"),
        pytest.param({"source": "a.py:3"}, "h1/kernel  (a.py:3)", id="source"),
        pytest.param({"where": tuple("abcdefgh")}, "a, b, c, d, e, f and 2 more", id="many"),
        pytest.param({"notes": ("look",)}, "note    look", id="note"),
        pytest.param(
            {"causes": (Cause(name="dead_relu", score=0.9),)},
            f"dead_relu: {CAUSES['dead_relu']}.",
            id="cause",
        ),
        pytest.param(
            {"causes": tuple(Cause(name="zero_init", score=s) for s in (0.1, 0.2, 0.3, 0.4))},
            "or      zero_init",
            id="others",
        ),
    ],
)
def test_the_text_says(changes, inside):
    assert inside in plain(**changes).message


def test_at_most_three_causes_are_told():
    many = plain(causes=tuple(Cause(name="zero_init", score=0.5) for _ in range(9)))
    assert many.message.count("zero_init") == 3


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: plain(symptom="bad_luck"), "symptom='bad_luck'"),
        (lambda: plain(severity="fatal"), "severity='fatal'"),
        (lambda: Cause(name="bad_luck", score=0.5), "name='bad_luck'"),
        (lambda: Cause(name="dead_relu", score=1.5), "score=1.5"),
        (lambda: Cause(name="dead_relu", score=-0.1), "score=-0.1"),
        (lambda: Cause(name="dead_relu", score=float("nan")), "score=nan"),
    ],
    ids=["symptom", "severity", "cause", "high", "low", "nan"],
)
def test_wrong_words_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_findings_are_frozen():
    with pytest.raises(AttributeError):
        plain().step = 3


# ---------------------------------------------------------------- HTML


class Page(html.parser.HTMLParser):
    """Collects tags, styles and text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.styles, self.text = [], set(), [], ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}
        self.styles += [value for _, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


OURS = {"div", "table", "tr", "th", "td", "strong", "code", "p"}


@given(FINDING)
def test_html_is_ours_and_text_is_the_users(finding):
    page = Page(finding._repr_html_())
    assert page.open == []
    assert page.tags <= OURS
    for told in (finding.summary, finding.fix, *finding.where[:6], *finding.notes):
        assert told in page.text
    for cause in finding.causes[:3]:
        assert cause.name in page.text


@given(st.lists(FINDING, max_size=3), WORDS)
def test_html_of_a_report(findings, title):
    page = Page(Report(findings=tuple(findings), title=title, notes=("<&>",))._repr_html_())
    assert page.open == []
    assert page.tags <= OURS
    assert (title or "GradGuard report") in page.text
    assert "Note: <&>" in page.text
    assert ("Nothing found." in page.text) or findings


def test_html_can_be_read_on_white_and_on_black():
    """The text keeps the notebook's own colour and nothing has a background of its own."""
    page = Page(Report(findings=(plain(severity="warn"),))._repr_html_())
    for style in page.styles:
        for rule in filter(None, style.split(";")):
            name, value = rule.split(":", 1)
            assert name != "color"
            assert name != "background" or value == "transparent"


def test_html_is_no_place_for_a_script():
    bad = "</td><script>alert(1)</script>"
    shown = plain(summary=bad, where=(bad,), notes=(bad,), source=bad)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
