"""Text of image pages."""

import pytest
from PIL import Image, ImageDraw

from flowgrpo.evaluation.pages.grid import Font


@pytest.mark.parametrize("size", [16, 40])
def test_a_line_is_drawn_from_its_upper_left_corner_within_its_height(size):
    page, font = Image.new("L", (600, 200), 0), Font(size)
    font.draw(ImageDraw.Draw(page), (10, 50), "Élg", "white")
    left, top, right, bottom = page.getbbox()
    assert 10 <= left < 10 + size / 4 and right <= 11 + font.getlength("Élg")
    assert 50 <= top < 50 + size / 2 and 50 + size < bottom <= 50 + font.height
