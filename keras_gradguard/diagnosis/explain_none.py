"""Why a variable has no gradient at all."""

from __future__ import annotations

from typing import Any

from keras_gradguard.diagnosis import contract, logits
from keras_gradguard.diagnosis import path as paths
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.ranking import ranked
from keras_gradguard.diagnosis.work import Work
from keras_gradguard.findings import Cause, Evidence

_PIECEWISE_LINEAR = frozenset({"Relu", "Relu6", "LeakyRelu", "Abs"})


def none_gradient(work: Work) -> None:
    """Explain a gradient that is None."""
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
    used = [o for o in outputs if o in facts.reach or logits.rescued_output(o, facts)]
    if not used:
        return
    unused = len(outputs) - len(used)
    if not unused:
        return
    declared = logits.declared_unused(facts.context.model, facts.context.loss)
    work.severity = "info" if declared else "warn"
    work.notes.append(
        f"{unused} of {len(outputs)} outputs of the model enter no loss"
        + (", as compile() says." if declared else ".")
    )
