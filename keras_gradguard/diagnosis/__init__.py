"""From a symptom to its cause, its place and the fix."""

from __future__ import annotations

from keras_gradguard.diagnosis.context import Batch, Context, DataStats
from keras_gradguard.diagnosis.diagnose import diagnose
from keras_gradguard.diagnosis.explain import explain
from keras_gradguard.diagnosis.preflight import preflight
from keras_gradguard.records import ActivationStats

__all__ = [
    "ActivationStats",
    "Batch",
    "Context",
    "DataStats",
    "diagnose",
    "explain",
    "preflight",
]
