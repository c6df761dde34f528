"""Summary values as TensorBoard's protocol buffers. TensorBoard is imported on first use only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.tensorboard import schema

_DT_FLOAT: Final = 1
_DT_STRING: Final = 7

LOG10_DESCRIPTION: Final = (
    "Gradient entries by **log10 of their magnitude**: -3 means 0.001. One bucket is a factor "
    "of two. The bucket from **-19.1 to -18.1 holds the exact zeros**; NaN and Inf are left "
    "out and counted in `gradient_nonfinite`. A healthy layer keeps its place from step to "
    "step; one that wanders left is vanishing, one that piles up in the zero bucket has "
    "stopped learning."
)
DESCRIPTIONS: Final = {
    "gradient_log10": LOG10_DESCRIPTION,
    "gradient_norm": "L2 norm of the gradient.",
    "gradient_zero_fraction": "Share of gradient entries that are exactly zero. At 1 the "
    "variable is not learning.",
    "gradient_nonfinite": "Number of NaN and Inf in the gradient.",
    "update_ratio": "Size of the step against the size of the weights, about 1e-3 as a rule.",
    "gradient_log10_p05": "5th percentile of log10|gradient| over a layer, zeros left out.",
    "gradient_log10_p50": "Median of log10|gradient| over a layer, zeros left out.",
    "gradient_log10_p95": "95th percentile of log10|gradient| over a layer, zeros left out.",
    "gradient_global_norm": "L2 norm of all gradients together: the largest of the steps since "
    "the point before.",
    "loss": "Loss of the batch at this optimizer step.",
}


@functools.cache
def protos() -> Any:
    """TensorBoard's ``summary_pb2`` and ``event_pb2``, imported once."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    return summary_pb2, event_pb2


@functools.cache
def _metadata(plugin: str, description: str) -> Any:
    from tensorboard.plugins.histogram import metadata as histogram
    from tensorboard.plugins.scalar import metadata as scalar
    from tensorboard.plugins.text import metadata as text

    summary_pb2, _ = protos()
    if plugin == schema.PLUGIN:
        result = summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(
                plugin_name=schema.PLUGIN, content=b'{"version":%d}' % schema.VERSION
            )
        )
        result.data_class = summary_pb2.DATA_CLASS_TENSOR
        return result
    module = {"scalars": scalar, "histograms": histogram, "text": text}[plugin]
    result = module.create_summary_metadata(None, description)
    result.data_class = (
        summary_pb2.DATA_CLASS_SCALAR if plugin == "scalars" else summary_pb2.DATA_CLASS_TENSOR
    )
    return result


class EventBuilder:
    """Collects the values of one event.

    Args:
        described: Tags whose metadata the file already holds; new ones are added. TensorBoard
            needs the metadata with the first value of a tag only.
    """

    def __init__(self, described: set[str]) -> None:
        self._described = described
        summary_pb2, _ = protos()
        self._summary = summary_pb2.Summary()

    def __len__(self) -> int:
        return len(self._summary.value)

    def _add(self, tag: str, plugin: str) -> Any:
        value = self._summary.value.add(tag=tag)
        if tag not in self._described:
            self._described.add(tag)
            group = tag.partition("/")[0]
            value.metadata.CopyFrom(_metadata(plugin, DESCRIPTIONS.get(group, "")))
        return value

    def scalar(self, tag: str, number: float) -> None:
        """Add a number."""
        tensor = self._add(tag, "scalars").tensor
        tensor.dtype = _DT_FLOAT
        tensor.float_val.append(number)

    def _floats(self, tag: str, plugin: str, array: NDArray[Any]) -> None:
        tensor = self._add(tag, plugin).tensor
        tensor.dtype = _DT_FLOAT
        for size in array.shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.tensor_content = np.ascontiguousarray(array, dtype="<f4").tobytes()

    def histogram(self, tag: str, table: NDArray[Any]) -> None:
        """Add a ``[k, 3]`` table of left edge, right edge, count."""
        self._floats(tag, "histograms", table)

    def tensor(self, tag: str, array: NDArray[Any]) -> None:
        """Add a tensor for the guard's own plugin."""
        self._floats(tag, schema.PLUGIN, array)

    def text(self, tag: str, text: str, plugin: str = "text") -> None:
        """Add a text; lone surrogates are written as escapes."""
        tensor = self._add(tag, plugin).tensor
        tensor.dtype = _DT_STRING
        tensor.string_val.append(text.encode("utf-8", "backslashreplace"))

    def image(self, tag: str, size: tuple[int, int], png: bytes, names: Sequence[str]) -> None:
        """Add a picture, described by the names of its bands."""
        from tensorboard.plugins.image import metadata

        value = self._summary.value.add(tag=tag)
        if tag not in self._described:
            self._described.add(tag)
            listed = "\n".join(f"1. `{name.replace('`', '')}`" for name in names)
            text = (
                "Gradient norm, one band a variable, steps from left to right. Red: exactly "
                f"zero. Black: NaN or Inf. Grey: None. From the top:\n\n{listed}"
            )
            value.metadata.CopyFrom(
                metadata.create_summary_metadata(None, text, converted_to_tensor=True)
            )
            value.metadata.data_class = protos()[0].DATA_CLASS_BLOB_SEQUENCE
        value.tensor.dtype = _DT_STRING
        value.tensor.tensor_shape.dim.add(size=3)
        value.tensor.string_val.extend([str(n).encode("ascii") for n in size] + [png])

    def layout(self, data: bytes) -> None:
        """Add the Custom Scalars layout, see :mod:`keras_gradguard.tensorboard.layout`."""
        from tensorboard.plugins.custom_scalar import metadata

        value = self._summary.value.add(tag=metadata.CONFIG_SUMMARY_TAG)
        value.metadata.CopyFrom(metadata.create_summary_metadata())
        value.metadata.data_class = protos()[0].DATA_CLASS_TENSOR
        value.tensor.dtype = _DT_STRING
        value.tensor.string_val.append(data)

    def serialized(self, step: int, wall_time: float) -> bytes:
        """Return the event's bytes."""
        _, event_pb2 = protos()
        event = event_pb2.Event(wall_time=wall_time, step=step, summary=self._summary)
        data: bytes = event.SerializeToString()
        return data


def file_header(wall_time: float) -> bytes:
    """The first record of every event file."""
    _, event_pb2 = protos()
    data: bytes = event_pb2.Event(
        wall_time=wall_time, file_version="brain.Event:2"
    ).SerializeToString()
    return data


def layer_groups(layers: Sequence[str]) -> dict[str, list[int]]:
    """Columns of each layer, in order of first appearance.

    >>> layer_groups(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    groups: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(layer, []).append(index)
    return groups
