"""Summary values as TensorBoard's protocol buffers. TensorBoard is imported on first use only."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.tensorboard import schema, wire

_DT_STRING: Final = 7
# Numbers of the fields of Event, Summary, Summary.Value, TensorProto and TensorShapeProto.
_SUMMARY: Final = 5
_VALUE: Final = 1
_TAG: Final = 1
_METADATA: Final = 9
_TENSOR: Final = 8
_SHAPE: Final = 2
_DIM: Final = 2
_CONTENT: Final = 4
_STRINGS: Final = 8
_FLOAT: Final = b"\x08\x01"  # dtype = DT_FLOAT
_STRING: Final = b"\x08\x07"  # dtype = DT_STRING
_ONE_FLOAT: Final = _FLOAT + b"\x2a\x04"  # and float_val with the four bytes that follow

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
    "activation_log10": "Entries of a layer's output by **log10 of their magnitude**, like "
    "`gradient_log10`: the lowest bucket holds the exact zeros.",
    "activation_zero_fraction": "Share of a layer's output that is exactly zero in this batch.",
    "activation_dead_fraction": "Share of units that were zero for every example of the last "
    "samples. At 1 nothing passes this layer.",
    "activation_saturated_fraction": "Share of a bounded activation's output that lies at one of "
    "its ends, where the slope is zero.",
    "activation_nonfinite": "Number of NaN and Inf in a layer's output.",
    "loss": "Loss of the batch at this optimizer step.",
}


@functools.cache
def protos() -> Any:
    """TensorBoard's ``summary_pb2`` and ``event_pb2``, imported once."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    return summary_pb2, event_pb2


@functools.cache
def _metadata(plugin: str, description: str) -> bytes:
    data: bytes = _metadata_message(plugin, description).SerializeToString()
    return data


def _metadata_message(plugin: str, description: str) -> Any:
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
        # Values as the wire has them, one after another: a `Summary` is nothing else. Most are
        # numbers and tables, of which a sampled step has several a variable; put together here
        # they cost a tenth of what the message classes take.
        self._values: list[bytes] = []

    def __len__(self) -> int:
        return len(self._values)

    @contextlib.contextmanager
    def _other(self, tag: str) -> Iterator[Any]:
        """Add a value of any kind, filled in as a message in the ``with`` block."""
        summary_pb2, _ = protos()
        value = summary_pb2.Summary.Value(tag=tag)
        yield value
        self._values.append(wire.message(_VALUE, value.SerializeToString()))

    def _add(self, tag: str, plugin: str, tensor: bytes) -> None:
        head = wire.text(_TAG, tag)
        if tag not in self._described:
            self._described.add(tag)
            group = tag.partition("/")[0]
            head += wire.message(_METADATA, _metadata(plugin, DESCRIPTIONS.get(group, "")))
        self._values.append(wire.message(_VALUE, head + wire.message(_TENSOR, tensor)))

    def scalar(self, tag: str, number: float) -> None:
        """Add a number."""
        content = struct.pack("<f", number)
        if tag in self._described:
            self._values.append(_number_head(tag) + content)
        else:
            self._add(tag, "scalars", _ONE_FLOAT + content)

    def _floats(self, tag: str, plugin: str, array: NDArray[Any]) -> None:
        content = np.ascontiguousarray(array, dtype="<f4").tobytes()
        self._add(tag, plugin, _float_head(array.shape) + wire.message(_CONTENT, content))

    def histogram(self, tag: str, table: NDArray[Any]) -> None:
        """Add a ``[k, 3]`` table of left edge, right edge, count."""
        self._floats(tag, "histograms", table)

    def tensor(self, tag: str, array: NDArray[Any]) -> None:
        """Add a tensor for the guard's own plugin."""
        self._floats(tag, schema.PLUGIN, array)

    def text(self, tag: str, text: str, plugin: str = "text") -> None:
        """Add a text; lone surrogates are written as escapes."""
        string = wire.message(_STRINGS, text.encode("utf-8", "backslashreplace"))
        self._add(tag, plugin, _STRING + string)

    def image(self, tag: str, size: tuple[int, int], png: bytes, names: Sequence[str]) -> None:
        """Add a picture, described by the names of its bands."""
        from tensorboard.plugins.image import metadata

        with self._other(tag) as value:
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

        with self._other(metadata.CONFIG_SUMMARY_TAG) as value:
            value.metadata.CopyFrom(metadata.create_summary_metadata())
            value.metadata.data_class = protos()[0].DATA_CLASS_TENSOR
            value.tensor.dtype = _DT_STRING
            value.tensor.string_val.append(data)

    def serialized(self, step: int, wall_time: float) -> bytes:
        """Return the event's bytes."""
        _, event_pb2 = protos()
        head: bytes = event_pb2.Event(wall_time=wall_time, step=step).SerializeToString()
        return head + wire.message(_SUMMARY, b"".join(self._values))


@functools.lru_cache(maxsize=1 << 14)
def _number_head(tag: str) -> bytes:
    """A number's value up to the four bytes of the number."""
    inside = wire.text(_TAG, tag) + bytes((_TENSOR << 3 | 2, len(_ONE_FLOAT) + 4)) + _ONE_FLOAT
    return bytes((_VALUE << 3 | 2,)) + wire.varint(len(inside) + 4) + inside


@functools.lru_cache(maxsize=1 << 10)
def _float_head(shape: tuple[int, ...]) -> bytes:
    """A float tensor up to its content."""
    sizes = b"".join(wire.message(_DIM, b"\x08" + wire.varint(n) if n else b"") for n in shape)
    return _FLOAT + wire.message(_SHAPE, sizes)


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
