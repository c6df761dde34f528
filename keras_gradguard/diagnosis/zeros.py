"""From the operation that kills a gradient to a cause, or to a reason why that is healthy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.blame import Culprit
from keras_gradguard.diagnosis.data import zero_input, zero_sample_weight
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.frozen_update import explain_frozen
from keras_gradguard.diagnosis.normalisation import batch_of_one
from keras_gradguard.diagnosis.opgraph import Op, Value
from keras_gradguard.diagnosis.wording import op_words
from keras_gradguard.diagnosis.zero_causes import (
    all_masked,
    embedding_collapse,
    missing_activation,
    one_column_crossentropy,
    weights_zero,
)
from keras_gradguard.diagnosis.zero_source import (
    Sources,
    ZeroSource,
    upstream,
)
from keras_gradguard.diagnosis.zero_units import Units
from keras_gradguard.findings import Cause, Evidence

_IN_LOSS = frozenset({"RealDiv", "AddV2", "Maximum", "Minimum"})


_FOLLOW = blame.PASSES | {
    "Neg", "Sum", "Mean", "AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D", "Prod", "Max", "Min",
    "Square", "Abs", "Sqrt", "SpaceToBatchND", "BatchToSpaceND", "Tanh", "ReverseV2",
}  # fmt: skip


_FIRST = 4  # culprits that are looked at together


SWITCHED_OFF = "it is switched off by a factor of 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one culprit means.

    Args:
        cause: What is wrong, or None.
        healthy: Why nothing is wrong, or None.
        variables: The variables that it concerns.
    """

    cause: Cause | None = None
    healthy: str | None = None
    variables: tuple[str, ...] = ()


class Judge:
    """Judges the culprits of one step.

    Args:
        facts: Measurements with a traced step.
        culprits: What :func:`~keras_gradguard.diagnosis.blame.find_culprits` found.
        streak: Updates in a row with a gradient of 0, as far as known: each was another batch.
    """

    def __init__(self, facts: Facts, culprits: Sequence[Culprit], *, streak: int = 0) -> None:
        self.facts = facts
        self.culprits = culprits
        self.sources = Sources(facts)
        self.ranges = self.sources.ranges
        self.units = Units(facts, self.sources, streak)
        around: list[Value] = []
        for culprit in culprits:
            around += [culprit.value, *culprit.op.inputs, *culprit.op.outputs]
        for culprit in culprits[:_FIRST]:
            if culprit.op.type in blame.PRODUCTS:  # the other factor will be asked about next
                for v in culprit.op.inputs:
                    around += upstream(v)
        self.sources.measure(around)

    def verdicts(self, spent: Callable[[], bool] = lambda: False) -> list[Verdict]:
        """Return one verdict a culprit, in their order.

        Args:
            spent: Whether the time is over. The culprits that are left, which concern the
                fewest variables, get no verdict then.
        """
        found: list[Verdict] = []
        for culprit in self.culprits:
            if found and spent():
                break
            found.append(self._one(culprit))
        return found

    # ---- one culprit ---------------------------------------------------------------

    def _one(self, culprit: Culprit) -> Verdict:
        op = culprit.op
        if op.type in blame.STEPS:
            return self._found(culprit, self._step_op(op))
        if self.sources.is_relu(op):
            return self._found(culprit, self.units.dead(op))
        if op.type in blame.FLAT_ENDS:
            return self._found(culprit, self.units.flat(op))
        if op.type in blame.CLIPS:
            return self._clip(culprit)
        if op.type in blame.PRODUCTS or op.type in ("RealDiv", "DivNoNan", "Xdivy"):
            return self._product(culprit)
        if op.type in blame.CHOICES:
            return self._choice(culprit)
        if op.type in blame.EXTREMA:
            return self._extremum(culprit)
        if op.type.endswith("SoftmaxCrossEntropyWithLogits"):
            return self._crossentropy(culprit)
        if op.type in ("While", "If"):
            return Verdict(variables=culprit.variables)
        return self._cancelled(culprit)

    def _found(self, culprit: Culprit, cause: Cause | None) -> Verdict:
        return Verdict(cause=cause, variables=culprit.variables)

    def _step_op(self, op: Op) -> Cause:
        place = self.units.place(op)
        word = op_words(op).removesuffix("()")
        return Cause(
            name="zero_gradient_op",
            score=0.95,
            where=(place,),
            evidence=(
                Evidence(
                    name="op",
                    value=op.type,
                    text=f"{word} in '{place}' is flat: its derivative is 0 everywhere, whatever "
                    "comes back from the loss",
                ),
            ),
            fix=f"Wrap {word} in keras_gradguard.layers.StraightThrough (value of the step, "
            f"gradient of the identity: x + stop_gradient({word}(x) - x)), or use a smooth "
            "stand-in such as tanh.",
            source=op.source,
        )

    # ---- clips ---------------------------------------------------------------------

    def _clip(self, culprit: Culprit) -> Verdict:
        op = culprit.op
        low, high = self.ranges.get(culprit.value, (float("nan"), float("nan")))
        if blame.is_probability_clip(op):
            maker = blame.through(culprit.value, _IN_LOSS)
            if low < -1e-3 or high > 1 + 1e-3:
                return self._found(culprit, missing_activation(self.facts, low, high, maker))
            return self._found(culprit, self._clipped_loss(op, maker, low, high))
        bound_low, bound_high = blame.clip_bounds(op)
        if not op.layers and self._loss_is_zero():
            return Verdict(
                healthy="every margin of the loss is met: the loss is 0 at its minimum",
                variables=culprit.variables,
            )
        collapse = embedding_collapse(self.facts) if not op.layers else None
        if collapse is not None:
            return self._found(culprit, collapse)
        place = self.units.place(op)
        bounds = [
            f"below {bound_low:.4g}" if bound_low is not None else "",
            f"above {bound_high:.4g}" if bound_high is not None else "",
        ]
        told = " or ".join(b for b in bounds if b) or "past its bound"
        word = {"Maximum": "maximum", "Minimum": "minimum"}.get(op.type, "clip")
        word = op.api or word
        return self._found(
            culprit,
            Cause(
                name="clip_in_forward",
                score=0.93,
                where=(place, *self._behind(culprit.value)),
                evidence=(
                    Evidence(
                        name="clipped_range",
                        value=high if bound_high is not None else low,
                        text=f"{word} in '{place}' cuts values {told}; on this batch they lie "
                        f"between {low:.4g} and {high:.4g}, where its derivative is 0",
                    ),
                ),
                fix="Do not clip what the gradient has to pass: use a loss that is stable without "
                "(BinaryCrossentropy(from_logits=True)), keras_gradguard.ops.safe_log, or scale "
                "the values into the bounds; clip gradients with clipnorm instead.",
                source=op.source,
            ),
        )

    def _behind(self, value: Value) -> tuple[str, ...]:
        view = self.facts.view
        if view is None:
            return ()
        for op in view.ops.producers(value, 200):
            if op.layer:
                return (op.layer,)
        return ()

    def _clipped_loss(self, op: Op, maker: Op | None, low: float, high: float) -> Cause:
        place = self.units.place(maker) if maker is not None else "loss"
        return Cause(
            name="saturated_output_clipped_loss",
            score=0.94,
            where=("loss", place),
            evidence=(
                Evidence(
                    name="output_range",
                    value=high,
                    text=f"the output of '{place}' is saturated ({low:.4g} to {high:.4g}) and the "
                    "loss clips probabilities that close to 0 or 1, which gives a gradient of 0",
                ),
            ),
            fix=f"Let '{place}' give logits (activation=None) and use from_logits=True, or "
            "keras_gradguard.layers.LogitsOutput with its .loss(): then the loss never clips.",
            source=op.source,
        )

    def _loss_is_zero(self) -> bool:
        loss = self.facts.loss
        return loss is not None and abs(loss) < 1e-6

    # ---- products ------------------------------------------------------------------

    def _product(self, culprit: Culprit) -> Verdict:
        op = culprit.op
        others = [v for v in op.inputs if v is not culprit.value and v.is_float]
        if not others and op.type in ("Mul",):
            return self._extremum(culprit)
        zero = [v for v in others if self.ranges.get(v) == (0.0, 0.0)]
        if not zero:
            return self._cancelled(culprit)
        source = self.sources.of(zero[0])
        return self._from_source(culprit, source)

    def _from_source(self, culprit: Culprit, source: ZeroSource) -> Verdict:
        who = culprit.variables
        if source.kind == "variable":
            return self._zero_variable(culprit, source)
        if source.kind == "sample_weight":
            return self._found(culprit, zero_sample_weight(self.facts.data) or weights_zero())
        if source.kind == "input":
            return self._found(culprit, zero_input(self.facts.data))
        if source.kind == "target":
            return Verdict(healthy="the target of this batch is 0 everywhere", variables=who)
        if source.kind == "dead" and source.op is not None:
            return self._found(culprit, self.units.dead(source.op))
        if source.kind == "flat" and source.op is not None:
            return self._found(culprit, self.units.flat(source.op))
        if source.kind == "mask":
            if culprit.op.layers:
                return Verdict(healthy="a mask hides all of it in this batch", variables=who)
            return self._found(culprit, all_masked(culprit.op))
        if source.kind == "choice":
            return Verdict(healthy="nothing was routed to it in this batch", variables=who)
        if source.kind == "random":
            return Verdict(healthy="it was dropped at random in this batch", variables=who)
        if source.kind == "constant":
            return Verdict(healthy=SWITCHED_OFF, variables=who)
        if source.kind == "cancel":
            norm = batch_of_one(self.facts)
            if norm is not None:
                return self._found(culprit, norm)
        return Verdict(variables=who)

    def _zero_variable(self, culprit: Culprit, source: ZeroSource) -> Verdict:
        name = source.name
        variable = self.facts.variables.get(name)
        gradient = self.facts.gradients.get(name)
        if variable is None:
            shape = source.op.outputs[0].shape if source.op is not None else ()
            size = int(np.prod([d or 1 for d in shape or ()]))
            if size <= 1:
                return Verdict(
                    healthy=f"it is switched off: '{name}' is 0", variables=culprit.variables
                )
        if variable is not None and gradient is not None and np.any(gradient):
            pinned = self._pinned(name, variable, gradient)
            if pinned is not None:
                return self._found(culprit, pinned)
            return Verdict(
                healthy=f"'{name}' starts at 0 and has a gradient itself: after its first update "
                "the gradient gets through",
                variables=culprit.variables,
            )
        layers = tuple(dict.fromkeys(n.rsplit("/", 1)[0] for n in (name, *culprit.variables)))
        return self._found(
            culprit,
            Cause(
                name="zero_init",
                score=0.94,
                where=(name, *layers),
                evidence=(
                    Evidence(
                        name="zero_weights",
                        value=0.0,
                        text=f"every value of '{name}' is 0 and so is its own gradient, so what "
                        "goes forward and what comes back through it is 0 and stays 0",
                    ),
                ),
                fix=f"Initialise '{name}' with 'glorot_uniform' or 'he_normal' instead of zeros "
                "(biases may start at 0).",
            ),
        )

    def _pinned(self, name: str, variable: Any, gradient: Any) -> Cause | None:
        optimizer = self.facts.context.optimizer
        if optimizer is None or getattr(variable, "constraint", None) is None:
            return None
        causes = explain_frozen(optimizer, [variable], [gradient], [name])
        return causes[0] if causes else None

    # ---- the rest ------------------------------------------------------------------

    def _choice(self, culprit: Culprit) -> Verdict:
        op = culprit.op
        if op.type.startswith("Select"):
            out = self.ranges.get(op.outputs[0])
            if out == (0.0, 0.0) and op.layers and not self.sources.is_random(op.inputs[0]):
                return self._found(culprit, self._select_cause(op))
            if not op.layers and not self._loss_is_zero():
                return self._found(culprit, self._select_cause(op))
        return Verdict(
            healthy="nothing of it was chosen in this batch", variables=culprit.variables
        )

    def _select_cause(self, op: Op) -> Cause:
        place = self.units.place(op)
        return Cause(
            name="clip_in_forward",
            score=0.75,
            where=(place,),
            evidence=(
                Evidence(
                    name="where",
                    value=0.0,
                    text=f"where() in '{place}' takes the other branch for every entry of this "
                    "batch, so this one gets no gradient",
                ),
            ),
            fix="Check the condition of where(): a branch that is never taken never learns. "
            "Scale its input so that both branches occur, or use a smooth gate (sigmoid).",
            source=op.source,
        )

    def _extremum(self, culprit: Culprit) -> Verdict:
        collapse = embedding_collapse(self.facts)
        if collapse is not None and not self._loss_is_zero():
            return self._found(culprit, collapse)
        return Verdict(
            healthy="the values are exactly at the minimum of the loss",
            variables=culprit.variables,
        )

    def _crossentropy(self, culprit: Culprit) -> Verdict:
        op = culprit.op
        shape = op.inputs[0].shape or ()
        if shape and shape[-1] == 1:
            place = next(iter(self._behind(op.inputs[0])), "output")
            return self._found(culprit, one_column_crossentropy(place, op.source))
        if self._loss_is_zero():
            return Verdict(healthy="the loss is 0 at its minimum", variables=culprit.variables)
        low, high = self.ranges.get(culprit.value, (0.0, 0.0))
        place = next(iter(self._behind(op.inputs[0])), "output")
        return self._found(
            culprit,
            Cause(
                name="saturated_activation",
                score=0.8,
                where=("loss", place),
                evidence=(
                    Evidence(
                        name="logits",
                        value=max(abs(low), abs(high)),
                        text=f"the logits of '{place}' run from {low:.4g} to {high:.4g}: the "
                        "softmax is certain and matches its target to the last bit",
                    ),
                ),
                fix=f"Scale the input or lower the learning rate so that the logits of '{place}' "
                "stay within about +-10.",
            ),
        )

    def _cancelled(self, culprit: Culprit) -> Verdict:
        norm = batch_of_one(self.facts)
        if norm is not None:
            return self._found(culprit, norm)
        collapse = embedding_collapse(self.facts)
        if collapse is not None:
            return self._found(culprit, collapse)
        op = culprit.op
        if op.type in ("Sub", "AddV2", "BiasAdd", "Mean", "Sum", "SquaredDifference"):
            return Verdict(
                healthy="the terms of its gradient cancel: a normalisation or a softmax takes "
                "out what it adds",
                variables=culprit.variables,
            )
        return Verdict(variables=culprit.variables)
