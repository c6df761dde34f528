"""Where the way of the gradient from a variable to the loss is cut, nearest the variable first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keras_gradguard.diagnosis.opgraph import ALIAS, READ_OPS, Op, OpGraph, Value
from keras_gradguard.diagnosis.oracle import ZERO_INPUTS, Oracle, carries


@dataclass(frozen=True, slots=True)
class Cut:
    """One operation that hands no gradient back.

    Args:
        op: The operation.
        value: The input on which the way from the variable arrives.
        output: The output through which it would go on.
        distance: Number of operations between the variable and this one.
    """

    op: Op
    value: Value
    output: Value
    distance: int


@dataclass(frozen=True, slots=True)
class Way:
    """What was met on the way from a variable to the loss.

    Args:
        exists: Some way of the values leads from the variable to the loss.
        open: Some way lets a gradient through all along.
        cuts: Where the others are cut, nearest the variable first.
        passed: The operations that let a gradient through.
    """

    exists: bool
    open: bool
    cuts: tuple[Cut, ...] = ()
    passed: tuple[Op, ...] = ()


def way(
    ops: OpGraph,
    oracle: Oracle,
    starts: Sequence[Value],
    targets: Iterable[Value],
    *,
    zeros_cut: bool = False,
) -> Way:
    """Walk from a variable's reads towards the loss as far as a gradient comes back.

    Args:
        ops: The graph.
        oracle: Knows which operation passes a gradient.
        starts: What the reads of the variable gave.
        targets: The loss.
        zeros_cut: Also stop at operations whose gradient is exactly 0 everywhere.
    """
    goal = set(targets)
    between = ops.descendants(starts) & ops.ancestors(goal)
    if not between:
        return Way(False, False)
    queue: deque[tuple[Value, int]] = deque((v, 0) for v in starts if v in between)
    seen = {v for v, _ in queue}
    cuts: dict[tuple[Op, Value], Cut] = {}
    passed: dict[Op, None] = {}
    reached = False
    while queue:
        value, distance = queue.popleft()
        if value in goal and carries(value):
            reached = True
        for op in value.uses:
            further = [o for o in op.outputs if o in between]
            if not further:
                continue
            lets = oracle.passes(op, value) and not (zeros_cut and _is_zero(op, value))
            step = 0 if op.type == ALIAS else 1
            for output in further:
                if lets and carries(output):
                    passed[op] = None
                    if output not in seen:
                        seen.add(output)
                        queue.append((output, distance + step))
                else:
                    cuts.setdefault((op, value), Cut(op, value, output, distance + step))
    ordered = sorted(cuts.values(), key=lambda c: (c.distance, c.op.order))
    return Way(True, reached, tuple(ordered), tuple(passed))


def open_values(
    ops: OpGraph, oracle: Oracle, targets: Iterable[Value], *, zeros_cut: bool = False
) -> set[Value]:
    """Return the values from which some way to the loss lets a gradient through.

    What ``way(...).open`` says of one variable, for all of them in one walk.

    Args:
        ops: The graph.
        oracle: Knows which operation passes a gradient.
        targets: The loss.
        zeros_cut: Also stop at operations whose gradient is exactly 0 everywhere.
    """
    goal = set(targets)
    between = ops.ancestors(goal)
    found = {v for v in goal if carries(v)}
    before = -1
    while len(found) > before:  # again where a loop hands a value back to its beginning
        before = len(found)
        for op in reversed(ops.ops):
            if not any(o in found and carries(o) for o in op.outputs):
                continue
            for value in op.inputs:
                if value in found or value not in between:
                    continue
                if oracle.passes(op, value) and not (zeros_cut and _is_zero(op, value)):
                    found.add(value)
    return found


def opens(ops: OpGraph, oracle: Oracle, cut: Cut, targets: Iterable[Value]) -> bool:
    """Return True when the way would be open if this one cut were not there.

    A cut may begin a stretch of integers (an argmax, a cast, a gather by index); the whole
    stretch, up to the next value that can carry a gradient, counts as one.
    """
    goal = set(targets)
    todo, seen = [cut.output], {cut.output}
    further: list[Value] = []
    while todo:
        value = todo.pop()
        if carries(value):
            further.append(value)
            continue
        if value in goal:
            return True
        for op in value.uses:
            for out in op.outputs:
                if out not in seen:
                    seen.add(out)
                    todo.append(out)
    if not further:
        return False
    return bool(goal & set(further)) or way(ops, oracle, further, goal).open


def _is_zero(op: Op, value: Value) -> bool:
    index = ZERO_INPUTS.get(op.type)
    return index is not None and index < len(op.inputs) and op.inputs[index] is value


def starts_of(ops: OpGraph, key: int) -> tuple[list[Op], list[Value]]:
    """Return the operations that read a variable, and what they gave.

    Args:
        ops: The graph.
        key: The variable's key.

    A resource handle handed to an operation of a kind that is not known to read is taken
    for a read: it may look at the value.
    """
    reads = ops.reads(key)
    return reads, [out for op in reads for out in op.outputs]


def is_plain_read(op: Op) -> bool:
    """Return True for the operations that only read a variable."""
    return op.type in READ_OPS
