"""What a diagnosis may look at: model, optimizer, a batch, the history, cheap statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keras_gradguard.records import ActivationStats, Row, Sample, Table

Mode = Literal["fit", "loop", "check"]
Role = Literal["input", "target", "output", "sample_weight", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One or more batches, joined along the first axis.

    Args:
        x: Inputs as the model takes them: an array, or a list or dictionary of arrays.
        y: Targets in the same forms, or None.
        sample_weight: Weights in the same forms, or None.
        size: Examples in one training batch, when ``x`` holds more than one; None when
            ``x`` is a single batch.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStats:
    """Statistics of one array of a batch; cheap enough to be gathered inside the step.

    Args:
        name: Name to say: ``"x"``, ``"x['age']"``, ``"y"``, ``"y_pred"``.
        role: What the array is.
        shape: Shape, ``(batch, ...)``; None where unknown.
        dtype: Dtype name.
        min: Smallest finite value (NaN when there is none).
        max: Largest finite value (NaN when there is none).
        mean: Mean of the finite values (NaN when there is none).
        nonfinite: Number of NaN and Inf entries.
        zero_fraction: Share of entries that are exactly 0, 0 to 1.
        batches: Number of batches these figures cover.
        bad_columns: Indices on the last axis that hold a NaN or Inf, at most eight.
    """

    name: str
    role: Role
    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    min: float
    max: float
    mean: float
    nonfinite: int = 0
    zero_fraction: float = 0.0
    batches: int = 1
    bad_columns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything that a diagnosis may use. Only ``model`` is needed; more makes it sharper.

    Args:
        model: The Keras model (or layer) that is trained.
        optimizer: Its optimizer, or None.
        loss: The loss: a callable of (y_true, y_pred), a name that Keras knows, a Keras
            loss, a list or dictionary of these, or None when unknown.
        batch: Data to look at, or None. Never taken from a run that goes on.
        table: Columns of ``rows`` and ``samples``, or None.
        rows: History of the sentinel, oldest first.
        samples: History of the samples, oldest first.
        mode: ``"fit"``, ``"loop"`` or ``"check"`` (gradients handed over).
        partners: Other models that take part in the loss (a discriminator, a teacher).
        step: Optimizer step of the finding.
        trace: A traced step of :mod:`keras_gradguard.diagnosis.trace`, or None.
        recording: What was seen of an eager loop, or None.
        data: Statistics of inputs, targets, outputs and weights gathered while training.
        activations: Statistics of layer outputs gathered while training.
        applied: Whether ``optimizer.apply`` was reached; None when unknown.
        class_weight: The ``class_weight`` handed to ``fit``, or None.
    """

    model: Any
    optimizer: Any = None
    loss: Any = None
    batch: Batch | None = None
    table: Table | None = None
    rows: Sequence[Row] = ()
    samples: Sequence[Sample] = ()
    mode: Mode = "fit"
    partners: tuple[Any, ...] = ()
    step: int | None = None
    trace: Any = None
    recording: Any = None
    data: tuple[DataStats, ...] = ()
    activations: tuple[ActivationStats, ...] = ()
    applied: bool | None = None
    class_weight: dict[int, float] | None = None
