"""What the guard found, as frozen data, and the one place that turns it into text, HTML and JSON.

A :class:`Finding` is made by a rule (the symptom, measured), sharpened by the
diagnosis (the causes, ranked) and then consumed unchanged by the error, the
log line, the incident file and TensorBoard. Nothing here needs a model or a
backend.
"""

from keras_gradguard.findings.data import (
    SEVERITIES,
    Cause,
    Evidence,
    Finding,
    GradientSize,
    Report,
    Scalar,
    Severity,
)
from keras_gradguard.findings.text import render

__all__ = [
    "SEVERITIES",
    "Cause",
    "Evidence",
    "Finding",
    "GradientSize",
    "Report",
    "Scalar",
    "Severity",
    "render",
]
