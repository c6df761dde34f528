"""The picture of the gradient flow, decoded with the standard library."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.tensorboard import codes, flow_image
from keras_gradguard.tensorboard.events import EventWriter

from . import runs


def pixels_of(png: bytes) -> np.ndarray:
    """Decode the simplest kind of PNG, checking every checksum."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, data, size = 8, b"", (0, 0)
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        kind, body = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", png, place + 8 + length)
        assert check == zlib.crc32(kind + body)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
            assert body[8:] == bytes([8, 2, 0, 0, 0])
        elif kind == b"IDAT":
            data += body
        place += 12 + length
    width, height = size
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_zero_nan_and_none_have_their_colours_at_their_place():
    cells = np.zeros((100, 4), np.int16)
    cells[:, 0] = np.linspace(-400, 0, 100)
    cells[50:, 1] = codes.ZERO
    cells[75:, 2] = codes.NAN
    cells[:, 3] = codes.NONE
    width, height, png = flow_image.picture(cells)
    pixels = pixels_of(png)
    assert pixels.shape == (height, width, 3) == (48, 1024, 3)
    assert tuple(pixels[5, 2]) == (68, 1, 84)
    assert tuple(pixels[5, -2]) == (253, 231, 37)
    assert tuple(pixels[17, 500]) != (224, 20, 76)
    assert tuple(pixels[17, 520]) == (224, 20, 76)
    assert tuple(pixels[29, 760]) != (0, 0, 0)
    assert tuple(pixels[29, 780]) == (0, 0, 0)
    assert (pixels[41] == 176).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3000), st.integers(0, 2999))
def test_a_long_history_is_pooled_and_keeps_its_one_bad_step(steps, bad):
    norms = np.ones((steps, 2), np.float32)
    if bad < steps:
        norms[bad, 1] = np.nan
    history = flow_image.FlowHistory(2)
    for start in range(0, steps, 100):
        part = norms[start : start + 100]
        history.add([runs.row(start + i, n) for i, n in enumerate(part)])
    cells = history.cells
    pool = 1
    while pool * 512 < steps:
        pool *= 2
    assert len(cells) == -(-steps // pool)
    assert (cells[:, 0] == 0).all()
    assert np.flatnonzero(cells[:, 1] == codes.NAN).tolist() == (
        [bad // pool] if bad < steps else []
    )


def test_the_image_is_written_on_request_only(tmp_path):
    for images in (False, True):
        writer = EventWriter(tmp_path / str(images), images=images)
        for _ in range(2):
            writer.write_rows(runs.table(), runs.rows(0, 30))
            writer.close()
    assert not [v for v in runs.values(tmp_path / "False" / "gradguard") if "flow" in v[1]]
    [(step, tag, plugin, array)] = [
        v for v in runs.values(tmp_path / "True" / "gradguard") if v[1] == "gradient_flow"
    ]
    assert (step, tag, plugin) == (29, "gradient_flow", "images")
    assert array[:2].tolist() == [b"1024", b"24"]
    assert pixels_of(array[2]).shape == (24, 1024, 3)
    assert (tmp_path / "True" / "gradguard_1").is_dir()
