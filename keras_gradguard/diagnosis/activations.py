"""What the layers put out over many examples: dead, saturated, constant; and gradients by depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.diagnosis import blame
from keras_gradguard.diagnosis.data import input_scale
from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.trace import LayerCall
from keras_gradguard.diagnosis.zero_causes import ENOUGH_EXAMPLES
from keras_gradguard.findings import Cause, Evidence
from keras_gradguard.records import ActivationStats
from keras_gradguard.taps.gauge import BY_OP, flat_share


def layer_statistics(facts: Facts) -> tuple[ActivationStats, ...]:
    """Measure every layer output of the traced step on its batch.

    Args:
        facts: Measurements with a traced step.

    Returns:
        One entry a layer call with a float output, in the order of the calls. Without a
        trace: the statistics gathered while training.
    """
    trace = facts.trace
    if trace is None:
        return facts.context.activations
    calls = [c for c in trace.layers if _measurable(c, trace.graph)]
    if not calls:
        return ()
    kinds = [_kind(facts, c.outputs[0]) for c in calls]

    def make() -> list[Any]:
        tensors = []
        for call, kind in zip(calls, kinds, strict=True):
            t = tf.cast(call.outputs[0], tf.float32)
            axes = list(range(t.shape.rank - 1))
            low, high = tf.reduce_min(t, axes), tf.reduce_max(t, axes)
            tensors += [low, high, tf.stack([flat_share(t, kind), _share(t == 0), _bad(t)])]
        return tensors

    numbers = facts.compute(make)
    outputs = {id(v.tensor) for v in facts.outputs}
    found = []
    for i, (call, kind) in enumerate(zip(calls, kinds, strict=True)):
        low, high, (flat, zero, bad) = numbers[3 * i : 3 * i + 3]
        found.append(
            ActivationStats(
                layer=call.name,
                kind=kind,
                units=int(low.size),
                examples=int(call.outputs[0].shape[0] or 0),
                dead_fraction=float(((low == 0) & (high == 0)).mean()),
                saturated_fraction=float(flat),
                constant_fraction=float((low == high).mean()),
                zero_fraction=float(zero),
                min=float(low.min()),
                max=float(high.max()),
                output=any(id(t) in outputs for t in call.outputs),
                nonfinite=int(bad),
            )
        )
    return tuple(found)


def _measurable(call: LayerCall, graph: Any) -> bool:
    if len(call.outputs) != 1 or call.graph is not graph:
        return False
    t = call.outputs[0]
    if not t.dtype.is_floating or t.shape.rank is None or t.shape.rank < 2:
        return False
    return getattr(t, "graph", None) is graph and 0 not in t.shape.as_list()


def _kind(facts: Facts, tensor: Any) -> str:
    trace = facts.trace
    value = trace.value(tensor) if trace is not None else None
    op = blame.through(value) if value is not None else None
    return BY_OP.get(op.type, "") if op is not None else ""


def _share(flags: Any) -> Any:
    return tf.reduce_mean(tf.cast(flags, tf.float32))


def _bad(t: Any) -> Any:
    return tf.reduce_sum(tf.cast(~tf.math.is_finite(t), tf.float32))


def constant_outputs(facts: Facts) -> tuple[str, int, int] | None:
    """Find an embedding that is the same vector for every example.

    Returns:
        (layer, units, examples) of the output of the model, or of a layer that is called
        several times in one step, when all its units are constant; else None.
    """
    calls: dict[str, int] = {}
    trace = facts.trace
    if trace is None:
        return None
    for call in trace.layers:
        calls[call.name] = calls.get(call.name, 0) + 1
    for s in layer_statistics(facts):
        if s.units < 2 or s.examples < 2 or s.constant_fraction < 1.0:
            continue
        if s.output or calls.get(s.layer, 0) > 1:
            return s.layer, s.units, s.examples
    return None


def from_statistics(
    stats: Sequence[ActivationStats], layers: Iterable[str] = (), data: Sequence[Any] = ()
) -> list[Cause]:
    """Return what the statistics of layer outputs alone say about a gradient of 0.

    Args:
        stats: One entry a layer.
        layers: Layers whose gradient is 0; those and what comes after them are suspects.
        data: Statistics of the data, for the scale of the inputs.
    """
    order = [s.layer for s in stats]
    begin = min((order.index(n) for n in layers if n in order), default=0)
    causes = []
    scale = input_scale(data)
    for s in stats[begin:]:
        sure = 0.85 if s.examples >= ENOUGH_EXAMPLES else 0.6
        if s.kind in ("relu", "relu6") and s.dead_fraction == 1.0:
            causes.append(_dead(s, sure, scale))
        elif s.kind in ("sigmoid", "tanh", "softmax", "softsign") and s.saturated_fraction > 0.999:
            causes.append(_saturated(s, sure, scale))
    return causes


def _dead(s: ActivationStats, score: float, scale: Cause | None) -> Cause:
    evidence = [
        Evidence(
            name="dead_fraction",
            value=s.dead_fraction,
            text=f"{s.units} of {s.units} units of '{s.layer}' are off for all {s.examples} "
            "examples seen",
        )
    ]
    if s.output:
        return Cause(
            name="dead_relu_output",
            score=score,
            where=(s.layer,),
            evidence=tuple(evidence),
            fix=f"Take the relu off the output '{s.layer}': no activation for regression, softplus "
            "where the result must be positive.",
        )
    fix = "Lower the learning rate, use larger batches or He initialisation; leaky_relu cannot die."
    if scale is not None:
        evidence += list(scale.evidence)
        fix = f"{scale.fix} {fix}"
    return Cause(name="dead_relu", score=score, where=(s.layer,), evidence=tuple(evidence), fix=fix)


def _saturated(s: ActivationStats, score: float, scale: Cause | None) -> Cause:
    evidence = [
        Evidence(
            name="saturated_fraction",
            value=s.saturated_fraction,
            text=f"{100 * s.saturated_fraction:.1f} % of the {s.kind} outputs of '{s.layer}' are "
            f"at a flat end ({s.min:.4g} to {s.max:.4g}) over {s.examples} examples",
        )
    ]
    fix = f"Use a smaller learning rate or a normalisation layer before '{s.layer}'."
    if scale is not None:
        evidence += list(scale.evidence)
        fix = scale.fix
    return Cause(
        name="saturated_activation", score=score, where=(s.layer,), evidence=tuple(evidence),
        fix=fix,
    )  # fmt: skip


# ---- gradients by depth --------------------------------------------------------------


def kernel_norms(facts: Facts) -> list[tuple[str, float]]:
    """Return (layer, gradient norm of its largest weight) from the input side to the output."""
    found: dict[str, tuple[int, float]] = {}
    for name, gradient in facts.gradients.items():
        if gradient is None or "/" not in name:
            continue
        layer = name.rsplit("/", 1)[0]
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        if layer not in found or gradient.size > found[layer][0]:
            found[layer] = (gradient.size, norm)
    return [(layer, norm) for layer, (_, norm) in found.items()]


def vanishing_depth(
    norms: Sequence[tuple[str, float]], stats: Sequence[ActivationStats] = ()
) -> Cause | None:
    """Return ``vanishing_depth`` when gradients shrink steadily from the output to the input.

    Args:
        norms: (layer, gradient norm), input side first.
        stats: Layer outputs, to say which activation it is.
    """
    live = [(n, v) for n, v in norms if math.isfinite(v) and v > 0]
    if len(live) < 4:
        return None
    logs = np.log10([v for _, v in live])
    deep = float(logs[-1] - logs[0])
    if deep < 3:
        return None
    # A single collapse between two layers has another cause than depth.
    drops = np.diff(logs)
    if float(drops.max()) > 0.7 * deep:
        return None
    factor = 10 ** (deep / (len(live) - 1))
    kinds = {s.kind for s in stats if s.kind in ("sigmoid", "tanh", "softsign")}
    kind = next(iter(sorted(kinds)), "")
    low = [n for n, v in live if v < 1e-3 * live[-1][1]]
    told = f" through {kind}" if kind else ""
    return Cause(
        name="vanishing_depth",
        score=0.92,
        where=tuple(low[:6]) or (live[0][0],),
        evidence=(
            Evidence(
                name="gradient_ratio",
                value=live[0][1] / live[-1][1],
                text=f"the gradient shrinks about {factor:.2g} times a layer{told}: norm "
                f"{live[-1][1]:.2g} at '{live[-1][0]}', {live[0][1]:.2g} at '{live[0][0]}'",
            ),
        ),
        fix="Use relu or gelu with kernel_initializer='he_normal', put BatchNormalization or "
        "LayerNormalization between the layers, or add residual connections (keras.layers.Add).",
    )


def exploding_depth(norms: Sequence[tuple[str, float]]) -> bool:
    """Return True when gradients grow a thousandfold from the output to the input."""
    live = [v for _, v in norms if math.isfinite(v) and v > 0]
    return len(live) >= 2 and live[0] > 1e3 * live[-1]


def recurrent_explosion(facts: Facts) -> Cause | None:
    """Return ``recurrent_explosion`` when a recurrent layer's weights get the largest gradient."""
    layers = [la for la in _layers(facts) if _is_recurrent(la)]
    if not layers:
        return None
    norms = dict(kernel_norms(facts)) or _history_norms(facts)
    if not norms:
        return None
    whole = math.sqrt(sum(v * v for v in norms.values() if math.isfinite(v)))
    mine = {
        la.name: max((v for n, v in norms.items() if _belongs(la.name, n)), default=0.0)
        for la in layers
    }
    name, worst = max(mine.items(), key=lambda item: item[1] if math.isfinite(item[1]) else 1e38)
    if not (worst >= 0.3 * whole or not math.isfinite(worst)):
        return None
    layer = next(la for la in layers if la.name == name)
    steps = _steps(facts, name)
    radius = _spectral_radius(layer)
    text = f"the weights of the recurrent layer '{name}' get a gradient of norm {worst:.3g}"
    if steps:
        text += f" over {steps} time steps"
    if radius is not None:
        text += f"; its recurrent kernel has a largest eigenvalue of {radius:.3g}"
    grows = radius is not None and radius > 1.05
    return Cause(
        name="recurrent_explosion",
        score=0.9 if grows else 0.7,
        where=(name,),
        evidence=(Evidence(name="recurrent_gradient", value=worst, text=text),),
        fix="Set clipnorm=1.0 on the optimizer, keep recurrent_initializer='orthogonal', use LSTM "
        f"or GRU instead of '{name}' if it is a SimpleRNN, and shorten the sequences.",
    )


def _layers(facts: Facts) -> list[Any]:
    from keras_gradguard.diagnosis.sandbox import all_layers

    return [la for m in facts.models for la in all_layers(m)]


def _is_recurrent(layer: Any) -> bool:
    names = {k.__name__ for k in type(layer).__mro__}
    return bool(names & {"RNN", "LSTM", "GRU", "SimpleRNN", "ConvLSTM", "Bidirectional"})


def _belongs(name: str, path: str) -> bool:
    return name in path.split("/")


def _history_norms(facts: Facts) -> dict[str, float]:
    context = facts.context
    if context.table is None or not context.rows:
        return {}
    last = context.rows[-1].norm
    return {v.layer: float(n) for v, n in zip(context.table.variables, last, strict=True) if n == n}


def _steps(facts: Facts, name: str) -> int | None:
    if facts.trace is None:
        return None
    for call in facts.trace.layers:
        if call.name == name and call.inputs and call.inputs[0].shape.rank == 3:
            steps = call.inputs[0].shape[1]
            return None if steps is None else int(steps)
    return None


def _spectral_radius(layer: Any) -> float | None:
    for variable in getattr(layer, "weights", ()):
        if "recurrent_kernel" in variable.path:
            kernel = np.asarray(variable, dtype=np.float64)
            if kernel.ndim != 2 or not np.isfinite(kernel).all() or kernel.shape[0] > 1024:
                return None
            units = kernel.shape[0]
            blocks = [kernel[:, i : i + units] for i in range(0, kernel.shape[1], units)]
            square = [b for b in blocks if b.shape[0] == b.shape[1]]
            if square:
                return float(max(np.abs(np.linalg.eigvals(b)).max() for b in square))
    return None
