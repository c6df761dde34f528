"""From a finding to the same finding with its causes, and the last word on its severity."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from keras_gradguard.diagnosis import activations, blame, contract, data, nonfinite, optimizer
from keras_gradguard.diagnosis import path as paths
from keras_gradguard.diagnosis.context import Context
from keras_gradguard.diagnosis.facts import Facts, outside_graphs
from keras_gradguard.diagnosis.ranking import CONFIRMED, confirmed, ranked
from keras_gradguard.diagnosis.untracked import untracked
from keras_gradguard.diagnosis.zero import zero_gradient as zero_by_structure
from keras_gradguard.diagnosis.zeros import SWITCHED_OFF, Judge, Verdict, batch_of_one
from keras_gradguard.findings import Cause, Evidence, Finding, Severity
from keras_gradguard.taps.names import automatic_prefixes, path_of

_PIECEWISE_LINEAR = frozenset({"Relu", "Relu6", "LeakyRelu", "Abs"})

T = TypeVar("T")
SECONDS = 8.0  # of work of the thread that diagnoses
PATIENCE = 30.0  # seconds on the clock, on a machine that has other things to do

# A loss of 0 from the start is only a fault when one of these says why.
_EMPTY_LOSS = frozenset(
    {"zero_sample_weight", "zero_class_weight", "all_masked", "wrong_loss_for_labels",
     "softmax_over_one_unit", "labels_all_zero", "no_loss", "loss_arguments_swapped",
     "float16_underflow"}
)  # fmt: skip
_ROUNDING_ONLY = frozenset(
    {"softmax_over_one_unit", "wrong_loss_for_labels", "batchnorm_batch_one"}
)


class Work:
    """One diagnosis in progress: collects causes, notes what failed, keeps to its time.

    Args:
        finding: What was found.
        facts: Measurements.
    """

    def __init__(self, finding: Finding, facts: Facts) -> None:
        self.finding = finding
        self.facts = facts
        self.causes: list[Cause] = list(finding.causes)
        self.notes: list[str] = []
        self.severity: Severity = finding.severity
        self._until = time.thread_time() + SECONDS, time.monotonic() + PATIENCE

    def attempt(self, what: str, make: Callable[[], T], default: T) -> T:
        """Run one analysis; when it fails, say so in one line and go on."""
        if time.thread_time() > self._until[0] or time.monotonic() > self._until[1]:
            self.notes.append(f"The diagnosis stopped after {SECONDS:.0f} s, before: {what}.")
            return default
        try:
            return make()
        except Exception as error:  # the finding must get out whatever a model does
            first = (str(error).strip().splitlines() or [""])[0][:160]
            self.notes.append(f"Could not look at {what} ({type(error).__name__}: {first})")
            return default

    def add(self, what: str, make: Callable[[], Cause | Iterable[Cause] | None]) -> None:
        """Run one analysis and keep the causes that it returns."""
        found = self.attempt(what, make, None)
        if isinstance(found, Cause):
            self.causes.append(found)
        elif found is not None:
            self.causes += list(found)

    def result(self) -> Finding:
        """Return the finding with causes in order, severity and notes."""
        causes = ranked(self.causes)
        source = self.finding.source or next((c.source for c in causes[:1] if c.source), None)
        notes = tuple(dict.fromkeys((*self.finding.notes, *self.facts.notes, *self.notes)))
        return self.finding.replace(
            causes=causes, severity=self.severity, source=source, notes=notes
        )


def explain(finding: Finding, context: Context) -> Finding:
    """Say why, where and what to change; confirm or soften the severity.

    Args:
        finding: What a rule found.
        context: What may be looked at. Nothing in it is changed.

    Returns:
        The finding with ranked causes. Never raises: what could not be looked at is said in
        its notes.
    """

    def work() -> Finding:
        try:
            return explain_with(finding, _fitting(finding, _turned(context, finding)))
        except Exception as error:  # the finding must get out whatever a model does
            note = f"The diagnosis failed ({type(error).__name__}: {str(error)[:160]})."
            return finding.replace(notes=(*finding.notes, note))

    # A finding of a step that is being traced comes from inside its graph.
    return outside_graphs(work)


def _turned(context: Context, finding: Finding) -> Context:
    """Return the context with the model in front that the finding is about."""

    def knows(model: Any) -> int:
        names = automatic_prefixes([model])
        paths_ = {path_of(v, names) for v in getattr(model, "trainable_variables", ())}
        return sum(w in paths_ for w in finding.where)

    if not context.partners or context.model is None:
        return context
    models = (context.model, *context.partners)
    best = max(models, key=knows)
    if best is context.model or knows(best) == knows(context.model):
        return context
    others = tuple(m for m in models if m is not best)
    # The batch was an input of the first model; it is not known to be one of this model's.
    return dataclasses.replace(context, model=best, partners=others, batch=None)


def _fitting(finding: Finding, context: Context) -> Facts:
    """Return measurements of the step that shows what was found.

    A generator's output may go through its discriminator on the way to the loss, or straight
    into it: the way on which the gradients are 0 is the one that was trained.
    """
    plain = Facts(context)
    if context.mode == "fit" or not context.partners or finding.symptom != "zero_gradient":
        return plain
    for facts in (*(Facts(context, through=p) for p in context.partners), plain):
        if facts.trace is None:
            continue
        asked = [facts.gradients.get(n) for n in _asked(facts, finding)]
        if asked and all(g is not None and not np.any(g) for g in asked):
            return facts
    return plain


def explain_with(finding: Finding, facts: Facts) -> Finding:
    """Explain a finding with measurements that may be shared between several."""
    work = Work(finding, facts)
    if facts.is_symbolic and finding.symptom in _NEEDS_VALUES:
        return finding
    _BY_SYMPTOM[finding.symptom](work)
    if facts.synthetic is not None and finding.symptom != "zero_update":
        work.notes.append(
            f"{facts.synthetic} could not be seen here; it was made up for this look at the last "
            "inputs of the model."
        )
    return work.result()


# ---- zero gradient -------------------------------------------------------------------


def _zero_gradient(work: Work) -> None:
    facts, finding = work.facts, work.finding
    empty = any(e.name == "loss_zero_from_start" for e in finding.evidence)
    rounding = any(e.name == "peak_gradient_norm" for e in finding.evidence)
    weights = work.attempt("sample weights", lambda: _weights(facts), None)
    if weights is not None:
        work.causes.append(weights)
    if rounding:
        _structural(work)
        _confirm(work, _ROUNDING_ONLY)
        return
    names = _asked(facts, finding)
    verdicts: list[Verdict] = []
    if work.attempt("the training step", lambda: facts.trace, None) is not None:
        streak = _streak(finding)
        verdicts = work.attempt("zero gradients", lambda: _verdicts(facts, names, streak), [])
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
    _structural(work)
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
    work.add("the scale of the inputs", lambda: _scale_hint(work))
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


def _asked(facts: Facts, finding: Finding) -> list[str]:
    known = facts.variables
    named = [n for n in finding.where if n in known]
    for n in finding.where:
        if n not in known and "#" not in n:
            named += [k for k in known if k.startswith(f"{n}/")]
    return list(dict.fromkeys(named)) or list(known)


def _verdicts(facts: Facts, names: list[str], streak: int) -> list[Verdict]:
    zero = [
        n for n in names if (g := facts.gradients.get(n)) is not None and g.size and not np.any(g)
    ]
    if not zero:
        return []
    culprits = blame.find_culprits(facts, zero)
    return Judge(facts, culprits, streak=streak).verdicts()


def _structural(work: Work) -> None:
    facts = work.facts
    if work.attempt("the training step", lambda: facts.trace, None) is None:
        return
    work.add("model against loss", lambda: [
        c for c in contract.causes(facts)
        if c.name not in ("label_out_of_range", "labels_all_zero") or c.score > 0.8
    ])  # fmt: skip
    work.add("normalisation", lambda: batch_of_one(facts))


def _scale_hint(work: Work) -> Cause | None:
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


# ---- no gradient ---------------------------------------------------------------------


def _none_gradient(work: Work) -> None:
    facts, context = work.facts, work.facts.context
    seen: Any = context.recording
    causes: tuple[Cause, ...] = ()
    if seen is not None:
        causes = work.attempt(
            "the recorded step", lambda: paths.none_gradient(seen, model=context.model), ()
        )
    if not causes and work.attempt("the training step", lambda: facts.trace, None) is not None:
        trace = facts.trace
        if trace is not None and facts.is_own_loss:
            causes = work.attempt("the path", lambda: paths.none_gradient(trace), ())
    if not causes and facts.trace_error is not None:
        work.notes.append(f"The step could not be traced: {facts.trace_error}")
    work.causes += causes
    if seen is not None and causes:
        work.add("derivatives of derivatives", lambda: _second_derivative(seen, causes))
    if facts.trace is not None:
        work.add("model against loss", lambda: contract.swapped(facts))
    # The loss of a model with partners may go through them: what it does alone proves nothing.
    by_itself = context.mode != "fit" and facts.is_own_loss and not context.partners
    alone = not causes and by_itself
    if alone and facts.trace is not None and any(g is not None for g in facts.trace.gradients):
        work.causes.append(_outside_tape(facts))
    _settle_none(work)


def _second_derivative(seen: Any, causes: tuple[Cause, ...]) -> Cause | None:
    """Return ``second_derivative_of_relu`` for a loss on a derivative of a derivative.

    Two tapes inside the loop's own, a piecewise linear activation, and a loss that depends on
    nothing: its second derivative is 0 wherever it exists.
    """
    constant = any(
        e.name == "variables_without_gradient" and "depends on no variable" in e.text
        for c in causes
        for e in c.evidence
    )
    layers = [op.layer for op in seen.ops.ops if op.type in _PIECEWISE_LINEAR and op.layer]
    if not constant or len(seen.tapes) < 3 or not layers:
        return None
    names = tuple(dict.fromkeys(layers))
    return Cause(
        name="second_derivative_of_relu",
        score=0.9,
        where=("loss", *names),
        evidence=(
            Evidence(
                name="tapes",
                value=len(seen.tapes),
                text=f"{len(seen.tapes)} tapes are nested in one step, so the loss is made of a "
                f"second derivative, and {', '.join(map(repr, names[:4]))} are piecewise linear",
            ),
        ),
        fix="Use a smooth activation (tanh, gelu, softplus, swish) in the model whose second "
        "derivative the loss needs.",
    )


def _outside_tape(facts: Facts) -> Cause:
    return Cause(
        name="outside_tape",
        score=0.75,
        where=("loss", facts.context.model.name),
        evidence=(
            Evidence(
                name="gradient_inside_tape",
                value=True,
                text="the same model and loss, called inside one tape, do give gradients; so the "
                "tape of the loop did not see the forward pass, or the value left TensorFlow",
            ),
        ),
        fix="Call the model and the loss inside `with tf.GradientTape() as tape:` and keep the "
        "loss a tensor (no float(), .numpy(), np.mean).",
    )


def _settle_none(work: Work) -> None:
    """Soften a branch of an unused output; leave everything else to raise."""
    top = ranked(work.causes)
    if not top or top[0].name != "output_not_in_loss" or work.severity != "raise":
        return
    facts = work.facts
    outputs = facts.outputs
    if len(outputs) < 2:
        return
    used = [o for o in outputs if o in facts.reach or contract.rescued_output(o, facts)]
    if not used:
        return
    unused = len(outputs) - len(used)
    if not unused:
        return
    declared = contract.declared_unused(facts.context.model, facts.context.loss)
    work.severity = "info" if declared else "warn"
    work.notes.append(
        f"{unused} of {len(outputs)} outputs of the model enter no loss"
        + (", as compile() says." if declared else ".")
    )


# ---- no update -----------------------------------------------------------------------


def _zero_update(work: Work) -> None:
    facts, context = work.facts, work.facts.context
    opt = context.optimizer
    work.add("trainable flags", lambda: optimizer.trainable_flag(context.model))
    applied = context.applied
    said = any("apply" in e.name or "apply" in e.text for e in work.finding.evidence) or (
        "apply" in work.finding.summary
    )
    if applied is None and said:
        applied = False
    trace = work.attempt("the training step", lambda: facts.trace, None)
    if trace is not None and trace.custom_step and not trace.applies:
        applied = False
    work.add("apply", lambda: optimizer.apply_missing(opt, applied, facts.custom_step))
    if facts.custom_step:
        work.add("train_step", lambda: optimizer.frozen_condition(context.model, applied))
    if opt is not None:
        work.add(
            "the optimizer's variables", lambda: optimizer.frozen_after_build(context.model, opt)
        )
        warm = work.attempt("the schedule", lambda: optimizer.warms_up(opt), None)
        if warm is not None and applied is not False:
            work.severity = "info"
            work.notes.append(
                f"This looks healthy: a warm-up from learning rate 0, which rises in {warm} steps."
            )
            return
        work.add("the learning rate", lambda: optimizer.learning_rate_zero(opt, context.samples))
        if not confirmed(work.causes) and trace is not None:
            work.add("the update", lambda: _frozen(facts))
    if trace is not None:
        work.add("untracked weights", lambda: untracked(trace))


def _frozen(facts: Facts) -> list[Cause]:
    live = [n for n, g in facts.gradients.items() if g is not None]
    return optimizer.explain_frozen(
        facts.context.optimizer,
        [facts.variables[n] for n in live],
        [facts.gradients[n] for n in live],
        live,
    )


# ---- non-finite ----------------------------------------------------------------------


def _non_finite(work: Work) -> None:
    facts, context = work.facts, work.facts.context
    work.add("the data", lambda: data.nan_input(facts.data))
    trace = work.attempt("the training step", lambda: facts.trace, None)
    if trace is not None:
        work.add("non-finite values", lambda: nonfinite.non_finite(trace))
        work.add("labels", lambda: [
            c for c in contract.labels(facts)
            if c.name == "label_out_of_range" and c.score > 0.9
        ])  # fmt: skip
    elif facts.trace_error is not None:
        work.notes.append(f"The step could not be traced: {facts.trace_error}")
    at_once = bool(context.rows) and not np.isfinite(context.rows[0].norm).all()
    if at_once:
        # Before the first update no learning rate has done anything yet.
        work.causes = [c for c in work.causes if c.name != "learning_rate_too_high"]
    else:
        work.add(
            "the history", lambda: optimizer.learning_rate_too_high(context.rows, context.optimizer)
        )
    if context.optimizer is not None:
        work.add(
            "the loss scale", lambda: optimizer.loss_scale_stuck(context.optimizer, context.rows)
        )
    if not work.causes:
        work.add("the recurrent layers", lambda: activations.recurrent_explosion(facts))
    work.add("the scale of the inputs", lambda: data.input_scale(facts.data))


# ---- scale ---------------------------------------------------------------------------


def _vanishing(work: Work) -> None:
    facts = work.facts

    def by_depth() -> Cause | None:
        norms = activations.kernel_norms(facts) if facts.trace is not None else []
        cause = activations.vanishing_depth(norms, activations.layer_statistics(facts))
        return cause or activations.vanishing_depth(_norms_of_history(facts))

    work.add("gradients by depth", by_depth)
    if not work.causes:
        work.add("layer outputs", lambda: activations.from_statistics(
            activations.layer_statistics(facts), (), facts.data))  # fmt: skip
    _structural(work)
    work.add("the scale of the inputs", lambda: _scale_hint(work))


def _norms_of_history(facts: Facts) -> list[tuple[str, float]]:
    context = facts.context
    if context.table is None or not context.rows:
        return []
    found: dict[str, tuple[int, float]] = {}
    row = next((r for r in reversed(context.rows) if not r.skipped), context.rows[-1])
    for info, norm in zip(context.table.variables, row.norm, strict=True):
        if info.layer not in found or info.size > found[info.layer][0]:
            found[info.layer] = (info.size, float(norm))
    return [(layer, norm) for layer, (_, norm) in found.items()]


def _exploding(work: Work) -> None:
    facts, context = work.facts, work.facts.context
    work.add("the recurrent layers", lambda: activations.recurrent_explosion(facts))
    work.add(
        "the history", lambda: optimizer.learning_rate_too_high(context.rows, context.optimizer)
    )
    work.add("the data", lambda: data.nan_input(facts.data))
    work.add("the scale of the inputs", lambda: data.input_scale(facts.data))


def _bad_contract(work: Work) -> None:
    _structural(work)
    work.add("the data", lambda: data.nan_input(work.facts.data))


_NEEDS_VALUES = frozenset({"zero_gradient", "non_finite", "vanishing", "exploding"})
_BY_SYMPTOM: dict[str, Callable[[Work], None]] = {
    "zero_gradient": _zero_gradient,
    "none_gradient": _none_gradient,
    "zero_update": _zero_update,
    "non_finite": _non_finite,
    "vanishing": _vanishing,
    "exploding": _exploding,
    "bad_contract": _bad_contract,
}
