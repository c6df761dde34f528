"""Variables that the forward pass never reads: unused, or overwritten by a plain tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.diagnosis.cuts import starts_of
from keras_gradguard.diagnosis.trace import backend_variable
from keras_gradguard.diagnosis.view import StepView, VariableSeen

Unread = tuple[Any, str, str, str, tuple[str, ...], str | None]


def unread(view: StepView, variable: VariableSeen) -> Unread:
    """Say why a variable is never read.

    Args:
        view: The step.
        variable: A trainable variable without any read in it.

    Returns:
        What to group by, the cause, the evidence as text, the fix, the places, the line.
    """
    if not isinstance(backend_variable(variable.variable), tf.Variable):
        return (
            variable.key,
            "variable_replaced",
            "the tape was asked for the gradient of a plain tensor that the forward pass does "
            "not use: a variable was overwritten (`w = w - lr * g`)",
            "Update variables in place with `w.assign_sub(lr * g)`, or let an optimizer do it.",
            ("train_step",),
            view.tape_frames[-1].short if view.tape_frames else None,
        )
    replaced = replacement(variable)
    if replaced is not None:
        return (
            variable.key,
            "variable_replaced",
            f"attribute {replaced!r} of {variable.layer!r} is a plain tensor now; the variable "
            f"{variable.name} itself is read nowhere",
            f"Keep the variable and change its value with `.assign(...)`; do not set "
            f"`layer.{replaced}` to a tensor.",
            (variable.layer,),
            None,
        )
    used = _layer_is_used(view, variable)
    if used:
        return (
            variable.key,
            "unused_weight",
            f"{variable.layer!r} runs, but its call never reads {variable.name}",
            f"Use {variable.name} in call(), or create it with trainable=False, or remove it.",
            (variable.layer,),
            None,
        )
    return (
        variable.layer,
        "unused_layer",
        f"{variable.layer!r} has trainable weights but no operation of the forward pass reads them",
        f"Call {variable.layer!r} in the forward pass, delete it, or set its trainable=False.",
        (variable.layer,),
        None,
    )


def replacement(variable: VariableSeen) -> str | None:
    """Return the attribute of the owner that holds a tensor where the variable used to be."""
    owner = variable.owner
    if owner is None:
        return None
    inner = backend_variable(variable.variable)
    short = variable.name.rsplit("/", 1)[-1]
    names = (short, f"_{short}")
    attributes = vars(owner)
    if any(backend_variable(v) is inner for v in attributes.values()):
        return None
    for name in names:
        value = attributes.get(name)
        if isinstance(value, (tf.Tensor, np.ndarray)) and tuple(value.shape) == tuple(inner.shape):
            return name
    return None


def _layer_is_used(view: StepView, variable: VariableSeen) -> bool:
    """Return True when the variable's own layer is called, or another of its weights is read."""
    owner = variable.owner
    if owner is None:
        return False
    if view.trace is not None:
        return any(call.layer is owner for call in view.trace.layers)
    siblings = [v for v in view.variables if v.owner is owner and v is not variable]
    return any(starts_of(view.ops, v.key)[0] for v in siblings)
