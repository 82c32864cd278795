"""The page of an evaluation grid in a headless Chromium."""

import pytest
import torch

from flowgrpo.evaluation.columns import write_page
from flowgrpo.evaluation.pages.grid import Row
from tests.browser.opened import DESK, PHONE, opened, overflow

EVIL = "<script>alert(1)</script> a cat"
RED, BLUE = (torch.zeros(3, 16, 16).index_fill(0, torch.tensor([channel]), 1.0) for channel in (0, 2))


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    rows = [Row(EVIL, [RED, BLUE], [{"r": 0.25}, {"r": 0.75}]), Row("a dog", [BLUE, RED], [{"r": 0.5}, {"r": 0.25}])]
    return write_page(tmp_path_factory.mktemp("grid") / "grid.html", "run", ["base", "trained"], rows).as_uri()


def colour(page, place: int) -> list[int]:
    """The colour that the browser decodes in an image of the page."""
    return page.evaluate("""async place => {
        const image = document.querySelectorAll("img")[place], canvas = document.createElement("canvas");
        await image.decode();
        canvas.width = canvas.height = 1;
        const pen = canvas.getContext("2d");
        pen.drawImage(image, 0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }""", place)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_grid_shows_its_images_and_fits_the_screen(browser, address, size, scheme):
    with opened(browser, address, size, color_scheme=scheme) as page:
        assert overflow(page) <= 0
        assert [colour(page, place) for place in range(4)] == [[255, 0, 0], [0, 0, 255], [0, 0, 255], [255, 0, 0]]
        assert page.locator("thead th").all_inner_texts() == ["base", "trained"]
        assert page.locator("tr.prompt").first.inner_text() == EVIL
        assert "0.75" in page.locator(".rose").first.inner_text()
        assert "0.25" in page.locator(".fell").first.inner_text()
