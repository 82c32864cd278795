"""All pages of the site in a headless Chromium, at the widths of a desk and a phone: nothing is cut."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.opened import overflow

ROOT = Path(__file__).parents[2]
WIDTHS = [1400, 390]

# Text of an article that leaves the screen, or is hidden by an element around it, which does not scroll
CUT = """() => {
    const cut = [];
    const walk = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
    for (let node; node = walk.nextNode();) {
        if (!node.data.trim() || !node.parentElement.checkVisibility({visibilityProperty: true})) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const { left, right } = range.getBoundingClientRect();
        for (let box = node.parentElement; ; box = box.parentElement) {
            const page = box === document.body, over = page ? "hidden" : getComputedStyle(box).overflowX;
            if (over === "auto" || over === "scroll") break;
            const sides = page ? { left: 0, right: innerWidth } : box.getBoundingClientRect();
            if (over !== "visible" && right > left && (left < sides.left - 1 || right > sides.right + 1)) {
                cut.push(node.data.trim());
                break;
            }
            if (page) break;
        }
    }
    return cut;
}"""
# Blocks of code that have to be scrolled
SCROLLED = """() => [...document.querySelectorAll("article pre, article pre code")]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerText)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    built = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", built], cwd=ROOT, check=True)
    return built


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_cut(browser, site, width):
    found, pages = {}, sorted(site.rglob("index.html"))
    with browser.new_context(viewport={"width": width, "height": 900}) as context:
        page = context.new_page()
        for path in pages:
            page.goto(path.as_uri())
            told = (max(0, overflow(page)), page.evaluate(CUT), page.evaluate(SCROLLED))
            if told != (0, [], []):
                found[path.parent.name] = told
    assert found == {} and len(pages) == len([*ROOT.glob("docs/**/*.md")])


def test_a_phone_shows_memory_and_hours_of_each_recipe(browser, site):
    with browser.new_context(viewport={"width": 390, "height": 900}) as context:
        page = context.new_page()
        page.goto((site / "recipes" / "index.html").as_uri())
        table = page.locator("article table").first
        shown = table.locator("th").evaluate_all(
            "all => all.filter(each => each.getBoundingClientRect().right <= innerWidth).map(each => each.innerText)")
        assert shown[:3] == ["recipe", "GiB", "hours"]
