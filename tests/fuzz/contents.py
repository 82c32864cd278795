"""Hypothesis strategies of bytes: files of the corpus with edits, texts that nest, and headers that claim any size."""

import struct
import zlib
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import CORPUS

TOKENS = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"[", b"]", b"{", b"}", b"- ", b"? ", b": ", b"\n", b",", b'"', b"'", b"&a ",
    b"*a", b"<<: *a\n", b"!!int ", b"!!binary ", b"!!timestamp ", b"!!python/name:os.system ", b"%YAML 1.1\n",
    b"---\n", b"9" * 400, b"1e999", b"NaN", b"-Infinity", b"0x" + b"f" * 400, b"1:60:60", b"2020-13-45", b'"\\ud800"',
    b"\\u0000", b'"\\U00110000"', b"\x1b[2J", "\u202e\u2028\x85".encode(), b"\xed\xa0\x80", b"../../", b"pipe",
    b"/dev/zero", b"x" * 300, b"\x00\x00\x00\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"null", b"true", b"yes",
    b"~", b"010", b"0o7", b"on", b"~/", b"~nobody/x", b"1_0", b"2024-01-01", b"#", b"|", b">", b"%"]


@st.composite
def mutated(draw: Any, pattern: str, most: int = 6) -> bytes:
    """Bytes of a corpus file with up to `most` edits: flips, cuts, insertions, repetitions and parts of other files."""
    files = sorted(file for file in CORPUS.glob(pattern) if file.is_file())
    content = draw(st.sampled_from(files)).read_bytes()
    for kind in draw(
        st.lists(st.sampled_from(["flip", "cut", "insert", "token", "repeat", "splice", "end"]), max_size=most)):
        at = draw(st.integers(0, 2**16)) % (len(content) + 1)
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at] + content[at + draw(st.integers(1, 40)) :]
        elif kind == "insert":
            content = content[:at] + draw(st.binary(max_size=8)) + content[at:]
        elif kind == "token":
            content = content[:at] + draw(st.sampled_from(TOKENS)) + content[at:]
        elif kind == "repeat":
            size, times = draw(st.integers(1, 12)), draw(st.sampled_from([2, 10, 300, 20_000]))
            content = content[:at] + content[at : at + size] * times + content[at + size :]
        elif kind == "splice":
            other = draw(st.sampled_from(files)).read_bytes()
            content = content[:at] + other[draw(st.integers(0, 2**16)) % (len(other) + 1) :]
        elif kind == "end":
            content = content[:at]
    return content[: 2**20]


@st.composite
def nested(draw: Any) -> bytes:
    """Texts that nest, repeat or expand."""
    depth = draw(st.sampled_from([10, 63, 66, 1000, 20_000, 100_000]))
    opening = draw(st.sampled_from([b"[", b"{a: ", b'{"a":', b"- ", b"? ", b"&a [", b"!!seq [", b"[{"]))
    text = opening * depth + draw(st.sampled_from([b"", b"1", b"]" * depth, b"}" * depth, b"1" + b"}" * depth]))
    if draw(st.booleans()):
        text = b"".join(
            b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9) if i else b"x") for i in range(9))
    head = draw(st.sampled_from([b"", b"train: ", b"parts: ", b'{"prompt": "a", "metadata": ', b"parts: {a: "]))
    return (head + text)[: 2**20]


@st.composite
def bombs(draw: Any) -> bytes:
    """Headers of images that claim any size, with little behind."""
    sizes = st.sampled_from([0, 1, 4, 255, 8191, 8192, 16_383, 65_535, 2**20, 2**31 - 1, 2**32 - 1])
    width, height = draw(sizes), draw(sizes)
    kind = draw(st.sampled_from(["png", "gif", "bmp", "ppm", "webp"]))
    if kind == "png":
        depth, colour = draw(st.sampled_from([(8, 2), (8, 6), (16, 0), (16, 2), (1, 0), (8, 3), (16, 6), (3, 9)]))
        data = zlib.compress(bytes(draw(st.sampled_from([0, 10, 2**20]))))
        parts = [
            b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, draw(st.integers(0, 2))),
            *[b"zTXtx\0\0" + zlib.compress(bytes(2**24))] * draw(st.integers(0, 2)),
            *[b"acTL" + struct.pack(">II", draw(sizes), 0)] * draw(st.integers(0, 1)),
            b"IDAT" + data,
            b"IEND"]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    if kind == "gif":
        return (
            b"GIF89a"
            + struct.pack("<HH", width % 2**16, height % 2**16)
            + b"\x80\0\0"
            + bytes(6)
            + (b",\0\0\0\0" + struct.pack("<HH", width % 2**16, height % 2**16) + b"\0\x02\x02D\x01\0")
            * draw(st.sampled_from([1, 2, 3000]))
            + b";")
    if kind == "bmp":
        return (
            b"BM"
            + struct.pack("<IHHI", 58, 0, 0, 54)
            + struct.pack(
                "<IiiHHIIiiII",
                40,
                width % 2**31,
                height % 2**31,
                1,
                draw(st.sampled_from([1, 8, 24, 32])),
                draw(st.sampled_from([0, 1, 3])),
                0,
                0,
                0,
                0,
                0)
            + bytes(4))
    if kind == "ppm":
        return b"P%d\n%d %d\n%d\n" % (draw(st.integers(1, 6)), width, height, draw(sizes)) + bytes(64)
    body = (
        b"VP8X"
        + struct.pack("<I", 10)
        + bytes([draw(st.integers(0, 63))])
        + bytes(3)
        + struct.pack("<I", width % 2**14)[:3]
        + struct.pack("<I", height % 2**14)[:3])
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
