"""Formulas over the exponent histogram and over norms. NumPy only: every backend's tap uses them.

**The exponent histogram.** A float32 is ``sign | exponent (8 bits) | fraction``. The top nine
bits, read as a signed number and shifted to start at 0, give one of 512 bins::

    bin = (int32 bits >> 23) + 256        # arithmetic shift

    0        -0 and negative subnormals   256        +0 and positive subnormals
    1..254   -(2**(e-127) .. 2**(e-126))  257..510   the same octaves, positive (e = bin - 256)
    255      -Inf and NaN, sign bit set   511        +Inf and NaN

Counting these bins is exact, costs about three norms and has a static shape, so it runs on the
device in any compiled step. Everything else here follows from the counts: zeros, non-finite
values, and percentiles to one octave (a factor of two).

**What counts as zero.** Subnormal float32 values (below 1.18e-38 in magnitude) share their bin
with zero and are counted as zero: compiled code and accelerators may flush them to zero, so the
two cannot be told apart reliably, and no optimizer step ever depended on one. float16
subnormals (5.96e-8 and up) are normal float32 numbers and are not affected. float64 values are
rounded to float32 first: below that range they are zeros, above it they are infinite.

All functions take counts of shape ``[..., 512]`` and work along the last axis.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS: Final = 512
ZERO_EXPONENT: Final = 0
NON_FINITE_EXPONENT: Final = 255
EXPONENT_BIAS: Final = 127
LOG10_OCTAVE: Final = float(np.log10(2.0))
LOWEST_OCTAVE: Final = -60
"""Octaves below ``2**-60`` (8.7e-19) are folded into the lowest bucket of a table."""

Counts = NDArray[np.int64]
Float64 = NDArray[np.float64]


def exponent_counts(values: ArrayLike) -> Counts:
    """Count ``values`` by their float32 sign and exponent bits.

    The reference for what taps compute on the device.

    Args:
        values: Numbers of any shape and real or complex dtype (complex as magnitude).

    Returns:
        ``[512]`` int64 counts; they sum to the number of values.

    Example:
    >>> counts = exponent_counts([0.0, 1.5, -1.5])
    >>> counts[256], counts[256 + 127], counts[127]
    (np.int64(1), np.int64(1), np.int64(1))
    """
    array = np.asarray(values)
    if np.iscomplexobj(array):
        array = np.abs(array)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = np.ascontiguousarray(array.reshape(-1), dtype=np.float32)
    return np.bincount((single.view(np.int32) >> 23) + 256, minlength=BINS).astype(np.int64)


def _checked(counts: ArrayLike) -> NDArray[Any]:
    array = np.asarray(counts)
    if array.ndim == 0 or array.shape[-1] != BINS:
        raise ValueError(
            f"`counts` must have {BINS} bins on its last axis, as `exponent_counts` gives. "
            f"Received: shape {array.shape}"
        )
    return array


def magnitude_counts(counts: ArrayLike) -> Counts:
    """Fold the two signs: ``[..., 512]`` to ``[..., 256]`` counts by biased exponent.

    Index 0 holds zeros, ``e`` in 1..254 holds ``2**(e-127) <= |x| < 2**(e-126)``, and 255 the
    non-finite values.
    """
    array = _checked(counts).astype(np.int64)
    return array[..., :256] + array[..., 256:]


def total_count(counts: ArrayLike) -> Counts:
    """Number of values counted, ``[...]``."""
    return np.asarray(_checked(counts).sum(axis=-1, dtype=np.int64))


def zero_count(counts: ArrayLike) -> Counts:
    """Number of zeros (float32 subnormals included), ``[...]``."""
    return np.asarray(magnitude_counts(counts)[..., ZERO_EXPONENT])


def nonfinite_count(counts: ArrayLike) -> Counts:
    """Number of NaN and Inf, ``[...]``."""
    return np.asarray(magnitude_counts(counts)[..., NON_FINITE_EXPONENT])


def zero_fraction(counts: ArrayLike) -> Float64:
    """Share of zeros among all values, ``[...]`` in [0, 1]; 0 where nothing was counted.

    An empty gradient is not an all-zero gradient, hence 0 and not NaN.

    >>> float(zero_fraction(exponent_counts([0.0, -0.0, 1.0, float("nan")])))
    0.5
    """
    return np.asarray(zero_count(counts) / np.maximum(total_count(counts), 1))


def merge(counts: ArrayLike, axis: int = 0) -> Counts:
    """Add histograms along ``axis`` (not the last), e.g. those of a layer's variables.

    Args:
        counts: ``[..., 512]`` with at least two axes.
        axis: Which axis to sum over. Defaults to 0.

    Returns:
        Counts as if all values had been counted at once, int64 so that they cannot overflow.
    """
    array = _checked(counts)
    if array.ndim < 2 or axis in (-1, array.ndim - 1):
        raise ValueError(
            "`axis` must leave the axis of 512 bins alone. "
            f"Received: axis={axis!r}, shape {array.shape}"
        )
    return np.asarray(array.sum(axis=axis, dtype=np.int64))


def log10_percentiles(counts: ArrayLike, q: Sequence[float] = (5.0, 50.0, 95.0)) -> Float64:
    """Percentiles of log10|g| over the finite values that are not zero.

    Inside an octave the values are taken as spread evenly in log10, so that the result is at
    most one octave (0.301) from the exact percentile.

    Args:
        counts: ``[..., 512]``.
        q: Percentiles in [0, 100]. Defaults to ``(5, 50, 95)``.

    Returns:
        ``[..., len(q)]`` float64; NaN where every value is zero or non-finite.

    Example:
    >>> log10_percentiles(exponent_counts([1e-3] * 99 + [0.0]), q=[50]).round(2)
    array([-2.86])
    """
    wanted = np.asarray(q, dtype=np.float64)
    if wanted.ndim != 1 or not np.all((wanted >= 0.0) & (wanted <= 100.0)):
        raise ValueError(f"`q` must be percentiles between 0 and 100. Received: q={q!r}")
    octaves = magnitude_counts(counts)[..., 1:NON_FINITE_EXPONENT]
    cumulative = octaves.cumsum(axis=-1)
    total = cumulative[..., -1]
    target = total[..., None] * (wanted / 100.0)
    # The octave is the first whose cumulated count reaches the target and is not empty; the
    # 0th percentile has target 0, hence the floor just above it.
    floor = np.maximum(target, np.finfo(np.float64).tiny)
    index = (cumulative[..., None, :] < floor[..., None]).sum(axis=-1)
    index = np.minimum(index, octaves.shape[-1] - 1)
    count = np.take_along_axis(octaves, index, axis=-1)
    before = np.take_along_axis(cumulative, index, axis=-1) - count
    inside = np.clip((target - before) / np.maximum(count, 1), 0.0, 1.0)
    value = (index + 1 - EXPONENT_BIAS + inside) * LOG10_OCTAVE
    return np.where(total[..., None] > 0, value, np.nan)


def log10_table(counts: ArrayLike) -> Float64:
    """Fold one histogram to the ``[k, 3]`` table that TensorBoard draws, on a log10|g| axis.

    TensorBoard bins its histograms linearly, so raw gradients look like one spike; on the
    log10 axis an octave is a bucket of width 0.301. Exact zeros stand in a bucket one decade
    wide at the left end, -19.06 to -18.06; magnitudes below ``2**-60`` go to the lowest octave.
    Non-finite values have no place on the axis and are left out. Empty buckets at both ends
    are trimmed, as the chart stretches to the outermost edges.

    Args:
        counts: ``[512]``.

    Returns:
        ``[k, 3]`` float64 rows ``left edge, right edge, count``, k >= 1, edges finite,
        increasing and contiguous. When nothing can be drawn: the zero bucket with count 0.

    Example:
    >>> log10_table(exponent_counts([1.0, 1.0, 3.0])).round(2)
    array([[0. , 0.3, 2. ],
           [0.3, 0.6, 1. ]])
    """
    if np.ndim(counts) != 1:
        raise ValueError(
            f"`counts` must be one histogram of shape (512,). Received: shape {np.shape(counts)}"
        )
    return log10_tables(np.asarray(counts)[None])[0]


def log10_tables(counts: ArrayLike) -> list[Float64]:
    """Apply :func:`log10_table` to each row of ``[V, 512]`` counts, at once."""
    array = _checked(counts)
    if array.ndim != 2:
        raise ValueError(f"`counts` must have shape (V, 512). Received: shape {array.shape}")
    magnitude = magnitude_counts(array)
    lowest = EXPONENT_BIAS + LOWEST_OCTAVE
    octaves = NON_FINITE_EXPONENT - lowest
    edges = np.arange(LOWEST_OCTAVE, LOWEST_OCTAVE + octaves + 1) * LOG10_OCTAVE
    tables = np.empty((len(array), octaves + 1, 3))
    tables[:, 0, :2] = edges[0] - 1.0, edges[0]
    tables[:, 1:, 0], tables[:, 1:, 1] = edges[:-1], edges[1:]
    tables[:, 0, 2] = magnitude[:, ZERO_EXPONENT]
    tables[:, 1:, 2] = magnitude[:, lowest:NON_FINITE_EXPONENT]
    tables[:, 1, 2] += magnitude[:, 1:lowest].sum(axis=-1)
    filled = tables[:, :, 2] > 0
    first = filled.argmax(axis=1)
    last = np.where(filled.any(axis=1), octaves - filled[:, ::-1].argmax(axis=1), 0)
    return [t[a : b + 1] for t, a, b in zip(tables, first, last, strict=True)]


def norm_from_half_square(half_square: ArrayLike) -> NDArray[np.float32]:
    """L2 norm from half the sum of squares (what ``tf.nn.l2_loss`` returns).

    Args:
        half_square: ``[...]``, not negative. NaN and Inf pass through: they say that the
            values hold one, or that the sum overflowed float32 (norm above 1.8e19).

    Returns:
        ``[...]`` float32. Doubling happens in float64, so the norm cannot overflow by itself.
    """
    doubled = 2.0 * np.asarray(half_square, dtype=np.float64)
    return np.asarray(np.sqrt(doubled), dtype=np.float32)


def global_norm(norms: ArrayLike, none: Collection[int] = ()) -> Float64:
    """L2 norm of all gradients together, from the norm of each.

    Args:
        norms: ``[..., V]``.
        none: Indices of columns to leave out: their gradient is None and their norm has no
            meaning. Defaults to ``()``.

    Returns:
        ``[...]`` float64, in which no float32 norm can overflow when squared. NaN or Inf when
        a counted norm is; 0 for no columns.

    Example:
    >>> float(global_norm([3.0, 4.0, float("nan")], none=[2]))
    5.0
    """
    array = np.asarray(norms, dtype=np.float64)
    if none:
        array = np.delete(array, sorted(none), axis=-1)
    return np.asarray(np.sqrt(np.square(array).sum(axis=-1)))


def update_ratio(update: ArrayLike, weight: ArrayLike) -> Float64:
    """Size of the step against the size of the weights, ``|w_after - w_before| / |w_before|``.

    About 1e-3 is usual; 0 means that nothing moved, above 0.1 the weights are rewritten at
    each step.

    Args:
        update: ``[...]`` L2 norm of the change.
        weight: ``[...]`` L2 norm of the weights before it.

    Returns:
        ``[...]`` float64. 0 where nothing moved; Inf where weights that were all zero moved
        (zero initialisation); NaN where an input is NaN.
    """
    moved = np.asarray(update, dtype=np.float64)
    size = np.asarray(weight, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = moved / size
    return np.where((moved == 0.0) & ~np.isnan(size), 0.0, ratio)
