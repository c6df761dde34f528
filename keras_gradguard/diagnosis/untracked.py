"""Weights that take part in the step but that the model does not list, so that nothing trains."""

from __future__ import annotations

from typing import Any

from keras_gradguard.diagnosis.cuts import starts_of, way
from keras_gradguard.diagnosis.oracle import Oracle
from keras_gradguard.diagnosis.trace import LayerCall, Trace, backend_variable
from keras_gradguard.diagnosis.view import view_of_trace
from keras_gradguard.diagnosis.wording import listed, unique
from keras_gradguard.findings import Cause, Evidence
from keras_gradguard.taps.names import path_of


def untracked(trace: Trace) -> tuple[Cause, ...]:
    """Find trainable weights used inside the model that the model does not list.

    Args:
        trace: A traced step.

    Returns:
        ``untracked_variable`` for a bare ``tf.Variable`` and for the weights of a layer that
        Keras does not see (one hidden in a Lambda, a closure, a plain object), and
        ``layer_created_in_call`` for a layer that is made anew in every call. Weights of
        other models that only take part in the loss are left alone.
    """
    view = view_of_trace(trace)
    oracle = Oracle()
    causes: list[Cause] = []
    owned: set[int] = set()
    for call in _foreign_layers(trace):
        weights = list(call.layer.trainable_variables)
        owned |= {id(backend_variable(v)) for v in weights}
        causes.append(_layer_cause(call, weights))
    for variable in trace.untracked:
        if id(variable) in owned:
            continue
        reads, starts = starts_of(view.ops, id(variable))
        places = [op.layers[-1] for op in reads if trace.model.name in op.layers]
        if not places or not way(view.ops, oracle, starts, view.loss).open:
            continue
        name = path_of(variable)
        line = next((op.source for op in reads if op.source), None)
        causes.append(
            Cause(
                name="untracked_variable",
                score=0.95,
                where=unique(places, (name,)),
                evidence=(
                    Evidence(
                        name="variable",
                        value=name,
                        text=f"{places[0]!r} uses the tf.Variable {name!r} "
                        f"({'x'.join(map(str, variable.shape)) or 'scalar'}), the loss depends "
                        "on it, and model.trainable_variables does not list it",
                    ),
                ),
                fix="Create the weight with self.add_weight(...) or keras.Variable as an "
                "attribute of the layer; Keras 3 does not track a bare tf.Variable.",
                source=line,
            )
        )
    return tuple(causes)


def _foreign_layers(trace: Trace) -> list[LayerCall]:
    """Return the outermost calls of layers with weights that the model does not list."""
    listed_keys = {id(backend_variable(v)) for v in trace.model.variables}
    found: dict[int, LayerCall] = {}
    for call in trace.layers:
        weights = getattr(call.layer, "trainable_variables", None)
        if not weights or trace.model.name not in call.parents:
            continue
        if all(id(backend_variable(v)) in listed_keys for v in weights):
            continue
        if any(c.name in call.parents for c in found.values()):
            continue
        if call.built_here or id(call.layer) not in trace.known_layers:
            found.setdefault(id(call.layer), call)
    return list(found.values())


def _layer_cause(call: LayerCall, weights: list[Any]) -> Cause:
    names = [path_of(v) for v in weights]
    line = call.frames[-1] if call.frames else None
    inside = call.parents[-1] if call.parents else "model"
    if call.built_here:
        return Cause(
            name="layer_created_in_call",
            score=0.95,
            where=unique((inside, call.name), names),
            evidence=(
                Evidence(
                    name="layer",
                    value=call.name,
                    text=f"{call.name!r} ({type(call.layer).__name__}) is made inside the call "
                    f"of {inside!r}"
                    + (f" ({line})" if line else "")
                    + f": its weights {listed(names)} are new in every trace and never trained",
                ),
            ),
            fix="Create the layer in __init__ (or build) as an attribute and only call it in "
            "call().",
            source=line.short if line else None,
        )
    return Cause(
        name="untracked_variable",
        score=0.93,
        where=unique((inside, call.name), names),
        evidence=(
            Evidence(
                name="layer",
                value=call.name,
                text=f"{inside!r} calls the layer {call.name!r}"
                + (f" ({line})" if line else "")
                + f", which is no attribute that Keras tracks: {listed(names)} are not in "
                "model.trainable_variables",
            ),
        ),
        fix="Make the layer an attribute of the layer or model that calls it (a Lambda or a "
        "closure hides it), or place it in the model as a layer of its own.",
        source=line.short if line else None,
    )
