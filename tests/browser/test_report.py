"""The report in a headless Chromium."""

import json

import pytest
import torch
from PIL import Image
from playwright.sync_api import expect

from flowgrpo.data.prompts import load_prompts
from flowgrpo.evaluation.report import report, snapshots
from flowgrpo.evaluation.report.report import server
from tests.browser.opened import DESK, PHONE, opened, overflow
from tests.evaluation.report.test_report import EVIL, Measured, make_run, measured
from tests.helpers.servers import running

GREYS = (0.1, 0.4, 0.7, 1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 60 epochs with a grey of its own at every stage, and numbers that are long on an axis."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", epochs=60, every=30)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line | {
        "loss": (-1) ** number * 3e-5, "memory/host": 1.074e9 + 1e5 * number}) + "\n"
        for number, line in enumerate(lines)))
    for (name, epoch), grey in zip((("before", 0), ("epoch-00030", 30), ("epoch-00060", 60), ("after", 60)), GREYS):
        found = measured(grey, grey / 2)
        snapshots.stage(run, name, epoch, Measured(found.prompts, found.scores, torch.full((2, 3, 8, 8), grey)))
    cards = report.read_stages(run)[0]["cards"]
    snapshots.write(run / "report" / "last.json", {
        "epoch": 60, "best": cards, "worst": cards, "first_ratio": {"found": 0.0, "limit": 1e-6, "rescored": False}})
    report.write(run)
    return run


@pytest.fixture
def page(browser, run):
    with opened(browser, (run / "report.html").as_uri(), DESK) as page:
        yield page


def sources(page, holder: str = "#stages") -> list[str]:
    return page.locator(f"{holder} img").evaluate_all("images => images.map(image => image.src)")


def grey(page) -> float:
    """What the first image shows, as the browser decodes it."""
    return page.evaluate("""async () => {
        const image = document.querySelector("#stages img"), canvas = document.createElement("canvas");
        await image.decode();
        canvas.width = canvas.height = 1;
        const pen = canvas.getContext("2d");
        pen.drawImage(image, 0, 0, 1, 1);
        return pen.getImageData(0, 0, 1, 1).data[0] / 255;
    }""")


def test_the_slider_and_the_toggle_show_the_images(page):
    slider = page.locator("#stage")
    slider.focus()
    assert slider.get_attribute("aria-valuetext") == "after training" and grey(page) == pytest.approx(1.0, abs=0.01)
    for key, label, value in (("ArrowLeft", "epoch 60", 0.7), ("Home", "before training", 0.1),
                              ("ArrowRight", "epoch 30", 0.4), ("End", "after training", 1.0)):
        slider.press(key)
        assert page.locator("#stage-name").inner_text() == slider.get_attribute("aria-valuetext") == label
        assert grey(page) == pytest.approx(value, abs=0.01)
    page.locator("#base").focus()
    for label, pressed, value in (("before training", "true", 0.1), ("after training", "false", 1.0)):
        page.keyboard.press("Enter")
        assert page.locator("#base").get_attribute("aria-pressed") == pressed
        assert page.locator("#stage-name").inner_text() == label and grey(page) == pytest.approx(value, abs=0.01)


def test_foreign_text_is_shown_as_it_is(page):
    caption = page.locator("#stages figcaption").first
    assert caption.evaluate("element => element.firstChild.data") == EVIL
    assert page.locator("h1").inner_text() == "<b>mine" and page.title() == "<b>mine - flowgrpo report"
    assert len(sources(page, "#best")) == len(sources(page, "#worst")) == 2


def test_a_chart_tells_its_values(page):
    chart = page.locator("figure.chart", has_text="Gradient norm")
    value, at = chart.locator("b"), chart.locator(".at")
    svg = chart.locator("svg")
    assert at.inner_text() == "epoch 60"
    svg.focus()
    svg.press("Home")
    assert at.inner_text() == "epoch 1" and value.inner_text() == "1.767"  # 0.1 + 5 / 3
    svg.press("ArrowRight")
    assert svg.get_attribute("aria-valuetext") == "epoch 2: grad_norm 1.867"
    box = svg.bounding_box()
    page.mouse.move(box["x"] + 52 + (box["width"] - 62) / 2 + 1, box["y"] + 60)
    assert at.inner_text() in ("epoch 30", "epoch 31")


VALUES = {"memory/host": (1.43e9, 1.47e9), "huge": (2.8e12, 2.8003e12), "tiny": (1e-9, 1.2e-9), "one": (1e300, 1e300),
          "below": (-123456.0, -123455.9), "fine": (0.1234561, 0.1234562), "wide": (-1e6, 9e6)}


def test_labels_of_axes_are_whole_and_differ(browser, tmp_path):
    run = make_run(tmp_path / "run", epochs=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(
        json.dumps(line | {name: both[place] for name, both in VALUES.items()}) + "\n"
        for place, line in enumerate(lines)))
    report.write(run)
    with opened(browser, (run / "report.html").as_uri(), PHONE) as page:
        page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true; })")
        for name in [*VALUES][1:] + ["Peak memory"]:
            chart = page.locator("figure.chart", has=page.locator(f"h3[title='{name}']"))
            axis = chart.locator("svg text[text-anchor=end]")
            told = axis.all_text_contents()
            assert len(told) > 1 and len({*told}) == len(told), (name, told)
            assert min(axis.evaluate_all("all => all.map(each => each.getBBox().x)")) >= 0, (name, told)
        assert [text for text in told if text in ("1.43", "1.44")], told  # of the last, in GB


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_fits_the_screen(browser, run, size, scheme):
    with opened(browser, (run / "report.html").as_uri(), size, color_scheme=scheme) as page:
        assert overflow(page) <= 0
        page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true; })")
        assert overflow(page) <= 0
        assert page.locator("figure.chart svg path").count() > 10
        begins = page.locator("figure.chart svg text").evaluate_all("all => all.map(each => each.getBBox().x)")
        assert len(begins) > 20 and min(begins) >= 0
        lines = page.locator(".tile .numbers, .scores")
        assert lines.evaluate_all("all => all.every(each => each.scrollWidth <= each.clientWidth)")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert dark == (scheme == "dark")


@pytest.fixture(scope="module", params=["edit", "clip"])
def sourced(request, tmp_path_factory):
    """A run whose prompts bring an image and a mask, and its outputs: images or clips of 320 x 200 pixels."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, level in (("source", 90), ("mask", 255)):
        Image.new("RGB", (320, 200), (level,) * 3).save(folder / f"{name}.png")
    rows = [{"prompt": f"a long request to change one thing and to leave everything else as it is, number {number}",
             "image": "source.png", "mask_image": "mask.png"} for number in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, run = load_prompts(folder / "prompts.jsonl"), make_run(folder / "run")
    for name, epoch, grey in (("before", 0, 0.2), ("after", 4, 0.8)):
        shape = (2, 9, 3, 200, 320) if request.param == "clip" else (2, 3, 200, 320)
        scores = {"scene": [grey, grey / 2], "piqe": [0.5, 0.5]}
        snapshots.stage(run, name, epoch, Measured(prompts, scores, torch.full(shape, grey)))
    report.write(run)
    return run


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_sources_and_outputs_are_seen_whole(browser, sourced, size):
    with opened(browser, (sourced / "report.html").as_uri(), size) as page:
        page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true; })")
        assert overflow(page) <= 0
        figure = page.locator("#stages figure").first
        assert [word for word in ("source", "mask") if word not in figure.inner_text()] == []
        shown = page.locator("#stages img, #stages video")
        assert shown.count() >= 6  # two prompts: source, mask and output
        boxes = shown.evaluate_all("""all => all.map(each => each.getBoundingClientRect())
            .map(box => [box.left, box.right - innerWidth, box.width])""")
        assert all(left >= 0 and over <= 0 and width >= 40 for left, over, width in boxes), boxes


def test_live_it_follows_without_losing_its_place(browser, tmp_path):
    run = make_run(tmp_path / "run", finished=False)
    with running(server(run, 0)) as serving:
        with opened(browser, f"http://127.0.0.1:{serving.server_port}/", DESK) as page:
            page.locator("#stage").press("Home")
            snapshots.stage(run, "after", 4, measured(1.0, 1.0))
            expect(page.locator("#stage")).to_have_attribute("max", "3", timeout=30_000)
            assert page.locator("#stage-name").inner_text() == "before training"
            page.locator("#stage").press("End")
            assert page.locator("#stage-name").inner_text() == "after training"


def test_a_script_that_got_into_the_file_is_not_run(browser, run, tmp_path):
    text = (run / "report.html").read_text()
    for evil in ("<script>document.title = 'theirs'</script>", "<img src=x onerror=\"document.title = 'theirs'\">",
                 "<a id=e href=\"javascript:document.title='theirs'\">x</a>"):
        (tmp_path / "report.html").write_text(text.replace("</main>", f"{evil}</main>"))
        with browser.new_context(viewport=DESK) as context:
            page, said = context.new_page(), []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.goto((tmp_path / "report.html").as_uri())
            page.evaluate("document.getElementById('e')?.click()")
            expect(page.locator("h1")).to_have_text("<b>mine")  # the page's own script ran
            assert page.title() == "<b>mine - flowgrpo report" and "Content Security Policy" in "".join(said)
