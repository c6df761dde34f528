"""Rules: pure functions from a recorded history to findings. No model, no backend."""

from __future__ import annotations

from keras_gradguard.findings import Finding
from keras_gradguard.policy import Policy
from keras_gradguard.recorder import History
from keras_gradguard.rules.disconnected import none_gradient
from keras_gradguard.rules.finite import non_finite
from keras_gradguard.rules.first_look import ordinary, unremarkable
from keras_gradguard.rules.scale import exploding, vanishing
from keras_gradguard.rules.update import zero_update
from keras_gradguard.rules.zero import zero_gradient

__all__ = ["judge", "none_gradient", "ordinary", "suspicious"]

_RULES = (non_finite, exploding, zero_update, zero_gradient, vanishing)


def judge(history: History, policy: Policy) -> tuple[Finding, ...]:
    """Apply every rule to the rows that were not judged before.

    Args:
        history: What was recorded.
        policy: Patience and what to leave alone.

    Returns:
        Findings, the one that became certain first at the front.
    """
    if not history.new:
        return ()
    rules = (vanishing,) if unremarkable(history) else _RULES
    found = [f for rule in rules for f in rule(history, policy)]
    # Stable: of findings certain at the same step the earlier rule's stands first.
    return tuple(sorted(found, key=lambda f: f.step if f.step is not None else -1))


def suspicious(history: History) -> bool:
    """Return True when the last sample shows a lost update, so that each step deserves a look."""
    if not history.samples:
        return False
    last = history.samples[-1]
    if not (last.update == 0).any():
        return False
    rows = history.step == last.step
    if not rows.any() or not history.due[rows][0]:
        return False
    norm = history.norm[rows][0]
    with_gradient = (norm > 0) & (last.update == 0)
    return bool(with_gradient.any())
