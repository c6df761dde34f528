"""Units that hand no gradient back: a ReLU that is off, a sigmoid at its flat end."""

from __future__ import annotations

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.data import input_scale
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import Op
from keras_gradguard.diagnosis.zero_causes import (
    ENOUGH_EXAMPLES,
    logits_loss,
    names_in,
    one_unit_softmax,
)
from keras_gradguard.diagnosis.zero_source import Sources
from keras_gradguard.findings import Cause, Evidence


class Units:
    """Says what is the matter with an activation, from the values around it.

    Args:
        facts: Measurements with a traced step.
        sources: What was measured around the culprits, and can measure more.
        streak: Updates in a row with a gradient of 0, as far as known: each was another batch.
    """

    def __init__(self, facts: Facts, sources: Sources, streak: int = 0) -> None:
        self.facts = facts
        self.sources = sources
        self.streak = streak

    def place(self, op: Op) -> str:
        """Return where an operation stands: a layer, or the loss."""
        view = self.facts.view
        return view.place(op) if view is not None else (op.layer or "loss")

    def dead(self, op: Op) -> Cause:
        """Return the cause for a ReLU that is off for every example of the batch."""
        if self.sources.ranges.get(op.inputs[0]) == (0.0, 0.0):
            # It is only starved: what comes to it is 0 already.
            source = self.sources.of(op.inputs[0])
            if source.kind == "dead" and source.op is not None and source.op is not op:
                op = source.op
        place = self.place(op)
        output = blame.is_output(op, self.facts)
        shape = op.outputs[0].shape or ()
        units = shape[-1] if shape and shape[-1] else 1
        examples = self.examples()
        low, high = self.sources.ranges.get(op.inputs[0], (float("nan"), float("nan")))
        everywhere = high <= 0
        evidence = [
            Evidence(
                name="dead_fraction",
                value=1.0 if everywhere else float("nan"),
                text=f"{units} of {units} units of '{place}' are off (output 0) for "
                + (f"all {examples} examples" if examples > 1 else "the example")
                + f" looked at; before the ReLU they lie between {low:.4g} and {high:.4g}"
                if everywhere
                else f"wherever a gradient arrives at '{place}' its ReLU is off",
            )
        ]
        if output:
            return Cause(
                name="dead_relu_output",
                score=self._sure(0.95),
                where=(place,),
                evidence=tuple(evidence),
                fix=f"Take the relu off the output '{place}': use no activation for regression "
                "(softplus where the result must be positive), sigmoid or softmax for classes.",
                source=op.source,
            )
        scale = input_scale(self.facts.data)
        cure = "Lower the learning rate, use larger batches or He initialisation"
        if scale is not None:
            evidence += list(scale.evidence)
            cure = f"{scale.fix} Then lower the learning rate"
        return Cause(
            name="dead_relu",
            score=self._sure(0.93 if everywhere else 0.8),
            where=(place,),
            evidence=tuple(evidence),
            fix=f"{cure}; leaky_relu or gelu in '{place}' cannot die this way. Units that are "
            "dead stay dead: start again from fresh weights.",
            source=op.source,
        )

    def _sure(self, score: float) -> float:
        """Lower a score when one or a few examples are all that was ever seen."""
        few = max(self.examples(), self.streak) < ENOUGH_EXAMPLES
        return 0.6 if few and self.streak < 5 else score

    def examples(self) -> int:
        """Return how many examples the traced batch has."""
        trace = self.facts.trace
        if trace is None or not trace.feeds:
            return 0
        rank = trace.feeds[0][0].shape.rank
        return int(trace.feeds[0][0].shape[0] or 0) if rank else 0

    def flat(self, op: Op) -> Cause:
        """Return the cause for a sigmoid, tanh, softmax... at its flat ends."""
        place = self.place(op)
        kind = op.type.lower()
        shape = op.outputs[0].shape or ()
        if op.type in ("Softmax", "LogSoftmax") and shape and shape[-1] == 1:
            return one_unit_softmax(place, op.source)
        low, high = self.sources.ranges.get(op.inputs[0], (float("nan"), float("nan")))
        out = self.sources.ranges.get(op.outputs[0], (float("nan"), float("nan")))
        seen = Evidence(
            name="saturation",
            value=max(abs(low), abs(high)),
            text=f"the {kind} of '{place}' gets values from {low:.4g} to {high:.4g} and gives "
            f"{out[0]:.4g} to {out[1]:.4g}: there its derivative is 0",
        )
        if self.facts.is_partner(op.layer):
            partner = next(
                (p.name for p in self.facts.context.partners if op.layer in names_in(p)), place
            )
            mine = self.facts.context.model.name
            return Cause(
                name="saturated_discriminator",
                score=0.94,
                where=(place, partner, mine),
                evidence=(seen,),
                fix=f"'{partner}' is certain, so '{mine}' gets no gradient. Let '{partner}' give "
                "logits (no sigmoid on its output) with BinaryCrossentropy(from_logits=True), or "
                "use a non-saturating or Wasserstein loss; train it less, and scale real data to "
                f"the range of '{mine}'.",
                source=op.source,
            )
        evidence = [seen]
        scale = input_scale(self.facts.data)
        cure = (
            f"Put BatchNormalization or LayerNormalization before the {kind}, or use smaller "
            "initial weights and a lower learning rate."
        )
        if scale is not None:
            evidence += list(scale.evidence)
            cure = scale.fix
        output = blame.is_output(op, self.facts)
        if output and op.type in ("Sigmoid", "Softmax"):
            cure = (
                f"Leave the {kind} out of '{place}' and train on logits: "
                f"{logits_loss(op)}, or keras_gradguard.layers.LogitsOutput. " + cure
            )
        return Cause(
            name="saturated_activation",
            score=self._sure(0.92),
            where=(place,),
            evidence=tuple(evidence),
            fix=cure,
            source=op.source,
        )
