"""Never executed: mypy reads it, so that the types users see stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

from keras_gradguard import (
    Cause,
    Evidence,
    Finding,
    GradientGuard,
    GradientGuardCallback,
    GradientGuardError,
    GradientGuardWarning,
    Policy,
    Report,
    ZeroGradientError,
    assert_trains,
    diagnose,
)
from keras_gradguard.findings import Severity


def callback(model: Any) -> None:
    guard = GradientGuard(
        log_dir=None,
        policy=Policy(zero_gradient="stop", patience=3, ignore=["head/*"]),
        sample_every=10,
        check_every=5,
        histograms=False,
        skip_non_finite=True,
        on_finding=print,
    )
    model.fit(callbacks=[guard])
    assert_type(guard.findings, tuple[Finding, ...])
    assert_type(guard.steps_seen, int)
    guard.plot().savefig("flow.png")
    assert_type(GradientGuardCallback(), GradientGuard)


def loop(model: Any, optimizer: Any, batches: list[Any]) -> None:
    guard = GradientGuard()
    with guard.watch([model], [optimizer], loss=None) as watching:
        assert_type(watching, GradientGuard)
        for _ in batches:
            guard.step(0.5)
    guard.check([None], [object()], loss=1.0, step=3)


def findings(error: GradientGuardError, warning: GradientGuardWarning) -> str:
    finding = error.finding
    assert_type(finding, Finding)
    assert_type(warning.finding, Finding | None)
    assert_type(finding.where, tuple[str, ...])
    assert_type(finding.step, int | None)
    assert_type(finding.severity, Severity)
    assert_type(finding.causes, tuple[Cause, ...])
    assert_type(finding.evidence, tuple[Evidence, ...])
    assert_type(ZeroGradientError(finding).finding, Finding)
    return finding.cause + finding.fix + finding.message + finding.to_json()


def reports(model: Any, heard: Callable[[Finding], None]) -> bool:
    report = diagnose(model, [1.0], [0.0])
    assert_type(report, Report)
    report.plot(figure=None).savefig("gradients.png")
    assert_type(report.gradients[0].norm, float | None)
    for finding in report.findings:
        heard(finding)
    assert_trains(model, [1.0], [0.0], steps=5, policy=Policy())
    return report.ok


def mistakes() -> None:
    Policy(zero_gradient="explode")  # type: ignore[arg-type]
    Finding(symptom="zero_gradient")  # type: ignore[call-arg]
    GradientGuard(check_every="often")  # type: ignore[arg-type]
