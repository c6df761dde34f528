"""True gradients inside Keras training, an honest alarm, the cause and the fix."""

from __future__ import annotations

from keras_gradguard import layers, losses, ops
from keras_gradguard.diagnosis import diagnose
from keras_gradguard.errors import (
    BadContractError,
    ExplodingGradientError,
    GradientGuardError,
    GradientGuardWarning,
    NoneGradientError,
    NonFiniteError,
    VanishingGradientError,
    ZeroGradientError,
    ZeroUpdateError,
)
from keras_gradguard.findings import Cause, Evidence, Finding, Report
from keras_gradguard.guard import GradientGuard, GradientGuardCallback
from keras_gradguard.layers import (
    DynamicRepeatDense,
    GradientProbe,
    LogitsOutput,
    StraightThrough,
    probabilities,
    with_probabilities,
)
from keras_gradguard.losses import LengthLoss, PaddedSequenceLoss
from keras_gradguard.policy import Policy
from keras_gradguard.trying import assert_trains

__all__ = [
    "BadContractError",
    "Cause",
    "DynamicRepeatDense",
    "Evidence",
    "ExplodingGradientError",
    "Finding",
    "GradientGuard",
    "GradientGuardCallback",
    "GradientGuardError",
    "GradientGuardWarning",
    "GradientProbe",
    "LengthLoss",
    "LogitsOutput",
    "NonFiniteError",
    "NoneGradientError",
    "PaddedSequenceLoss",
    "Policy",
    "Report",
    "StraightThrough",
    "VanishingGradientError",
    "ZeroGradientError",
    "ZeroUpdateError",
    "assert_trains",
    "diagnose",
    "layers",
    "losses",
    "ops",
    "probabilities",
    "with_probabilities",
]


def __getattr__(name: str) -> str:
    """Return the installed version as ``__version__``, looked up only when asked for."""
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("keras-gradguard")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
