"""The record container against TensorBoard's own writer and reader."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.tensorboard import record_file


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, as the polynomial division is written in a textbook."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40), st.integers(0, 20000))
def test_crc32c_matches_the_bitwise_division(seed, length):
    data = (seed * (length // max(len(seed), 1) + 1))[:length] or seed
    assert record_file.crc32c(data) == slow_crc32c(data)


@pytest.mark.parametrize("length", [0, 1, 5999, 6000, 8191, 8192, 8193, 65536, 65537, 300_001])
def test_masked_checksum_matches_tensorboard(length):
    from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

    data = bytes((i * i + 7) % 251 for i in range(length))
    assert record_file.masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.binary(max_size=2000), max_size=6))
def test_bytes_match_tensorboards_record_writer(records):
    from tensorboard.summary.writer.record_writer import RecordWriter

    expected = io.BytesIO()
    writer = RecordWriter(expected)
    for record in records:
        writer.write(record)
    assert b"".join(map(record_file.framed, records)) == expected.getvalue()


def test_nothing_reaches_the_file_before_a_flush_and_everything_after(tmp_path):
    file = record_file.RecordFile(tmp_path / "f")
    file.write(b"abc")
    assert (tmp_path / "f").read_bytes() == b""
    file.flush()
    assert (tmp_path / "f").read_bytes() == record_file.framed(b"abc")
    file.write(b"d")
    file.close()
    file.close()
    assert (tmp_path / "f").read_bytes() == record_file.framed(b"abc") + record_file.framed(b"d")


def test_a_full_buffer_flushes_itself(tmp_path):
    file = record_file.RecordFile(tmp_path / "f", buffer_bytes=100)
    file.write(bytes(200))
    assert (tmp_path / "f").stat().st_size == 216
    file.close()


def test_an_existing_file_is_not_touched(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        record_file.RecordFile(tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"


def test_a_deleted_file_is_noticed(tmp_path):
    file = record_file.RecordFile(tmp_path / "f")
    (tmp_path / "f").unlink()
    file.write(b"abc")
    with pytest.raises(FileNotFoundError, match="deleted"):
        file.flush()
    file.abandon()


def test_a_failed_write_leaves_only_whole_records(tmp_path, monkeypatch):
    file = record_file.RecordFile(tmp_path / "f")
    file.write(b"first")
    file.flush()
    real = os.write
    calls = []

    def disk_is_full_after_three_bytes(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, bytes(data[:3]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", disk_is_full_after_three_bytes)
    file.write(b"second")
    with pytest.raises(OSError, match="No space"):
        file.flush()
    assert (tmp_path / "f").read_bytes() == record_file.framed(b"first")
    file.abandon()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(0, 400))
def test_reading_gives_the_whole_records_of_any_beginning(records, cut):
    import tempfile
    from pathlib import Path

    framed = [record_file.framed(r) for r in records]
    ends = [sum(map(len, framed[: i + 1])) for i in range(len(framed))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "f"
        path.write_bytes(b"".join(framed)[:cut])
        whole = sum(end <= cut for end in ends)
        assert list(record_file.read_records(path)) == records[:whole]


def test_reading_stops_at_a_length_that_cannot_be_true(tmp_path):
    (tmp_path / "f").write_bytes(record_file.framed(b"abc") + b"\xff" * 40)
    assert list(record_file.read_records(tmp_path / "f")) == [b"abc"]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 1200), max_size=14), st.randoms(use_true_random=False))
def test_checksums_side_by_side_are_those_one_by_one(sizes, random):
    parts = [random.randbytes(size) for size in sizes]
    assert record_file.checksums(parts) == [slow_crc32c(p) for p in parts]
    assert record_file.framed_all(parts) == b"".join(map(record_file.framed, parts))
