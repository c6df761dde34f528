"""Numbers as int16 codes, made so that pooling is a plain maximum and hides nothing bad.

A cell of the heat map stands for many steps. With these codes the largest one is the one to
show: NaN before Inf before the largest number, and "exactly zero" only where every step is::

    MISSING < NONE < ZERO < numbers < INF < NAN
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.tensorboard import schema

MISSING: Final = -32768  # nothing recorded, or a step skipped by loss scaling
NONE: Final = -32767  # the gradient is None
ZERO: Final = -32766
LIMIT: Final = 32000
INF: Final = 32766
NAN: Final = 32767

Codes = NDArray[np.int16]

SCALES: Final = {"norm": 100, "update_ratio": 100, "median": 100, "zero_fraction": 10_000}
"""Codes per unit: of log10 for the first three, of the fraction itself for the last.

``nonfinite`` is a count and stands for itself."""


def log10_codes(values: NDArray[Any]) -> Codes:
    """Codes of 100 log10(value) for values >= 0; ``schema.NONE_NORM`` means None.

    >>> log10_codes(np.array([1.0, 0.001, 0.0, -1.0, np.nan, np.inf])).tolist()
    [0, -300, -32766, -32767, 32767, 32766]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log10(values, dtype=np.float32)
    scaled *= 100.0
    np.rint(scaled, out=scaled)
    finite = np.isfinite(scaled)
    all_plain = bool(finite.all())
    if not all_plain:
        np.nan_to_num(scaled, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    np.clip(scaled, -LIMIT, LIMIT, out=scaled)
    codes: Codes = scaled.astype(np.int16)
    if not all_plain:
        codes[np.isnan(values)] = NAN
        codes[np.isposinf(values)] = INF
        codes[values == 0] = ZERO
        codes[values < 0] = NONE
    return codes


def norm_codes(block: schema.RowBlock) -> Codes:
    """``[n, V]`` codes of the gradient norms; non-finite norms of skipped steps are missing.

    Loss scaling provokes overflows on purpose and throws such a step away.
    """
    codes: Codes = log10_codes(block.norm)
    skipped = (block.flags & schema.SKIPPED) != 0
    if skipped.any():
        part = codes[skipped]
        part[part >= INF] = MISSING
        codes[skipped] = part
    return codes


def sample_codes(sample: NDArray[Any]) -> dict[str, Codes]:
    """``{metric: [V]}`` codes of one sample (``[9, V]``, see ``schema.SAMPLE_FIELDS``)."""
    fields = dict(zip(schema.SAMPLE_FIELDS, sample.astype(np.float32), strict=True))
    zero, bad = fields["zero_fraction"], fields["nonfinite"]
    none = np.isnan(zero)
    fraction = np.rint(np.clip(np.nan_to_num(zero), 0, 1) * SCALES["zero_fraction"])
    count = np.clip(np.nan_to_num(bad), 0, LIMIT)
    with np.errstate(over="ignore"):
        median = np.nan_to_num(np.clip(fields["p50"] * 100, -LIMIT, LIMIT))
    median = np.where(np.isnan(fields["p50"]), np.where(bad > 0, NAN, ZERO), np.rint(median))
    found = {
        "zero_fraction": fraction,
        "nonfinite": count,
        "update_ratio": log10_codes(np.where(none, schema.NONE_NORM, fields["update_ratio"])),
        "median": median,
    }
    return {k: np.where(none, NONE, v).astype(np.int16) for k, v in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A pooled piece of a matrix.

    Args:
        start: ``[n]`` first step of each column.
        end: Step after the last column.
        codes: ``[n, V]``.
        pool: Rows in a column.
        low: First row shown.
        high: Row after the last shown.
    """

    start: NDArray[np.int64]
    end: int
    codes: Codes
    pool: int
    low: int
    high: int


def pooled(steps: NDArray[np.int64], codes: Codes, first: int, last: int, width: int) -> Picture:
    """Take the steps from ``first`` to before ``last`` and pool them to ``width`` columns.

    Args:
        steps: ``[n]``, increasing.
        codes: ``[n, V]``.
        first: First step. The row before it is shown too when there is none at it: a sample
            stands until the next one.
        last: Step after the last.
        width: Most columns to return, at least 1.
    """
    low = int(np.searchsorted(steps, first, side="right")) - 1
    low, high = max(low, 0), int(np.searchsorted(steps, last, side="left"))
    if high <= low:
        empty = np.zeros(0, np.int64)
        return Picture(start=empty, end=last, codes=codes[:0], pool=1, low=low, high=low)
    pool = -(-(high - low) // width)
    # Groups keep their borders when the range moves, so that cells do not flicker in panning.
    low -= low % pool
    cuts = np.arange(low, high, pool)
    if pool == 1:
        shown = codes[low:high]
    else:
        shown = np.maximum.reduceat(codes[low:high], cuts - low, axis=0)
    gap = int(steps[high - 1] - steps[high - 2]) if high >= 2 else 1
    end = int(steps[high]) if high < len(steps) else int(steps[high - 1]) + max(gap, 1)
    return Picture(start=steps[cuts], end=end, codes=shown, pool=pool, low=low, high=high)


def by_layer(codes: Codes, groups: list[list[int]], metric: str, sizes: NDArray[Any]) -> Codes:
    """Join the columns of each layer.

    Norms add as squares, non-finite counts add, zero fractions are weighted by size; of update
    ratios and medians the largest is taken.

    Args:
        codes: ``[n, V]``.
        groups: Columns of each of the ``L`` layers.
        metric: One of ``norm``, ``update_ratio``, ``median``, ``zero_fraction``, ``nonfinite``.
        sizes: ``[V]`` elements of each variable.

    Returns:
        ``[n, L]``. Special codes win or lose as in pooling.
    """
    joined = np.empty((len(codes), len(groups)), np.int16)
    for target, columns in enumerate(groups):
        part = codes[:, columns]
        top = part.max(axis=1)
        plain = (part >= -LIMIT) & (part <= LIMIT)
        number = (top >= -LIMIT) & (top <= LIMIT)
        if len(columns) > 1 and metric == "norm":
            squares = np.where(plain, 10.0 ** (np.where(plain, part, 0) / 50.0), 0.0).sum(axis=1)
            total = np.rint(50.0 * np.log10(np.maximum(squares, 1e-300)))
        elif len(columns) > 1 and metric == "nonfinite":
            total = np.where(plain, part, 0).astype(np.int64).sum(axis=1)
        elif len(columns) > 1 and metric == "zero_fraction":
            weight = np.maximum(sizes[columns], 1) * plain
            total = (np.where(plain, part, 0) * weight).sum(axis=1)
            total = np.rint(total / np.maximum(weight.sum(axis=1), 1))
        else:
            total = top.astype(np.int64)
        joined[:, target] = np.where(number, np.clip(total, -LIMIT, LIMIT), top)
    return joined
