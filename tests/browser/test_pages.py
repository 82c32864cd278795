"""Pages of grids, votes and taste, and all of the site, in a headless Chromium."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect

from flowgrpo.contrib.taste.votes import SKIP, TIE, VoteLog
from flowgrpo.evaluation.columns import write_page
from flowgrpo.evaluation.pages.grid import Row
from flowgrpo.tools.vote import server
from flowgrpo.tools.vote.ballot import Ballot
from flowgrpo.tools.vote.live import LiveBallot
from flowgrpo.tools.vote.sources import pairs
from tests.browser.opened import DESK, PHONE, opened, overflow
from tests.helpers.servers import running
from tests.tools.vote.test_live import never, questions
from tests.tools.vote.test_vote import folders

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


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_keys_vote_and_the_last_page_sums_up(browser, size, tmp_path):
    ballot = Ballot(*pairs(folders(tmp_path, 3)), tmp_path / "pairs.jsonl", 0)
    with running(server.server(ballot, 0)) as serving:
        with opened(browser, server.address(serving), size) as page:
            expect(page.locator("#progress")).to_contain_text("0 of 3")
            assert overflow(page) <= 0 and page.locator("#prompt").inner_text().startswith("prompt ")
            first = page.locator("#prompt").inner_text()
            page.keyboard.press("ArrowLeft")
            expect(page.locator("#prompt")).not_to_have_text(first)
            page.keyboard.press("u")
            expect(page.locator("#prompt")).to_have_text(first)
            seen = first
            for key in ("ArrowLeft", "ArrowRight"):
                page.keyboard.press(key)
                expect(page.locator("#prompt")).not_to_have_text(seen)
                seen = page.locator("#prompt").inner_text()
            page.keyboard.press("t")
            expect(page.locator("#summary")).to_contain_text("all prompts")
            assert overflow(page) <= 0
    written = [json.loads(line) for line in ballot.output.read_text().splitlines()]
    assert [row.get("aspects") for row in written].count({"overall": "tie"}) == 1 and len(written) == 3


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_keys_vote_and_new_images_come_while_it_serves(browser, size, tmp_path):
    live = LiveBallot(VoteLog(tmp_path / "votes.jsonl"), seconds=600)
    live.ask(questions(tmp_path, 0, 4))
    with running(server.server(live, 0)) as serving:
        with opened(browser, server.address(serving), size) as page:
            prompt, sides = page.locator("#prompt"), page.locator(".side img")
            expect(prompt).to_have_text("prompt 0 0")
            expect(sides).to_have_count(4)
            assert overflow(page) <= 0 and page.evaluate("document.body.scrollHeight - innerHeight") <= 0
            page.keyboard.press("3")
            expect(prompt).to_have_text("prompt 0 1")
            page.keyboard.press("u")
            expect(prompt).to_have_text("prompt 0 0")
            for key, then in (("4", "prompt 0 1"), ("0", "prompt 0 2")):
                page.keyboard.press(key)
                expect(prompt).to_have_text(then)
            page.keyboard.press("p")
            expect(sides).to_have_count(2)
            page.keyboard.press("4")  # not shown
            page.keyboard.press("2")
            expect(prompt).to_have_text("prompt 0 3")
            page.keyboard.press("s")
            expect(prompt).to_have_text("The next images are being generated")
            votes = live.wait(0, never)
            assert [len(votes[place].shown) for place in range(4)] == [4, 4, 2, 2]
            assert [votes[place].choice for place in range(4)] == [votes[0].shown[3], TIE, votes[2].shown[1], SKIP]
            live.tell(updates=1, foretold={"right": 2, "of": 3})
            live.ask(questions(tmp_path, 1, 1, check=True) + questions(tmp_path, 1, 1))
            expect(prompt).to_have_text("prompt 1 0")
            expect(page.locator("#facts")).to_contain_text("2 of the last 3 clicks were predicted")
            page.keyboard.press("1")
            expect(page.locator("#facts")).to_contain_text("against the base: ")
            assert overflow(page) <= 0
            for _ in range(20):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.id") == "finish":
                    break
            page.keyboard.press("Enter")
            expect(prompt).to_contain_text("The session has ended")
    assert live.is_finished and list(live.log.votes) == ["0.q0", "0.q1", "0.q2", "0.q3", "1.c0"]


def test_quick_keys_wait_for_the_images_of_their_question(browser, tmp_path):
    """Keys that are pressed at once vote on one question after the other, each once its images are there."""
    live = LiveBallot(VoteLog(tmp_path / "votes.jsonl"), seconds=600)
    live.ask(questions(tmp_path, 0, 3))
    with running(server.server(live, 0)) as serving:
        with opened(browser, server.address(serving), DESK) as page:
            prompt = page.locator("#prompt")
            expect(prompt).to_have_text("prompt 0 0")
            held: list = []
            page.route("**/0.q1/*", lambda route: held.append(route))  # its images are late
            page.evaluate("""() => { for (const key of ["1", "2", "4", "3", "1"])
                dispatchEvent(new KeyboardEvent("keydown", {key})); }""")
            expect(prompt).to_have_text("prompt 0 1")
            page.wait_for_timeout(300)
            assert list(live.log.votes) == ["0.q0"]
            for route in held:
                route.continue_()
            page.unroute("**/0.q1/*")
            expect(prompt).to_have_text("The next images are being generated")
            shown = [live.log.votes[f"0.q{number}"] for number in range(3)]
            assert [vote.shown.index(vote.choice) for vote in shown] == [0, 1, 3]
            live.ask(questions(tmp_path, 1, 2))  # keys without a question are gone
            expect(prompt).to_have_text("prompt 1 0")
            page.locator(".side").nth(2).focus()
            page.keyboard.press("Enter")
            expect(prompt).to_have_text("prompt 1 1")
            assert page.evaluate("[...document.querySelectorAll('.side')].indexOf(document.activeElement)") == 2


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
