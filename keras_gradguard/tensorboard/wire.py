"""The bytes of the few protocol buffer messages that are written often."""

from __future__ import annotations

import functools


def varint(number: int) -> bytes:
    """Return a number that is not negative as protocol buffers write it, 7 bits a byte.

    >>> varint(300).hex()
    'ac02'
    """
    if number < 128:
        return bytes((number,))
    pieces = bytearray()
    while number > 127:
        pieces.append(number & 127 | 128)
        number >>= 7
    pieces.append(number)
    return bytes(pieces)


def message(field: int, content: bytes) -> bytes:
    """Return a field that holds bytes: a string, a nested message, packed numbers.

    Args:
        field: Its number, 1 to 15.
        content: What it holds.

    >>> message(1, b"tag").hex()
    '0a03746167'
    """
    return bytes((field << 3 | 2,)) + varint(len(content)) + content


@functools.lru_cache(maxsize=1 << 14)
def text(field: int, content: str) -> bytes:
    """Return a field that holds a string. The same tags come again and again."""
    return message(field, content.encode())
