"""The node of examples/comfyui, by its functions: ComfyUI calls `vote` with images [B, H, W, 3] in [0, 1]."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.data.images import read_image
from flowgrpo.data.pairs import load_pairs

FOLDER = Path(__file__).parents[1] / "examples" / "comfyui"


@pytest.fixture
def node(here):
    spec = importlib.util.spec_from_file_location("flowgrpo_vote", FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    [node] = module.NODE_CLASS_MAPPINGS.values()
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    assert list((FOLDER / module.WEB_DIRECTORY).glob("*.js"))
    return node()


def batch(*levels: float) -> torch.Tensor:
    """Images [B, 64, 64, 3], each of one grey."""
    return torch.tensor(levels)[:, None, None, None].expand(-1, 64, 64, 3)


def test_a_vote_is_on_the_images_of_the_run_before(node, tmp_path):
    run = getattr(node, node.FUNCTION)
    assert set(node.INPUT_TYPES()["required"]) == {"images", "prompt", "best", "folder"} and node.OUTPUT_NODE
    assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES) == 1
    first = run(images=batch(0.0, 0.5, 1.0), prompt="a red star", best=2, folder="votes")
    assert first["ui"]["text"] == ["no vote: no images wait for one"]
    assert [each["filename"] for each in first["ui"]["images"]] == ["000001.png", "000002.png", "000003.png"]
    second = run(images=batch(0.25), prompt="a ring", best=2, folder="votes")
    [pairs] = second["result"]
    assert Path(pairs) == tmp_path / "votes" / "pairs.jsonl" and second["ui"]["text"][0].startswith("image 2 of 3")
    found = load_pairs(pairs)
    assert [(pair.prompt, Path(pair.chosen).name, Path(pair.rejected).name) for pair in found] == [
        ("a red star", "000002.png", "000001.png"), ("a red star", "000002.png", "000003.png")]
    assert read_image(tmp_path / "votes" / "000002.png").getpixel((0, 0)) == (128, 128, 128)
    third = run(images=batch(0.5, 0.5), prompt="a ring", best=0, folder="votes")
    assert third["ui"]["text"] == ["no vote"] and len(load_pairs(pairs)) == 2


@pytest.mark.parametrize("best, folder, line", [
    (3, "votes", "best is 3, expected 1 to 2, the images shown last, or 0"),
    (0, "../votes", "folder is '../votes', expected the name of a folder below"),
    (0, "", "folder is '', expected")])
def test_what_cannot_be_voted_on_is_one_line(node, best, folder, line):
    node.vote(batch(0.1, 0.2), "a star", 0, "votes")
    with pytest.raises(ValueError, match=line.replace("(", r"\(")):
        node.vote(batch(0.1, 0.2), "a star", best, folder)


def test_a_run_trains_on_the_votes(node, tmp_path):
    for prompt in ("a red star", "a blue ring", ""):
        node.vote(batch(0.2, 0.8), prompt or "a red star", 1, "votes")
    (tmp_path / "voted.yaml").write_text("""
model: starter
method: diffusion_dpo
preferences: votes/pairs.jsonl
prompts: starter
reward: scene
image: {height: 64, width: 64}
train: {epochs: 1, group: 2, prompts: 2, micro_batch: 4, lr: 1e-4}
eval: {prompts: 2, steps: 2}
""")
    assert main(["train", "voted.yaml"]) == 0
    [epoch] = [json.loads(line) for line in (tmp_path / "runs" / "voted" / "metrics.jsonl").read_text().splitlines()]
    assert epoch["loss"] == pytest.approx(0.693, abs=0.01)
