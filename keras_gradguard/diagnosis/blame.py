"""Which operation turns a live gradient into zeros: a walk from the variable towards the loss.

The gradient of the loss with respect to every value between a variable and the loss is computed
on the batch. Walking from the variable, the first operation that gets a gradient at its output
and gives none at its input is where it dies: a ReLU that is off, a sigmoid at its flat end, a
clip, a product with something that is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.liveness import liveness, top_tensor
from keras_gradguard.diagnosis.opgraph import ALIAS, Op, Value

PASSES = frozenset(
    {
        ALIAS, "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "Cast", "Transpose",
        "ConcatV2", "Pack", "Unpack", "Split", "SplitV", "StridedSlice", "Snapshot", "BroadcastTo",
        "Tile", "Slice", "PadV2", "Pad", "CheckNumerics", "EnsureShape",
    }
)  # fmt: skip
"""Operations that hand values on as they are (only moved or repeated)."""

SQUASHERS = frozenset({"Sigmoid", "Softmax"})
FLAT_ENDS = frozenset(
    {"Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Relu6", "Elu", "Selu", "Softplus", "Softsign",
     "Erf", "Erfc", "Exp", "Expm1", "Atan"}
)  # fmt: skip
STEPS = frozenset(
    {"Sign", "Floor", "Ceil", "Round", "Rint", "FloorDiv", "TruncateDiv", "ZerosLike"}
)
CLIPS = frozenset({"Maximum", "Minimum", "ClipByValue"})
PRODUCTS = frozenset(
    {"Mul", "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv1D", "Conv2D", "Conv3D",
     "DepthwiseConv2dNative", "Einsum", "MulNoNan", "Conv2DBackpropInput",
     "Conv3DBackpropInputV2"}
)  # fmt: skip
CHOICES = frozenset({"Select", "SelectV2", "GatherV2", "GatherNd", "ResourceGather", "Gather"})
EXTREMA = frozenset({"Abs", "Square", "SquaredDifference", "Pow", "L2Loss", "Huber"})
_MOST_CULPRITS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Culprit:
    """One operation that gets a gradient and gives none to ``value``.

    Args:
        op: The operation.
        value: Its input whose gradient is 0.
        variables: Names of the variables behind it.
    """

    op: Op
    value: Value
    variables: tuple[str, ...]


def find_culprits(facts: Facts, names: Sequence[str]) -> list[Culprit]:
    """Find where the gradients of some variables die.

    Args:
        facts: Measurements with a traced step.
        names: Variables whose gradient is 0 on the batch.

    Returns:
        The operations, those that concern most variables first.
    """
    trace, view = facts.trace, facts.view
    if trace is None or view is None or not facts.loss_values:
        return []
    ops = view.ops
    starts: dict[str, list[Value]] = {}
    for name in names:
        variable = facts.variables.get(name)
        if variable is not None:
            starts[name] = [o for op in ops.reads(trace.key(variable)) for o in op.outputs]
    walk = _Walk(facts, liveness(facts, [v for vs in starts.values() for v in vs]))
    found: dict[tuple[int, int], tuple[Op, Value, list[str]]] = {}
    for name, values in starts.items():
        for op, value in walk.culprits(values):
            key = (id(op), id(value))
            found.setdefault(key, (op, value, []))[2].append(name)
    ranked = sorted(found.values(), key=lambda item: -len(item[2]))[:_MOST_CULPRITS]
    return [Culprit(op, value, tuple(who)) for op, value, who in ranked]


class _Walk:
    """Walks from variables towards the loss for as long as no gradient arrives.

    Args:
        facts: Measurements with a traced step.
        alive: Whether a value gets a gradient other than 0.
    """

    def __init__(self, facts: Facts, alive: Callable[[Value], bool | None]) -> None:
        self.facts = facts
        self.alive = alive
        self._known: dict[Value, tuple[list[tuple[Op, Value]], list[Value]]] = {}

    def culprits(self, starts: Iterable[Value]) -> list[tuple[Op, Value]]:
        """Return the operations where gradients towards ``starts`` die."""
        found: list[tuple[Op, Value]] = []
        todo = list(starts)
        seen = set(todo)
        while todo:
            deadly, further = self._from(todo.pop())
            found += deadly
            new = [o for o in further if o not in seen]
            seen.update(new)
            todo += new
        return found

    def _from(self, value: Value) -> tuple[list[tuple[Op, Value]], list[Value]]:
        """Return what kills the gradient of ``value`` at once, and where to look further."""
        if value not in self._known:
            deadly: list[tuple[Op, Value]] = []
            further: list[Value] = []
            for op in value.uses:
                outs = [o for o in op.outputs if o in self.facts.reach]
                if op.type != ALIAS and any(self.alive(o) for o in outs):
                    deadly.append((op, value))
                else:
                    further += [o for o in outs if o.is_float]
            self._known[value] = deadly, further
        return self._known[value]


def can_measure(value: Value, facts: Facts) -> bool:
    """Return True when :func:`activity` can look at a value."""
    if top_tensor(value, facts) is None or value.dtype in ("resource", "variant", "string"):
        return False
    return value.shape is None or 0 not in value.shape


def activity(facts: Facts, values: Sequence[Value]) -> dict[Value, tuple[float, float]]:
    """Return (smallest, largest) of each value that lives in the top graph, on the batch."""
    here = [v for v in dict.fromkeys(values) if can_measure(v, facts)]
    if not here:
        return {}

    def make() -> list[Any]:
        axes: dict[int, Any] = {}  # one constant a rank, not two a value
        ends: list[Any] = []
        for v in here:
            t = v.tensor
            t = tf.cast(t, tf.float32) if t.dtype != tf.float32 else t
            if t.shape.rank is None:
                t = tf.reshape(t, [-1])
            rank = t.shape.rank
            if rank not in axes:
                axes[rank] = tf.range(rank)
            ends += [tf.raw_ops.Min(input=t, axis=axes[rank]), tf.raw_ops.Max(
                input=t, axis=axes[rank])]  # fmt: skip
        return [tf.stack(ends)]

    (table,) = facts.compute(make)
    return {
        v: (float(lo), float(hi)) for v, lo, hi in zip(here, table[::2], table[1::2], strict=True)
    }


def through(value: Value, also: frozenset[str] = frozenset()) -> Op | None:
    """Return the operation that made a value, seen through mere reshapes and renamings.

    Args:
        value: Where to start.
        also: More types to look through (their first input is followed).
    """
    seen: set[int] = set()
    while value.op is not None and id(value.op) not in seen:
        op = value.op
        if op.type not in PASSES and op.type not in also:
            return op
        seen.add(id(op))
        floats = [v for v in op.inputs if v.is_float] or op.inputs
        if not floats:
            return op
        value = floats[0]
    return value.op


def is_output(op: Op, facts: Facts) -> bool:
    """Return True when an operation's output is an output of the model, maybe reshaped."""
    outputs = set(facts.outputs)
    todo = list(op.outputs)
    seen = set(todo)
    while todo:
        value = todo.pop()
        if value in outputs:
            return True
        for user in value.uses:
            if user.type in PASSES:
                new = [o for o in user.outputs if o not in seen]
                seen.update(new)
                todo += new
    return False


def constant(value: Value) -> float | None:
    """Return the number that a value is known to be at trace time, or None."""
    op = value.op
    steps = 0
    while op is not None and op.type in PASSES and op.inputs and steps < 20:
        value, steps = op.inputs[0], steps + 1
        op = value.op
    if op is not None and op.type == "Const" and "value" in op.attrs:
        array = op.attrs["value"]
        if array.dtype.kind in "fiu" and array.size and bool((array == array.flat[0]).all()):
            return float(array.flat[0])
    return None


def clip_bounds(op: Op) -> tuple[float | None, float | None]:
    """Return (lower, upper) of a clip operation as far as they are constants."""
    if op.type == "ClipByValue" and len(op.inputs) == 3:
        return constant(op.inputs[1]), constant(op.inputs[2])
    numbers = [c for c in map(constant, op.inputs) if c is not None]
    if not numbers:
        return None, None
    return (numbers[0], None) if op.type == "Maximum" else (None, numbers[0])


def is_probability_clip(op: Op) -> bool:
    """Return True for a clip to just inside [0, 1], as cross-entropies on probabilities do."""
    low, high = clip_bounds(op)
    return (low is not None and 0 < low <= 1e-2) or (high is not None and 0.99 <= high < 1.0)
