"""The gradient flow of a run as a picture for the Images tab, drawn with NumPy alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from keras_gradguard.flow import Pool
from keras_gradguard.records import Row
from keras_gradguard.tensorboard import codes, schema

_COLUMNS: Final = 512
_WIDTH: Final = 1024
_ROW_HEIGHT: Final = 12
_ZERO: Final = (224, 20, 76)
_BAD: Final = (0, 0, 0)
_NONE: Final = (176, 176, 176)
_MISSING: Final = (244, 244, 244)
# Anchor colours of the perceptually uniform map "viridis".
_ANCHORS: Final = np.array(
    [
        (68, 1, 84),
        (72, 35, 116),
        (64, 67, 135),
        (52, 94, 141),
        (41, 120, 142),
        (32, 144, 140),
        (34, 167, 132),
        (68, 190, 112),
        (121, 209, 81),
        (189, 222, 38),
        (253, 231, 37),
    ],
    np.float64,
)


class FlowHistory:
    """Norms of a whole run as codes, in at most 512 columns.

    Args:
        variables: Number of variables.
    """

    def __init__(self, variables: int) -> None:
        self._pool = Pool(np.zeros((_COLUMNS, variables), np.int16))

    def add(self, rows: Sequence[Row], none: frozenset[int] = frozenset()) -> None:
        """Add consecutive rows; columns in ``none`` have no gradient."""
        block = schema.decode_rows(rows[0].step, schema.encode_rows(rows, none))
        for line in codes.norm_codes(block):
            self._pool.put(line)

    @property
    def cells(self) -> codes.Codes:
        """``[n, V]`` codes, the largest of each column's steps."""
        cells: codes.Codes = self._pool.cells
        return cells


def paint(cells: codes.Codes) -> NDArray[np.uint8]:
    """Colours of the cells, ``[n, V]`` codes to ``[V, n, 3]``.

    The scale runs over the middle 98 % of the numbers, two decades at least; exact zeros are
    red, NaN and Inf black, None grey.
    """
    numbers = cells[np.abs(cells.astype(np.int32)) <= codes.LIMIT]
    low, high = np.percentile(numbers, [1, 99]) if len(numbers) else (0.0, 0.0)
    middle, half = (low + high) / 2, max((high - low) / 2, 100.0)
    place = np.clip((cells - (middle - half)) / (2 * half), 0, 1) * (len(_ANCHORS) - 1)
    anchors = np.arange(len(_ANCHORS))
    colors = np.stack([np.interp(place, anchors, channel) for channel in _ANCHORS.T], axis=-1)
    for code, color in (
        (codes.MISSING, _MISSING),
        (codes.NONE, _NONE),
        (codes.ZERO, _ZERO),
        (codes.INF, _BAD),
        (codes.NAN, _BAD),
    ):
        colors[cells == code] = color
    painted: NDArray[np.uint8] = np.rint(colors).astype(np.uint8)
    return painted.transpose(1, 0, 2)


def picture(cells: codes.Codes) -> tuple[int, int, bytes]:
    """Draw the cells: one band a variable, from the first step on the left to the last.

    Returns:
        Width and height in pixels, and the PNG file.
    """
    small = paint(cells)
    columns = np.arange(_WIDTH) * small.shape[1] // _WIDTH
    pixels = small[:, columns].repeat(_ROW_HEIGHT, axis=0)
    pixels[_ROW_HEIGHT - 1 :: _ROW_HEIGHT] = 255  # a line between the bands
    return _WIDTH, len(pixels), _png(pixels)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file (W3C Portable Network Graphics, 8 bits, RGB) of ``[h, w, 3]`` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line starts with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)),
            chunk(b"IEND", b""),
        )
    )
