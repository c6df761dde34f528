"""An append-only file of length-and-checksum framed records, the container of event files.

TensorBoard's own ``EventFileWriter`` writes the same format. It is not used, for three measured
reasons: it opens files through TensorFlow whenever TensorFlow is installed, whatever backend
Keras runs on; its checksum is a Python loop (3.6 MB/s, with the interpreter lock held, so that
the training loop waits); and on a full disk its thread prints a traceback of its own.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]

_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_LANE: Final = 256  # bytes; records are cut into lanes whose checksums run side by side
_SHORT: Final = 6000  # below this a plain loop is faster than NumPy's call overhead


@functools.cache
def _byte_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


def _times(matrix: UInt32, vectors: UInt32) -> UInt32:
    """Multiply bit vectors (as uint32) by a 32x32 matrix over GF(2), given by its columns."""
    product = np.zeros_like(vectors)
    for bit in range(32):
        product ^= matrix[bit] * ((vectors >> np.uint32(bit)) & np.uint32(1))
    return product


@functools.cache
def _after_zero_bytes(doublings: int) -> UInt32:
    """Matrix that takes a checksum through ``2**doublings`` zero bytes."""
    if doublings == 0:
        table = _byte_table()
        columns = [table[(1 << bit) & 255] ^ ((1 << bit) >> 8) for bit in range(32)]
        return np.array(columns, np.uint32)
    half = _after_zero_bytes(doublings - 1)
    return _times(half, half)


@functools.cache
def _half_word_tables() -> tuple[UInt32, UInt32]:
    """What the low and the high 16 bits of a checksum become after four zero bytes."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    matrix = _after_zero_bytes(2)
    return _times(matrix, halves), _times(matrix, halves << np.uint32(16))


def crc32c(data: bytes) -> int:
    """CRC-32C of ``data``.

    Long data are front-padded with zeros (which leave a checksum register of 0 at 0) to a power
    of two of 256-byte lanes; the lanes run in parallel and are then joined pairwise, each left
    half taken through as many zero bytes as its right half is long.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if len(data) < _SHORT:
        table, register = _byte_table(), 0xFFFFFFFF
        for byte in data:
            register = table[(register ^ byte) & 255] ^ (register >> 8)
        return register ^ 0xFFFFFFFF
    lanes = 1 << (-(-len(data) // _LANE) - 1).bit_length()
    padded = np.zeros(lanes * _LANE, np.uint8)
    start = len(padded) - len(data)
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start : start + 4] ^= 255  # the same as starting from a register of all ones
    words = np.ascontiguousarray(padded.view("<u4").reshape(lanes, -1).T)
    low, high = _half_word_tables()
    registers = np.zeros(lanes, np.uint32)
    for word in words:
        registers ^= word
        registers = low[registers & np.uint32(0xFFFF)] ^ high[registers >> np.uint32(16)]
    doublings = _LANE.bit_length() - 1
    while len(registers) > 1:
        registers = _times(_after_zero_bytes(doublings), registers[::2]) ^ registers[1::2]
        doublings += 1
    return int(registers[0]) ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum as record files store it: rotated by 15 bits, plus a constant."""
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return ``data`` as one record: length, checksum of the length, data, checksum."""
    head = struct.pack("<Q", len(data))
    return b"".join(
        (head, struct.pack("<I", masked_crc32c(head)), data, struct.pack("<I", masked_crc32c(data)))
    )


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, as far as they are whole.

    A file that is still being written, or whose writer was killed, ends in the middle of a
    record: reading stops there, without an error. The checksum of a record's length is looked
    at, that of its data is not.

    Args:
        path: An event file.
    """
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", head)
            if checksum != masked_crc32c(head[:8]):
                return
            data = file.read(length + 4)
            if len(data) < length + 4:
                return
            yield data[:length]


class RecordFile:
    """A record file that never holds half a record longer than a failed write takes.

    Records are collected in memory and reach the operating system in :meth:`flush`; what was
    flushed survives a killed process.

    Args:
        path: File to create. It must not exist.
        buffer_bytes: Flush by itself when this much is waiting. Defaults to 1 MiB.

    Raises:
        OSError: The file cannot be created, or (from any method) written.
    """

    def __init__(self, path: Path, buffer_bytes: int = 1 << 20) -> None:
        self.path = path
        self._buffer_bytes = buffer_bytes
        self._pending = bytearray()
        self._good = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o644)

    def write(self, data: bytes) -> None:
        """Append one record."""
        self._pending += framed(data)
        if len(self._pending) >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand everything written so far to the operating system.

        Raises:
            OSError: The disk is full, or the file was deleted meanwhile (a write to a deleted
                file would succeed and be lost).
        """
        if os.fstat(self._descriptor).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the event file was deleted", str(self.path))
        try:
            with memoryview(self._pending) as view:
                done = 0
                while done < len(view):
                    done += os.write(self._descriptor, view[done:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._good)
            raise
        self._good += len(self._pending)
        self._pending.clear()

    def close(self) -> None:
        """Flush and close; the file is closed even when the flush fails."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing what is still waiting."""
        descriptor, self._descriptor = self._descriptor, -1
        self._pending.clear()
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
