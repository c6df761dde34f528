"""Where a NaN or Inf comes from: the first operation that makes one, and which classic it is.

The step is traced once more and run on one batch. Every float value of it is asked whether
it is finite: forward first, then, if the loss itself is finite, backward. The first
operation that makes a NaN or Inf out of finite numbers is the culprit. Weights that are
NaN by now say nothing about how they became so: they are replaced, for this run only, by
the values their initializers give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from keras_gradguard.diagnosis import classics, probe
from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.probe import Step
from keras_gradguard.diagnosis.trace import Trace, backend_variable
from keras_gradguard.diagnosis.view import StepView, view_of_trace
from keras_gradguard.diagnosis.wording import listed, unique
from keras_gradguard.findings import Cause, Evidence

_HUGE_WEIGHT = 1e6


def non_finite(trace: Trace) -> tuple[Cause, ...]:
    """Explain NaN and Inf in the loss, the gradients or the weights.

    Args:
        trace: A traced step, with the batch on which it happened (or any batch).

    Returns:
        Causes, best first; empty when everything is finite and nothing looks as if it
        could be otherwise.
    """
    data = _bad_data(trace)
    if data:
        return data
    view = view_of_trace(trace)
    bad = probe.bad_variables(trace)
    instead = probe.fresh_values(trace, bad)
    try:
        causes = _run(trace, view, instead)
    except tf.errors.InvalidArgumentError as problem:
        return _refused(trace, problem)
    blown = _blown_weights(trace, view, bad, explained=bool(causes))
    if bad and not causes:
        causes = classics.risks(view)
    return tuple(sorted([*causes, *blown], key=lambda c: -c.score))


# ---- the data --------------------------------------------------------------------------


def _bad_data(trace: Trace) -> tuple[Cause, ...]:
    causes = []
    for holder, value in trace.feeds:
        if not value.dtype.is_floating:
            continue
        array = np.asarray(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)
        wrong = ~np.isfinite(array)
        count = int(wrong.sum())
        if not count:
            continue
        name = _feed_name(trace, holder)
        facts = [
            Evidence(
                name="nonfinite_entries",
                value=count,
                text=f"{name} holds {count} NaN or Inf among {array.size} entries of this batch",
            )
        ]
        columns = _bad_columns(wrong)
        if columns:
            facts.append(
                Evidence(
                    name="bad_columns",
                    value=listed(map(str, columns), 8),
                    text=f"all in column {listed(map(str, columns), 8)} of the last axis",
                )
            )
        what = "targets" if name.startswith("y") else "inputs"
        causes.append(
            Cause(
                name="nan_input",
                score=0.98 if what == "inputs" else 0.96,
                where=("data", name),
                evidence=tuple(facts),
                fix=f"Clean the {what} before training: `np.isfinite({name})` finds the rows. A "
                "standard deviation of 0 in a standardisation is the usual reason; add a small "
                "epsilon to it or drop the column.",
            )
        )
    return tuple(causes)


def _bad_columns(wrong: Any) -> list[int]:
    if wrong.ndim < 2:
        return []
    columns = np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1))))
    return [int(c) for c in columns] if len(columns) < wrong.shape[-1] else []


def _feed_name(trace: Trace, holder: Any) -> str:
    for label, structure in (
        ("x", trace.x),
        ("y", trace.y),
        ("sample_weight", trace.sample_weight),
    ):
        if structure is None:
            continue
        flat = tree.flatten_with_path(structure)
        for path, leaf in flat:
            if leaf is holder:
                return label + "".join(f"[{p!r}]" for p in path)
    return "x"


# ---- the run ---------------------------------------------------------------------------


def _run(trace: Trace, view: StepView, instead: Mapping[int, Any]) -> tuple[Cause, ...]:
    if trace.loss is None or not trace.loss.dtype.is_floating:
        return ()
    gradients = [g.values if isinstance(g, tf.IndexedSlices) else g for g in trace.gradients]
    gradients = [g for g in gradients if g is not None and g.dtype.is_floating]
    health = probe.count_bad(trace, [trace.loss, *gradients], instead)
    if not any(health.values()):
        return ()
    handles = probe.forward_handles(trace)
    if health[trace.loss.name]:
        bad = probe.count_bad(trace, probe.float_tensors(handles), instead)
        steps = probe.first_bad_forward(trace, bad, handles)[:3]
        return _spread([classics.forward(trace, view, s, instead) for s in steps])
    is_scaled = trace.scaled_loss is not None and trace.scaled_loss is not trace.loss
    backward, known = probe.first_bad_backward(trace, handles, instead, scaled=False)
    causes = [classics.backward(trace, view, s, known, instead) for s in backward[:3]]
    if not backward and is_scaled:
        backward, _ = probe.first_bad_backward(trace, handles, instead)
        causes += [_only_scaled(trace, step) for step in backward[:1]]
    return _spread(causes)


def _only_scaled(trace: Trace, step: Step) -> Cause:
    """The gradient itself is finite: only the loss scale drives it out of range."""
    scale, loss = run(trace, [trace.scaled_loss, trace.loss])
    factor = float(scale) / float(loss) if float(loss) else float("nan")
    return Cause(
        name="float16_overflow",
        score=0.4,
        where=("optimizer",),
        evidence=(
            Evidence(
                name="loss_scale",
                value=factor,
                text=f"the gradient is finite by itself and overflows with the loss scale "
                f"{factor:.4g}, first at {step.handle.name!r}; a dynamic loss scale lowers "
                "itself, which is healthy in the first steps",
            ),
        ),
        fix="Nothing while the loss scale still falls. If it goes on for many steps, set a "
        "smaller `initial_scale`, or use the mixed_bfloat16 policy.",
    )


def _spread(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Lower the score of each further cause: the first operation to fail is the likeliest."""
    kept: dict[tuple[str, str | None, tuple[str, ...]], Cause] = {}
    for rank, cause in enumerate(causes):
        key = (cause.name, cause.source, cause.where[:1])
        if key not in kept:
            kept[key] = Cause(
                name=cause.name,
                score=round(cause.score * 0.85**rank, 4),
                where=cause.where,
                evidence=cause.evidence,
                fix=cause.fix,
                source=cause.source,
            )
    return tuple(kept.values())


def _refused(trace: Trace, problem: Exception) -> tuple[Cause, ...]:
    """TensorFlow refuses labels and indices out of range on the CPU instead of giving NaN."""
    telling = ("label value", "not in [0")
    lines = [s for s in str(problem).splitlines() if any(t in s for t in telling)]
    if lines:
        text = lines[0]
        label = telling[0] in text
        return (
            Cause(
                name="label_out_of_range",
                score=0.95,
                where=("data", "y" if label else "x"),
                evidence=(Evidence(name="message", value=text[:200], text=text[:200]),),
                fix="Labels must be integers from 0 to units - 1; relabel them, or give the "
                "output layer more units."
                if label
                else "Indices must lie in 0 .. input_dim - 1 of the Embedding.",
            ),
        )
    raise problem


# ---- the weights -----------------------------------------------------------------------


def _blown_weights(
    trace: Trace, view: StepView, bad: Mapping[int, Any], *, explained: bool
) -> tuple[Cause, ...]:
    names = {v.key: v.name for v in view.variables}
    largest, where = 0.0, ""
    for variable in trace.variables:
        inner = backend_variable(variable)
        if id(inner) in bad or not inner.dtype.is_floating:
            continue
        size = float(tf.reduce_max(tf.abs(tf.cast(inner.read_value(), tf.float32))))
        if size > largest:
            largest, where = size, names.get(id(inner), "")
    broken = [names[k] for k in bad if k in names]
    if largest < _HUGE_WEIGHT and not broken:
        return ()
    facts = []
    if broken:
        facts.append(
            Evidence(
                name="nonfinite_weights",
                value=len(broken),
                text=f"the weights {listed(broken)} are NaN or Inf already; with the weights "
                "they started from, "
                + ("it still happens" if explained else "this step is finite"),
            )
        )
    if largest >= _HUGE_WEIGHT:
        facts.append(
            Evidence(
                name="largest_weight",
                value=largest,
                text=f"the largest weight is {largest:.3g} (in {where})",
            )
        )
    # Huge weights tell of a divergence whatever op broke in the end; NaN weights alone may
    # have come from anything, and a classic that still happens explains them better.
    score = 0.9 if largest >= _HUGE_WEIGHT else (0.3 if explained else 0.55)
    return (
        Cause(
            name="learning_rate_too_high",
            score=score,
            where=unique(("optimizer",), broken[:4], (where,) if where else ()),
            evidence=tuple(facts),
            fix="Lower the learning rate (by a factor of 10 first), scale the inputs to about "
            "unit size (keras.layers.Normalization or Rescaling), or set `clipnorm=1.0`.",
        ),
    )
