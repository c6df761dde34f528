"""Words for operations and places, and the fix that goes with each kind of cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keras_gradguard.diagnosis.opgraph import Op, Value

_WORDS = {
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "Bincount": "bincount",
    "Bucketize": "bucketize (digitize)",
    "Ceil": "ceil",
    "DenseBincount": "bincount",
    "Equal": "== (equal)",
    "Floor": "floor",
    "FloorDiv": "// (floor division)",
    "ClipByValue": "clip_by_value",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Pow": "power",
    "Conv2D": "conv2d",
    "Greater": "> (greater)",
    "GreaterEqual": ">= (greater_equal)",
    "HistogramFixedWidth": "histogram_fixed_width",
    "If": "the condition of a cond/if",
    "IsFinite": "is_finite",
    "IsNan": "is_nan",
    "Less": "< (less)",
    "LessEqual": "<= (less_equal)",
    "Exp": "exp",
    "Log": "log",
    "Log1p": "log1p",
    "LogicalAnd": "logical_and",
    "LogicalNot": "logical_not",
    "MatMul": "matmul",
    "Mul": "multiplication",
    "Multinomial": "random.categorical",
    "NotEqual": "!= (not_equal)",
    "OneHot": "one_hot",
    "PreventGradient": "an op that refuses to be differentiated",
    "PyFunc": "numpy_function",
    "PyFuncStateless": "numpy_function",
    "Range": "range",
    "RealDiv": "division",
    "Reciprocal": "reciprocal",
    "Rint": "rint",
    "Round": "round",
    "Rsqrt": "rsqrt",
    "Shape": "shape",
    "Sign": "sign",
    "Size": "size",
    "StatelessMultinomial": "random.categorical",
    "Sqrt": "sqrt",
    "Square": "square",
    "StopGradient": "stop_gradient",
    "TopKV2": "the indices of top_k",
    "TruncateDiv": "integer division",
    "Where": "where (indices)",
    "While": "the condition of a while loop",
}
_STEPS = frozenset({"Round", "Rint", "Floor", "Ceil", "Sign", "FloorDiv", "TruncateDiv"})
_COMPARISONS = frozenset(
    {"Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"}
)
_INDICES = frozenset({"ArgMax", "ArgMin", "TopKV2", "Multinomial", "StatelessMultinomial", "Where"})


def op_words(op: Op) -> str:
    """Return how a user would name an operation, e.g. ``"cast to int32"``."""
    if op.api and op.type not in ("Cast", "StopGradient", "If", "While"):
        return op.api
    if op.type == "Cast":
        made = op.attrs.get("DstT") or (op.outputs[0].dtype if op.outputs else "integer")
        return f"cast to {made}"
    return _WORDS.get(op.type, op.type)


def cut_fix(op: Op) -> str:
    """Return what to change about an operation that has no gradient."""
    kind = op.type
    if kind == "StopGradient":
        return (
            "Remove `stop_gradient`, or let the value pass straight through: "
            "`x + stop_gradient(f(x) - x)`, which is keras_gradguard.layers.StraightThrough."
        )
    if kind in _STEPS:
        return (
            f"Wrap `{op_words(op)}` in keras_gradguard.layers.StraightThrough (value of the "
            "step, gradient of the identity), or use a smooth stand-in such as sigmoid or tanh."
        )
    if kind in _INDICES:
        return (
            f"An index has no gradient: use the scores themselves (softmax, or a "
            f"cross-entropy on them) instead of `{op_words(op)}`, and keep it for metrics only."
        )
    if kind in _COMPARISONS:
        return (
            "A comparison has no gradient: replace it by a smooth one (`sigmoid(k * (a - b))`) "
            "or train on a differentiable loss and keep this as a metric."
        )
    if kind in ("PyFunc", "PyFuncStateless"):
        return (
            "Write this with keras.ops or tf functions; NumPy code is opaque to the tape. If "
            "it must stay, give it a gradient with tf.custom_gradient."
        )
    if kind in ("Shape", "Size", "Range", "If", "While") or (
        kind == "Cast" and op.outputs and not op.outputs[0].is_float
    ):
        return (
            "Keep the value a float up to the loss. For a length or a count use "
            "keras_gradguard.layers.DynamicRepeatDense(length_gradient='boundary') with "
            "keras_gradguard.losses.LengthLoss, or StraightThrough around the rounding."
        )
    return (
        f"Replace `{op_words(op)}` by a differentiable function of keras.ops, or go around it "
        "with keras_gradguard.layers.StraightThrough."
    )


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Return names as text, e.g. ``"a, b, c, d and 3 more"``."""
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def shape_words(value: Value) -> str:
    """Return dtype and shape of a value as text, e.g. ``"float32 (16, 1)"``."""
    if value.shape is None:
        return value.dtype
    return f"{value.dtype} ({', '.join('?' if d is None else str(d) for d in value.shape)})"


def unique(*groups: Sequence[str]) -> tuple[str, ...]:
    """Join sequences of names, each name once, in order."""
    return tuple(dict.fromkeys(name for group in groups for name in group if name))
