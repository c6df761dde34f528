"""Layers that do not break gradients."""

from __future__ import annotations

from keras_gradguard.layers.contract import logits_mismatch
from keras_gradguard.layers.dynamic_repeat_dense import DynamicRepeatDense
from keras_gradguard.layers.gradient_probe import GradientProbe, find_probes
from keras_gradguard.layers.logits_output import LogitsOutput
from keras_gradguard.layers.serving import (
    Probabilities,
    probabilities,
    with_probabilities,
)
from keras_gradguard.layers.straight_through import StraightThrough

__all__ = [
    "DynamicRepeatDense",
    "GradientProbe",
    "LogitsOutput",
    "Probabilities",
    "StraightThrough",
    "find_probes",
    "logits_mismatch",
    "probabilities",
    "with_probabilities",
]
