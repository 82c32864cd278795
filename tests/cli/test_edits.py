"""Edits as a user runs them: training, evaluation, report and card; sources that are damaged in mid-run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.data.images import read_image
from flowgrpo.errors import UserError
from flowgrpo.run import run
from flowgrpo.tools.check.tiny import make
from tests.helpers import tiny

RED = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
SEVERAL = {  # by pipeline: `image` of its recipe
    "Flux2Pipeline": {"height": 64, "width": 64, "call": {"max_sequence_length": 16, "text_encoder_out_layers": [1]}},
    "QwenImageEditPlusPipeline": {"height": 256, "width": 256}}


def noise(folder: Path, names: str, size: tuple[int, int] = (64, 64)) -> None:
    """Write images of noise, NAME.jpg each."""
    for seed, name in enumerate(names):
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.jpg")


def cut(file: Path) -> None:
    """Cut a file off in the middle."""
    file.write_bytes(file.read_bytes()[:file.stat().st_size // 2])


@pytest.mark.parametrize("name", SEVERAL)
def test_an_edit_of_several_images_from_training_to_card(name, here, capsys):
    tiny.save(make(name)[0], here / "model")
    noise(here, "abcdef")
    Path("red.py").write_text(RED)
    lines = [json.dumps({"prompt": f"edit {one}", "images": [f"{one}.jpg", f"{other}.jpg"]})
             for one, other in zip("abcd", "bcde")]
    Path("train.jsonl").write_text("\n".join(lines[:2]))
    Path("held.jsonl").write_text("\n".join(lines[2:]))
    Path("r.yaml").write_text(yaml.dump({
        "model": "model", "prompts": "train.jsonl", "held_out": "held.jsonl", "reward": "red.py:red", "device": "cpu",
        "precision": "fp32", "tracker": "none", "method": "mix_grpo", "image": SEVERAL[name], "adapter": {"rank": 2},
        "train": {"epochs": 1, "prompts": 1, "group": 2, "micro_batch": 2, "steps": 6},
        "eval": {"steps": 2, "guidance": 1.0, "prompts": 2, "grid": 2}}))
    assert main(["train", "r.yaml"]) == 0
    page = Path("runs/r/report.html").read_text()
    assert "source 1" in page and "source 2" in page
    assert len([*Path("runs/r/source").glob("*.png")]) == 4  # two of each prompt
    Path("all.jsonl").write_text("\n".join(lines))
    assert main(["eval", "runs/r", "--suite", "all.jsonl", "--output", "e", "--steps", "2", "--trust-run"]) == 0
    assert "the run trained on 2 of the 4 prompts: what it does on new ones" in capsys.readouterr().out
    assert main(["export", "runs/r", "--form", "card"]) == 0
    [snippet] = re.findall(r"```python\n(.*?)```", Path("runs/r/README.md").read_text(), re.S)
    assert "image=[image, image_2]" in snippet
    exec(snippet, {})
    assert np.asarray(Image.open("image.png")).std() > 0


@pytest.fixture
def edits(tmp_path):
    """Return a function that runs a tiny Kontext on the edits a to d, measured on e to h; its reward calls
    `then(number, metadata)`."""
    noise(tmp_path, "abcdefgh")
    for file, names in (("train", "abcd"), ("held", "efgh")):
        (tmp_path / f"{file}.jsonl").write_text("\n".join(
            json.dumps({"prompt": f"edit {name}", "image": f"{name}.jpg"}) for name in names))
    def made(then=lambda number, metadata: None, **options):
        pipe, call = make("FluxKontextPipeline")
        number = 0
        def red(images, prompts, metadata):
            nonlocal number
            number += 1
            then(number, metadata)
            return images[:, 0].mean((1, 2))
        settings = tiny.config(
            tmp_path / "runs", prompts=str(tmp_path / "train.jsonl"), held_out=str(tmp_path / "held.jsonl"),
            image__call={key: value for key, value in call.items() if key != "image"}, train__prompts=2,
            train__save_every=1, eval__prompts=4, eval__grid=4)
        return run(settings, pipe=pipe, functions={"red": red}, **options)
    return made


IN_TRAINING = 4  # call of the reward, behind those of the trial and of the base


def test_a_training_source_that_is_damaged_in_mid_run_costs_its_prompt(edits, tmp_path, capsys):
    """Three of four, while the first epoch is scored."""
    summary = edits(lambda number, _: [cut(tmp_path / f"{name}.jpg") for name in "abc"] if number == IN_TRAINING else 0)
    said = capsys.readouterr().out
    assert summary["epochs"] == 2 and summary["updates"] > 0
    lost = re.findall(r"epoch 1: prompts .*train.jsonl, line (\d), 'image': .*/([abc]).jpg cannot be read as an image "
                      r".*: another prompt is sampled in its place \('edit d'; \d of 4 prompts lost\)", said)
    assert lost and all("abcd"[int(line) - 1] == name for line, name in lost)


def test_a_held_out_source_that_is_damaged_in_mid_run_is_not_measured(edits, tmp_path, capsys):
    summary = edits(lambda number, _: cut(tmp_path / "f.jpg") if number == IN_TRAINING else None)
    said = capsys.readouterr().out
    assert "held-out prompts, after: prompts" in said and "held.jsonl, line 2, 'image'" in said
    assert "it is not measured (1 of 4 prompts lost)" in said
    assert summary["evaluation"]["lost"] == 1 and summary["compared"]["red"]["all prompts"]["change"]["prompts"] == 3


def test_a_run_that_a_reward_ended_over_a_damaged_source_goes_on_without_it(edits, tmp_path, capsys):
    """The reward reads the source itself, in the epoch in which it was damaged."""
    def read(number, metadata):
        if number == IN_TRAINING + 2:
            cut(Path(metadata[0]["image"]))
        for entry in metadata:
            read_image(entry["image"])
    with pytest.raises(UserError, match=r"[abcd]\.jpg cannot be read as an image"):
        edits(read)
    assert "epoch 1 is saved in" in capsys.readouterr().out
    summary = edits(lambda number, metadata: [read_image(entry["image"]) for entry in metadata], resume=True)
    said = capsys.readouterr().out
    assert summary["epochs"] == 2 and re.search(
        r"resume: prompts .*train.jsonl, line \d, .*: the run goes on without this prompt \(1 of 8 lost\)", said)
