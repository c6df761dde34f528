"""The numbers that leave a training step, as frozen data: what taps hand out and rules read."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Int = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableInfo:
    """What is fixed about one watched variable.

    Args:
        path: Name as the user knows it, without the automatic model prefix:
            ``"dense_1/kernel"``. Unique within a table.
        layer: Name of the layer that owns it, or the path without its last part.
        shape: Static shape.
        dtype: Dtype name, e.g. ``"float32"``.
        size: Number of elements.
        trainable: The variable's own flag when the table was made.
        sparse: True when its gradient arrives as rows (``tf.IndexedSlices``):
            statistics are then over the rows touched, not over the whole table.
        constrained: True when a Keras constraint is applied after each update.
    """

    path: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    trainable: bool = True
    sparse: bool = False
    constrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The sentinel's view of one optimizer step. ``V`` is the number of variables.

    Args:
        step: Optimizer step, 0 for the first.
        norm: ``[V]`` float32, L2 norm of each (unscaled) gradient. NaN or Inf when the
            gradient holds a NaN or Inf, or when its sum of squares overflows float32.
            NaN for a variable whose gradient is None (see ``Table.none``).
        loss: Loss of this batch, or None when it could not be seen.
        scale: Loss scale in force (1 without loss scaling).
        skipped: The loss-scale optimizer skipped this step because of a non-finite value.
        update_due: A weight update was due at this step (False on k-1 of k steps
            with gradient accumulation, and when skipped).
    """

    step: int
    norm: Float
    loss: float | None = None
    scale: float = 1.0
    skipped: bool = False
    update_due: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The full statistics of one sampled optimizer step.

    Args:
        step: Optimizer step.
        histogram: ``[V, 512]`` int32 counts by sign and exponent bits of the float32
            value (see :mod:`keras_gradguard.statistics`).
        max_abs: ``[V]`` float32, largest finite or non-finite magnitude (0 when empty).
        update: ``[V]`` float32, L2 norm of the real change ``w_after - w_before``.
        weight: ``[V]`` float32, L2 norm of ``w_before``.
        learning_rate: Learning rate of this step, or None when unknown.
    """

    step: int
    histogram: Int
    max_abs: Float
    update: Float
    weight: Float
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is computed once, and kept
class Table:
    """The columns of a channel: one optimizer's variables in order.

    Args:
        optimizer: Name of the optimizer (or ``"check"`` for hand-delivered gradients).
        variables: One entry a column.
        none: Indices of columns whose gradient is None in the current trace.
        skips: The guard itself leaves out steps with a NaN or Inf (``skip_non_finite``).
        judged: The rules apply. False for what is only recorded, such as probes.
    """

    optimizer: str
    variables: tuple[VariableInfo, ...]
    none: frozenset[int] = frozenset()
    skips: bool = False
    judged: bool = True

    @functools.cached_property
    def present(self) -> NDArray[np.bool_]:
        """``[V]`` bool, the columns that have a gradient. Not to be written to."""
        mask = np.ones(len(self.variables), bool)
        mask[list(self.none)] = False
        mask.flags.writeable = False
        return mask

    @functools.cached_property
    def half(self) -> bool:
        """True when a variable has a 16-bit type."""
        return any(v.dtype in ("float16", "bfloat16") for v in self.variables)

    @functools.cached_property
    def kernels(self) -> tuple[int, ...]:
        """Columns of dense matrices and filters, in order."""
        return tuple(i for i, v in enumerate(self.variables) if len(v.shape) >= 2 and not v.sparse)

    @functools.cached_property
    def sizes(self) -> NDArray[np.float64]:
        """``[V]`` float64, number of elements of each variable, at least 1."""
        return np.array([max(v.size, 1) for v in self.variables], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStats:
    """What one layer put out, per unit (last axis), over every example seen.

    Args:
        layer: Name of the layer.
        kind: ``"relu"``, ``"sigmoid"``, ``"tanh"``, ``"softmax"``, another activation's
            name, or ``""`` when the output is not an activation's.
        units: Size of the last axis.
        examples: Number of examples (rows) that the figures cover.
        dead_fraction: Share of units that are exactly 0 for every example, 0 to 1.
        saturated_fraction: Share of entries at a flat end of the activation, 0 to 1.
        constant_fraction: Share of units with one and the same value for every example.
        zero_fraction: Share of entries that are exactly 0.
        min: Smallest value.
        max: Largest value.
        output: True when this layer's output is an output of the model.
        nonfinite: Number of NaN and Inf entries.
    """

    layer: str
    kind: str = ""
    units: int = 0
    examples: int = 0
    dead_fraction: float = 0.0
    saturated_fraction: float = 0.0
    constant_fraction: float = 0.0
    zero_fraction: float = 0.0
    min: float = 0.0
    max: float = 0.0
    output: bool = False
    nonfinite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSample:
    """What the layers put out at one step. ``L`` is the number of layer calls seen.

    Args:
        step: Optimizer step, 0 for the first.
        layers: One entry a call, in the order of the calls. ``dead_fraction`` and
            ``constant_fraction`` cover every example of the last samples (``examples`` of
            them); the other figures are those of this step.
        histogram: ``[L, 512]`` int32, entries by sign and exponent bits, as in
            :class:`Sample`.
    """

    step: int
    layers: tuple[ActivationStats, ...]
    histogram: Int
