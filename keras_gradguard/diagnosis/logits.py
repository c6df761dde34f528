"""Where logits enter a loss, and what squashed them before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.clips import probability_clips
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import Op, Value
from keras_gradguard.findings import Cause, Evidence

_SCALED = frozenset({"Mul", "RealDiv", "Neg"})


@dataclass(frozen=True, slots=True, eq=False)
class LogitSite:
    """A place that takes logits: where a sigmoid or softmax is (about to be) applied.

    Args:
        op: The operation.
        logits: The value it takes as logits.
        name: How a user would call it.
    """

    op: Op
    logits: Value
    name: str


def logit_sites(ops: Iterable[Op]) -> list[LogitSite]:
    """Find every operation that applies a sigmoid or softmax, explicitly or inside a loss."""
    found = []
    for op in ops:
        if not op.inputs:
            continue
        if op.type == "SparseSoftmaxCrossEntropyWithLogits":
            found.append(LogitSite(op, op.inputs[0], "sparse softmax cross-entropy (logits)"))
        elif op.type == "SoftmaxCrossEntropyWithLogits":
            found.append(LogitSite(op, op.inputs[0], "softmax cross-entropy (logits)"))
        elif op.type in ("LogSoftmax", "Softmax", "Sigmoid"):
            found.append(LogitSite(op, op.inputs[0], op.type.lower()))
        elif op.type == "Softplus":
            found.append(LogitSite(op, op.inputs[0], "softplus (sigmoid cross-entropy)"))
        elif op.type == "Log1p":
            logits = logistic_argument(op)
            if logits is not None:
                found.append(LogitSite(op, logits, "sigmoid cross-entropy (logits)"))
    return found


def logistic_argument(op: Op) -> Value | None:
    """Return x of log1p(exp(-|x|)), the core of every stable sigmoid cross-entropy."""
    inner = op.inputs[0].op
    if inner is None or inner.type != "Exp":
        return None
    made = inner.inputs[0].op
    if made is None:
        return None
    if made.type == "Neg":
        absolute = made.inputs[0].op
        return absolute.inputs[0] if absolute is not None and absolute.type == "Abs" else None
    if made.type in ("Select", "SelectV2") and len(made.inputs) == 3:
        negated, plain = made.inputs[1], made.inputs[2]
        if negated.op is not None and negated.op.type == "Neg" and negated.op.inputs[0] is plain:
            return plain
    return None


def squasher_behind(value: Value) -> Op | None:
    """Return the sigmoid or softmax that made a value, through reshapes and constant factors."""
    for _ in range(12):
        op = blame.through(value)
        if op is None:
            return None
        if op.type in blame.SQUASHERS:
            return op
        if op.type not in _SCALED:
            return None
        others = [v for v in op.inputs if blame.constant(v) is None]
        if len(others) != 1:
            return None
        value = others[0]
    return None


def double_activation(facts: Facts, sites: Sequence[LogitSite] | None = None) -> Cause | None:
    """Return ``double_activation`` when a sigmoid/softmax output meets another one on its way.

    Only operations that the loss is computed from count: Keras losses take the logits behind
    a sigmoid or softmax output where they can, and then the activation is not on the way.
    """
    for site in sites if sites is not None else sites_of(facts):
        if site.op.type == "Softplus" and site.op.layers:
            continue
        inner = squasher_behind(site.logits)
        if inner is None or inner is site.op:
            continue
        if site.op.layers and inner.layers and not _near_output(site.op, facts):
            continue
        return _double(site, inner, facts)
    return None


def _near_output(op: Op, facts: Facts) -> bool:
    """Return True when only parameter-free operations stand between ``op`` and the loss."""
    todo, seen = list(op.outputs), set(op.outputs)
    while todo:
        value = todo.pop()
        for user in value.uses:
            if user.type in ("MatMul", "Conv2D", "Einsum", "BatchMatMulV2", "BatchMatMulV3"):
                return False
            new = [o for o in user.outputs if o in facts.reach and o not in seen]
            seen.update(new)
            todo += new
    return True


def _double(site: LogitSite, inner: Op, facts: Facts) -> Cause:
    view = facts.view
    place = view.place(inner) if view is not None else (inner.layer or "output")
    kind = inner.type.lower()
    binary = kind == "sigmoid"
    floor = ""
    if binary:
        floor = (
            "; as a logit a value in [0, 1] can only mean probabilities from 0.5 to 0.73, so "
            "where the labels are 0 the loss cannot fall below ln 2 = 0.693"
        )
    outer = view.place(site.op) if view is not None else "loss"
    loss = "BinaryCrossentropy" if binary else "CategoricalCrossentropy"
    return Cause(
        name="double_activation",
        score=0.96,
        where=tuple(dict.fromkeys(("loss" if outer == "loss" else outer, place))),
        evidence=(
            Evidence(
                name="activations_in_a_row",
                value=2,
                text=f"'{place}' already ends in {kind}, and {site.name} in the {outer} takes its "
                f"output for logits and applies one more{floor}",
            ),
        ),
        fix=f"Drop activation='{kind}' on '{place}' (keep the loss on logits; "
        f"keras_gradguard.layers.LogitsOutput does both), or keep it and use a loss on "
        f"probabilities: keras.losses.{loss}(from_logits=False).",
        source=site.op.source,
    )


def sites_of(facts: Facts) -> list[LogitSite]:
    """Return the places of the step where a loss takes logits."""
    view = facts.view
    if view is None:
        return []
    reach = facts.reach
    return logit_sites(op for op in view.ops.ops if any(o in reach for o in op.outputs))


def rescued(facts: Facts) -> bool:
    """Return True when the loss takes the logits behind a sigmoid or softmax output."""
    for output in facts.outputs:
        op = blame.through(output)
        if op is not None and op.type in blame.SQUASHERS and output not in facts.reach:
            return True
    return False


def rescued_output(output: Value, facts: Facts) -> bool:
    """Return True when the loss takes the logits behind this sigmoid or softmax output."""
    op = blame.through(output)
    return op is not None and op.type in blame.SQUASHERS and op.inputs[0] in facts.reach


def declared_unused(model: Any, loss: Any = None) -> bool:
    """Return True when compile() says itself that some output has no loss.

    Args:
        model: A compiled model, or one trained in a loop.
        loss: The loss if it is not the compiled one: None entries in a list or dictionary,
            and outputs left out of a dictionary, are meant.
    """
    chosen = loss if loss is not None else getattr(model, "loss", None)
    names = list(getattr(model, "output_names", None) or ())
    if isinstance(chosen, dict):
        return any(v is None for v in chosen.values()) or len(chosen) < len(names)
    if isinstance(chosen, list | tuple):
        return any(v is None for v in chosen)
    return False


def logits_output_mismatch(facts: Facts) -> Cause | None:
    """Return ``missing_activation`` when a LogitsOutput feeds a loss on probabilities."""
    trace = facts.trace
    if trace is None or not probability_clips(facts):
        return None
    outputs = {v.tensor.name for v in facts.outputs if v.tensor is not None}
    for call in trace.layers:
        if type(call.layer).__name__ == "LogitsOutput" and any(
            t.name in outputs for t in call.outputs
        ):
            return Cause(
                name="missing_activation",
                score=0.97,
                where=("loss", call.name),
                evidence=(
                    Evidence(
                        name="from_logits",
                        value=False,
                        text=f"'{call.name}' is a LogitsOutput and gives logits, but the loss "
                        "takes them for probabilities",
                    ),
                ),
                fix=f"Compile with loss=model.get_layer('{call.name}').loss() (or any Keras loss "
                "with from_logits=True).",
            )
    return None


def logits_behind(outputs: Sequence[Value]) -> list[Value]:
    """Return the values that squashers of the outputs take."""
    found = []
    for output in outputs:
        op = blame.through(output)
        if op is not None and op.type in blame.SQUASHERS:
            found.append(op.inputs[0])
    return found
