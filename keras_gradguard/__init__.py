"""True gradients inside Keras training, an honest alarm, the cause and the fix."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keras_gradguard._registration import register_with_keras

if TYPE_CHECKING:
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

# Where each name lives. They are imported when first used: the command line and the TensorBoard
# tab need no TensorFlow, and a script that sets KERAS_BACKEND at its top is not too late.
_HOMES = {
    "errors": (
        "BadContractError",
        "ExplodingGradientError",
        "GradientGuardError",
        "GradientGuardWarning",
        "NonFiniteError",
        "NoneGradientError",
        "VanishingGradientError",
        "ZeroGradientError",
        "ZeroUpdateError",
    ),
    "findings": ("Cause", "Evidence", "Finding", "Report"),
    "guard": ("GradientGuard", "GradientGuardCallback"),
    "layers": (
        "DynamicRepeatDense",
        "GradientProbe",
        "LogitsOutput",
        "StraightThrough",
        "probabilities",
        "with_probabilities",
    ),
    "losses": ("LengthLoss", "PaddedSequenceLoss"),
    "policy": ("Policy",),
    "trying": ("assert_trains",),
    "diagnosis": ("diagnose",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _HOME:
        return getattr(importlib.import_module(f"keras_gradguard.{_HOME[name]}"), name)
    if name in ("layers", "losses", "ops"):
        return importlib.import_module(f"keras_gradguard.{name}")
    if name == "__version__":
        from importlib import metadata

        return metadata.version("keras-gradguard")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


register_with_keras()
