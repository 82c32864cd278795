"""`--best-of N --by REWARD`: the highest of N draws is kept, by its own seed, and recorded with the image."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation import best_of, images
from flowgrpo.evaluation.plan import Ledger, Place
from flowgrpo.samplers.rollout import seeder
from flowgrpo.text import evaluation as texts
from tests.evaluation.test_images import BRIGHT, pixels
from tests.helpers import tiny, tiny_text


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny.save(tiny.sd3(), folder / "tiny")
    (folder / "bright.py").write_text(BRIGHT)
    (folder / "suite.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a dog", "a hat")))
    return folder


def bright(file) -> float:
    return pixels(file).mean()


def flat(*values: float) -> list[torch.Tensor]:
    return [torch.full((3, 2, 2), value) for value in values]


def scored(images, prompts):
    """Brightness; none for black images."""
    return [None if image.max() == 0 else float(image.mean()) for image in images]


def test_the_highest_score_is_picked_and_a_missing_one_never_is():
    best, prompts = best_of.BestOf(3, "scored", scored), [Prompt("a"), Prompt("b")]
    assert best.pick(flat(0.25, 0.75, 0.5, 0.0, 0.0, 0.125), prompts) == [(1, 0.75), (2, 0.125)]
    assert best.pick(flat(0.5, 0.5, 0.25), prompts[:1]) == [(0, 0.5)]
    with pytest.raises(UserError, match="--by scored: none of the 3 samples of 'a' has a score"):
        best.pick(flat(0.0, 0.0, 0.0), prompts[:1])


def test_sample_keeps_the_best_draw_and_says_so_in_the_image(world, capsys):
    by = f"{world}/bright.py:bright"
    for output, options in (("all", ["--count", "6"]), ("best", ["--count", "2", "--best-of", "3", "--by", by])):
        assert main(["sample", str(world / "tiny"), "--prompt", "a dog", "--prompt", "a hat", "--steps", "1",
                     "--output", str(world / output), "--precision", "fp32", *options]) == 0
    every = sorted((world / "all").iterdir())
    kept = sorted((world / "best").iterdir())
    assert len(kept) == 4
    for at, file in enumerate(kept):
        some = every[3 * at:3 * at + 3]
        number = int(np.argmax([bright(each) for each in some]))
        assert (pixels(file) == pixels(some[number])).all()
        line = Image.open(file).text["parameters"].splitlines()[-1]
        assert f"Seed: {seeder(0, 0)(at // 2, at % 2 * 3 + number)}" in line
        assert "Best of: 3, Best by: " in line and f"Best score: {bright(file) / 255:.3f}"[:-1] in line


def test_eval_and_prompt_files_keep_the_best_draw_too(world):
    by, options = f"{world}/bright.py:bright", ["--steps", "1", "--precision", "fp32"]
    for output, more in (("drawn", ["--samples", "4"]), ("chosen", ["--samples", "2", "--best-of", "2", "--by", by])):
        assert main(["eval", str(world / "tiny"), "--suite", str(world / "suite.jsonl"), "--output",
                     str(world / output), "--rewards", by, *options, *more]) == 0
    assert main(["sample", str(world / "tiny"), "--prompts", str(world / "suite.jsonl"), "--count", "2", "--best-of",
                 "2", "--by", by, "--output", str(world / "file"), *options]) == 0
    drawn, chosen, file = (Ledger(world / name) for name in ("drawn", "chosen", "file"))
    for prompt in range(2):
        for kept in range(2):
            some = [drawn.load(Place("base", prompt, 2 * kept + number)) for number in range(2)]
            best, place = max(some, key=lambda picture: picture.mean().item()), Place("base", prompt, kept)
            assert torch.equal(chosen.load(place), best) and torch.equal(file.load(place), best)
            assert "Best of: 2" in Image.open(chosen.image(place)).text["parameters"]
    results = json.loads((world / "chosen" / "results.json").read_text())
    assert (results["best_of"], results["by"]) == (2, by) and "best_of" not in json.loads(
        (world / "drawn" / "results.json").read_text())


def test_texts_are_chosen_as_well(tmp_path):
    for each in tiny_text.model():
        each.save_pretrained(tmp_path / "lm")
    (tmp_path / "long.py").write_text("def long(texts, prompts):\n    return [float(len(set(t))) for t in texts]\n")
    every = texts.sample(str(tmp_path / "lm"), None, ["1+2=", "3+4="], 6, 0)
    kept = texts.sample(str(tmp_path / "lm"), None, ["1+2=", "3+4="], 2, 0, best_of=3,
                        by=f"{tmp_path}/long.py:long")
    assert kept == [max(every[at:at + 3], key=lambda text: len(set(text))) for at in range(0, 12, 3)]


@pytest.mark.parametrize("count, by, told", [
    (2, "", "got --best-of 2 without --by"), (1, "scene", "got --by without --best-of"),
    (2, {"scene": None, "sharp": None}, "--by: got scene, sharp, expected one reward")])
def test_one_option_without_the_other_is_refused(count, by, told):
    with pytest.raises(UserError) as caught:
        best_of.make(count, by, None)
    assert told in str(caught.value)
    assert best_of.make(1, "", None) is None


def test_a_mistake_is_reported_before_a_model_is_loaded(tmp_path):
    with pytest.raises(UserError, match="without --by"):
        images.sample(str(tmp_path / "none"), None, ["a"], 1, 0, 1, 1.0, tmp_path / "out", best_of=2)
