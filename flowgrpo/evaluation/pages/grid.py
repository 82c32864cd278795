"""Pages of images: before and after side by side with their scores. Their font is DejaVu
Sans, which comes with matplotlib; installed fonts have the letters that it lacks.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from PIL import Image, ImageDraw, ImageFont

from flowgrpo.evaluation.pages.clips import animate, as_image, moving, save_png, seconds_of, still
from flowgrpo.evaluation.pages.sources import Source, within
from flowgrpo.evaluation.statistics import bounds, decimals, format_value
from flowgrpo.nouns import quantity

if TYPE_CHECKING:
    import torch

    from flowgrpo.evaluation.statistics import Interval

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
        """Width of a line in pixels."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, pen: ImageDraw.ImageDraw, at: tuple[float, float], text: str, colour: str) -> None:
        """Draw a line whose upper left corner is `at`."""
        left, line = at[0], at[1] + _load_font(_own(), self.size).getmetrics()[0]
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
        return ((_load_font(path, self.size), run) for path, run in runs)


@functools.cache
def _own() -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


@functools.cache
def _load_font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@functools.cache
def _holder(letter: str) -> str:
    """Font that has this letter. Without one, warn once and draw a box."""
    if _has(_own(), letter):
        return _own()
    fallback = next((path for path in _find_fonts() if _has(path, letter)), None)
    if fallback is None:
        if not _lacking:
            print(f"no font of this machine has the letter {letter!r}: what is lacking is a box on pages of images; "
                  "install a font that has it, such as Noto Sans CJK", file=sys.stderr)
        _lacking.add(letter)
    return fallback or _own()


@functools.cache
def _find_fonts() -> tuple[str, ...]:
    from matplotlib.font_manager import fontManager

    fonts = sorted(fontManager.ttflist, key=lambda font: (font.style != "normal", font.weight not in (400, "normal"),
                                                          "sans" not in font.name.lower(), font.fname))
    return tuple(dict.fromkeys(font.fname for font in fonts if LAST_RESORT not in font.fname))


def _has(path: str, letter: str) -> bool:
    from matplotlib.ft2font import FT2Font

    try:
        return bool(FT2Font(path).get_char_index(ord(letter))) and bool(_load_font(path, 12))
    except (OSError, RuntimeError):  # matplotlib remembers deleted fonts; bitmap emoji fonts have a single size
        return False


SMALLEST, LARGEST = 160, 256  # longer side of an image on the page, in pixels
SEVERAL = 127  # longer side of one of several sources
FRAME_SMALLEST, FRAME_LARGEST, FRAMES, BETWEEN_FRAMES = 80, 160, 5, 2  # of a clip's frames, side by side
LINES = 14  # of a text
MARGIN, BETWEEN_CARDS, BETWEEN_IMAGES = 28, 36, 14
BESIDE, REPEATED = 2, 6  # a page with more columns is a table, one card wide; their names repeat after so many cards
ASPECT = 1.5  # target width over height of a page of whole cards
PAPER, INK, FAINT, FRAME, WRITTEN = "#ffffff", "#1f2328", "#6b7280", "#d5d8dd", "#f4f5f7"
ROSE, FELL = "#15803d", "#c0262d"
HEADING, CAPTION, SCORE = Font(16), Font(13), Font(12)


@dataclass(frozen=True)
class Row:
    """One prompt: one image ([3, H, W] in [0, 1]), clip ([F, 3, H, W]) or text per column, with its scores.

    sources: images that the prompt brings, which stand left of the columns.
    """

    caption: str
    images: Sequence[torch.Tensor | str]
    scores: Sequence[dict[str, float]]
    sources: Sequence[Source] = ()


@dataclass(frozen=True)
class Summary:
    """Means of a page's columns over so many prompts, by reward, with intervals."""

    prompts: int
    columns: Sequence[Mapping[str, Interval]]

    @property
    def label(self) -> str:
        return f"mean of {quantity(self.prompts, 'prompt')}, 95 % interval"


def draw_grid(path: str | Path, columns: Sequence[str], rows: Sequence[Row], summary: Summary | None = None,
              facts: Mapping[str, str] | None = None, fps: float | None = None) -> Path:
    """Write a PNG with a card per row, several cards side by side, and the columns' names above the images. With
    clips, also write an animated WebP and an mp4 of the same name. The sources of prompts stand left of the columns.

    A score is green with a triangle up if above that of the row's first image, red with one down if below; NaN is
    printed as n/a. summary: printed at the end. facts: text chunks of the PNG. fps: frames per second of clips.
    """
    assert rows and all(len(row.images) == len(row.scores) == len(columns) for row in rows)
    path = Path(path)
    save_png(path, _render(columns, rows, summary), facts or {})
    if moments := moving([image for row in rows for image in row.images]):
        assert not any(isinstance(image, str) for row in rows for image in row.images), "no texts beside clips"
        stills = ([replace(row, images=[still(cast("torch.Tensor", image), at) for image in row.images], sources=[
            Source(name, still(picture, at)) for name, picture in row.sources]) for row in rows] for at in moments)
        seconds = seconds_of(max(len(image) for row in rows for image in row.images), fps)
        animate(path.with_suffix(".webp"), [_render(columns, at, summary) for at in stills], seconds)
    return path


def digits_of(rows: Sequence[Row]) -> dict[str, int]:
    names = dict.fromkeys(name for row in rows for scores in row.scores for name in scores)
    return {name: decimals(scores.get(name) for row in rows for scores in row.scores) for name in names}


def direction(value: float, before: float, digits: int) -> int:
    """1 if a value is shown above the one before, -1 below, 0 otherwise."""
    if math.isnan(value) or math.isnan(before) or format_score(value, digits) == format_score(before, digits):
        return 0
    return 1 if value > before else -1


def format_score(value: float, digits: int) -> str:
    return "n/a" if math.isnan(value) else format_value(value, digits)


def _render(columns: Sequence[str], rows: Sequence[Row], summary: Summary | None) -> Image.Image:
    images = [[_tile(image) for image in row.images] for row in rows]
    cell = tuple(max(picture.size[axis] for line in images for picture in line) for axis in (0, 1))
    beside = [_beside(row.sources) if row.sources else None for row in rows]
    lead = max((tile.width + BETWEEN_IMAGES for tile in beside if tile), default=0)
    tallest = max([cell[1], *(tile.height for tile in beside if tile)])
    cell, digits = (max(cell[0], SMALLEST), tallest), digits_of(rows)
    cards = [_card(row, line, cell, digits, tile, lead) for row, line, tile in zip(rows, images, beside)]
    end = _summary(summary, columns, cell[0], cards[0].width, digits, lead) if summary else None
    return _page(cards, columns if any(columns) else (), cell, end, lead)


def _tile(image: torch.Tensor | str) -> Image.Image:
    if not isinstance(image, str):
        return _image(image) if image.ndim == 3 else _strip(image)
    paragraphs = image.splitlines() or [""]  # a text: its first LINES lines
    lines = [line for paragraph in paragraphs for line in _wrap(paragraph, CAPTION, LARGEST - 16, LINES)][:LINES]
    page = Image.new("RGB", (LARGEST, 16 + len(lines) * CAPTION.height), WRITTEN)
    for number, line in enumerate(lines):
        CAPTION.draw(ImageDraw.Draw(page), (8, 8 + number * CAPTION.height), line, INK)
    return page


def _image(image: torch.Tensor, smallest: int = SMALLEST, largest: int = LARGEST) -> Image.Image:
    """Convert a tensor to an image whose longer side is `smallest` to `largest` pixels."""
    picture = as_image(image)
    side = max(picture.size)
    if side < smallest:
        factor = math.ceil(smallest / side)
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    return within(picture, largest)


def _strip(clip: torch.Tensor) -> Image.Image:
    """Place at most FRAMES frames of a clip side by side: the first, the last, and evenly spaced ones between."""
    count = min(FRAMES, len(clip))
    frames = [_image(clip[round(i * (len(clip) - 1) / max(count - 1, 1))], FRAME_SMALLEST, FRAME_LARGEST)
              for i in range(count)]
    width, height = frames[0].size
    strip = Image.new("RGB", (count * (width + BETWEEN_FRAMES) - BETWEEN_FRAMES, height), FRAME)
    for i, frame in enumerate(frames):
        strip.paste(frame, (i * (width + BETWEEN_FRAMES), 0))
    return strip


def _beside(sources: Sequence[Source]) -> Image.Image:
    """Sources of a prompt as one image: several are smaller, two in a line, each above its name."""
    tiles = [_tile(picture) for _, picture in sources]
    if len(tiles) == 1:
        return tiles[0]
    for tile in tiles:
        tile.thumbnail((SEVERAL, SEVERAL))
    lines = [range(first, min(first + 2, len(tiles))) for first in range(0, len(tiles), 2)]
    heights = [max(tiles[place].height for place in line) + SCORE.height + 2 for line in lines]
    page = Image.new("RGB", (2 * SEVERAL + BETWEEN_FRAMES, sum(heights)), PAPER)
    pen, top = ImageDraw.Draw(page), 0
    for line, height in zip(lines, heights):
        for column, place in enumerate(line):
            left = column * (SEVERAL + BETWEEN_FRAMES)
            page.paste(tiles[place], (left, top))
            SCORE.draw(pen, (left, top + height - SCORE.height), _shorten(sources[place].name, SCORE, SEVERAL), FAINT)
        top += height
    return page


def _card(row: Row, images: Sequence[Image.Image], cell: tuple[int, int], digits: Mapping[str, int],
          beside: Image.Image | None = None, lead: int = 0) -> Image.Image:
    """Card of a row. beside: its sources; lead: the width in which they stand."""
    width = lead + len(images) * (cell[0] + BETWEEN_IMAGES) - BETWEEN_IMAGES
    caption = _wrap(row.caption, CAPTION, width)
    told, lines = len(caption) * CAPTION.height, max(len(scores) for scores in row.scores)
    above = told + 6 if any(isinstance(image, str) for image in row.images) else 0
    below = above + cell[1] + 8
    under = below + lines * SCORE.height + (6 if lines else 0)
    card = Image.new("RGB", (width, under + (0 if above else told)), PAPER)
    pen = ImageDraw.Draw(card)
    if beside is not None:
        card.paste(beside, (0, above + (0 if above else (cell[1] - beside.height) // 2)))
    for column, (picture, scores) in enumerate(zip(images, row.scores)):
        left = lead + column * (cell[0] + BETWEEN_IMAGES)
        corner = left + (cell[0] - picture.width) // 2, above + (0 if above else (cell[1] - picture.height) // 2)
        card.paste(picture, corner)
        pen.rectangle((*corner, corner[0] + picture.width - 1, corner[1] + picture.height - 1), outline=FRAME)
        for line, (name, value) in enumerate(scores.items()):
            _score(pen, (left, below + line * SCORE.height), cell[0], name, value, row.scores[0].get(name, value),
                   digits[name])
    for line, text in enumerate(caption):
        CAPTION.draw(pen, (0, (0 if above else under) + line * CAPTION.height), text, INK)
    return card


def _score(pen: ImageDraw.ImageDraw, at: tuple[int, int], width: int, name: str, value: float, before: float,
           digits: int) -> None:
    """Draw a line of a score: name on the left, value on the right with a triangle if it rose or fell."""
    text, change = format_score(value, digits), direction(value, before, digits)
    colour = {1: ROSE, 0: INK, -1: FELL}[change]
    left = at[0] + width - SCORE.getlength(text)
    SCORE.draw(pen, (left, at[1]), text, colour)
    SCORE.draw(pen, at, _shorten(name.rpartition("/")[2], SCORE, left - at[0] - 20), FAINT)
    if change:
        x, y = left - 10, at[1] + 9
        pen.polygon([(x - 4, y + 3 * change), (x + 4, y + 3 * change), (x, y - 4 * change)], fill=colour)


def _summary(summary: Summary, columns: Sequence[str], width: int, total: int, digits: Mapping[str, int],
             lead: int = 0) -> Image.Image:
    """Draw the columns' means, each above its interval, below a rule. lead: width left of the columns."""
    top, line = 10 + HEADING.height + CAPTION.height, 2 * SCORE.height
    card = Image.new("RGB", (total, top + line * len(summary.columns[0])), PAPER)
    pen = ImageDraw.Draw(card)
    pen.line((0, 0, total, 0), fill=FRAME)
    CAPTION.draw(pen, (0, 8), _shorten(summary.label, CAPTION, total), INK)
    _headings(pen, (lead, 8 + CAPTION.height), columns, width)
    for column, means in enumerate(summary.columns):
        left = lead + column * (width + BETWEEN_IMAGES)
        for place, (name, of) in enumerate(means.items()):
            first, at = summary.columns[0][name].mean, top + place * line
            _score(pen, (left, at), width, name, of.mean, first, digits[name])
            text = bounds(of.low, of.high, digits[name])
            SCORE.draw(pen, (left + width - SCORE.getlength(text), at + SCORE.height), text, FAINT)
    return card


def _page(cards: Sequence[Image.Image], columns: Sequence[str], cell: tuple[int, int], end: Image.Image | None,
          lead: int = 0) -> Image.Image:
    table = len(columns) > BESIDE

    def misfit(across: int) -> float:  # of a page's shape from ASPECT, plus its share of empty places
        lines = math.ceil(len(cards) / across)
        height = lines * (max(card.height for card in cards) + BETWEEN_CARDS)
        empty = (across * lines - len(cards)) / len(cards)
        return abs(math.log(across * (cards[0].width + BETWEEN_CARDS) / height / ASPECT)) + empty

    across = 1 if table else min(range(1, len(cards) + 1), key=misfit)
    lines = [cards[start:start + across] for start in range(0, len(cards), across)]
    headed = range(0, len(lines), REPEATED if table else len(lines)) if columns else range(0)
    head = HEADING.height + 6
    width = 2 * MARGIN + across * (cards[0].width + BETWEEN_CARDS) - BETWEEN_CARDS
    height = sum(max(card.height for card in line) + BETWEEN_CARDS for line in lines) - BETWEEN_CARDS
    last = end.height + BETWEEN_CARDS if end else 0
    page = Image.new("RGB", (width, 2 * MARGIN + len(headed) * head + height + last), PAPER)
    top = MARGIN
    for number, line in enumerate(lines):
        if number in headed:
            for place in range(across):
                left = MARGIN + place * (cards[0].width + BETWEEN_CARDS)
                if lead:
                    _headings(ImageDraw.Draw(page), (left, top), ["source"], lead)
                _headings(ImageDraw.Draw(page), (left + lead, top), columns, cell[0])
            top += head
        for place, card in enumerate(line):
            page.paste(card, (MARGIN + place * (card.width + BETWEEN_CARDS), top))
        top += max(card.height for card in line) + BETWEEN_CARDS
    if end:
        page.paste(end, (MARGIN, top))
    return page


def _headings(pen: ImageDraw.ImageDraw, at: tuple[int, int], columns: Sequence[str], width: int) -> None:
    for column, name in enumerate(columns):
        heading = _shorten(name, HEADING, width)
        HEADING.draw(pen, (at[0] + column * (width + BETWEEN_IMAGES), at[1]), heading, INK)


def _wrap(text: str, font: Font, width: int, most: int = 4) -> list[str]:
    """Wrap to at most `most` lines no wider than `width`; longer words, and text that does not fit, are shortened."""
    lines = [""]
    for word in WORDS.findall(" ".join(text.split())):
        joined = (lines[-1] + word).strip()
        if not lines[-1] or font.getlength(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word.strip())
    if len(lines) > most:
        lines[most - 1:] = [" ".join(lines[most - 1:])]
    return [_shorten(line, font, width) for line in lines]


def _shorten(text: str, font: Font, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    fitting = bisect.bisect_right(range(len(text)), width, key=lambda count: font.getlength(text[:count] + "..."))
    return text[:max(fitting - 1, 0)] + "..."
