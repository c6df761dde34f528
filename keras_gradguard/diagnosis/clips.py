"""Probabilities in a loss: clipped, or divided by their own sum."""

from __future__ import annotations

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import Op


def probability_clips(facts: Facts) -> list[Op]:
    """Return the clips to just inside [0, 1] that outputs of the model go through."""
    view = facts.view
    if view is None or not facts.outputs:
        return []
    after = view.ops.descendants(facts.outputs)
    return [
        op
        for op in view.ops.ops
        if op.type in blame.CLIPS
        and any(v in after for v in op.inputs)
        and any(o in facts.reach for o in op.outputs)
        and blame.is_probability_clip(op)
    ]


def divides_by_own_sum(op: Op) -> bool:
    """Return True for a division by the sum over the same values, as a softmax by hand ends."""
    if op.type != "RealDiv":
        return False
    under = op.inputs[1].op
    return under is not None and under.type == "Sum" and under.inputs[0] is op.inputs[0]
