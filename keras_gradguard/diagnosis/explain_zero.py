"""Why a gradient is exactly 0, or why that is healthy."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_gradguard.diagnosis import activations, blame, contract, data
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.normalisation import batch_of_one
from keras_gradguard.diagnosis.ranking import CONFIRMED, confirmed
from keras_gradguard.diagnosis.work import Work
from keras_gradguard.diagnosis.zero import zero_gradient as zero_by_structure
from keras_gradguard.diagnosis.zeros import SWITCHED_OFF, Judge, Verdict
from keras_gradguard.findings import Cause, Evidence, Finding

# A loss of 0 from the start is only a fault when one of these says why.
_EMPTY_LOSS = frozenset(
    {"zero_sample_weight", "zero_class_weight", "all_masked", "wrong_loss_for_labels",
     "softmax_over_one_unit", "labels_all_zero", "no_loss", "loss_arguments_swapped",
     "float16_underflow"}
)  # fmt: skip


_ROUNDING_ONLY = frozenset(
    {"softmax_over_one_unit", "wrong_loss_for_labels", "batchnorm_batch_one"}
)


def zero_gradient(work: Work) -> None:
    """Explain a gradient that is exactly 0, or say why that is healthy."""
    facts, finding = work.facts, work.finding
    empty = any(e.name == "loss_zero_from_start" for e in finding.evidence)
    rounding = any(e.name == "peak_gradient_norm" for e in finding.evidence)
    weights = work.attempt("sample weights", lambda: _weights(facts), None)
    if weights is not None:
        work.causes.append(weights)
    if rounding:
        structural(work)
        _confirm(work, _ROUNDING_ONLY)
        return
    names = asked_names(facts, finding)
    verdicts: list[Verdict] = []
    if work.attempt("the training step", lambda: facts.trace, None) is not None:
        streak = _streak(finding)
        verdicts = work.attempt("zero gradients", lambda: _verdicts(work, names, streak), [])
        lost = work.attempt("half precision", lambda: _underflow(facts, names), None)
        if lost is not None:
            # What a scaled loss brings back is neither dead nor saturated: it was too small.
            verdicts = []
            work.causes.append(lost)
        work.causes += [v.cause for v in verdicts if v.cause is not None]
        trace = facts.trace
        if trace is not None:
            asked = [facts.variables[n] for n in names if n in facts.variables]
            work.add("operations without slope", lambda: zero_by_structure(trace, variables=asked))
    elif facts.trace_error is not None:
        work.notes.append(f"The step could not be traced: {facts.trace_error}")
    structural(work)
    if not confirmed(work.causes):
        layers = [n for n in finding.where if "/" not in n]
        work.add(
            "layer outputs",
            lambda: activations.from_statistics(
                activations.layer_statistics(facts), layers, facts.data
            ),
        )
        work.add("layer statistics", lambda: activations.from_statistics(
            facts.context.activations, layers, facts.data))  # fmt: skip
    work.add("the scale of the inputs", lambda: scale_hint(work))
    if empty:
        _confirm(work, _EMPTY_LOSS)
        return
    _settle_zero(work, verdicts, len(names))


def _settle_zero(work: Work, verdicts: list[Verdict], asked: int) -> None:
    healthy = [v for v in verdicts if v.healthy is not None]
    if _is_whole(work) and work.facts.context.mode == "fit":
        frozen = [v for v in healthy if v.healthy == SWITCHED_OFF]
        work.causes += [_frozen_factor() for _ in frozen[:1]]
        if not verdicts and not work.causes and work.facts.trace is not None:
            work.add("a step traced anew", lambda: _alive_when_traced_anew(work.facts))
    proven = [c for c in work.causes if c.score >= CONFIRMED]
    whole = _is_whole(work)
    if proven:
        if work.severity == "info" or work.severity == "warn":
            work.severity = "raise"
        return
    if healthy and not any(v.cause for v in verdicts):
        reason = max(healthy, key=lambda v: len(v.variables)).healthy or ""
        covered = {n for v in healthy for n in v.variables}
        if len(covered) >= asked or not whole:
            work.severity = "info"
            work.causes = [c for c in work.causes if c.score >= CONFIRMED]
            work.notes.append(f"This looks healthy: {reason}.")


def _alive_when_traced_anew(facts: Facts) -> Cause | None:
    """Return ``python_side_effect_in_graph`` when the same step, traced now, has a gradient."""
    if getattr(facts.context.model, "run_eagerly", False) or facts.synthetic is not None:
        return None
    sizes = [float(np.linalg.norm(g)) for g in facts.gradients.values() if g is not None]
    finite = [s for s in sizes if np.isfinite(s)]
    if not finite or max(finite) == 0:
        return None
    return Cause(
        name="python_side_effect_in_graph",
        score=0.85,
        where=("loss", "train_step"),
        evidence=(
            Evidence(
                name="gradient_when_traced_anew",
                value=max(finite),
                text="the same step on the same batch, traced anew, does give a gradient (norm "
                f"{max(finite):.3g}): a Python value that has changed since is frozen in the graph",
            ),
        ),
        fix="Hold a weight or switch that changes during training in a keras.Variable (and assign "
        "to it), or compile with run_eagerly=True: Python values are read once, when the step is "
        "traced.",
    )


def _frozen_factor() -> Cause:
    return Cause(
        name="python_side_effect_in_graph",
        score=0.85,
        where=("loss",),
        evidence=(
            Evidence(
                name="factor",
                value=0.0,
                text="in the traced graph the whole loss that depends on the weights is multiplied "
                "by the constant 0: a Python number or condition, read once, when it was traced",
            ),
        ),
        fix="Hold a weight that changes during training in a keras.Variable (and assign to it), "
        "or compile with run_eagerly=True: Python values are frozen into the graph.",
    )


def _is_whole(work: Work) -> bool:
    return "every gradient" in work.finding.summary.lower()


def _streak(finding: Finding) -> int:
    for e in finding.evidence:
        if e.name == "zero_updates" and isinstance(e.value, int):
            return e.value
    return 0


def asked_names(facts: Facts, finding: Finding) -> list[str]:
    """Return the names of the variables that a finding is about; of all when it names none."""
    known = facts.variables
    named = [n for n in finding.where if n in known]
    for n in finding.where:
        if n not in known and "#" not in n:
            named += [k for k in known if k.startswith(f"{n}/")]
    return list(dict.fromkeys(named)) or list(known)


def _verdicts(work: Work, names: list[str], streak: int) -> list[Verdict]:
    facts = work.facts
    zero = [
        n for n in names if (g := facts.gradients.get(n)) is not None and g.size and not np.any(g)
    ]
    if not zero:
        return []
    culprits = blame.find_culprits(facts, zero)
    verdicts = Judge(facts, culprits, streak=streak).verdicts(work.spent)
    if len(verdicts) < len(culprits):
        left = len(culprits) - len(verdicts)
        work.notes.append(
            f"The diagnosis ran out of time: {left} more places where gradients "
            "die were not looked at."
        )
    return verdicts


def structural(work: Work) -> None:
    """Add what is wrong between model, loss and labels."""
    facts = work.facts
    if work.attempt("the training step", lambda: facts.trace, None) is None:
        return
    work.add("model against loss", lambda: [
        c for c in contract.causes(facts)
        if c.name not in ("label_out_of_range", "labels_all_zero") or c.score > 0.8
    ])  # fmt: skip
    work.add("normalisation", lambda: batch_of_one(facts))


def scale_hint(work: Work) -> Cause | None:
    """Return the scale of the inputs as a cause where another cause may come from it."""
    if any(c.name in ("dead_relu", "saturated_activation", "clip_in_forward") for c in work.causes):
        return data.input_scale(work.facts.data)
    return None


def _weights(facts: Facts) -> Cause | None:
    y = facts.batch.y if facts.batch is not None else None
    return data.zero_sample_weight(
        facts.data, facts.context.class_weight, y if not isinstance(y, dict | list) else None
    )


def _confirm(work: Work, names: frozenset[str]) -> None:
    work.causes = [c for c in work.causes if c.name in names]
    work.severity = "raise" if confirmed(work.causes) else "info"


def _underflow(facts: Facts, names: list[str]) -> Cause | None:
    """Return ``float16_underflow`` when a scaled loss brings the gradient back."""
    import tensorflow as tf

    trace = facts.trace
    if trace is None or not _uses_half(facts):
        return None
    scale = 2.0**13
    variables = [
        (n, facts.variables[n]) for n in names
        if (g := facts.gradients.get(n)) is not None and not np.any(g)
    ]  # fmt: skip
    if not variables:
        return None
    reads = [
        out.tensor
        for _, v in variables
        for op in trace.ops.reads(trace.key(v))
        for out in op.outputs
        if out.tensor is not None and out.tensor.graph is trace.graph
    ]
    if not reads:
        return None
    target = trace.scaled_loss

    def make() -> list[Any]:
        seed = tf.cast(tf.ones_like(target) * scale, target.dtype)
        found = [g for g in tf.gradients(target, reads, grad_ys=seed) if g is not None]
        return [tf.reduce_max(tf.abs(tf.cast(tf.convert_to_tensor(g), tf.float32))) for g in found]

    largest = max((float(v) for v in facts.compute(make)), default=0.0)
    if not 0 < largest < float("inf"):
        return None
    return Cause(
        name="float16_underflow",
        score=0.94,
        where=("optimizer", *(n for n, _ in variables[:4])),
        evidence=(
            Evidence(
                name="gradient_when_scaled",
                value=largest / scale,
                text=f"with the loss scaled by {scale:.0f} the gradient is there (largest entry "
                f"{largest / scale:.2g} unscaled); float16 cannot hold less than 6e-8",
            ),
        ),
        fix="Scale the loss: keras.optimizers.LossScaleOptimizer(optimizer) (in a custom loop also "
        "optimizer.scale_loss(loss)), or use the dtype policy 'mixed_bfloat16'.",
    )


def _uses_half(facts: Facts) -> bool:
    from keras_gradguard.diagnosis.sandbox import all_layers

    return any(
        str(getattr(la, "compute_dtype", "")) in ("float16",)
        for m in facts.models
        for la in all_layers(m)
    )
