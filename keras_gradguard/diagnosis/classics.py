"""Which classic NaN maker an operation is: judged by its type and the numbers it got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradguard.diagnosis.execute import run
from keras_gradguard.diagnosis.opgraph import ALIAS, Op, OpGraph, Value
from keras_gradguard.diagnosis.probe import Step, count_bad
from keras_gradguard.diagnosis.trace import Trace
from keras_gradguard.diagnosis.view import StepView
from keras_gradguard.diagnosis.wording import op_words, unique
from keras_gradguard.findings import Cause, Evidence

_LOG = frozenset({"Log", "Log1p", "Xlogy", "Xlog1py"})
_ROOT = frozenset({"Sqrt", "Rsqrt", "Acos", "Asin", "Atanh", "Acosh"})
_EXP = frozenset({"Exp", "Expm1", "Sinh", "Cosh"})
_DIVIDE = frozenset(
    {"RealDiv", "Div", "Reciprocal", "Inv", "Xdivy", "FloorMod", "Mod", "TruncateDiv"}
)
_SELECT = frozenset({"Select", "SelectV2"})
_HALF = ("float16", "bfloat16")
_ELEMENTWISE_HOPS = 12

FIXES = {
    "log_of_zero": "Use the loss that takes logits (BinaryCrossentropy(from_logits=True), or a "
    "LogitsOutput), or keras_gradguard.ops.safe_log.",
    "sqrt_gradient_at_zero": "Use keras_gradguard.ops.safe_sqrt (or safe_norm), or work with "
    "squared distances; `sqrt(x + 1e-12)` helps too.",
    "exp_overflow": "Keep the exponent bounded: softplus or log-sum-exp instead of exp, a "
    "clipped log-variance, or subtract the maximum first.",
    "division_by_zero": "Use keras_gradguard.ops.safe_divide, or add an epsilon to the "
    "denominator.",
    "where_double_branch": "Make the argument safe before the op: `f(where(ok, x, 1.0))` inside "
    "the outer `where(ok, ..., 0.0)`, as keras_gradguard.ops.safe_sqrt, safe_log and "
    "safe_divide do.",
    "float16_overflow": "Scale the inputs down, use the mixed_bfloat16 policy, or keep this "
    "layer in float32 (`dtype='float32'`).",
    "input_scale": "Scale the inputs to about unit size (keras.layers.Normalization or Rescaling).",
    "learning_rate_too_high": "Lower the learning rate, scale the inputs, or set `clipnorm`.",
    "unknown": "Look at this operation's inputs on the batch at hand.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    name: str
    score: float
    text: str


def forward(trace: Trace, view: StepView, step: Step, instead: Mapping[int, Any]) -> Cause:
    """Explain an operation that made NaN or Inf out of finite inputs.

    Args:
        trace: The traced step.
        view: Its view.
        step: The operation (or call).
        instead: Values used in place of variables.
    """
    op = _suspect(step, _LOG | _DIVIDE | _EXP | _ROOT)
    verdict = _judge_forward(op, _numbers(trace, step.handle.inputs, instead), step)
    return _cause(view, op, verdict, step)


def backward(
    trace: Trace,
    view: StepView,
    step: Step,
    known: Mapping[str, Any],
    instead: Mapping[int, Any],
) -> Cause:
    """Explain an operation whose gradient is finite behind it and NaN or Inf before it.

    Args:
        trace: The traced step, whose loss is finite.
        view: Its view.
        step: The operation (or call).
        known: Tensor name -> gradient tensor.
        instead: Values used in place of variables.
    """
    op = _suspect(step, _ROOT | _DIVIDE | _LOG | _EXP)
    numbers = _numbers(trace, step.handle.inputs, instead)
    if _behind_where(view.ops, op) and _gets_zero(trace, step, known, instead):
        made = [t for t in step.handle.outputs if t.dtype.is_floating]
        hidden = any(count_bad(trace, made, instead).values())
        what = "is NaN or Inf itself" if hidden else "has an infinite derivative"
        return _cause(
            view,
            op,
            _Verdict(
                name="where_double_branch",
                score=0.95,
                text=f"{op_words(op)} {what} in the branch that `where` does not take; its "
                f"gradient there is 0 * inf = NaN ({step.bad_entries} entries)",
            ),
            step,
        )
    return _cause(view, op, _judge_backward(op, numbers, step), step)


# ---- numbers ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Numbers:
    low: float
    high: float
    zeros: int
    size: int


def _numbers(trace: Trace, tensors: Sequence[Any], instead: Mapping[int, Any]) -> list[_Numbers]:
    """Return smallest, largest, zeros and size of each input (zeros for non-numbers)."""
    fetched = [t for t in tensors if t.dtype.is_floating or t.dtype.is_integer]
    arrays = iter(run(trace, fetched, instead=instead) if fetched else [])
    found = []
    for tensor in tensors:
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
            found.append(_Numbers(0.0, 0.0, 0, 0))
            continue
        array = np.asarray(next(arrays)).astype(np.float64).ravel()
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        found.append(_Numbers(low, high, int((array == 0).sum()), int(array.size)))
    return found


def _suspect(step: Step, dangerous: frozenset[str]) -> Op:
    """Return the flat operation to name: the dangerous one of a call's body, else the last."""
    inner = [op for op in step.ops if op.type in dangerous]
    if len(step.ops) == 1 or not inner:
        return step.ops[-1] if step.ops else Op(type=step.handle.type, name=step.handle.name)
    return inner[0]


# ---- judging ---------------------------------------------------------------------------


def _judge_forward(op: Op, numbers: Sequence[_Numbers], step: Step) -> _Verdict:
    kind = op.type
    whole = len(step.ops) <= 1  # the numbers belong to this very operation
    first = numbers[0] if numbers and whole else None
    last = numbers[-1] if numbers and whole else None
    if kind in _LOG:
        low = None if last is None else last.low
        text = "of 0" if low == 0 else ("of a negative number" if low is not None else "of 0")
        return _Verdict(
            name="log_of_zero",
            score=0.95 if whole else 0.85,
            text=f"{op_words(op)} {text}: {_range(last)}, {step.bad_entries} entries become "
            "NaN or Inf",
        )
    if kind in _DIVIDE or (kind in ("Rsqrt", "Pow") and first is not None and first.zeros):
        what = f"the denominator is 0 in {last.zeros} of {last.size} entries" if last else ""
        return _Verdict(
            name="division_by_zero",
            score=0.95 if last is None or last.zeros else 0.6,
            text=f"{op_words(op)}: {what or 'a denominator is 0'}",
        )
    if _is_half(op, step):
        return _half(op, numbers, step)
    if kind in _EXP or kind == "Pow":
        return _Verdict(
            name="exp_overflow",
            score=0.95 if kind in _EXP else 0.8,
            text=f"{op_words(op)} overflows: {_range(first)}, {step.bad_entries} entries "
            "become Inf",
        )
    if kind in _ROOT:
        return _Verdict(
            name="sqrt_gradient_at_zero",
            score=0.7,
            text=f"{op_words(op)} of a value outside its domain: {_range(first)}",
        )
    return _overflow(op, numbers, step)


def _judge_backward(op: Op, numbers: Sequence[_Numbers], step: Step) -> _Verdict:
    kind = op.type
    whole = len(step.ops) <= 1
    first = numbers[0] if numbers and whole else None
    last = numbers[-1] if numbers and whole else None
    if kind in _ROOT or kind == "Pow":
        zeros = f"{first.zeros} of {first.size} entries are 0" if first and first.zeros else ""
        return _Verdict(
            name="sqrt_gradient_at_zero",
            score=0.95 if first is None or first.zeros else 0.7,
            text=f"{op_words(op)} has an infinite derivative: {zeros or _range(first)}",
        )
    if kind in _DIVIDE:
        zeros = f"the denominator is 0 in {last.zeros} entries" if last and last.zeros else ""
        return _Verdict(
            name="division_by_zero",
            score=0.9,
            text=f"the gradient of {op_words(op)} is not finite: {zeros or _range(last)}",
        )
    if kind in _LOG:
        return _Verdict(
            name="log_of_zero",
            score=0.9,
            text=f"the gradient of {op_words(op)} is not finite: {_range(last)}",
        )
    if _is_half(op, step):
        return _half(op, numbers, step)
    if kind in _EXP:
        return _Verdict(
            name="exp_overflow",
            score=0.85,
            text=f"the gradient of {op_words(op)} overflows: {_range(first)}",
        )
    return _overflow(op, numbers, step)


def _is_half(op: Op, step: Step) -> bool:
    outputs = [v.dtype for v in op.outputs] or [t.dtype.name for t in step.handle.outputs]
    inputs = [v.dtype for v in op.inputs]
    names = outputs if step.bad_outputs else inputs
    return any(n == "float16" for n in names)


def _half(op: Op, numbers: Sequence[_Numbers], step: Step) -> _Verdict:
    largest = max((max(abs(n.low), abs(n.high)) for n in numbers), default=0.0)
    return _Verdict(
        name="float16_overflow",
        score=0.95,
        text=f"{op_words(op)} passes 65504, the largest float16, in {step.bad_entries} entries "
        f"(its inputs go up to {largest:.4g})",
    )


def _overflow(op: Op, numbers: Sequence[_Numbers], step: Step) -> _Verdict:
    largest = max((max(abs(n.low), abs(n.high)) for n in numbers), default=0.0)
    if largest > 1e15:
        return _Verdict(
            name="learning_rate_too_high",
            score=0.8,
            text=f"{op_words(op)} overflows: its inputs go up to {largest:.3g}",
        )
    return _Verdict(
        name="unknown",
        score=0.4,
        text=f"{op_words(op)} is the first operation with a NaN or Inf ({step.bad_entries} "
        f"entries); its inputs go up to {largest:.4g}",
    )


def _range(numbers: _Numbers | None) -> str:
    if numbers is None:
        return "inside a function"
    return f"its input runs from {numbers.low:.4g} to {numbers.high:.4g}"


# ---- where -----------------------------------------------------------------------------


def _behind_where(ops: OpGraph, op: Op) -> bool:
    """Return True when a ``where`` picks among what the operation makes, a few ops later."""
    todo = [(o, 0) for o in op.outputs]
    seen: set[Value] = set(op.outputs)
    while todo:
        value, hops = todo.pop()
        if hops > _ELEMENTWISE_HOPS:
            continue
        for user in value.uses:
            if user.type in _SELECT and value in user.inputs[1:]:
                return True
            for out in user.outputs:
                if out not in seen and (user.type == ALIAS or out.shape == value.shape):
                    seen.add(out)
                    todo.append((out, hops + 1))
    return False


def _gets_zero(
    trace: Trace, step: Step, known: Mapping[str, Any], instead: Mapping[int, Any]
) -> bool:
    """Return True when the gradient that arrives is exactly 0 wherever the result is not finite."""
    outputs = [t for t in step.handle.outputs if t.name in known]
    inputs = [
        t
        for t in step.handle.inputs
        if t.name in step.bad_inputs and outputs and t.shape == outputs[0].shape
    ]
    if not outputs or not inputs:
        return False
    arriving, leaving = run(trace, [known[outputs[0].name], known[inputs[0].name]], instead=instead)
    if arriving.shape != leaving.shape:
        return False
    wrong = ~np.isfinite(leaving)
    return bool(np.all(arriving[wrong] == 0))


# ---- what could have been --------------------------------------------------------------


def risks(view: StepView) -> tuple[Cause, ...]:
    """Name operations that could have made the NaN, judged by how the step is built.

    Used when the weights are NaN by now and the weights they started from give finite
    numbers: a log right behind a sigmoid or softmax, and a root of something that may
    be 0.
    """
    behind = view.ops.ancestors(view.loss)
    found: list[Cause] = []
    for op in view.ops.ops:
        if not any(o in behind for o in op.outputs):
            continue
        if op.type == "Log" and _comes_from(op, {"Sigmoid", "Softmax"}):
            verdict = _Verdict(
                name="log_of_zero",
                score=0.65,
                text=f"{op_words(op)} is taken of a sigmoid or softmax output without any "
                "guard; once it saturates this is the log of 0",
            )
        elif op.type == "Sqrt" and _comes_from(op, {"Sum", "Mean", "Square"}):
            verdict = _Verdict(
                name="sqrt_gradient_at_zero",
                score=0.6,
                text=f"{op_words(op)} is taken of a sum of squares without an epsilon; its "
                "derivative is infinite at 0",
            )
        elif op.type == "Exp" and op.frames:
            verdict = _Verdict(
                name="exp_overflow",
                score=0.5,
                text=f"{op_words(op)} is taken of an unbounded value",
            )
        else:
            continue
        found.append(_cause(view, op, verdict, None))
    return tuple(found[:3])


_PASSING = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "Sub", "Neg", ALIAS, "Cast"})


def _comes_from(op: Op, wanted: set[str]) -> bool:
    """Return True when an op's input is made by ``wanted`` with nothing that guards between."""
    todo, seen = list(op.inputs), set(op.inputs)
    while todo:
        maker = todo.pop().op
        if maker is None:
            continue
        if maker.type in wanted:
            return True
        if maker.type in _PASSING:
            fresh = [v for v in maker.inputs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return False


def _cause(view: StepView, op: Op, verdict: _Verdict, step: Step | None) -> Cause:
    place = view.place(op)
    line = op.frames[-1] if op.frames else None
    where = f"in {place!r}" if place not in ("loss", "train_step") else f"in the {place}"
    text = f"{verdict.text} ({where}" + (f", {line})" if line else ")")
    facts = [Evidence(name="operation", value=op.type, text=text)]
    if step is not None:
        facts.append(
            Evidence(
                name="nonfinite_entries",
                value=step.bad_entries,
                text=f"{step.bad_entries} entries are NaN or Inf here first",
            )
        )
    return Cause(
        name=verdict.name,
        score=verdict.score,
        where=unique((place,), op.layers[1:-1][::-1][:1]),
        evidence=tuple(facts),
        fix=FIXES[verdict.name],
        source=line.short if line else None,
    )
