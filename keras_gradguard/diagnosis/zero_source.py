"""Where a value that is 0 everywhere comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import READ_OPS, Op, Value

_FIRST_UPSTREAM = 24
_MOST_UPSTREAM = 600


SLICES = frozenset({"StridedSlice", "Slice", "GatherV2", "GatherNd", "Split", "SplitV", "Unpack"})


# Far above the smallest float16 number: a smaller product may be 0 by underflow.
NOT_UNDERFLOW = 1e-3


CHOOSERS = blame.CHOICES | {
    "OneHot", "TopKV2", "ScatterNd", "TensorScatterUpdate", "Where", "ArgMax", "Floor", "Round",
    "Sign", "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "LogicalAnd",
    "LogicalOr", "LogicalNot", "SequenceMask", "MatrixBandPart", "TensorListStack",
    "TensorListGetItem",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSource:
    """Where a value that is 0 everywhere comes from."""

    kind: str  # "variable", "input", "sample_weight", "target", "constant", "mask", "choice",
    # "random", "dead", "flat", "cancel", "unknown"
    op: Op | None = None
    name: str = ""


def upstream(value: Value, most: int = _FIRST_UPSTREAM) -> list[Value]:
    """Return the values that ``value`` is computed from, nearest first, at most ``most``."""
    found: list[Value] = []
    seen = {value}
    level = [value]
    while level and len(found) < most:
        before = [v for u in level if u.op is not None for v in u.op.inputs if v.is_float]
        level = [v for v in dict.fromkeys(before) if v not in seen]
        seen.update(level)
        found += level
    return found[:most]


class Sources:
    """Walks from values that are 0 on one batch to where their zeros come from.

    Args:
        facts: Measurements with a traced step.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.ranges: dict[Value, tuple[float, float]] = {}

    def measure(self, values: Sequence[Value]) -> None:
        """Find the smallest and the largest entry of values that were not measured before."""
        new = [v for v in values if v not in self.ranges]
        self.ranges.update(blame.activity(self.facts, new))

    def of(self, value: Value) -> ZeroSource:
        """Walk back from a value that is 0 everywhere to where the zeros come from."""
        self.measure(upstream(value))
        for _ in range(60):
            op = value.op
            if op is None:
                return self._fed(value)
            if op.type in READ_OPS:
                return self._variable(op)
            if op.type == "Const":
                return ZeroSource(kind="constant", op=op)
            if "Random" in op.type:
                return ZeroSource(kind="random", op=op)
            floats = [v for v in op.inputs if v.is_float]
            if any(v not in self.ranges and blame.can_measure(v, self.facts) for v in floats):
                # Far from where it began: all at once, for a run costs more than what it measures.
                self.measure([*op.inputs, *upstream(value, _MOST_UPSTREAM)])
            zero = [v for v in floats if self.ranges.get(v) == (0.0, 0.0)]
            if op.type == "Cast" and not floats:
                return self._mask(op)
            if self.is_relu(op) and not zero:
                return ZeroSource(kind="dead", op=op)
            if op.type in blame.FLAT_ENDS and not zero:
                return ZeroSource(kind="flat", op=op)
            if op.type in CHOOSERS:
                # where(a, zeros, zeros) is 0 because of what it chooses from, not by the choice.
                both = [v for v in zero if v.op is None or v.op.type != "Const"]
                if not op.type.startswith("Select") or len(zero) < 2 or not both:
                    return self._chooser(op)
                value = both[0]
                continue
            if not floats:
                return ZeroSource(kind="unknown", op=op)
            if op.type in SLICES and not zero:
                # The part that was taken is 0, the whole is not: what was chosen lies elsewhere.
                return self._chooser(op)
            if op.type in blame.PRODUCTS and not zero:
                if self.excluding(op):
                    return self._chooser(op)
                return ZeroSource(kind="unknown", op=op)
            if op.type in ("Sub", "AddV2", "BiasAdd", "AddN", "RealDiv") and not zero:
                return ZeroSource(kind="cancel", op=op)
            fed = [v for v in (zero or floats) if v.op is None or v.op.type != "Const"]
            value = (fed or zero or floats)[0]
        return ZeroSource(kind="unknown")

    def _fed(self, value: Value) -> ZeroSource:
        import tensorflow as tf

        trace = self.facts.trace
        if trace is not None:
            for kind, part in (
                ("input", trace.x), ("target", trace.y), ("sample_weight", trace.sample_weight)
            ):  # fmt: skip
                if any(trace.value(t) is value for t in tf.nest.flatten(part) if tf.is_tensor(t)):
                    return ZeroSource(kind=kind)
        return ZeroSource(kind="unknown")

    def _mask(self, op: Op) -> ZeroSource:
        """Tell a weight or a mask that was fed from one that was computed."""
        value = op.inputs[0]
        while value.op is not None and value.op.type in blame.PASSES and value.op.inputs:
            value = value.op.inputs[0]
        if value.op is None:
            fed = self._fed(value)
            return fed if fed.kind != "unknown" else ZeroSource(kind="mask", op=op)
        if self.is_random(value):
            return ZeroSource(kind="random", op=op)
        return ZeroSource(kind="mask", op=op)

    def excluding(self, op: Op) -> bool:
        """Return True for a product that is 0 although neither factor is small: a mask at work."""
        tops = [max(map(abs, self.ranges.get(v, (0.0, 0.0)))) for v in op.inputs if v.is_float]
        return op.type == "Mul" and len(tops) == 2 and tops[0] * tops[1] > NOT_UNDERFLOW

    def _chooser(self, op: Op) -> ZeroSource:
        if any(self.is_random(v) for v in op.inputs):
            return ZeroSource(kind="random", op=op)
        return ZeroSource(kind="choice", op=op)

    def is_random(self, value: Value) -> bool:
        """Return True for a value that random numbers go into."""
        view = self.facts.view
        if view is None:
            return False
        return any("Random" in op.type for op in view.ops.producers(value, 40))

    def _variable(self, op: Op) -> ZeroSource:
        view = self.facts.view
        if view is not None:
            for key, handles in view.ops.variables.items():
                if any(op in h.uses for h in handles):
                    return ZeroSource(kind="variable", op=op, name=view.names.get(key, ""))
        return ZeroSource(kind="variable", op=op)

    def is_relu(self, op: Op) -> bool:
        """Return True for a ReLU, whatever operation it was made of."""
        if op.type == "Relu":
            return True
        if op.type == "LeakyRelu":
            return abs(float(op.attrs.get("alpha", 0.2))) < 1e-6
        if op.type == "Relu6":
            out = self.ranges.get(op.outputs[0], (1.0, 1.0))
            return out == (0.0, 0.0) and not self._named(op, "hard_")
        if op.type == "Maximum" and op.layers:
            return blame.clip_bounds(op)[0] == 0.0
        return False

    def _named(self, op: Op, part: str) -> bool:
        layer = self.facts.layer(op.layer) if op.layer else None
        activation = getattr(layer, "activation", None)
        return part in str(getattr(activation, "__name__", activation or ""))
