"""Fonts of pages: DejaVu Sans, which comes with matplotlib, and installed fonts for letters that it lacks."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import ImageDraw, ImageFont

LAST_RESORT = "LastResort"  # also part of matplotlib; draws every letter as a box
BETWEEN = "[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"  # Chinese, Japanese: lines break at each
WORDS = re.compile(rf"\s*(?:{BETWEEN}|(?:(?!{BETWEEN})\S)+)")
_lacking: set[str] = set()


@dataclass(frozen=True)
class Font:
    """Font with the letters of most languages; size: in pixels."""

    size: int

    @property
    def height(self) -> int:
        """Line height in pixels."""
        return round(self.size * 1.4)

    def getlength(self, text: str) -> float:
        """Return the width of a line in pixels."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, pen: ImageDraw.ImageDraw, at: tuple[float, float], text: str, colour: str) -> None:
        """Draw a line whose upper left corner is `at`."""
        left, line = at[0], at[1] + _opened(_own(), self.size).getmetrics()[0]
        for font, run in self._runs(text):
            pen.text((left, line), run, colour, font, anchor="ls")
            left += font.getlength(run)

    def _runs(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
        """Split the text into pieces of one font each; accents and marks stay with their letter."""
        runs: list[list[str]] = []
        for letter in text:
            mark = unicodedata.category(letter)[0] in "MCZ" and unicodedata.category(letter) not in ("Cn", "Co")
            path = runs[-1][0] if mark and runs else _own() if mark else _holder(letter)
            if runs and runs[-1][0] == path:
                runs[-1][1] += letter
            else:
                runs.append([path, letter])
        return ((_opened(path, self.size), run) for path, run in runs)


@functools.cache
def _own() -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


@functools.cache
def _opened(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@functools.cache
def _holder(letter: str) -> str:
    """Return the font that has this letter. Without one, warn once and draw a box."""
    if _has(_own(), letter):
        return _own()
    fallback = next((path for path in _installed() if _has(path, letter)), None)
    if fallback is None:
        if not _lacking:
            print(f"no font of this machine has the letter {letter!r}: what is lacking is a box on pages of pictures; "
                  "install a font that has it, such as Noto Sans CJK", file=sys.stderr)
        _lacking.add(letter)
    return fallback or _own()


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the installed scalable fonts, upright sans serif first."""
    from matplotlib.font_manager import fontManager

    fonts = sorted(fontManager.ttflist, key=lambda font: (font.style != "normal", font.weight not in (400, "normal"),
                                                          "sans" not in font.name.lower(), font.fname))
    return tuple(dict.fromkeys(font.fname for font in fonts if LAST_RESORT not in font.fname))


def _has(path: str, letter: str) -> bool:
    from matplotlib.ft2font import FT2Font

    try:
        return bool(FT2Font(path).get_char_index(ord(letter))) and bool(_opened(path, 12))
    except (OSError, RuntimeError):  # matplotlib remembers deleted fonts; bitmap emoji fonts have a single size
        return False
