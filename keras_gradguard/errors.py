"""Errors and the warning that carry a finding; one error class a symptom."""

from __future__ import annotations

from keras_gradguard.findings import Finding


class GradientGuardError(RuntimeError):
    """Training was stopped because of a finding.

    Args:
        finding: What was found. Taken positionally, so that the error pickles.

    Example:

    >>> from keras_gradguard.findings import Finding
    >>> error = error_for(Finding(symptom="non_finite", summary="The loss is NaN."))
    >>> type(error).__name__, error.finding.symptom
    ('NonFiniteError', 'non_finite')
    """

    # Autograph replaces an exception it does not know by a StagingError, which would
    # lose the class and the finding; this attribute makes it pass the error on as it is.
    ag_pass_through = True
    # Keras adds a layer's arguments to an error by making a new one from its text, which would
    # lose the finding; this attribute says that it has done so already.
    _keras_call_info_injected = True

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding

    def __str__(self) -> str:
        return "\n" + self.finding.message


class NoneGradientError(GradientGuardError):
    """The tape returned None for trainable variables."""


class ZeroGradientError(GradientGuardError):
    """Gradients of the model or of a layer are exactly zero."""


class ZeroUpdateError(GradientGuardError):
    """The gradient is there, but the weights do not change."""


class NonFiniteError(GradientGuardError):
    """A gradient, a weight or the loss is NaN or Inf."""


class VanishingGradientError(GradientGuardError):
    """The gradient vanishes with depth."""


class ExplodingGradientError(GradientGuardError):
    """The gradient explodes over time or depth."""


class BadContractError(GradientGuardError):
    """Model, loss, labels and data do not fit together."""


class GradientGuardWarning(UserWarning):
    """A finding that did not stop training. ``warning.finding`` holds it."""

    def __init__(self, finding: Finding | str) -> None:
        super().__init__(finding)
        self.finding = finding if isinstance(finding, Finding) else None

    def __str__(self) -> str:
        return self.finding.message if self.finding is not None else str(self.args[0])


_BY_SYMPTOM: dict[str, type[GradientGuardError]] = {
    "none_gradient": NoneGradientError,
    "zero_gradient": ZeroGradientError,
    "zero_update": ZeroUpdateError,
    "non_finite": NonFiniteError,
    "vanishing": VanishingGradientError,
    "exploding": ExplodingGradientError,
    "bad_contract": BadContractError,
}


def error_for(finding: Finding) -> GradientGuardError:
    """Return the error of the finding's symptom, not raised.

    Args:
        finding: What was found.

    Returns:
        An instance of the symptom's subclass of :class:`GradientGuardError`.
    """
    return _BY_SYMPTOM[finding.symptom](finding)
