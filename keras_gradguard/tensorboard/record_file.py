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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]

_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_LANE: Final = 256  # bytes; records are cut into lanes whose checksums run side by side
_FRAME: Final = 16  # bytes around a record
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

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return _one_by_one(data) if len(data) < _SHORT else checksums([data])[0]


def _one_by_one(data: bytes) -> int:
    table, register = _byte_table(), 0xFFFFFFFF
    for byte in data:
        register = table[(register ^ byte) & 255] ^ (register >> 8)
    return register ^ 0xFFFFFFFF


def checksums(parts: Sequence[bytes]) -> list[int]:
    """CRC-32C of each of ``parts``.

    All of them run side by side: each is front-padded with zeros (which leave a checksum register
    of 0 at 0) to a power of two of equal lanes, all lanes go through NumPy at once, and those of
    a part are then joined pairwise, each left half taken through as many zero bytes as its right
    half is long.

    >>> [hex(c) for c in checksums([b"123456789", b""])]
    ['0xe3069283', '0x0']
    """
    sizes = [len(p) for p in parts]
    if sum(sizes) < _SHORT or min(sizes) < 4:
        return [_one_by_one(p) for p in parts]
    numbers = np.array([1 << (-(-n // _LANE) - 1).bit_length() for n in sizes])
    filled = [p.rjust(n * _LANE, b"\0") for p, n in zip(parts, numbers.tolist(), strict=True)]
    padded = np.frombuffer(bytearray().join(filled), np.uint8)
    starts = np.cumsum(numbers) * _LANE - sizes
    padded[starts[:, None] + np.arange(4)] ^= 255  # the same as registers of all ones
    words = np.ascontiguousarray(padded.view("<u4").reshape(-1, _LANE // 4).T)
    low, high = _half_word_tables()
    registers = np.zeros(words.shape[1], np.uint32)
    for word in words:
        registers ^= word
        registers = low[registers & np.uint32(0xFFFF)] ^ high[registers >> np.uint32(16)]
    found = np.zeros(len(parts), np.uint32)
    first = np.cumsum(numbers) - numbers
    for number in np.unique(numbers):
        alike = np.flatnonzero(numbers == number)
        joined = registers[first[alike, None] + np.arange(number)]
        doublings = _LANE.bit_length() - 1
        while joined.shape[1] > 1:
            joined = _times(_after_zero_bytes(doublings), joined[:, ::2]) ^ joined[:, 1::2]
            doublings += 1
        found[alike] = joined[:, 0]
    result: list[int] = (found ^ np.uint32(0xFFFFFFFF)).tolist()
    return result


def _masked(checksum: int) -> int:
    """The checksum as record files store it: rotated by 15 bits, plus a constant."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum of ``data`` as record files store it."""
    return _masked(crc32c(data))


@functools.lru_cache(maxsize=4096)
def _head(length: int) -> bytes:
    """The length of a record and its checksum. The same few lengths come again and again."""
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc32c(head))


def framed_all(records: Sequence[bytes]) -> bytes:
    """Return records as they stand in a file, one after another, see :func:`framed`."""
    pieces: list[bytes] = []
    for data, checksum in zip(records, checksums(records), strict=True):
        pieces += (_head(len(data)), data, struct.pack("<I", _masked(checksum)))
    return b"".join(pieces)


def framed(data: bytes) -> bytes:
    """Return ``data`` as one record: length, checksum of the length, data, checksum."""
    return framed_all([data])


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
        self._records: list[bytes] = []
        self._waiting = 0
        self._good = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o644)

    @property
    def size(self) -> int:
        """Bytes written so far, flushed or not."""
        return self._good + self._waiting

    def write(self, data: bytes) -> None:
        """Append one record."""
        # Checksums are made when it is handed on: of many records at once they cost little.
        self._records.append(data)
        self._waiting += len(data) + _FRAME
        if self._waiting >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand everything written so far to the operating system.

        Raises:
            OSError: The disk is full, or the file was deleted meanwhile (a write to a deleted
                file would succeed and be lost).
        """
        if os.fstat(self._descriptor).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the event file was deleted", str(self.path))
        if not self._records:
            return
        data = framed_all(self._records)
        try:
            with memoryview(data) as view:
                done = 0
                while done < len(view):
                    done += os.write(self._descriptor, view[done:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._good)
            raise
        self._good += len(data)
        self._forget()

    def _forget(self) -> None:
        self._records.clear()
        self._waiting = 0

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
        self._forget()
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
