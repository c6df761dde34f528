"""Square root, logarithm, division and norm whose values and gradients stay finite.

The plain operations are finite almost everywhere, but their gradients are not:
``d sqrt(x)/dx`` is infinite at 0, ``d|x|/dx`` is 0/0 at the zero vector, and a
``where`` around them does not help, because the branch that was not taken still
sends back ``0 * inf = nan``. Each function here replaces the argument *before*
the dangerous operation as well as the value after it (a "double where"), so no
infinite derivative is ever formed.

Where an argument cannot be served (``sqrt(-1)``), the value is a constant and its
gradient is exactly 0. NaN in gives NaN out: a broken input is not hidden.
Everything is written in ``keras.ops`` and works in eager and graph mode, under
XLA and on symbolic Keras tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

__all__ = ["safe_divide", "safe_log", "safe_norm", "safe_sqrt"]

Tensor = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The range of a float dtype.

    Args:
        tiny: Smallest positive number that is not flushed to zero.
        reciprocal: Smallest positive number whose reciprocal is finite.
        largest: Largest finite number.
    """

    tiny: float
    reciprocal: float
    largest: float


# float16 keeps its subnormals on every device (the arithmetic is done in
# float32); the wider types have theirs flushed to zero, so that a subnormal
# passes `x > 0` on one device and is 0 in the division on the next.
_LIMITS = {
    "float16": _Limits(tiny=6e-8, reciprocal=1.53e-5, largest=65504.0),
    "bfloat16": _Limits(tiny=1.1754944e-38, reciprocal=1.1754944e-38, largest=3.3895314e38),
    "float32": _Limits(tiny=1.1754944e-38, reciprocal=1.1754944e-38, largest=3.4028235e38),
    "float64": _Limits(
        tiny=2.2250738585072014e-308,
        reciprocal=2.2250738585072014e-308,
        largest=1.7976931348623157e308,
    ),
}


def _as_float(x: Any, name: str) -> Tensor:
    """Return ``x`` as a float tensor; integers become ``keras.config.floatx()``."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        x = ops.convert_to_tensor(x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    if dtype in _LIMITS:
        return x if keras.backend.is_keras_tensor(x) else ops.convert_to_tensor(x)
    if dtype.startswith(("int", "uint", "bool")):
        return ops.cast(x, keras.config.floatx())
    raise TypeError(
        f"`{name}` must be real: a float16, bfloat16, float32 or float64 tensor, or integers. "
        f"Received: {name} of dtype {dtype}"
    )


def _limits(x: Tensor) -> _Limits:
    return _LIMITS[keras.backend.standardize_dtype(x.dtype)]


def _constant(value: float, dtype: Any) -> Tensor:
    # Not `ops.cast`, which takes a Python number through float32.
    return ops.convert_to_tensor(value, dtype=dtype)


def safe_sqrt(x: Any) -> Tensor:
    """Square root with a finite gradient at 0.

    ``sqrt(x)`` for ``x > 0``, else 0 with gradient 0. (The plain gradient,
    ``1 / (2 sqrt(x))``, is infinite at 0 and NaN below.)

    Args:
        x: Tensor of any shape; float, or integers (taken as ``floatx``).

    Returns:
        Tensor of the shape and float dtype of ``x``. NaN where ``x`` is NaN.

    Raises:
        TypeError: ``x`` is complex or not numeric.

    Example:
    >>> safe_sqrt([4.0, 0.0, -1.0]).numpy().tolist()
    [2.0, 0.0, 0.0]
    """
    x = _as_float(x, "x")
    positive = ops.greater_equal(x, _constant(_limits(x).tiny, x.dtype))
    root = ops.sqrt(ops.where(positive, x, ops.ones_like(x)))
    return ops.where(positive, root, _zero_or_nan(x))


def _zero_or_nan(x: Tensor) -> Tensor:
    """Return 0, or NaN where ``x`` is NaN, as a constant."""
    x = ops.stop_gradient(x)
    return ops.where(ops.isnan(x), x, ops.zeros_like(x))


def safe_log(x: Any) -> Tensor:
    """Natural logarithm with a finite value and gradient everywhere.

    ``log(x)`` for ``x > 0``. At and below 0 the value is the logarithm of the
    smallest normal number of the dtype (-87.3 in float32) with gradient 0. In
    float16 the gradient ``1 / x`` overflows below 1.53e-5, so it is 0 there too.

    Args:
        x: Tensor of any shape; float, or integers (taken as ``floatx``).

    Returns:
        Tensor of the shape and float dtype of ``x``. NaN where ``x`` is NaN.

    Raises:
        TypeError: ``x`` is complex or not numeric.

    Example:
    >>> [round(v, 3) for v in safe_log([1.0, 0.5, 0.0]).numpy().tolist()]
    [0.0, -0.693, -87.337]
    """
    x = _as_float(x, "x")
    limits = _limits(x)
    smooth = ops.greater_equal(x, _constant(limits.reciprocal, x.dtype))
    value = ops.log(ops.where(smooth, x, ops.ones_like(x)))
    # `maximum` would also do for NaN on some devices and not on others.
    fixed = ops.stop_gradient(x)
    floor = _constant(limits.tiny, x.dtype) * ops.ones_like(fixed)
    fixed = ops.where(ops.less(fixed, floor), floor, fixed)
    return ops.where(smooth, value, ops.log(fixed))


def safe_divide(x: Any, y: Any) -> Tensor:
    """Quotient with a finite value and finite gradients everywhere.

    ``x / y`` where the quotient and both derivatives, ``1 / y`` and ``-x / y**2``,
    are finite numbers of the dtype. Elsewhere the gradients are 0 and the value
    is: 0 where ``y`` is 0, and ``x / y`` cut to the largest finite number where
    that overflows.

    Args:
        x: Numerator; float, or integers (taken as ``floatx``).
        y: Denominator, broadcastable with ``x``.

    Returns:
        Tensor of the broadcast shape and the wider dtype. NaN where ``x`` or ``y``
        is NaN.

    Raises:
        TypeError: An argument is complex or not numeric.

    Example:
    >>> safe_divide([1.0, 1.0, 0.0], [4.0, 0.0, 0.0]).numpy().tolist()
    [0.25, 0.0, 0.0]
    """
    x, y = _as_float(x, "x"), _as_float(y, "y")
    dtype = keras.backend.result_type(x.dtype, y.dtype)
    x, y = ops.cast(x, dtype), ops.cast(y, dtype)
    limits = _limits(x)
    largest = _constant(limits.largest, dtype)

    fixed_x, fixed_y = ops.stop_gradient(x), ops.stop_gradient(y)
    divisible = ops.greater_equal(ops.abs(fixed_y), _constant(limits.reciprocal, dtype))
    denominator = ops.where(divisible, fixed_y, ops.ones_like(fixed_y))
    quotient = fixed_x / denominator
    derivative = quotient / denominator
    smooth = ops.logical_and(
        divisible,
        ops.logical_and(
            ops.less_equal(ops.abs(quotient), largest), ops.less_equal(ops.abs(derivative), largest)
        ),
    )
    value = ops.where(smooth, x, ops.zeros_like(x)) / ops.where(smooth, y, ops.ones_like(y))

    # Below `reciprocal` but not 0 the quotient itself may still be a number
    # (float16 subnormals); it is kept as a constant.
    is_zero = ops.less(ops.abs(fixed_y), _constant(limits.tiny, dtype))
    plain = fixed_x / ops.where(is_zero, ops.ones_like(fixed_y), fixed_y)
    plain = ops.where(ops.greater(plain, largest), largest, plain)
    plain = ops.where(ops.less(plain, -largest), -largest, plain)
    undefined = ops.logical_and(is_zero, ops.logical_not(ops.isnan(fixed_x)))
    constant = ops.where(undefined, ops.zeros_like(plain), plain)
    return ops.where(smooth, value, constant)


def safe_norm(x: Any, axis: int | Sequence[int] | None = -1, keepdims: bool = False) -> Tensor:
    """Euclidean norm with a finite gradient at the zero vector.

    ``sqrt(sum(x ** 2))`` along ``axis``, computed as ``m * sqrt(sum((x / m) ** 2))``
    with ``m = max(abs(x))``, so that neither large nor small entries overflow or
    vanish in the squares. The gradient is ``x / norm``; 0 for the zero vector
    (and where every entry is within a few units of the smallest normal number).

    Args:
        x: Tensor; float, or integers (taken as ``floatx``).
        axis: Axis or axes to reduce; None for all.
        keepdims: Keep reduced axes with size 1.

    Returns:
        Tensor of norms, at most the largest finite number of the dtype. NaN where
        a vector holds NaN.

    Raises:
        TypeError: ``x`` is complex or not numeric.

    Example:
    >>> safe_norm([[3.0, 4.0], [0.0, 0.0]]).numpy().tolist()
    [5.0, 0.0]

    References:
        J. L. Blue, "A portable Fortran program to find the Euclidean norm of a
        vector", ACM TOMS 4(1), 1978: scaling by the largest entry.
    """
    x = _as_float(x, "x")
    limits = _limits(x)
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    scale = ops.max(ops.abs(ops.stop_gradient(x)), axis=axis, keepdims=True)
    usable = ops.logical_and(
        ops.greater_equal(scale, _constant(limits.tiny, x.dtype)),
        ops.less_equal(scale, _constant(limits.largest, x.dtype)),
    )
    safe_scale = ops.where(usable, scale, ops.ones_like(scale))
    # With a constant vector in place of an unusable one the root is never at 0.
    scaled = ops.where(usable, x / safe_scale, ops.ones_like(x))
    root = ops.sqrt(ops.sum(ops.square(scaled), axis=axis, keepdims=True))
    largest = _constant(limits.largest, x.dtype)
    fits = ops.less_equal(ops.stop_gradient(root), largest / safe_scale)
    norm = ops.where(fits, root, ops.zeros_like(root)) * safe_scale
    norm = ops.where(fits, norm, largest)
    norm = ops.where(usable, norm, _unusable_norm(x, axis, limits))
    if keepdims:
        return norm
    return ops.squeeze(norm, axis=tuple(range(len(x.shape))) if axis is None else axis)


def _unusable_norm(x: Tensor, axis: Any, limits: _Limits) -> Tensor:
    """Return, as a constant, NaN for a vector with NaN, Inf for one with Inf, else 0."""
    x = ops.stop_gradient(x)
    total = ops.sum(ops.abs(x), axis=axis, keepdims=True)
    too_large = ops.greater(total, _constant(limits.largest, x.dtype))
    broken = ops.logical_or(too_large, ops.isnan(total))
    return ops.where(broken, total, ops.zeros_like(total))
