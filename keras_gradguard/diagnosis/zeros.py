"""From the operation that kills a gradient to a cause, or to a reason why that is healthy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.blame import Culprit
from keras_gradguard.diagnosis.data import input_scale, zero_input, zero_sample_weight
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import READ_OPS, Op, Value
from keras_gradguard.diagnosis.optimizer import explain_frozen
from keras_gradguard.diagnosis.wording import op_words
from keras_gradguard.findings import Cause, Evidence

ENOUGH_EXAMPLES = 8
_IN_LOSS = frozenset({"RealDiv", "AddV2", "Maximum", "Minimum"})
_FOLLOW = blame.PASSES | {
    "Neg", "Sum", "Mean", "AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D", "Prod", "Max", "Min",
    "Square", "Abs", "Sqrt", "SpaceToBatchND", "BatchToSpaceND", "Tanh", "ReverseV2",
}  # fmt: skip
_MOST_UPSTREAM = 600
SWITCHED_OFF = "it is switched off by a factor of 0"
_SLICES = frozenset({"StridedSlice", "Slice", "GatherV2", "GatherNd", "Split", "SplitV", "Unpack"})
# Far above the smallest float16 number: a smaller product may be 0 by underflow.
_NOT_UNDERFLOW = 1e-3
_CHOOSERS = blame.CHOICES | {
    "OneHot", "TopKV2", "ScatterNd", "TensorScatterUpdate", "Where", "ArgMax", "Floor", "Round",
    "Sign", "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "LogicalAnd",
    "LogicalOr", "LogicalNot", "SequenceMask", "MatrixBandPart", "TensorListStack",
    "TensorListGetItem",
}  # fmt: skip


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSource:
    """Where a value that is 0 everywhere comes from."""

    kind: str  # "variable", "input", "sample_weight", "target", "constant", "mask", "choice",
    # "random", "dead", "flat", "cancel", "unknown"
    op: Op | None = None
    name: str = ""


def _upstream(value: Value) -> list[Value]:
    """Return the values that ``value`` is computed from, nearest first, so far as they matter."""
    found: list[Value] = []
    seen = {value}
    level = [value]
    while level and len(found) < _MOST_UPSTREAM:
        before = [v for u in level if u.op is not None for v in u.op.inputs if v.is_float]
        level = [v for v in dict.fromkeys(before) if v not in seen]
        seen.update(level)
        found += level
    return found[:_MOST_UPSTREAM]


class Judge:
    """Judges the culprits of one step.

    Args:
        facts: Measurements with a traced step.
        culprits: What :func:`~keras_gradguard.diagnosis.blame.find_culprits` found.
        streak: Updates in a row with a gradient of 0, as far as known: each was another batch.
    """

    def __init__(self, facts: Facts, culprits: Sequence[Culprit], *, streak: int = 0) -> None:
        self.facts = facts
        self.streak = streak
        self.culprits = culprits
        self.ranges: dict[Value, tuple[float, float]] = {}
        around: list[Value] = []
        for culprit in culprits:
            around += [culprit.value, *culprit.op.inputs, *culprit.op.outputs]
        self._measure(around)

    def _measure(self, values: Sequence[Value]) -> None:
        new = [v for v in values if v not in self.ranges]
        self.ranges.update(blame.activity(self.facts, new))

    def verdicts(self) -> list[Verdict]:
        """Return one verdict a culprit, in their order."""
        return [self._one(c) for c in self.culprits]

    # ---- one culprit ---------------------------------------------------------------

    def _one(self, culprit: Culprit) -> Verdict:
        op = culprit.op
        if op.type in blame.STEPS:
            return self._found(culprit, self._step_op(op))
        if self._is_relu(op):
            return self._found(culprit, self.dead(op))
        if op.type in blame.FLAT_ENDS:
            return self._found(culprit, self.flat(op))
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

    def _place(self, op: Op) -> str:
        view = self.facts.view
        return view.place(op) if view is not None else (op.layer or "loss")

    def _is_relu(self, op: Op) -> bool:
        if op.type == "Relu":
            return True
        if op.type == "LeakyRelu":
            return abs(float(op.attrs.get("alpha", 0.2))) < 1e-6
        if op.type == "Relu6":
            out = self.ranges.get(op.outputs[0], (1.0, 1.0))
            return out == (0.0, 0.0) and not self._named(op, "hard_")
        if op.type == "Maximum" and op.layers:
            return blame.clip_bounds(op)[0] == 0.0
        return False

    def _named(self, op: Op, part: str) -> bool:
        layer = self.facts.layer(op.layer) if op.layer else None
        activation = getattr(layer, "activation", None)
        return part in str(getattr(activation, "__name__", activation or ""))

    def _step_op(self, op: Op) -> Cause:
        place = self._place(op)
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

    def dead(self, op: Op) -> Cause:
        """Return the cause for a ReLU that is off for every example of the batch."""
        if self.ranges.get(op.inputs[0]) == (0.0, 0.0):
            # It is only starved: what comes to it is 0 already.
            source = self.zero_source(op.inputs[0])
            if source.kind == "dead" and source.op is not None and source.op is not op:
                op = source.op
        place = self._place(op)
        output = blame.is_output(op, self.facts)
        shape = op.outputs[0].shape or ()
        units = shape[-1] if shape and shape[-1] else 1
        examples = self.examples()
        low, high = self.ranges.get(op.inputs[0], (float("nan"), float("nan")))
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
        place = self._place(op)
        kind = op.type.lower()
        shape = op.outputs[0].shape or ()
        if op.type in ("Softmax", "LogSoftmax") and shape and shape[-1] == 1:
            return one_unit_softmax(place, op.source)
        low, high = self.ranges.get(op.inputs[0], (float("nan"), float("nan")))
        out = self.ranges.get(op.outputs[0], (float("nan"), float("nan")))
        seen = Evidence(
            name="saturation",
            value=max(abs(low), abs(high)),
            text=f"the {kind} of '{place}' gets values from {low:.4g} to {high:.4g} and gives "
            f"{out[0]:.4g} to {out[1]:.4g}: there its derivative is 0",
        )
        if self.facts.is_partner(op.layer):
            partner = next(
                (p.name for p in self.facts.context.partners if op.layer in _names_in(p)), place
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
                f"{_logits_loss(op)}, or keras_gradguard.layers.LogitsOutput. " + cure
            )
        return Cause(
            name="saturated_activation",
            score=self._sure(0.92),
            where=(place,),
            evidence=tuple(evidence),
            fix=cure,
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
        place = self._place(op)
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
        place = self._place(maker) if maker is not None else "loss"
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
        source = self.zero_source(zero[0])
        return self._from_source(culprit, source)

    def zero_source(self, value: Value) -> ZeroSource:
        """Walk back from a value that is 0 everywhere to where the zeros come from."""
        self._measure(_upstream(value))  # all in one run: a run costs more than what it measures
        for _ in range(60):
            op = value.op
            if op is None:
                return self._fed(value)
            if op.type in READ_OPS:
                return self._variable(op)
            if op.type == "Const":
                return ZeroSource(kind="constant", op=op)
            if "Random" in op.type:
                return ZeroSource(kind="random", op=op)
            self._measure(op.inputs)
            floats = [v for v in op.inputs if v.is_float]
            zero = [v for v in floats if self.ranges.get(v) == (0.0, 0.0)]
            if op.type == "Cast" and not floats:
                return self._mask(op)
            if self._is_relu(op) and not zero:
                return ZeroSource(kind="dead", op=op)
            if op.type in blame.FLAT_ENDS and not zero:
                return ZeroSource(kind="flat", op=op)
            if op.type in _CHOOSERS:
                # where(a, zeros, zeros) is 0 because of what it chooses from, not by the choice.
                both = [v for v in zero if v.op is None or v.op.type != "Const"]
                if not op.type.startswith("Select") or len(zero) < 2 or not both:
                    return self._chooser(op)
                value = both[0]
                continue
            if not floats:
                return ZeroSource(kind="unknown", op=op)
            if op.type in _SLICES and not zero:
                # The part that was taken is 0, the whole is not: what was chosen lies elsewhere.
                return self._chooser(op)
            if op.type in blame.PRODUCTS and not zero:
                if self._excluding(op):
                    return self._chooser(op)
                return ZeroSource(kind="unknown", op=op)
            if op.type in ("Sub", "AddV2", "BiasAdd", "AddN", "RealDiv") and not zero:
                return ZeroSource(kind="cancel", op=op)
            fed = [v for v in (zero or floats) if v.op is None or v.op.type != "Const"]
            value = (fed or zero or floats)[0]
        return ZeroSource(kind="unknown")

    def _fed(self, value: Value) -> ZeroSource:
        import tensorflow as tf

        trace = self.facts.trace
        if trace is not None:
            for kind, part in (
                ("input", trace.x), ("target", trace.y), ("sample_weight", trace.sample_weight)
            ):  # fmt: skip
                if any(trace.value(t) is value for t in tf.nest.flatten(part) if tf.is_tensor(t)):
                    return ZeroSource(kind=kind)
        return ZeroSource(kind="unknown")

    def _mask(self, op: Op) -> ZeroSource:
        """Tell a weight or a mask that was fed from one that was computed."""
        value = op.inputs[0]
        while value.op is not None and value.op.type in blame.PASSES and value.op.inputs:
            value = value.op.inputs[0]
        if value.op is None:
            fed = self._fed(value)
            return fed if fed.kind != "unknown" else ZeroSource(kind="mask", op=op)
        if self._is_random(value):
            return ZeroSource(kind="random", op=op)
        return ZeroSource(kind="mask", op=op)

    def _excluding(self, op: Op) -> bool:
        """Return True for a product that is 0 although neither factor is small: a mask at work."""
        tops = [max(map(abs, self.ranges.get(v, (0.0, 0.0)))) for v in op.inputs if v.is_float]
        return op.type == "Mul" and len(tops) == 2 and tops[0] * tops[1] > _NOT_UNDERFLOW

    def _chooser(self, op: Op) -> ZeroSource:
        if any(self._is_random(v) for v in op.inputs):
            return ZeroSource(kind="random", op=op)
        return ZeroSource(kind="choice", op=op)

    def _is_random(self, value: Value) -> bool:
        view = self.facts.view
        if view is None:
            return False
        return any("Random" in op.type for op in view.ops.producers(value, 40))

    def _variable(self, op: Op) -> ZeroSource:
        view = self.facts.view
        if view is not None:
            for key, handles in view.ops.variables.items():
                if any(op in h.uses for h in handles):
                    return ZeroSource(kind="variable", op=op, name=view.names.get(key, ""))
        return ZeroSource(kind="variable", op=op)

    def _from_source(self, culprit: Culprit, source: ZeroSource) -> Verdict:
        who = culprit.variables
        if source.kind == "variable":
            return self._zero_variable(culprit, source)
        if source.kind == "sample_weight":
            return self._found(culprit, zero_sample_weight(self.facts.data) or _weights_zero())
        if source.kind == "input":
            return self._found(culprit, zero_input(self.facts.data))
        if source.kind == "target":
            return Verdict(healthy="the target of this batch is 0 everywhere", variables=who)
        if source.kind == "dead" and source.op is not None:
            return self._found(culprit, self.dead(source.op))
        if source.kind == "flat" and source.op is not None:
            return self._found(culprit, self.flat(source.op))
        if source.kind == "mask":
            if culprit.op.layers:
                return Verdict(healthy="a mask hides all of it in this batch", variables=who)
            return self._found(culprit, _all_masked(culprit.op))
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
            if out == (0.0, 0.0) and op.layers and not self._is_random(op.inputs[0]):
                return self._found(culprit, self._select_cause(op))
            if not op.layers and not self._loss_is_zero():
                return self._found(culprit, self._select_cause(op))
        return Verdict(
            healthy="nothing of it was chosen in this batch", variables=culprit.variables
        )

    def _select_cause(self, op: Op) -> Cause:
        place = self._place(op)
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


# ---- causes that several analyses name ---------------------------------------------


def _names_in(model: Any) -> set[str]:
    from keras_gradguard.diagnosis.sandbox import all_layers

    return {la.name for la in all_layers(model)}


def _logits_loss(op: Op) -> str:
    if op.type == "Softmax":
        return "SparseCategoricalCrossentropy(from_logits=True)"
    return "BinaryCrossentropy(from_logits=True)"


def _weights_zero() -> Cause:
    return Cause(
        name="zero_sample_weight",
        score=0.9,
        where=("loss", "sample_weight"),
        evidence=(Evidence(name="weight_sum", value=0.0, text="every weight of the loss is 0"),),
        fix="Check how the weights are built: print(sample_weight.sum()) per batch.",
    )


def _all_masked(op: Op) -> Cause:
    return Cause(
        name="all_masked",
        score=0.92,
        where=("loss", "data"),
        evidence=(
            Evidence(
                name="masked_fraction",
                value=1.0,
                text="the mask of the loss is 0 for every position of this batch",
            ),
        ),
        fix="Check `mask_value` (Masking) or the padding value (Embedding(mask_zero=True) takes 0 "
        "for padding, so real tokens must count from 1), and that the mask is not turned round.",
        source=op.source,
    )


def one_unit_softmax(place: str, source: str | None = None) -> Cause:
    """Return the cause ``softmax_over_one_unit``."""
    return Cause(
        name="softmax_over_one_unit",
        score=0.98,
        where=(place,),
        evidence=(
            Evidence(
                name="units",
                value=1,
                text=f"the softmax of '{place}' runs over an axis of size 1, so its output is 1 "
                "for every input and its derivative is 0",
            ),
        ),
        fix=f"For two classes give '{place}' one unit with sigmoid and use binary_crossentropy, or "
        "two units with softmax and sparse_categorical_crossentropy.",
        source=source,
    )


def one_column_crossentropy(place: str, source: str | None = None) -> Cause:
    """Return the cause ``wrong_loss_for_labels`` for a categorical loss on one column."""
    return Cause(
        name="wrong_loss_for_labels",
        score=0.96,
        where=("loss", place),
        evidence=(
            Evidence(
                name="columns",
                value=1,
                text=f"a categorical cross-entropy compares classes along the last axis, and the "
                f"output of '{place}' has a single column: the loss is 0 whatever the model says",
            ),
        ),
        fix=f"With one unit in '{place}' use binary_crossentropy (and sigmoid); for a categorical "
        "loss give it one unit per class and one-hot labels.",
        source=source,
    )


def missing_activation(facts: Facts, low: float, high: float, maker: Op | None = None) -> Cause:
    """Return the cause ``missing_activation``: raw outputs in a loss on probabilities."""
    place = maker.layer if maker is not None and maker.layer else None
    if place is None:
        view = facts.view
        outputs = facts.outputs
        if view is not None and outputs:
            place = next((o.layer for o in view.ops.producers(outputs[0], 50) if o.layer), None)
    place = place or "output"
    return Cause(
        name="missing_activation",
        score=0.95,
        where=("loss", place),
        evidence=(
            Evidence(
                name="output_range",
                value=high if high > 1 else low,
                text=f"the loss expects probabilities, but the output of '{place}' runs from "
                f"{low:.4g} to {high:.4g}; outside [0, 1] the loss clips and its gradient is 0",
            ),
        ),
        fix=f"Say that '{place}' gives logits: BinaryCrossentropy(from_logits=True) (or the "
        f"categorical one), or give '{place}' activation='sigmoid' (one unit) or 'softmax'; "
        "keras_gradguard.layers.LogitsOutput keeps the two together.",
    )


def batch_of_one(facts: Facts) -> Cause | None:
    """Return ``batchnorm_batch_one`` when a normalisation averages over a single value."""
    trace = facts.trace
    if trace is None:
        return None
    size = facts.context.batch.size if facts.context.batch is not None else None
    for call in trace.layers:
        kind = type(call.layer).__name__
        if kind not in ("BatchNormalization", "LayerNormalization", "GroupNormalization"):
            continue
        if not call.inputs or call.inputs[0].shape.rank is None:
            continue
        shape = call.inputs[0].shape.as_list()
        if kind == "BatchNormalization" and not call.layer.trainable:
            continue
        count = _averaged(call.layer, kind, shape, size)
        if count == 1:
            return _norm_cause(call.name, kind, shape)
    return None


def _averaged(layer: Any, kind: str, shape: list[Any], size: int | None) -> int | None:
    if kind == "GroupNormalization":
        channels = shape[layer.axis]
        if channels is None or not layer.groups or layer.groups < 1:
            return None
        rest = [d for i, d in enumerate(shape) if i not in (0, layer.axis % len(shape))]
        per = channels // max(layer.groups, 1)
        return None if None in rest else per * int(np.prod(rest, dtype=int))
    axis = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    axes = {a % len(shape) for a in axis}
    over = [d for i, d in enumerate(shape) if (i in axes) == (kind == "LayerNormalization")]
    if kind == "BatchNormalization" and size is not None and over:
        over[0] = size
    return None if None in over else int(np.prod(over, dtype=int))


def _norm_cause(name: str, kind: str, shape: list[Any]) -> Cause:
    batch = kind == "BatchNormalization"
    what = (
        f"'{name}' averages over a batch of {shape[0]}: one value per channel"
        if batch
        else f"'{name}' averages over a single feature"
    )
    return Cause(
        name="batchnorm_batch_one",
        score=0.96,
        where=(name,),
        evidence=(
            Evidence(
                name="values_averaged",
                value=1,
                text=f"{what}, so value minus mean is 0 and the output is constant",
            ),
        ),
        fix=f"Use a larger batch_size, or LayerNormalization (GroupNormalization for images) "
        f"instead of '{name}'."
        if batch
        else f"Normalise over more than one value, or leave '{name}' out.",
    )


def embedding_collapse(facts: Facts) -> Cause | None:
    """Return ``embedding_collapse`` when an output is one vector for all examples."""
    trace = facts.trace
    if trace is None or not facts.outputs:
        return None
    from keras_gradguard.diagnosis.activations import constant_outputs
    from keras_gradguard.diagnosis.contract import compared_directly

    hit = constant_outputs(facts)
    if hit is None or compared_directly(facts):
        return None
    name, units, examples = hit
    return Cause(
        name="embedding_collapse",
        score=0.9,
        where=(name, "loss"),
        evidence=(
            Evidence(
                name="distinct_embeddings",
                value=1,
                text=f"'{name}' gives one and the same vector of {units} numbers for all "
                f"{examples} examples: every distance is 0 and the loss sits at its margin",
            ),
        ),
        fix="Lower the learning rate, normalise the embeddings (keras.layers.UnitNormalization), "
        "mine semi-hard instead of the hardest negatives, and make sure that batches hold "
        "several classes.",
    )
