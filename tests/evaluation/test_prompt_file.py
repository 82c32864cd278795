"""`flowgrpo sample --prompts`: every prompt's sample, a prompt file that names it, and going on after a kill."""

import json

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.data import prompts
from flowgrpo.errors import UserError
from flowgrpo.evaluation.images import sample_file as sample
from flowgrpo.evaluation.plan import Ledger, Place
from tests.evaluation.test_images import drawn, pixels
from tests.helpers import tiny

LINES = [{"prompt": "a dog", "metadata": {"task": "animals"}, "weight": 2, "negative_prompt": "a cat"},
         {"prompt": "a hat"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def asked(tmp_path):
    """A prompt file."""
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_the_prompt_file_names_every_image(tmp_path, model, asked, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", str(model), "--prompts", str(asked), "--output", "base", "--steps", "2", "--guidance", "1.5",
                 "--seed", "3", "--count", "2", "--batch", "3", "--precision", "fp32"]) == 0
    assert capsys.readouterr().out.strip() == "base/prompts.jsonl"
    monkeypatch.chdir("/")  # its paths are whole
    found = prompts.load_prompts(tmp_path / "base" / "prompts.jsonl")
    assert [(p.text, p.negative, p.weight, p.metadata.get("task")) for p in found] == \
        [("a dog", "a cat", 2, "animals")] * 2 + [("a hat", None, 1, None)] * 2
    files = [p.metadata["base_image"] for p in found]
    assert files == [str(tmp_path / "base" / "pictures" / "base" / f"0000{i}-0{k}.png") for i in (0, 1)
                     for k in (0, 1)]
    # The images are those of --prompt: the second prompt's depend on the seed and its number alone.
    alone = drawn(tmp_path / "alone", model, prompts=("a dog", "a hat"), count=2)
    assert max(abs(pixels(file) - other).max() for file, other in zip(files[2:], alone[2:])) <= 1
    # And the reward that compares with them reads them.
    images = torch.stack([Ledger(tmp_path / "base").load(Place("base", i, k)) for i in (0, 1) for k in (0, 1)])
    likeness = {"base_similarity": rewards.find("base_similarity")}
    scores = rewards.score(likeness, images, [p.text for p in found], [p.metadata for p in found])
    assert scores[:, 0].tolist() == pytest.approx([1] * 4)
    assert rewards.score(likeness, images.flip(0), [""] * 4, [p.metadata for p in found]).max() < 0.999


def test_it_goes_on_without_drawing_again(tmp_path, model, asked):
    def draw(**options):
        return sample(str(model), asked, tmp_path / "out", steps=1, **options)
    first = draw().read_text()
    kept, lost = (tmp_path / "out" / "pictures" / "base" / f"0000{i}-00.png" for i in (0, 1))
    before, content = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.unlink()
    assert draw(key="mine").read_text() == first.replace("base_image", "mine")
    assert kept.stat().st_mtime_ns == before and lost.read_bytes() == content
    with pytest.raises(UserError, match="holds an evaluation with another seed"):
        draw(seed=1)
    asked.write_text("another\n{}")
    with pytest.raises(UserError, match="line 1: not valid JSON"):
        draw()
    asked.write_text('{"prompt": "another"}\n')
    with pytest.raises(UserError, match="with another prompt file"):
        draw()


def test_texts_stand_in_the_file_itself(tmp_path):
    asked = tmp_path / "sums.txt"
    asked.write_text("1+2=\n7+8=\n")
    path = sample("starter_text", asked, tmp_path / "out", seed=5)
    found = prompts.load_prompts(path)
    assert [p.text for p in found] == ["1+2=", "7+8="]
    texts = [p.metadata["base_text"] for p in found]
    assert all(text and isinstance(text, str) for text in texts)
    lines = [json.loads(line) for line in (tmp_path / "out" / "texts-0.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == texts
    assert sample("starter_text", asked, tmp_path / "out", seed=5) == path
    # As prompts of their own, with the user's beside them; nothing is written again.
    assert sample("starter_text", asked, tmp_path / "out", seed=5, key="prompt") == path
    assert [(p.text, p.metadata) for p in prompts.load_prompts(path)] == [
        (texts[0], {"user_prompt": "1+2="}), (texts[1], {"user_prompt": "7+8="})]
    assert len((tmp_path / "out" / "texts-0.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("options, line", [
    ([], "got neither, expected --prompt TEXT or --prompts FILE"),
    (["--prompt", "x", "--prompts", "y.txt"], "got both, expected --prompt TEXT or --prompts FILE"),
    (["--prompts", "y.txt", "--image", "z.png"], "--image: goes with --prompt"),
    (["--prompt", "x", "--batch", "2"], "--batch: goes with --prompts FILE"),
    (["--prompt", "x", "--key", "k"], "--key: goes with --prompts FILE"),
    (["--prompts", "no.txt"], "prompts no.txt: no such file"),
    (["--prompts", "no.txt", "--temperature", "1"], "--temperature: is of a language model"),
    (["--prompts", "no.txt", "--key", "prompt"], "--key prompt: makes a text the prompt of its line"),
    (["--prompt", "x", "--enhancer", "starter"], "--enhancer starter: generates images, expected a language model"),
])
def test_mistakes_are_told(options, line, capsys):
    assert main(["sample", "starter", *options]) == 2
    assert line in capsys.readouterr().err
