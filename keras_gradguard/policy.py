"""What a run does about each symptom, how patient it is and how often it looks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, get_args

from keras_gradguard.findings import Finding
from keras_gradguard.vocabulary import SYMPTOMS

Action = Literal["raise", "stop", "warn", "record", "ignore"]
ACTIONS: tuple[str, ...] = get_args(Action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do when a symptom is found.

    Every symptom takes one of ``"raise"`` (stop with an error), ``"stop"`` (set
    ``model.stop_training`` and warn), ``"warn"``, ``"record"`` (only in
    ``guard.findings``, the incident file and TensorBoard) or ``"ignore"``. It is the most
    that happens: a finding that only deserves a warning never raises.

    Args:
        none_gradient: The tape returned None. Defaults to ``"raise"``.
        zero_gradient: Gradients are exactly zero. Defaults to ``"raise"``.
        zero_update: Weights do not change. Defaults to ``"raise"``.
        non_finite: NaN or Inf. Defaults to ``"raise"``.
        vanishing: Gradients shrink with depth. Defaults to ``"warn"``.
        exploding: Gradients grow over time. Defaults to ``"raise"`` (only when the loss
            diverges too; a mere jump is a warning).
        bad_contract: Model, loss and data do not fit. Defaults to ``"raise"``.
        patience: Real updates in a row that the whole model's gradient (or an update)
            must be zero. Updates that were not due do not count. Defaults to 5.
        layer_patience: The same for a single layer. Defaults to 8.
        scale_patience: Steps in a row that a loss-scale optimizer may skip before that
            is a finding. Defaults to 50.
        ignore: Variable or layer names, or glob patterns (``"lora/*"``), that are never
            judged. A plain string counts as one pattern. Defaults to ``()``.

    Raises:
        ValueError: An action is unknown or a patience is not a positive integer.
        TypeError: ``ignore`` is not a string or an iterable of strings.

    Example:

    >>> Policy(vanishing="ignore", ignore="head/*").ignored("head/kernel")
    True
    """

    none_gradient: Action = "raise"
    zero_gradient: Action = "raise"
    zero_update: Action = "raise"
    non_finite: Action = "raise"
    vanishing: Action = "warn"
    exploding: Action = "raise"
    bad_contract: Action = "raise"
    patience: int = 5
    layer_patience: int = 8
    scale_patience: int = 50
    ignore: Iterable[str] = ()

    def __post_init__(self) -> None:
        for symptom in SYMPTOMS:
            action = getattr(self, symptom)
            if action not in ACTIONS:
                raise ValueError(
                    f"`{symptom}` must be one of {', '.join(map(repr, ACTIONS))}. "
                    f"Received: {symptom}={action!r}"
                )
        for item in fields(self):
            if item.name.endswith("patience"):
                value = getattr(self, item.name)
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(
                        f"`{item.name}` must be an integer of at least 1 (steps). "
                        f"Received: {item.name}={value!r}"
                    )
        given = (self.ignore,) if isinstance(self.ignore, str) else self.ignore
        patterns = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(p, str) for p in patterns):
            raise TypeError(
                "`ignore` must be a name or glob pattern such as 'dense_1/*', or several of "
                f"them. Received: ignore={self.ignore!r}"
            )
        object.__setattr__(self, "ignore", patterns)

    def ignored(self, *names: str) -> bool:
        """Return True when any of ``names`` (a variable path, its layer) is to be left alone."""
        return any(fnmatch.fnmatchcase(n, p) for n in names for p in self.ignore)

    def action(self, finding: Finding) -> Action:
        """Return what to do about ``finding``: the milder of its severity and the policy.

        Args:
            finding: A finding of any symptom.

        Returns:
            One of ``"raise"``, ``"stop"``, ``"warn"``, ``"record"``, ``"ignore"``.
        """
        wanted: Action = getattr(self, finding.symptom)
        if finding.severity == "info" and wanted != "ignore":
            return "record"
        if finding.severity == "warn" and wanted in ("raise", "stop"):
            return "warn"
        return wanted
