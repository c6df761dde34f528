"""A live gradient that changes no weight: what one trial update on copies says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_gradguard.diagnosis.learning_rate import inner, learning_rate_at, learning_rate_zero
from keras_gradguard.diagnosis.trial_walk import copy_state
from keras_gradguard.findings import Cause, Evidence

_MAX_ELEMENTS = 50_000_000


_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


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
    copy_state(source, clone, variables)
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
