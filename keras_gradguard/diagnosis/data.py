"""What the data of a batch say: NaN, all zero, far from unit scale, empty labels, no weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.diagnosis.context import Batch, DataStats, Role
from keras_gradguard.findings import Cause, Evidence

# Raw pixels (255), years (2000) and prices are above, standardised data below.
UNIT_SCALE_LIMIT = 50.0


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name to say, array) for an array, or a list, tuple or dictionary of arrays.

    Args:
        name: Name of the whole, e.g. ``"x"``.
        value: The structure; None yields nothing.

    Example:
    >>> [n for n, _ in leaves("x", {"age": 1, "size": [2, 3]})]
    ["x['age']", "x['size']"]
    """
    if value is None:
        return
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(f"{name}[{key!r}]", value[key])
    elif isinstance(value, list | tuple) and not _is_numbers(value):
        for i, item in enumerate(value):
            yield from leaves(f"{name}[{i}]", item)
    else:
        yield name, value


def _is_numbers(value: Sequence[Any]) -> bool:
    """Tell a plain list of numbers (one array) from a list of arrays."""
    return bool(value) and all(isinstance(v, bool | int | float) for v in value)


def as_array(value: Any) -> NDArray[Any] | None:
    """Return ``value`` as a NumPy array, or None when it is not numeric (text, objects)."""
    if hasattr(value, "to_tensor"):  # a ragged tensor; the padding counts as zeros
        value = value.to_tensor()
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    return array if array.dtype.kind in "fiub" else None


def describe(name: str, value: Any, role: Role) -> DataStats | None:
    """Measure one array.

    Args:
        name: Name to say.
        value: Anything NumPy can read.
        role: What it is.

    Returns:
        The statistics, or None when the array is empty or not numeric.

    Example:
    >>> describe("x", [[0.0, 2.0], [0.0, float("nan")]], "input").bad_columns
    (1,)
    """
    array = as_array(value)
    if array is None or array.size == 0:
        return None
    floats = array.astype(np.float64)
    finite = np.isfinite(floats)
    good = floats[finite]
    bad = ~finite
    columns: tuple[int, ...] = ()
    if bad.any() and array.ndim > 1:
        columns = tuple(np.flatnonzero(bad.reshape(-1, array.shape[-1]).any(0))[:8].tolist())
    return DataStats(
        name=name,
        role=role,
        shape=tuple(array.shape),
        dtype=array.dtype.name,
        min=float(good.min()) if good.size else math.nan,
        max=float(good.max()) if good.size else math.nan,
        mean=float(good.mean()) if good.size else math.nan,
        nonfinite=int(bad.sum()),
        zero_fraction=float((floats == 0).mean()),
        bad_columns=columns,
    )


def describe_batch(batch: Batch | None) -> tuple[DataStats, ...]:
    """Measure every array of a batch: inputs, targets and sample weights."""
    if batch is None:
        return ()
    parts: tuple[tuple[str, Any, Role], ...] = (
        ("x", batch.x, "input"),
        ("y", batch.y, "target"),
        ("sample_weight", batch.sample_weight, "sample_weight"),
    )
    found = (describe(n, v, role) for p, value, role in parts for n, v in leaves(p, value))
    return tuple(s for s in found if s is not None)


def _role(stats: Iterable[DataStats], role: Role) -> list[DataStats]:
    return [s for s in stats if s.role == role]


def nan_input(stats: Iterable[DataStats]) -> Cause | None:
    """Return the cause ``nan_input`` when inputs, targets or weights hold NaN or Inf."""
    bad = [s for s in stats if s.nonfinite and s.role != "output"]
    if not bad:
        return None
    evidence = []
    for s in bad:
        total = math.prod(d or 1 for d in s.shape)
        at = ""
        if s.bad_columns and len(s.shape) > 1:
            word = "column" if len(s.bad_columns) == 1 else "columns"
            at = f", in {word} {', '.join(map(str, s.bad_columns))} of the last axis"
        evidence.append(
            Evidence(
                name=f"nonfinite {s.name}",
                value=s.nonfinite,
                text=f"{s.nonfinite} of {total} values of `{s.name}` are NaN or Inf{at}",
            )
        )
    first = bad[0].name
    return Cause(
        name="nan_input",
        score=0.97,
        where=("data", *(s.name for s in bad)),
        evidence=tuple(evidence),
        fix=f"Clean `{first}` before training: np.isfinite({first}).all() must be True. A column "
        "that never changes has a standard deviation of 0: add a small epsilon when you "
        "standardise, or drop it; fill missing values.",
    )


def zero_input(stats: Iterable[DataStats]) -> Cause | None:
    """Return the cause ``zero_input`` when an input (of several: all of them) is all zero."""
    inputs = _role(stats, "input")
    zero = [s for s in inputs if s.zero_fraction == 1.0]
    if not zero:
        return None
    names = ", ".join(f"`{s.name}`" for s in zero)
    indices = all(s.dtype.startswith(("int", "uint", "bool")) for s in zero)  # 0 may be a token
    return Cause(
        name="zero_input",
        score=0.95 if len(zero) == len(inputs) and not indices else 0.55,
        where=("data", *(s.name for s in zero)),
        evidence=(
            Evidence(
                name="zero_fraction", value=1.0, text=f"every value of {names} is 0 in this batch"
            ),
        ),
        fix="Look at what the input pipeline really delivers (print(x.min(), x.max())): an integer "
        "division such as `x // 255`, a cast of values in [0, 1] to int, or a failed read gives "
        "zeros.",
    )


def input_scale(stats: Iterable[DataStats]) -> Cause | None:
    """Return the cause ``input_scale`` for float inputs far from unit size (not for indices)."""
    far = []
    for s in _role(stats, "input"):
        if not s.dtype.startswith(("float", "bfloat")) or math.isnan(s.max):
            continue
        size = max(abs(s.min), abs(s.max))
        if size > UNIT_SCALE_LIMIT or 0 < size < 1e-4:
            far.append((size, s))
    if not far:
        return None
    size, s = max(far, key=lambda pair: abs(math.log(pair[0])))
    pixels = s.min >= 0 and 100 < s.max <= 255
    cure = (
        "keras.layers.Rescaling(1.0 / 255) as the first layer"
        if pixels
        else "a keras.layers.Normalization layer adapted to the training data, or standardise it: "
        f"({s.name} - mean) / std"
    )
    return Cause(
        name="input_scale",
        score=min(0.45 + 0.05 * abs(math.log10(size)), 0.65),
        where=("data", s.name),
        evidence=(
            Evidence(
                name="input_range",
                value=size,
                text=f"`{s.name}` runs from {s.min:.4g} to {s.max:.4g} (mean {s.mean:.4g})",
            ),
        ),
        fix=f"Bring `{s.name}` to about unit size with {cure}.",
    )


def zero_sample_weight(stats: Iterable[DataStats], class_weight: Mapping[int, float] | None = None,
                       y: Any = None) -> Cause | None:  # fmt: skip
    """Return ``zero_sample_weight`` or ``zero_class_weight`` when no example counts."""
    weights = _role(stats, "sample_weight")
    if class_weight is not None and y is not None:
        present = _classes_present(y)
        if present and all(class_weight.get(c, 1.0) == 0 for c in present):
            listed = ", ".join(map(str, present[:8]))
            return Cause(
                name="zero_class_weight",
                score=0.96,
                where=("loss", "class_weight"),
                evidence=(
                    Evidence(
                        name="class_weight",
                        value=0.0,
                        text=f"the classes present ({listed}) all have class_weight 0",
                    ),
                ),
                fix="Give every class that occurs a positive class_weight; the keys must be the "
                "labels as they are in y (0, 1, ...), not names or labels counted from 1.",
            )
    if not weights or any(s.zero_fraction < 1.0 for s in weights):
        return None
    s = weights[0]
    return Cause(
        name="zero_sample_weight",
        score=0.97,
        where=("loss", s.name),
        evidence=(
            Evidence(
                name="weight_sum",
                value=0.0,
                text=f"all {math.prod(d or 1 for d in s.shape)} values of `{s.name}` are 0, so "
                "the loss is 0 whatever the model says",
            ),
        ),
        fix="Check how the weights are built: print(sample_weight.sum()) per batch. A threshold "
        "that nothing passes, a mask turned round, or a class_weight whose keys are not the labels "
        "gives zeros.",
    )


def _classes_present(y: Any) -> list[int]:
    array = as_array(y)
    if array is None or array.size == 0:
        return []
    if array.ndim > 1 and array.shape[-1] > 1:
        array = array.argmax(-1)
    return sorted({int(v) for v in array.ravel()})


def labels_all_zero(y: Any, y_pred_units: int | None = None) -> Cause | None:
    """Return the cause ``labels_all_zero`` for one-hot rows that sum to 0.

    Args:
        y: One array of targets with one column per class.
        y_pred_units: Units of the output; rows are only judged when the columns match.
    """
    array = as_array(y)
    if array is None or array.ndim < 2 or array.shape[-1] < 2:
        return None
    if y_pred_units is not None and array.shape[-1] != y_pred_units:
        return None
    rows = array.reshape(-1, array.shape[-1])
    empty = ~np.any(rows, axis=-1)
    share = float(empty.mean())
    if share == 0.0:
        return None
    return Cause(
        name="labels_all_zero",
        score=0.5 + 0.45 * share,
        where=("data", "y"),
        evidence=(
            Evidence(
                name="empty_label_rows",
                value=share,
                text=f"{int(empty.sum())} of {len(rows)} one-hot rows of `y` hold no 1",
            ),
        ),
        fix="Every row of a one-hot target must sum to 1: check the number of classes and that "
        "labels count from 0 (keras.utils.to_categorical(y, num_classes)); examples without "
        "a class need a class of their own or a sample_weight of 0.",
    )
