"""Loss, gradients, and which values get a gradient at all: one run of a traced step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.opgraph import READ_OPS
from keras_gradguard.diagnosis.stops import behind_stops
from keras_gradguard.diagnosis.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers:
    """What one run of a step gave.

    Args:
        loss: The loss before loss scaling, or None when there is none.
        gradients: One per variable of the trace, float32 and unscaled; None where the
            gradient is None. Empty when the trace has none.
        alive: Name of a tensor of the top graph -> some entry of its gradient is not 0. Only
            for what the trace holds in ``value_gradients``.
        note: What the reader should know about these numbers, or None.
    """

    loss: float | None
    gradients: tuple[NDArray[Any] | None, ...] = ()
    alive: dict[str, bool] = field(default_factory=dict)
    note: str | None = None


def measure(trace: Trace) -> Numbers:
    """Run a traced step once on its batch, forward and backward as far as it was traced.

    Args:
        trace: A traced step.
    """
    given = [g for g in trace.gradients if g is not None]
    with trace.graph.as_default():
        losses = [] if trace.loss is None else [trace.loss]
        if losses and trace.scaled_loss is not trace.loss:
            losses.append(trace.scaled_loss)
        dense = [_as_float32(g) for g in given]
        told = {n: trace.value_gradients[n] for n in _telling(trace)} | behind_stops(trace)
        table = health(list(told.values()))
    results = run(trace, [*losses, *dense, *table]) if losses or dense else []
    means = [float(np.mean(r)) for r in results[: len(losses)]]
    arrays = results[len(losses) : len(losses) + len(dense)]
    scale, note = _ratio(means), None
    if scale != 1.0 and not all(np.isfinite(a).all() for a in arrays):
        pairs = zip(trace.variables, trace.gradients, strict=True)
        plain = _unscaled(trace, [v for v, g in pairs if g is not None])
        if plain:
            note = (
                f"The loss scale of {scale:g} is still too high for this batch; "
                "the loss-scale optimizer skips such steps and halves it."
            )
            arrays, scale = plain, 1.0
    unscaled = iter([a / np.float32(scale) for a in arrays])
    return Numbers(
        loss=means[0] if means else None,
        gradients=tuple(None if g is None else next(unscaled) for g in trace.gradients),
        alive=_spread(trace, dict(zip(told, living(results[-1]), strict=True)) if table else {}),
        note=note,
    )


def _as_float32(gradient: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def _ratio(means: Sequence[float]) -> float:
    """Return the loss scale from the loss and the scaled loss."""
    if len(means) < 2 or not means[0]:
        return 1.0
    ratio = means[1] / means[0]
    return ratio if np.isfinite(ratio) and ratio > 0 else 1.0


def _unscaled(trace: Trace, variables: Sequence[Any]) -> list[NDArray[Any]]:
    """Return gradients of the loss before scaling, where every variable is read plainly."""
    if trace.loss is None:
        return []
    reads = []
    for v in variables:
        outs = [o.tensor for op in trace.ops.reads(trace.key(v)) for o in op.outputs]
        here = [t for t in outs if t is not None and t.graph is trace.graph]
        if not here or len(here) != len(outs):
            return []
        reads.append(here)
    with trace.graph.as_default():
        parts = iter(tf.gradients(trace.loss, [t for here in reads for t in here]))
        sums = []
        for here in reads:
            known = [g for g in (next(parts) for _ in here) if g is not None]
            dense = [_as_float32(g) for g in known]
            sums.append(tf.add_n(dense) if dense else tf.zeros(()))
    arrays = run(trace, sums) if sums else []
    fits = all(a.shape == tuple(v.shape) for a, v in zip(arrays, variables, strict=True))
    return arrays if fits else []


# ---- alive or not ----------------------------------------------------------------------

# Places in what DebugNumericSummaryV2 gives in its mode FULL_HEALTH.
_FULL_HEALTH, _ENTRIES, _ZEROS = 4, 4, 9


_MOVES = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "Transpose"})


def _handed_on(trace: Trace, name: str) -> str | None:
    """Return the tensor that takes a value on as it is, when nothing else uses the value."""
    value = trace.ops.value(name)
    if value is None or len(value.uses) != 1:
        return None
    op = value.uses[0]
    if op.type not in _MOVES or "_gradient_op_type" in op.attrs or op.inputs[0] is not value:
        return None
    tensor = op.outputs[0].tensor
    return tensor.name if tensor is not None and tensor.name in trace.value_gradients else None


def _telling(trace: Trace) -> list[str]:
    """Return the tensors to ask about: not what a variable reads, nor what is only moved."""
    return [
        name
        for name in trace.value_gradients
        if (value := trace.ops.value(name)) is not None
        and (value.op is None or value.op.type not in READ_OPS or value.op.assigned)
        and _handed_on(trace, name) is None
    ]


def _spread(trace: Trace, alive: dict[str, bool]) -> dict[str, bool]:
    """Add the values whose gradient is that of another one, in another shape."""
    for name in reversed(trace.value_gradients):  # towards the variables
        further = _handed_on(trace, name)
        if further in alive:
            alive[name] = alive[further]
    return alive


def health(gradients: Sequence[Any]) -> list[Any]:
    """Return one tensor that holds the kinds of entries of gradients, or nothing for none.

    Args:
        gradients: Tensors or ``IndexedSlices`` of the graph that is the default.

    There are hundreds of them: one operation each, for making operations takes the time.
    """
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    counts = [
        tf.raw_ops.DebugNumericSummaryV2(
            input=g, output_dtype=tf.float64, tensor_debug_mode=_FULL_HEALTH
        )
        for g in dense
    ]
    return [tf.stack(counts)] if counts else []


def living(table: NDArray[Any]) -> list[bool]:
    """Return whether some entry is not 0, for each row of what :func:`health` gave."""
    return [bool(row[_ZEROS] < row[_ENTRIES]) for row in table]
