"""Pages of images: what is on them, where, in which colour and font."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor, ImageDraw

from flowgrpo.evaluation.pages import grid
from flowgrpo.evaluation.pages.before_after import means_of
from flowgrpo.evaluation.pages.grid import Font, Row, draw_grid


def flat(colour: tuple[float, float, float], height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.tensor(colour)[:, None, None].expand(3, height, width)


RED, BLUE = flat((1, 0, 0)), flat((0, 0, 1))


def area(page: Image.Image, colour: str) -> int:
    """Number of pixels of exactly that colour."""
    pixels = torch.frombuffer(bytearray(page.tobytes()), dtype=torch.uint8).view(-1, 3)
    return int((pixels == torch.tensor(ImageColor.getrgb(colour), dtype=torch.uint8)).all(1).sum())


@pytest.mark.parametrize("before, after, rose, fell", [
    (0.2, 0.8, True, False), (0.8, 0.2, False, True), (0.5, 0.5, False, False), (0.5, 0.50001, False, False),
    (math.nan, 0.5, False, False), (0.5, math.nan, False, False), (-21.3, -20.1, True, False)])
def test_scores_are_green_where_they_rose_and_red_where_they_fell(before, after, rose, fell, tmp_path):
    page = Image.open(draw_grid(tmp_path / "a.png", ["before", "after"],
                                [Row("a cat", [RED, BLUE], [{"r": before}, {"r": after}])]))
    assert (area(page, grid.ROSE) > 0) == rose and (area(page, grid.FELL) > 0) == fell


def test_images_stand_side_by_side_enlarged(tmp_path):
    rows = [Row("x", [RED, BLUE], [{}, {}])] * 4
    page = Image.open(draw_grid(tmp_path / "deep" / "a.png", ["before", "after"], rows))
    inner = (3 * 64 - 2) ** 2  # an image of 64 pixels is shown three times as large, in a frame of one pixel
    assert area(page, "#ff0000") == area(page, "#0000ff") == 4 * inner
    left = grid.MARGIN + 1
    line = [page.getpixel((x, page.height // 3)) for x in range(left, left + 2 * 192 + grid.BETWEEN_IMAGES - 2)]
    assert line == [(255, 0, 0)] * 190 + [line[190]] + [(255, 255, 255)] * grid.BETWEEN_IMAGES + [line[190]] + [
        (0, 0, 255)] * 190


@pytest.mark.parametrize("height, width, expected", [
    (64, 64, (192, 192)), (32, 16, (80, 160)), (100, 100, (200, 200)), (160, 80, (80, 160)), (256, 200, (200, 256)),
    (512, 1024, (256, 128)), (1024, 1024, (256, 256)), (2000, 1, (1, 256))])
def test_images_have_a_readable_size(height, width, expected):
    assert grid._image(torch.rand(3, height, width)).size == expected


def test_enlarged_pixels_keep_their_values():
    picture = grid._image(torch.tensor([0.0, 0.5, 2.0, -1.0]).view(1, 2, 2).expand(3, 2, 2).to(torch.bfloat16))
    assert [picture.getpixel(at)[0] for at in ((0, 0), (159, 0), (0, 159), (159, 159))] == [0, 128, 255, 0]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12, 40])
def test_every_card_is_on_the_page(count, tmp_path):
    page = Image.open(draw_grid(tmp_path / "a.png", ["one"], [Row("x", [RED], [{}])] * count))
    assert area(page, "#ff0000") == count * 190 ** 2
    assert count < 3 or 0.5 < page.width / page.height < 3


def test_captions_and_sheets_without_headings(tmp_path):
    text = "a photograph of an astronaut who rides a horse on the moon in golden light"
    lines = grid._wrap(text, grid.CAPTION, 190)
    assert " ".join(lines) == text and 2 < len(lines) <= 4
    assert all(grid.CAPTION.getlength(line) <= 190 for line in lines)
    lines = grid._wrap("word " * 200, grid.CAPTION, 190)
    assert len(lines) == 4 and lines[-1].endswith("...") and grid.CAPTION.getlength(lines[-1]) <= 190
    assert grid._wrap("w" * 500, grid.CAPTION, 190)[0].endswith("...")
    assert grid._wrap("", grid.CAPTION, 190) == [""]
    sheet, titled = (Image.open(draw_grid(tmp_path / "a.png", [head], [Row("a red square", [RED], [{}])] * 6))
                     for head in ("", "title"))
    assert area(sheet, "#ff0000") == area(titled, "#ff0000") == 6 * 190 ** 2
    assert sheet.width == titled.width and sheet.height < titled.height
    assert sheet.getpixel((grid.MARGIN + 1, grid.MARGIN + 1)) == (255, 0, 0)


def drawn(text: str, font: Font = Font(24)) -> bytes:
    """The pixels of a line."""
    page = Image.new("L", (160, 40), 255)
    font.draw(ImageDraw.Draw(page), (0, 0), text, "black")
    return page.tobytes()


LACKING = "\u0378"  # no letter has this number, so that no font has it
SERIF = "\u2900"  # an arrow that DejaVu Serif has, which comes with matplotlib as DejaVu Sans does, which has it not


@pytest.mark.parametrize("text", ["é", "ü", "ż", "Ж", "λ", "→", "“", SERIF])
def test_letters_are_no_boxes(text):
    assert drawn(text) != drawn(LACKING) != drawn("")


@pytest.mark.parametrize("word", ["café", "Кошка", "γάτα", "naïve"])
def test_each_letter_of_a_word_has_its_own_shape(word):
    assert len({drawn(letter) for letter in word}) == len(set(word))
    assert Font(24).getlength(word) == pytest.approx(sum(map(Font(24).getlength, word)), abs=2)  # kerning


def test_fonts_of_lines_marks_and_chinese():
    text, font = f"up {SERIF} down", Font(20)
    pieces = ["up ", f"{SERIF} ", "down"]
    assert font.getlength(text) == pytest.approx(sum(map(font.getlength, pieces)))
    runs = list(font._runs(text))
    assert [run for _, run in runs] == pieces and len({piece for piece, _ in runs}) == 2
    assert [run for _, run in Font(20)._runs(f"e\u0301{SERIF}\u0301\ufe0f")] == ["e\u0301", f"{SERIF}\u0301\ufe0f"]
    text = "一只猫坐在垫子上 near the river, 两只狗"
    lines = grid._wrap(text, grid.CAPTION, 80)
    assert 2 < len(lines) <= 4 and all(grid.CAPTION.getlength(line) <= 80 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split()) and "near" in " ".join(lines).split()


def test_what_no_font_has_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(grid, "_lacking", set())
    grid._holder.cache_clear()
    for text in (f"a {LACKING}", "\u0379", "é"):
        drawn(text)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has the letter '\\u0378'" in said and "install a font" in said


def test_means_prompts_and_small_scores(tmp_path):
    scores = [np.array([[0.2], [0.4]]), np.array([[0.6], [0.9]])]
    rows = [Row("x", [RED, BLUE], [{"f.py:r": float(column[i, 0])} for column in scores]) for i in range(2)]
    means = means_of([{"f.py:r": column} for column in scores])
    assert means.label == "mean of 2 prompts, 95 % interval" and means.columns[1]["f.py:r"].mean == pytest.approx(0.75)
    plain, page = (Image.open(draw_grid(tmp_path / f"{i}.png", ["a", "b"], rows, summary))
                   for i, summary in enumerate((None, means)))
    assert page.height > plain.height + 60 and area(page, grid.ROSE) > area(plain, grid.ROSE)
    assert means_of([{"r": column[:1]} for column in scores]) is None and means_of([{}]) is None
    # The first dark pixel under the heading is the prompt's or the image's.
    for image, words_first in (("an answer", True), (RED, False)):
        page = grid._card(Row("a prompt", [image], [{"r": 1.0}]), [grid._tile(image)], (192, 192), {"r": 3})
        top = [page.getpixel((x, y)) for y in range(12) for x in range(100)]
        assert ((255, 0, 0) not in top and any(max(pixel) < 100 for pixel in top)) == words_first
    rows = [Row("x", [RED, BLUE], [{"r": 0.0071}, {"r": 0.0064}])]
    digits = grid.digits_of(rows)
    assert digits == {"r": 5} and grid.format_score(0.0071, 5) == "0.00710" and grid.direction(0.0064, 0.0071, 5) == -1


@pytest.mark.parametrize("size", [16, 40])
def test_a_line_is_drawn_from_its_upper_left_corner_within_its_height(size):
    page, font = Image.new("L", (600, 200), 0), Font(size)
    font.draw(ImageDraw.Draw(page), (10, 50), "Élg", "white")
    left, top, right, bottom = page.getbbox()
    assert 10 <= left < 10 + size / 4 and right <= 11 + font.getlength("Élg")
    assert 50 <= top < 50 + size / 2 and 50 + size < bottom <= 50 + font.height
