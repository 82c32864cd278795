"""Features of texts without a model: hashed words and pairs of words."""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np

WIDTH = 512  # of a text's features
_WORDS = re.compile(r"\w+|[^\w\s]")


@functools.lru_cache(maxsize=65536)
def features(text: str, width: int = WIDTH) -> np.ndarray:
    """Return the counts of a text's words and pairs of words, hashed to `width` places, of length 1: [width]."""
    words, counts = _WORDS.findall(text.lower()), np.zeros(width)
    for gram in [*words, *(" ".join(pair) for pair in zip(words, words[1:]))]:
        counts[zlib.crc32(gram.encode()) % width] += 1
    return counts / max(float(np.linalg.norm(counts)), 1e-12)
