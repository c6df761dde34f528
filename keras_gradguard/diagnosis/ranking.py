"""Which cause comes first: plain rules over the scores that the analyses gave.

Each analysis scores its own cause from 0 to 1: above 0.9 when the numbers leave no other
reading, 0.6 to 0.9 when they fit well, below when they only make it likelier. What is left here
is what no single analysis can know: two names for one thing, and which of two comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from keras_gradguard.diagnosis.wording import unique
from keras_gradguard.findings import Cause

CONFIRMED = 0.72
"""From this score on a cause is taken for proven enough to stop a run."""

MOST_CAUSES = 4

# (reason, consequence): where both are found, the consequence steps behind the reason.
_EXPLAINS = (
    ("double_activation", "saturated_activation"),
    ("double_activation", "saturated_output_clipped_loss"),
    ("missing_activation", "clip_in_forward"),
    ("missing_activation", "saturated_output_clipped_loss"),
    ("softmax_over_one_unit", "saturated_activation"),
    ("softmax_over_one_unit", "wrong_loss_for_labels"),
    ("saturated_discriminator", "saturated_activation"),
    ("nan_input", "input_scale"),
    ("nan_input", "learning_rate_too_high"),
    ("nan_input", "float16_overflow"),
    ("zero_class_weight", "zero_sample_weight"),
    ("zero_sample_weight", "all_masked"),
    ("zero_sample_weight", "wrong_loss_for_labels"),
    ("constraint_projects_update", "zero_init"),
    ("constraint_projects_update", "update_below_precision"),
    ("learning_rate_zero", "update_below_precision"),
    ("batchnorm_batch_one", "embedding_collapse"),
    ("dead_relu", "input_scale"),
    ("dead_relu", "embedding_collapse"),
    ("saturated_activation", "input_scale"),
    ("learning_rate_too_high", "input_scale"),
    ("second_derivative_of_relu", "zero_gradient_op"),
    ("layer_created_in_call", "untracked_variable"),
    ("trainable_flag", "apply_missing"),
    ("python_side_effect_in_graph", "apply_missing"),
    ("recurrent_explosion", "learning_rate_too_high"),
    ("loss_arguments_swapped", "non_differentiable_op"),
)


# A step is too large for its rate or for the data alike: one run cannot tell, so both are named.
_TOGETHER = ("learning_rate_too_high", "input_scale")

# What a run has once, wherever it shows.
_ONCE = frozenset({"learning_rate_too_high"})


def merged(causes: Iterable[Cause]) -> list[Cause]:
    """Keep the best of the causes with the same name and place."""
    kept: dict[tuple[str, str], Cause] = {}
    for cause in sorted(causes, key=lambda c: -c.score):
        place = "" if cause.name in _ONCE or not cause.where else cause.where[0]
        key = (cause.name, place)
        if key not in kept:
            kept[key] = cause
    return list(kept.values())


def ranked(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Order causes: by score, a reason before its consequence, the weak ones left out.

    Args:
        causes: What the analyses found.

    Returns:
        At most four; two that the evidence cannot tell apart both stay.

    Example:
    >>> from keras_gradguard.findings import Cause
    >>> both = [Cause(name="input_scale", score=0.9), Cause(name="dead_relu", score=0.8)]
    >>> [c.name for c in ranked(both)]
    ['dead_relu', 'input_scale']
    """
    found = merged(causes)
    best: dict[str, float] = {}
    for cause in found:
        best[cause.name] = max(best.get(cause.name, 0.0), cause.score)
    for reason, consequence in _EXPLAINS:
        if best.get(reason, 0.0) < 0.6 or consequence not in best:
            continue
        limit = best[reason] - 0.05
        found = [
            dataclasses.replace(c, score=min(c.score, limit)) if c.name == consequence else c
            for c in found
        ]
    found.sort(key=lambda c: -c.score)
    names: dict[str, int] = {}
    kept = []
    for cause in found:
        names[cause.name] = names.get(cause.name, 0) + 1
        if cause.score >= 0.3 and names[cause.name] <= 2:
            kept.append(cause)
    return tuple(_placed(kept[:MOST_CAUSES]))


def _placed(causes: list[Cause]) -> list[Cause]:
    """Let the first of two causes that belong together name the place of the other as well."""
    pair = [c for c in causes if c.name in _TOGETHER]
    if len(pair) < 2 or pair[0] is not causes[0]:
        return causes
    first, second = pair[:2]
    first = dataclasses.replace(first, where=unique(first.where, second.where))
    return [first, *causes[1:]]


def confirmed(causes: Sequence[Cause]) -> bool:
    """Return True when the best cause is proven enough to stop a run."""
    return bool(causes) and max(c.score for c in causes) >= CONFIRMED
