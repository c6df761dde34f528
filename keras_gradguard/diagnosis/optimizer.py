"""What the optimizer would do: learning rate, clipping, precision and constraints, one at a time.

A step is tried on copies: a clone of the optimizer with the same state is applied to copies of
the weights. When the weights do not move, the suspects are taken away one by one (the
constraint, the clipping, the coarse dtype); the one whose absence brings the update back is the
cause. Model and optimizer are only read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_gradguard.diagnosis.learning_rate import inner
from keras_gradguard.findings import Cause, Evidence
from keras_gradguard.records import Row


def trainable_flag(model: Any) -> Cause | None:
    """Return the cause ``trainable_flag`` when the model has weights but nothing trainable."""
    weights = getattr(model, "weights", None) or []
    could = [v for v in weights if getattr(v, "trainable", False)]
    if not weights or model.trainable_variables:
        return None
    frozen = [la.name for la in flat_layers(model) if la.weights and not la.trainable]
    if not frozen and not could:
        return None
    return Cause(
        name="trainable_flag",
        score=0.97,
        where=(model.name, *frozen[:6]),
        evidence=(
            Evidence(
                name="trainable_variables",
                value=0,
                text=f"'{model.name}' lists {len(weights)} weights and 0 of them are trainable"
                + ("" if model.trainable else f" ({model.name}.trainable is False)"),
            ),
        ),
        fix=f"Set {model.name}.trainable = True before its own fit or train step. Keras reads "
        "`trainable` when the train step is traced, not at compile(), so freezing a model for a "
        "combined model (a GAN) freezes it in its own training too: set the flag again before "
        "each, or use two optimizers on two lists of variables.",
    )


def flat_layers(model: Any) -> list[Any]:
    """Return all layers inside ``model``, nested ones too, without ``model`` itself."""
    flatten = getattr(model, "_flatten_layers", None)
    if flatten is None:
        return []
    return list(flatten(include_self=False))


def frozen_after_build(model: Any, optimizer: Any) -> Cause | None:
    """Return ``trainable_flag`` or ``optimizer_built_for_other_variables`` on a list mismatch."""
    source = inner(optimizer)
    known = {id(v): v for v in getattr(source, "_trainable_variables", ()) or ()}
    if not getattr(source, "built", False) or not known:
        return None
    mine = {id(v): v for v in model.trainable_variables}
    every = {id(v) for v in model.weights}
    missing = [v for i, v in mine.items() if i not in known]
    frozen = [v for i, v in known.items() if i in every and i not in mine]
    if missing and not any(i in known for i in mine):
        return _other_variables(model, missing, list(known.values()))
    if missing:
        return Cause(
            name="optimizer_built_for_other_variables",
            score=0.9,
            where=("optimizer", *(v.path for v in missing[:5])),
            evidence=(
                Evidence(
                    name="unknown_variables",
                    value=len(missing),
                    text=f"{len(missing)} of {len(mine)} trainable variables were not there (or "
                    "were frozen) when the optimizer was built",
                ),
            ),
            fix="Make a new optimizer (compile again) after you unfreeze or add layers.",
        )
    if frozen:
        return Cause(
            name="trainable_flag",
            score=0.75,
            where=tuple(v.path for v in frozen[:5]),
            evidence=(
                Evidence(
                    name="frozen_later",
                    value=len(frozen),
                    text=f"{len(frozen)} variables were trainable when the optimizer was built "
                    "and are frozen now",
                ),
            ),
            fix="Set `trainable` before compile(), and compile again after changing it.",
        )
    return None


def _other_variables(model: Any, missing: Sequence[Any], known: Sequence[Any]) -> Cause:
    theirs = ", ".join(str(v.path) for v in known[:2])
    return Cause(
        name="optimizer_built_for_other_variables",
        score=0.95,
        where=("optimizer", *(v.path for v in missing[:5])),
        evidence=(
            Evidence(
                name="known_variables",
                value=0,
                text=f"the optimizer was built on {len(known)} variables ({theirs}, ...), none of "
                f"which belongs to '{model.name}'",
            ),
        ),
        fix=f"Make one optimizer per model: optimizer.build({model.name}.trainable_variables) with "
        "a fresh optimizer, or compile the model with its own.",
    )


def apply_missing(optimizer: Any, applied: bool | None, custom_step: bool) -> Cause | None:
    """Return the cause ``apply_missing`` when the optimizer was never reached.

    Args:
        optimizer: The Keras optimizer, or None.
        applied: Whether ``apply`` was reached in the step (traced or seen), None if unknown.
        custom_step: Whether the user wrote the training step.
    """
    if applied is not False:
        return None
    step = int(np.asarray(getattr(inner(optimizer), "iterations", 0))) if optimizer else 0
    place = "train_step" if custom_step else "optimizer"
    return Cause(
        name="apply_missing",
        score=0.97,
        where=(place, "optimizer"),
        evidence=(
            Evidence(
                name="iterations",
                value=step,
                text=f"the count optimizer.iterations is {step}: gradients are computed, but "
                "neither apply() nor apply_gradients() is called on this optimizer",
            ),
        ),
        fix="Call optimizer.apply(gradients, model.trainable_variables) at the end of the step "
        "(self.optimizer.apply in train_step), on the optimizer that the model was compiled with.",
    )


def frozen_condition(model: Any, applied: bool | None) -> Cause | None:
    """Return ``python_side_effect_in_graph`` when apply stands in ``train_step`` but not its graph.

    Args:
        model: A model with its own ``train_step``.
        applied: Whether ``apply`` was reached when the step was traced.
    """
    step = getattr(type(model), "train_step", None)
    if applied is not False or step is None:
        return None
    try:
        lines, first = inspect.getsourcelines(step)
        file = Path(inspect.getsourcefile(step) or "").name
    except (OSError, TypeError):
        return None
    hit = next(
        (i for i, t in enumerate(lines) if re.search(r"\.apply(_gradients)?\(", t.split("#")[0])),
        None,
    )
    guards = [t.strip() for t in lines[:hit] if re.match(r"\s+(if|elif|while|else)\b", t)]
    if hit is None or not guards:
        return None
    return Cause(
        name="python_side_effect_in_graph",
        score=0.96,
        where=("train_step", "optimizer"),
        evidence=(
            Evidence(
                name="condition",
                value=guards[-1],
                text=f"the train_step calls the optimizer's apply in line {first + hit}, but "
                f"behind `{guards[-1]}`, which was not true when the step was traced; the "
                "graph keeps that answer for good",
            ),
        ),
        fix="A Python condition is looked at once, when the graph is traced. Set it before the "
        "first step (or call model.make_train_function(force=True) after changing it), or make it "
        "a variable and choose with keras.ops.cond.",
        source=f"{file}:{first + hit}",
    )


def loss_scale_stuck(optimizer: Any, rows: Sequence[Row]) -> Cause | None:
    """Return ``float16_overflow`` when a loss scale fell to 1 and steps are still skipped."""
    skipped = [r for r in rows if r.skipped]
    if not skipped or not rows[-1].skipped or len(skipped) < 10:
        return None
    scale = rows[-1].scale
    return Cause(
        name="float16_overflow",
        score=0.85 if scale <= 1 else 0.6,
        where=("optimizer",),
        evidence=(
            Evidence(
                name="loss_scale",
                value=scale,
                text=f"{len(skipped)} of the last {len(rows)} steps were skipped and the loss "
                f"scale is down to {scale:g}: the unscaled values themselves overflow",
            ),
        ),
        fix="Scale the inputs to about unit size, keep the layer that overflows in float32 "
        "(dtype='float32'), or use the policy 'mixed_bfloat16'.",
    )
