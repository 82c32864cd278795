"""MessagePack, read: what an engine answers, in the types of JSON and bytes. Extensions, which could be any type, are
refused."""

from __future__ import annotations

import struct
from typing import Any

DEPTH = 64  # of containers within each other
# By the first byte: the form of a number, and that of the length of a text, of bytes, of a list and of a map.
_NUMBERS = {0xca: ">f", 0xcb: ">d", 0xcc: ">B", 0xcd: ">H", 0xce: ">I", 0xcf: ">Q", 0xd0: ">b", 0xd1: ">h", 0xd2: ">i",
            0xd3: ">q"}
_TEXTS = {0xd9: ">B", 0xda: ">H", 0xdb: ">I"}
_BYTES = {0xc4: ">B", 0xc5: ">H", 0xc6: ">I"}
_LISTS = {0xdc: ">H", 0xdd: ">I"}
_MAPS = {0xde: ">H", 0xdf: ">I"}
_CONSTANTS = {0xc0: None, 0xc2: False, 0xc3: True}


def unpacked(content: bytes, most: int = 2**20) -> Any:
    """Return the value of a message. Raises ValueError for another form, for an extension, for bytes behind it, and for
    more than `most` values."""
    reader = _Reader(content, most)
    try:
        value = reader.value(0)
    except (struct.error, IndexError):
        raise ValueError(f"the message ends within a value, after {len(content)} bytes") from None
    if reader.at != len(content):
        raise ValueError(f"the message goes on behind its value, at byte {reader.at} of {len(content)}")
    return value


class _Reader:
    def __init__(self, content: bytes, most: int):
        self.content, self.at, self.left = content, 0, most

    def value(self, depth: int) -> Any:
        """Return the next value."""
        if depth > DEPTH:
            raise ValueError(f"the message has more than {DEPTH} containers within each other")
        self.left -= 1
        if self.left < 0:
            raise ValueError("the message has too many values")
        first = self.content[self.at]
        self.at += 1
        if first < 0x80 or first >= 0xe0:
            return first if first < 0x80 else first - 256
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self._number(_NUMBERS[first])
        if first < 0xc0:
            size = first & (0x1f if first >= 0xa0 else 0x0f)
            return self._text(size) if first >= 0xa0 else self._list(size, depth) if first >= 0x90 else \
                self._map(size, depth)
        for forms, read in ((_TEXTS, self._text), (_BYTES, self._bytes)):
            if first in forms:
                return read(self._number(forms[first]))
        if first in _LISTS:
            return self._list(self._number(_LISTS[first]), depth)
        if first in _MAPS:
            return self._map(self._number(_MAPS[first]), depth)
        raise ValueError(f"the message has a value of the kind 0x{first:02x} at byte {self.at - 1}")

    def _number(self, form: str) -> Any:
        [value] = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return value

    def _bytes(self, size: int) -> bytes:
        if self.at + size > len(self.content):
            raise IndexError(size)
        self.at += size
        return self.content[self.at - size:self.at]

    def _text(self, size: int) -> str:
        return self._bytes(size).decode()

    def _list(self, size: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> dict[Any, Any]:
        found = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)):
                raise ValueError(f"the message has a map whose key is of the type {type(key).__name__}")
            found[key] = self.value(depth + 1)
        return found
