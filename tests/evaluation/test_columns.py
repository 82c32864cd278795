"""Pages with columns of one kind: which images or texts stand where, as PNG, HTML and Markdown."""

import base64
import html
import io
import re
import shutil
import weakref
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.cli.draw import ColumnKind
from flowgrpo.data import prompts, sets
from flowgrpo.evaluation import columns, evaluate, images, samplers
from flowgrpo.evaluation.columns import write_page, write_table
from flowgrpo.evaluation.pages import grid
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.policies import checkpoints, loading
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers import rollout
from flowgrpo.samplers.rollout import seeder
from flowgrpo.storage import checkpoint
from flowgrpo.text.policies import engines as texts
from flowgrpo.text.policies.causal_lm import CausalLM
from tests.evaluation.pages.test_grid import area, flat
from tests.evaluation.test_images import make_run, pixels
from tests.helpers import tiny
from tests.helpers import tiny_text as tiny_language
from tests.helpers.refusals import error_line, message, refused
from tests.text.test_text_evaluate import SHORT, finished


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model):
    """Two finished runs; the first has a checkpoint of its last weights, and one of the base's (an untrained LoRA)."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = make_run(folder / "first", model, 0.3), make_run(folder / "second", model, 0.6)
    pipe = load_pipeline(str(model))
    config = checkpoints.run_config(first)
    fresh = TrainableWeights(pipe, denoisers(pipe), config.adapter)
    tensors = {f"weights/{key}": value for key, value in fresh.snapshot().items()}
    checkpoint.save(first / "checkpoints", 1, tensors, {}, 9)
    with torch.no_grad():  # what make_run does to them
        for key, parameter in fresh.named.items():
            if "lora_B" in key:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tuned = {key: fresh.named[key].detach() for key in fresh.named}
    checkpoint.save(first / "checkpoints", 20, {f"weights/{key}": value for key, value in tuned.items()}, {}, 9)
    fresh.save(first)
    return first, second


class Page(HTMLParser):
    """Headings, captions, numbers and images of a page; outside: what it would fetch."""

    def __init__(self, path):
        super().__init__()
        self.images, self.texts, self.outside, self.stack = [], [], [], []
        self.feed(path.read_text())
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "img":
            head, code = given["src"].split(",")
            self.images.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(code))).convert("RGB")).astype(int))
        self.outside += [value for key, value in attributes if key in ("src", "href") and not value.startswith("data:")]
        self.stack += [tag] if tag not in ("img", "meta", "br", "wbr") else []

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, text):
        self.texts += [(self.stack[-1], text)] if text.strip() and self.stack[-1] in ("th", "span", "dt", "dd") else []


def drawn(run, kind, values, folder, count=2, seed=0) -> tuple[Page, list[str]]:
    png, page = columns.columns(run, kind, values, None, count, seed, folder / "page.png")
    assert Image.open(png).size > (16, 16) and page == folder / "page.html"
    found = Page(page)
    heads = [text for tag, text in found.texts if tag == "th"]
    return found, heads


def alone(run, prompt: int, seed: int = 0, lora: bool = True, **asked) -> np.ndarray:
    """An image as it is drawn by itself, at the size of the page."""
    config = checkpoints.run_config(run)
    pipe = load_pipeline(config.model)
    if lora:
        loading.load_tuned(pipe, run)
    texts = [f"picture {i}" for i in range(20)]
    held = sets.resolve(config)[1]
    assert held[prompt].text in texts
    call = {"num_inference_steps": 2, "guidance_scale": 1.5, **tiny.CALL, **asked}
    picture = samplers.draw_one(pipe, held[prompt], rollout.seeder(seed, 0)(prompt, 0), call)
    return np.asarray(grid._image(picture)).astype(int)


@pytest.mark.parametrize("kind, values, heads, options", [
    ("seeds", ["3", "0"], ["seed 3", "seed 0"], [{"seed": 3}, {"seed": 0}]),
    ("guidance", ["1", "4.5"], ["guidance 1", "guidance 4.5"], [{"guidance_scale": 1.0}, {"guidance_scale": 4.5}]),
    ("steps", ["1", "3"], ["steps 1", "steps 3"], [{"num_inference_steps": 1}, {"num_inference_steps": 3}])])
def test_columns_differ_in_what_was_asked(runs, tmp_path, kind, values, heads, options):
    page, found = drawn(runs[0], kind, values, tmp_path)
    assert [head for head in found if not head.startswith("picture")] == heads and page.outside == []
    for row in range(2):
        for column, changed in enumerate(options):
            assert np.abs(page.images[2 * row + column] - alone(runs[0], row, **changed)).max() <= 1
    assert np.abs(page.images[0] - page.images[1]).max() > 1


def test_checkpoints_and_runs_stand_in_order(runs, tmp_path):
    page, heads = drawn(runs[0], "checkpoints", [], tmp_path)
    assert heads[:3] == ["base", "epoch 1", "epoch 20"]
    base, first, last = page.images[:3]
    assert (base == alone(runs[0], 0, lora=False)).all() and np.abs(base - first).max() <= 1
    assert np.abs(last - alone(runs[0], 0)).max() <= 1 < np.abs(last - first).max()
    chosen, heads = drawn(runs[0], "checkpoints", ["20", "0"], tmp_path)
    assert heads[:2] == ["epoch 20", "base"]
    assert (chosen.images[0] == last).all() and (chosen.images[1] == base).all()
    page, heads = drawn(runs[0], "runs", [str(runs[1])], tmp_path)
    assert heads[0] == "base" and len(page.images) == 6
    for column, (run, lora) in enumerate([(runs[0], False), (runs[0], True), (runs[1], True)]):
        assert np.abs(page.images[column] - alone(run, 0, lora=lora)).max() <= 1
    page, _ = drawn(runs[0], "runs", [str(runs[0] / "checkpoints" / ".."), str(runs[1])], tmp_path, count=1)
    assert len(page.images) == 3  # the base and two runs


def test_a_pipeline_is_gone_before_the_next_is_loaded(runs, tmp_path, monkeypatch):
    load, alive = loading.make_pipeline, []
    def watched(*given, **options):
        assert not any(module() for module in alive)
        pipe = load(*given, **options)
        alive.append(weakref.ref(pipe.transformer))
        return pipe
    monkeypatch.setattr(loading, "make_pipeline", watched)
    drawn(runs[0], "checkpoints", [], tmp_path, count=1)
    assert len(alive) == 2  # the base leaves room for the first checkpoint, and nothing else for the second


def test_a_page_is_the_same_every_time_and_has_scores(runs, tmp_path):
    for folder in ("a", "b"):
        drawn(runs[0], "seeds", ["0", "1"], tmp_path / folder)
    for name in ("page.png", "page.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    page = Page(tmp_path / "a" / "page.html")
    numbers = [text.lstrip("\u25b2\u25bc ") for tag, text in page.texts if tag == "dd"]
    means = [picture.mean() / 255 for picture in page.images]  # `bright`, of enlarged pixels
    assert numbers[:len(means)] == [f"{mean:.3f}" for mean in means]
    assert numbers[len(means):] == [f"{np.mean(means[column::2]):.3f}" for column in (0, 1)]
    assert ("span", "mean of 2 prompts, 95 % interval") in page.texts


BESIDE = """
def far(images, prompts, base=None):
    return (images - base).abs().mean((1, 2, 3))


far.base = True
"""


def test_a_reward_that_compares_with_the_base_sees_that_of_its_column(runs, model, tmp_path):
    """With the base's own weights the distance is 0 at every guidance, with the run's it is not."""
    for change in (0.0, 0.3):
        run = make_run(tmp_path / f"run{change}", model, change)
        (run / "far.py").write_text(BESIDE)
        told = (run / "config.yaml").read_text().replace("bright.py:bright", "far.py:far")
        (run / "config.yaml").write_text(told)
        page, _ = drawn(run, "guidance", ["1", "4.5"], run)
        values = [float(text.lstrip("\u25b2\u25bc ")) for tag, text in page.texts if tag == "dd"]
        assert len(values) == 6 and (values == [0.0] * 6 if not change else min(values) > 0)


@pytest.mark.parametrize("kind, values, told", [
    ("checkpoints", ["7"], r"has none of epoch 7; there are: 1, 20 \(train.keep"),
    ("checkpoints", ["x"], "got 'x' in --values, expected whole numbers from 0 up"),
    ("runs", [], "expected --values with the folders of further runs"),
    ("runs", ["nowhere"], "no run at nowhere"),
    ("guidance", [], "expected --values with a number for each column"),
    ("guidance", ["-1"], "got '-1' in --values, expected numbers from 0 up"),
    ("guidance", ["inf"], "got 'inf'"),
    ("steps", ["0"], "got '0' in --values, expected whole numbers from 1 up"),
    ("seeds", ["1.5"], "got '1.5' in --values, expected whole numbers"),
    ("rlg", ["-1"], "got '-1' in --values, expected numbers from 0 up")])
def test_values_that_are_not_of_the_kind_are_told(runs, tmp_path, kind, values, told):
    refused(told, columns.columns, runs[0], kind, values, None, 1, 0, tmp_path / "a.png")


def test_a_run_without_checkpoints_and_one_of_another_model_are_told(runs, tmp_path):
    given = None, 1, 0, tmp_path / "a.png"
    refused("has none at all; there are: none", columns.columns, runs[1], "checkpoints", [], *given)
    other = shutil.copytree(runs[1], tmp_path / "other")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(re.sub(r"(?m)^model: .*$", "model: starter", text))
    refused("tuned 'starter', but .* expected runs of one model", columns.columns, runs[0], "runs", [str(other)],
            *given)


def test_the_command_line_writes_both_and_knows_every_kind(runs, tmp_path, capsys):
    assert set(ColumnKind.__args__) == set(columns.KINDS)
    code = main(["compare", "grid", str(runs[0]), "--columns", "seeds", "--values", "0,1", "--trust-run",
                 "--count", "1", "--output", str(tmp_path / "s.png")])
    assert code == 0 and capsys.readouterr().out.split() == [str(tmp_path / "s.png"), str(tmp_path / "s.html")]
    assert "--columns too" in error_line(capsys, "compare", "grid", str(runs[0]), "--values", "0,1")
    assert main(["compare", "grid", str(runs[0]), "--output", "a.html"]) == 2 and "the PNG" in capsys.readouterr().err


@pytest.mark.parametrize("count, width, names", [(4, 4, 1), (40, 8, 7)])
def test_large_pages_are_tables_with_repeated_names(tmp_path, count, width, names):
    caption = "a very long prompt about a red square on a blue table, with a green cat beside it and a lamp"
    row = Row(caption, [flat((1, 0, 0))] * width, [{"scene": 0.5}] * width)
    heads = [f"epoch {i}" for i in range(width)]
    page = Image.open(draw_grid(tmp_path / "a.png", heads, [row] * count))
    one = Image.open(draw_grid(tmp_path / "b.png", heads, [row]))
    assert area(page, "#ff0000") == count * width * 190 ** 2
    assert page.width == one.width == 2 * grid.MARGIN + width * (192 + grid.BETWEEN_IMAGES) - grid.BETWEEN_IMAGES
    head, card = grid.HEADING.height + 6, one.height - 2 * grid.MARGIN - grid.HEADING.height - 6
    assert page.height == 2 * grid.MARGIN + names * head + count * (card + grid.BETWEEN_CARDS) - grid.BETWEEN_CARDS


def test_html_pages_escape_colour_and_move(tmp_path):
    rows = [Row('a <b>"cat"</b> & dog', [flat((1, 0, 0)), flat((0, 0, 1)), flat((0, 1, 0))],
                [{"x/r<1": 0.2}, {"x/r<1": 0.8}, {"x/r<1": 0.1}])]
    text = write_page(tmp_path / "p.html", "<t>", ["a", "b<", "c"], rows).read_text()
    page = Page(tmp_path / "p.html")
    assert [text for _, text in page.texts] == ["a", "b<", "c", 'a <b>"cat"</b> & dog', "r<1", "0.200", "r<1",
                                                "\u25b2 0.800", "r<1", "\u25bc 0.100"]
    assert [tuple(picture[5, 5]) for picture in page.images] == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]
    assert '<dd class="rose">\u25b2 0.800' in text and '<dd class="fell">\u25bc 0.100' in text and "<dd>0.200" in text
    clip = torch.stack([flat((1, 0, 0)), flat((0, 0, 1))])
    text = write_page(tmp_path / "p.html", "t", ["a"], [Row("x", [clip], [{}])]).read_text()
    *_, code = re.findall(r"data:image/webp;base64,([^\"]+)", text)  # behind a poster, where the extra for mp4 is there
    shown = Image.open(io.BytesIO(base64.b64decode(code)))
    assert shown.n_frames == 2 and shown.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_a_checkpoint_stands_for_its_run(runs, model, tmp_path):
    run, last, first = runs[0], *(runs[0] / "checkpoints" / f"epoch-{epoch:05d}" for epoch in (20, 1))
    of_run, of_last, of_first = (pixels(images.sample(str(model), lora, ["a"], 1, 0, None, None, tmp_path / str(i))[0])
                                 for i, lora in enumerate((run, last, first)))
    assert np.abs(of_run - of_last).max() <= 1 < np.abs(of_last - of_first).max()
    plan = evaluate.make_plan(str(last), base=True)
    assert (plan.tuned, plan.model) == (last, str(model))
    assert "is a run, which brings its weights: leave out --lora" in message(evaluate.make_plan, str(last), run)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a checkpoint of other weights than its result."""
    folder = tmp_path_factory.mktemp("columns")
    (folder / "short.py").write_text(SHORT)
    (folder / "prompts.txt").write_text("\n".join(tiny_language.PROMPTS))
    lm = tiny_language.save(folder / "lm", tiny_language.model())
    found = finished(folder / "run", tiny_language.policy(), model=str(lm), reward=f"{folder}/short.py:short",
                     prompts=str(folder / "prompts.txt"))
    own = tiny_language.stir(tiny_language.policy(), 0.6)
    weights = {f"weights/{key}": value for key, value in own.weights.snapshot().items()}
    checkpoint.save(found / "checkpoints", 3, weights, {}, 2)
    return found


def expected(run, own: CausalLM, seed: int = 0, temperature: float = 0.0) -> list[str]:
    own.text = own.text.model_copy(update={"eval_temperature": temperature})
    asked = [prompt.text for prompt in prompts.load_prompts(run.parent / "prompts.txt")]
    of = seeder(seed, 0)
    return own.generate(own.encode(asked), own.generators(of(i, 0) for i in range(len(asked))))


def text_page(run, kind, *values, tmp_path):
    """Names of the columns with their texts."""
    written = columns.columns(run, kind, values, run.parent / "prompts.txt", 6, 0, tmp_path / "page.png")
    assert [file.name for file in written] == ["page.md", "page.html"]
    lines = [line.strip("| \n").split(" | ") for line in written[0].read_text().splitlines()[2:]]
    assert lines[-1][0] == "mean of 6 prompts, 95 % interval" and "[" in lines[-1][1]
    page = written[1].read_text()
    found = {name: [line[i].partition("<br>")[0] for line in lines[2:-1]] for i, name in enumerate(lines[0])}
    assert all(f"<p>{html.escape(text)}</p>" in page for name in found for text in found[name] if name != "prompt")
    return found


def test_checkpoints_stand_between_base_and_result(run, tmp_path):
    found = text_page(run, "checkpoints", tmp_path=tmp_path)
    assert list(found) == ["prompt", "base", "epoch 3"] and found["prompt"] == tiny_language.PROMPTS
    config = checkpoints.run_config(run)
    assert found["base"] == expected(run, texts.load(config, None))
    assert found["epoch 3"] == expected(run, tiny_language.stir(tiny_language.policy(), 0.6)) != found["base"]


def test_runs_and_seeds(run, tmp_path):
    other = shutil.copytree(run, run.parent / "other", dirs_exist_ok=True)
    tiny_language.stir(tiny_language.policy(), 0.9).weights.save(other)
    recipe = other / "config.yaml"
    recipe.write_text(recipe.read_text().replace("name: run\n", "name: other\n"))
    own = texts.load(checkpoints.run_config(run), run)
    found = text_page(run, "runs", str(other), tmp_path=tmp_path)
    assert list(found) == ["prompt", "base", "run", "other"] and found["run"] == expected(run, own)
    assert found["other"] == expected(run, tiny_language.stir(tiny_language.policy(), 0.9)) != found["run"]
    found = text_page(run, "seeds", "4", "5", tmp_path=tmp_path)
    assert found == {"prompt": tiny_language.PROMPTS, "seed 4": expected(run, own, 4, 1.0),
                     "seed 5": expected(run, own, 5, 1.0)}
    assert found["seed 4"] != found["seed 5"]


def test_what_is_of_denoisers_is_told(run, tmp_path, capsys):
    refused("--columns steps: is of denoisers", columns.columns, run, "steps", ["3"], None, 2, 0, tmp_path / "page.png")
    assert main(["compare", "grid", str(run), "--columns", "seeds", "--values", "1,2", "--count", "1", "--trust-run",
                 "--output", str(tmp_path / "one.png")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "one.md"), str(tmp_path / "one.html")]


def test_tables_and_pages_show_texts_and_hostile_names(tmp_path):
    row = Row("a|b", ["x *y*\n<b>|", "2_3"], [{"folder/f.py:right": 0.5}, {"folder/f.py:right": 1.0}])
    told = write_table(tmp_path / "page.md", "title", ["one", "two"], [row]).read_text()
    assert told == ("# title\n\n| prompt | one | two |\n| --- | --- | --- |\n"
                    "| a\\|b | x \\*y\\*<br>&lt;b&gt;\\|<br>f.py:right 0.500 | 2\\_3<br>f.py:right 1.000 |\n")
    page = write_page(tmp_path / "page.html", "title", ["one", "two"], [row]).read_text()
    assert "<p>x *y*\n&lt;b&gt;|</p>" in page and '<dd class="rose">\u25b2 1.000</dd>' in page
    assert page.index("a|b") < page.index("x *y*")
    evil = "\x1b[2J](x) | <img src=y>\n# head"
    row = Row(evil, [evil], [{evil: 0.5}])
    table = write_table(tmp_path / "page.md", evil, [evil], [row]).read_text()
    page = write_page(tmp_path / "page.html", evil, [evil], [row]).read_text()
    assert "\x1b" not in table and "<img" not in table + page and "](x)" not in table.replace("\\](x)", "")
    assert [line[:2] for line in table.splitlines()] == ["# ", "", "| ", "| ", "| "]
