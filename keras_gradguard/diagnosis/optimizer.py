"""What the optimizer would do: learning rate, clipping, precision and constraints, one at a time.

A step is tried on copies: a clone of the optimizer with the same state is applied to copies of
the weights. When the weights do not move, the suspects are taken away one by one (the
constraint, the clipping, the coarse dtype); the one whose absence brings the update back is the
cause. Model and optimizer are only read.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_gradguard.findings import Cause, Evidence
from keras_gradguard.records import Row, Sample

_LOOK_AHEAD = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000, 100000)
_MAX_ELEMENTS = 50_000_000
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


def inner(optimizer: Any) -> Any:
    """Return the optimizer that a loss-scale wrapper holds, or ``optimizer`` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate_at(optimizer: Any, ahead: int = 0) -> float | None:
    """Return the learning rate ``ahead`` steps from now.

    Args:
        optimizer: A Keras optimizer, or anything with ``learning_rate``.
        ahead: Steps into the future; only a schedule can tell more than now.

    Returns:
        The rate, or None when it cannot be told.
    """
    optimizer = inner(optimizer)
    if _shares_out(optimizer):
        # Its own rate is 0 and means nothing; when the largest of its parts is 0, all are.
        rates = [learning_rate_at(part, ahead) for part in optimizer.optimizers]
        return max((r for r in rates if r is not None), default=None)
    rate = getattr(optimizer, "_learning_rate", getattr(optimizer, "learning_rate", None))
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        steps = getattr(optimizer, "_iterations", getattr(optimizer, "iterations", 0))
        rate = rate(np.asarray(int(np.asarray(steps)) + ahead, dtype="int64"))
    elif callable(rate) and not hasattr(rate, "numpy"):
        rate = rate()
    try:
        return float(np.asarray(rate))
    except (TypeError, ValueError):
        return None


def _shares_out(optimizer: Any) -> bool:
    """Return True for Keras' ``MultiOptimizer``, which gives each variable to one of several."""
    several = getattr(keras.optimizers, "MultiOptimizer", None)  # Keras 3.14 and newer
    return several is not None and isinstance(optimizer, several)


def is_scheduled(optimizer: Any) -> bool:
    """Return True when the learning rate comes from a schedule."""
    if _shares_out(inner(optimizer)):
        return any(is_scheduled(part) for part in inner(optimizer).optimizers)
    rate = getattr(inner(optimizer), "_learning_rate", None)
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


def warms_up(optimizer: Any) -> int | None:
    """Return after how many steps a learning rate that is 0 now becomes positive, else None."""
    if not is_scheduled(optimizer) or learning_rate_at(optimizer) != 0:
        return None
    for ahead in _LOOK_AHEAD:
        rate = learning_rate_at(optimizer, ahead)
        if rate:
            return ahead
    return None


def learning_rate_zero(optimizer: Any, samples: Sequence[Sample] = ()) -> Cause | None:
    """Return the cause ``learning_rate_zero`` when the rate is 0 now and stays 0.

    Args:
        optimizer: The Keras optimizer.
        samples: History, for the first sampled step that had a rate of 0.
    """
    rate = learning_rate_at(optimizer)
    if rate is None or rate != 0 or warms_up(optimizer) is not None:
        return None
    name = type(inner(optimizer)).__name__
    step = int(np.asarray(getattr(inner(optimizer), "iterations", 0)))
    zero_since = next((s.step for s in samples if s.learning_rate == 0), None)
    schedule = getattr(inner(optimizer), "_learning_rate", None)
    if is_scheduled(optimizer):
        what = f"the schedule {type(schedule).__name__} gives 0.0 at step {step} and ever after"
        decay = getattr(schedule, "decay_steps", None)
        if decay is not None:
            what += f" (decay_steps={_plain(decay)})"
        fix = (
            f"{type(schedule).__name__} counts optimizer steps, not epochs: set decay_steps to "
            "epochs * steps_per_epoch, or give it a final value above 0 (alpha, "
            "end_learning_rate)."
        )
    else:
        what = f"the learning rate of {name} is 0.0"
        fix = (
            "Give the optimizer a learning rate above 0; a callback (ReduceLROnPlateau, "
            "LearningRateScheduler) may have set it to 0."
        )
    if zero_since is not None:
        what += f", seen first at step {zero_since}"
    return Cause(
        name="learning_rate_zero",
        score=0.98,
        where=("optimizer",),
        evidence=(Evidence(name="learning_rate", value=0.0, text=what),),
        fix=fix,
    )


def _plain(value: Any) -> Any:
    try:
        number = float(np.asarray(value))
    except (TypeError, ValueError):
        return value
    return int(number) if number.is_integer() else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One optimizer step tried on copies.

    Args:
        names: Variables, as the user knows them.
        before: Weights before.
        after: Weights after the step.
        gradients: The gradients applied.
        learning_rate: Rate of the step.
    """

    names: tuple[str, ...]
    before: tuple[NDArray[Any], ...]
    after: tuple[NDArray[Any], ...]
    gradients: tuple[NDArray[Any], ...]
    learning_rate: float | None

    def moved(self) -> tuple[bool, ...]:
        """Tell for each variable whether any of its elements changed."""
        return tuple(bool(np.any(a != b)) for a, b in zip(self.before, self.after, strict=True))

    def largest_step(self, index: int) -> float:
        """Return the largest absolute change of one variable."""
        change = self.after[index].astype("float64") - self.before[index].astype("float64")
        return float(np.max(np.abs(change))) if change.size else 0.0


def try_step(
    optimizer: Any,
    variables: Sequence[Any],
    gradients: Sequence[NDArray[Any]],
    names: Sequence[str],
    *,
    changes: Mapping[str, Any] | None = None,
    constraints: bool = True,
    dtype: str | None = None,
) -> Trial:
    """Apply the optimizer once to copies of the weights.

    Args:
        optimizer: The Keras optimizer; only read.
        variables: Keras variables; only read.
        gradients: One array a variable, unscaled.
        names: Names to say.
        changes: Entries of the optimizer's config to replace, e.g. ``{"clipnorm": None}``.
        constraints: Apply the variables' constraints afterwards.
        dtype: Dtype of the copies. Defaults to the variables' own.

    Returns:
        Weights before and after.
    """
    source = inner(optimizer)
    rate = learning_rate_at(optimizer)
    config = dict(source.get_config())
    config.update(learning_rate=rate if rate is not None else 0.0)
    config.update(gradient_accumulation_steps=None, use_ema=False, loss_scale_factor=None)
    config.update(changes or {})
    clone = type(source).from_config(config)
    values = [np.asarray(v) for v in variables]
    copies = [
        keras.Variable(
            keras.ops.convert_to_tensor(value),
            dtype=dtype or keras.backend.standardize_dtype(v.dtype),
            name=f"copy_{i}",
        )
        for i, (v, value) in enumerate(zip(variables, values, strict=True))
    ]
    clone.build(copies)
    _copy_state(source, clone, variables)
    before = [np.asarray(c) for c in copies]
    clone.apply(
        [
            keras.ops.convert_to_tensor(g, dtype=c.dtype)
            for g, c in zip(gradients, copies, strict=True)
        ],
        copies,
    )
    if constraints:
        for variable, copy in zip(variables, copies, strict=True):
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                copy.assign(constraint(copy))
    return Trial(
        names=tuple(names),
        before=tuple(before),
        after=tuple(np.asarray(c) for c in copies),
        gradients=tuple(gradients),
        learning_rate=rate,
    )


def _copy_state(source: Any, clone: Any, variables: Sequence[Any]) -> None:
    """Give the clone the moments of the original where they belong to the same variables."""
    known = [id(v) for v in getattr(source, "_trainable_variables", ())]
    if not getattr(source, "built", False) or known != [id(v) for v in variables]:
        return
    by_shape = list(zip(source.variables, clone.variables, strict=False))
    if len(source.variables) != len(clone.variables):
        return
    rate = getattr(clone, "_learning_rate", None)
    for old, new in by_shape:
        if new is not rate and tuple(old.shape) == tuple(new.shape):
            new.assign(keras.ops.cast(old.value, new.dtype))


def explain_frozen(
    optimizer: Any,
    variables: Sequence[Any],
    gradients: Sequence[NDArray[Any] | None],
    names: Sequence[str],
) -> list[Cause]:
    """Say why variables with a gradient do not move, by taking the suspects away one by one.

    Args:
        optimizer: The Keras optimizer; only read.
        variables: Keras variables; only read.
        gradients: One array a variable, or None where there is no gradient.
        names: Names to say.

    Returns:
        Causes; empty when the step does move the weights.
    """
    live = [
        (v, g, n)
        for v, g, n in zip(variables, gradients, names, strict=True)
        if g is not None and g.size and np.all(np.isfinite(g)) and np.any(g != 0)
    ]
    if not live or sum(g.size for _, g, _ in live) > _MAX_ELEMENTS:
        return []
    vs = [v for v, _, _ in live]
    gs = [g for _, g, _ in live]
    ns = [n for _, _, n in live]
    plain = try_step(optimizer, vs, gs, ns)
    stuck = [i for i, moved in enumerate(plain.moved()) if not moved]
    if not stuck:
        return _barely_moving(optimizer, vs, gs, ns, plain)
    if plain.learning_rate == 0:
        cause = learning_rate_zero(optimizer)
        return [cause] if cause is not None else []
    causes = []
    free = try_step(optimizer, vs, gs, ns, constraints=False)
    pinned = [i for i in stuck if free.moved()[i]]
    if pinned:
        causes.append(_constraint_cause(vs, free, pinned))
    rest = [i for i in stuck if i not in pinned]
    if rest:
        causes += _lost_step(optimizer, vs, gs, ns, plain, rest)
    return causes


def _constraint_cause(variables: Sequence[Any], free: Trial, pinned: Sequence[int]) -> Cause:
    i = max(pinned, key=free.largest_step)
    constraint = type(variables[i].constraint).__name__
    zero = not np.any(free.before[i])
    return Cause(
        name="constraint_projects_update",
        score=0.95,
        where=tuple(free.names[k] for k in pinned),
        evidence=(
            Evidence(
                name="step_without_constraint",
                value=free.largest_step(i),
                text=f"without its {constraint} constraint '{free.names[i]}' would move by "
                f"{free.largest_step(i):.3g} this step; with it, by exactly 0",
            ),
            Evidence(
                name="gradient_norm",
                value=float(np.linalg.norm(free.gradients[i])),
                text=f"its gradient norm is {np.linalg.norm(free.gradients[i]):.3g}"
                + (" and all its values are 0" if zero else ""),
            ),
        ),
        fix=f"{constraint} takes every step of '{free.names[i]}' back: drop the constraint, start "
        "from values inside it, or parametrise instead (softplus of a free weight is positive and "
        "has a gradient everywhere).",
    )


def _lost_step(
    optimizer: Any, vs: Sequence[Any], gs: Sequence[NDArray[Any]], ns: Sequence[str],
    plain: Trial, rest: Sequence[int],
) -> list[Cause]:  # fmt: skip
    causes = []
    config = inner(optimizer).get_config()
    clips = {k: config[k] for k in _CLIPS if config.get(k)}
    if clips:
        unclipped = try_step(optimizer, vs, gs, ns, changes=dict.fromkeys(clips))
        back = [i for i in rest if unclipped.moved()[i]]
        if back:
            causes.append(_clip_cause(clips, unclipped, back))
    fine = try_step(optimizer, vs, gs, ns, dtype="float32" if _half(vs[rest[0]]) else "float64")
    back = [i for i in rest if fine.moved()[i]]
    if back:
        i = max(back, key=fine.largest_step)
        spacing = float(np.min(np.spacing(np.abs(plain.before[i]).astype(_numpy_dtype(vs[i])))))
        step = fine.largest_step(i)
        dtype = keras.backend.standardize_dtype(vs[i].dtype)
        half = _half(vs[i])
        fix = (
            f"Keep {dtype} for the computation only: use the dtype policy 'mixed_float16' (or "
            "'mixed_bfloat16'), whose variables stay float32; or raise the learning rate "
            f"({plain.learning_rate:.3g})."
            if half
            else f"Raise the learning rate ({plain.learning_rate:.3g}): a step this small rounds "
            "away."
        )
        causes.append(
            Cause(
                name="update_below_precision",
                score=0.6 if causes else 0.95,
                where=("optimizer", *(ns[k] for k in back)),
                evidence=(
                    Evidence(
                        name="largest_step",
                        value=step,
                        text=f"the largest step of '{ns[i]}' would be {step:.3g}, but neighbouring "
                        f"{dtype} numbers near its weights are {spacing:.3g} apart or more, so "
                        "the sum rounds back",
                    ),
                ),
                fix=fix,
            )
        )
    return causes


def _half(variable: Any) -> bool:
    return keras.backend.standardize_dtype(variable.dtype) in ("float16", "bfloat16")


def _numpy_dtype(variable: Any) -> str:
    dtype = str(keras.backend.standardize_dtype(variable.dtype))
    return "float32" if dtype == "bfloat16" else dtype


def _clip_cause(clips: Mapping[str, float], unclipped: Trial, back: Sequence[int]) -> Cause:
    name, value = next(iter(clips.items()))
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype="float64"))) for g in unclipped.gradients))
    return Cause(
        name="clip_too_small",
        score=0.93,
        where=("optimizer", *(unclipped.names[i] for i in back)),
        evidence=(
            Evidence(
                name="clip_ratio",
                value=value / norm if norm else 1.0,
                text=f"{name}={value:g} cuts a gradient of norm {norm:.3g} by a factor of "
                f"{norm / value:.2g}",
            ),
        ),
        fix=f"Set {name} near the usual gradient norm (here about {norm:.2g}; 1.0 is a common "
        "choice), or drop it.",
    )


def _barely_moving(
    optimizer: Any, vs: Sequence[Any], gs: Sequence[NDArray[Any]], ns: Sequence[str], plain: Trial
) -> list[Cause]:
    """Find clipping that makes steps a million times smaller than the weights."""
    config = inner(optimizer).get_config()
    clips = {k: config[k] for k in _CLIPS if config.get(k)}
    if not clips:
        return []
    sizes = [float(np.max(np.abs(b))) for b in plain.before]
    tiny = [i for i, size in enumerate(sizes) if size and plain.largest_step(i) < 1e-7 * size]
    if len(tiny) < len(sizes):
        return []
    unclipped = try_step(optimizer, vs, gs, ns, changes=dict.fromkeys(clips))
    back = [i for i in tiny if unclipped.largest_step(i) > 100 * plain.largest_step(i)]
    return [_clip_cause(clips, unclipped, back)] if back else []


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


def _global_norms(rows: Sequence[Row]) -> NDArray[np.float64]:
    return np.array([math.sqrt(float(np.nansum(np.square(r.norm, dtype="float64")))) for r in rows])


def learning_rate_too_high(
    rows: Sequence[Row], optimizer: Any = None, losses: Sequence[float] = ()
) -> Cause | None:
    """Return the cause ``learning_rate_too_high`` when loss and gradient grow step by step.

    Args:
        rows: History of the sentinel.
        optimizer: For the learning rate to say.
        losses: Losses of a few trial steps on one and the same batch, when there are any.
    """
    rate = learning_rate_at(optimizer) if optimizer is not None else None
    evidence: list[Evidence] = []
    score = 0.0
    norms = _global_norms(rows)
    finite = norms[np.isfinite(norms) & (norms > 0)]
    if finite.size >= 3 and finite.max() > 100 * finite[0]:
        growth = (finite.max() / finite[0]) ** (1 / max(int(finite.argmax()), 1))
        evidence.append(
            Evidence(
                name="gradient_growth",
                value=float(growth),
                text=f"the gradient norm went from {finite[0]:.3g} to {finite.max():.3g} in "
                f"{int(finite.argmax())} steps (x{growth:.3g} a step)",
            )
        )
        score = 0.85
    seen = [r.loss for r in rows if r.loss is not None and math.isfinite(r.loss)]
    if len(seen) >= 3 and abs(seen[0]) > 0 and max(seen) > 10 * abs(seen[0]):
        evidence.append(
            Evidence(
                name="loss_growth",
                value=max(seen) / abs(seen[0]),
                text=f"the loss went from {seen[0]:.4g} to {max(seen):.4g}",
            )
        )
        score = max(score + 0.05, 0.8)
    if len(losses) >= 2 and losses[0] > 0:
        good = [v for v in losses if math.isfinite(v)]
        rising = all(b > 2 * a for a, b in itertools.pairwise(losses)
                     if math.isfinite(a) and math.isfinite(b))  # fmt: skip
        if rising and (len(good) < len(losses) or (len(good) > 2 and good[-1] > 10 * good[0])):
            told = ", ".join(f"{v:.3g}" for v in losses[:4])
            evidence.append(
                Evidence(
                    name="trial_losses",
                    value=good[-1] / losses[0] if good else math.inf,
                    text=f"the loss on one and the same batch rises with every step: {told}",
                )
            )
            score = max(score, 0.9)
    if not evidence:
        return None
    said = f" (now {rate:.3g})" if rate is not None else ""
    return Cause(
        name="learning_rate_too_high",
        score=min(score, 0.95),
        where=("optimizer",),
        evidence=tuple(evidence),
        fix=f"Lower the learning rate{said} by 10 to 1000 times, bring the inputs to about unit "
        "size (keras.layers.Rescaling or Normalization), or set clipnorm=1.0 on the optimizer.",
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


def walk(
    optimizer: Any,
    variables: Sequence[Any],
    measure: Callable[[], Sequence[NDArray[Any]]],
    steps: int,
) -> list[float]:
    """Take a few steps with a copy of the optimizer and put the weights back.

    Args:
        optimizer: The Keras optimizer; only read.
        variables: Keras variables; changed while this runs, afterwards as before.
        measure: Returns the loss and one gradient a variable, at the present weights.
        steps: How many steps to take.

    Returns:
        The loss before each step and after the last; ends at the first that is not finite.
    """
    source = inner(optimizer)
    rate = learning_rate_at(optimizer)
    config = dict(source.get_config())
    config.update(learning_rate=rate if rate is not None else 0.0)
    config.update(gradient_accumulation_steps=None, use_ema=False, loss_scale_factor=None)
    clone = type(source).from_config(config)
    copies = [
        keras.Variable(v.value, dtype=keras.backend.standardize_dtype(v.dtype), name=f"walk_{i}")
        for i, v in enumerate(variables)
    ]
    clone.build(copies)
    _copy_state(source, clone, variables)
    before = [np.array(v) for v in variables]
    losses: list[float] = []
    try:
        for _ in range(steps + 1):
            loss, *gradients = measure()
            losses.append(float(np.mean(loss)))
            if len(losses) > steps or not math.isfinite(losses[-1]):
                break
            clone.apply([keras.ops.convert_to_tensor(g) for g in gradients], copies)
            for variable, copy in zip(variables, copies, strict=True):
                constraint = getattr(variable, "constraint", None)
                variable.assign(copy if constraint is None else constraint(copy.value))
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    return losses
