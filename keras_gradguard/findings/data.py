"""Finding, Cause, Evidence, Report: frozen dataclasses, and their JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from keras_gradguard.findings import html, text
from keras_gradguard.plotting import sizes_figure
from keras_gradguard.vocabulary import CAUSES, SYMPTOMS

Severity = Literal["raise", "warn", "info"]
SEVERITIES: tuple[Severity, ...] = ("raise", "warn", "info")
Scalar = bool | int | float | str | None


def _plain(value: Scalar) -> Scalar:
    """Return ``value`` as something strict JSON can hold (NaN and Inf become text)."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measured fact.

    Args:
        name: Short machine name, e.g. ``"dead_fraction"``.
        value: The number (or word) itself; unit as said in ``text``.
        text: The fact as a person would say it, e.g.
            ``"64 of 64 units of 'head' are off for all 320 examples seen"``.
    """

    name: str
    value: Scalar
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that strict JSON can hold."""
        return {"name": self.name, "value": _plain(self.value), "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One possible reason for a finding.

    Args:
        name: A word of :data:`keras_gradguard.vocabulary.CAUSES`.
        score: How well the evidence supports it, 0 to 1. Causes are ranked by it.
        where: Names that a user can search for in their own code.
        evidence: The facts that speak for it.
        fix: What to change, one or two sentences.
        source: The line it comes from, ``"file.py:32"``, or None.

    Raises:
        ValueError: ``name`` is not in the vocabulary or ``score`` is not in [0, 1].
    """

    name: str
    score: float
    where: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    fix: str = ""
    source: str | None = None

    def __post_init__(self) -> None:
        if self.name not in CAUSES:
            raise ValueError(
                f"`name` must be one of the causes in keras_gradguard.vocabulary.CAUSES. "
                f"Received: name={self.name!r}"
            )
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"`score` must be between 0 and 1. Received: score={self.score!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that strict JSON can hold."""
        return {
            "name": self.name,
            "score": self.score,
            "where": list(self.where),
            "evidence": [e.to_dict() for e in self.evidence],
            "fix": self.fix,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong with a training run: what, where, since when, why, what to do.

    Args:
        symptom: What was measured, a word of
            :data:`keras_gradguard.vocabulary.SYMPTOMS`.
        summary: The measurement in one sentence.
        where: Names that a user can search for in their own code: variable paths
            without the automatic model prefix (``"dense_1/kernel"``), layer names,
            or ``loss``, ``optimizer``, ``data``, ``train_step``, ``model``, ``compile``.
        step: Optimizer step at which it was found (0 for the first step), or None.
        first_step: First step that showed it, or None.
        severity: What the rule thinks it deserves: ``"raise"`` (training cannot
            work), ``"warn"`` (unusual), ``"info"`` (worth a record). The policy
            has the last word.
        causes: Ranked by score, best first.
        evidence: The measurements behind the symptom.
        source: A source line ``"file.py:32"`` where one is known.
        optimizer: Name of the optimizer concerned, or None.

    Raises:
        ValueError: A word is not in the vocabulary.

    Example:

    >>> f = Finding(symptom="zero_gradient", summary="Every gradient is 0.", where=("loss",))
    >>> f.cause
    'unknown'
    """

    symptom: str
    summary: str
    where: tuple[str, ...] = ()
    step: int | None = None
    first_step: int | None = None
    severity: Severity = "raise"
    causes: tuple[Cause, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    source: str | None = None
    optimizer: str | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.symptom not in SYMPTOMS:
            raise ValueError(
                f"`symptom` must be one of {', '.join(SYMPTOMS)}. "
                f"Received: symptom={self.symptom!r}"
            )
        if self.severity not in SEVERITIES:
            raise ValueError(
                f"`severity` must be one of {', '.join(SEVERITIES)}. "
                f"Received: severity={self.severity!r}"
            )
        ranked = tuple(sorted(self.causes, key=lambda c: -c.score))
        object.__setattr__(self, "causes", ranked)

    @property
    def cause(self) -> str:
        """The most likely cause, or ``"unknown"``."""
        return self.causes[0].name if self.causes else "unknown"

    @property
    def fix(self) -> str:
        """What to change, from the most likely cause; else where to look first."""
        for cause in self.causes:
            if cause.fix:
                return cause.fix
        return SYMPTOMS[self.symptom].first_look

    @property
    def message(self) -> str:
        """The whole finding as text for a terminal, at most 88 columns wide."""
        return text.render(self)

    def replace(self, **changes: Any) -> Finding:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that strict JSON can hold."""
        return {
            "symptom": self.symptom,
            "cause": self.cause,
            "severity": self.severity,
            "summary": self.summary,
            "where": list(self.where),
            "step": self.step,
            "first_step": self.first_step,
            "optimizer": self.optimizer,
            "source": self.source,
            "evidence": [e.to_dict() for e in self.evidence],
            "causes": [c.to_dict() for c in self.causes],
            "notes": list(self.notes),
            "fix": self.fix,
            "message": self.message,
        }

    def to_json(self) -> str:
        """Return one line of strict JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)

    def __str__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return html.finding(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSize:
    """The size of one variable's gradient in one batch.

    Args:
        name: Path of the variable, as in :class:`Finding`.
        norm: L2 norm; None when there is no gradient, 0 when all of it is exactly 0.
    """

    name: str
    norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Several findings about one model.

    Args:
        findings: All of them, the worst first.
        title: What was looked at, one line.
        notes: Things the reader should know, e.g. a check that could not run.
        gradients: The size of each variable's gradient, where it was computed.
    """

    findings: tuple[Finding, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()
    gradients: tuple[GradientSize, ...] = ()

    def __post_init__(self) -> None:
        worst_first = sorted(self.findings, key=lambda f: SEVERITIES.index(f.severity))
        object.__setattr__(self, "findings", tuple(worst_first))

    @property
    def ok(self) -> bool:
        """True when nothing deserves a warning or an error."""
        return all(f.severity == "info" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that strict JSON can hold."""
        return {
            "title": self.title,
            "ok": self.ok,
            "findings": [f.to_dict() for f in self.findings],
            "notes": list(self.notes),
            "gradients": [{"name": g.name, "norm": _plain(g.norm)} for g in self.gradients],
        }

    def to_json(self) -> str:
        """Return one line of strict JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)

    def plot(self, figure: Any = None) -> Any:
        """Draw the size of each variable's gradient with matplotlib, the input side on top.

        Args:
            figure: A matplotlib figure to draw into. Defaults to a new one, which a notebook
                shows and ``.savefig("gradients.png")`` writes.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed (``pip install 'keras-gradguard[plot]'``).
            ValueError: The report holds no gradients, because the step could not be computed.
        """
        if not self.gradients:
            raise ValueError(
                "This report holds no gradients to plot: they are there when the step could be "
                "computed on the batch. For a training run use guard.plot(). "
                f"Received: a report with {len(self.findings)} findings and no gradients."
            )
        names = [g.name for g in self.gradients]
        return sizes_figure(names, [g.norm for g in self.gradients], self.title, figure)

    def __str__(self) -> str:
        return text.report(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return html.report(self)
