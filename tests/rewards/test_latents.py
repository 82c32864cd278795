"""Rewards that score clean latents, and images of several sizes in one call."""

import json
import re
from pathlib import Path

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.measured import measure
from flowgrpo.rewards.gradient import require_gradient
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.refusals import message, refused
from tests.rewards.test_local_model import Mean

DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"


def spread(latents, prompts):
    return latents.flatten(1).std(1)


spread.scores = "latents"


@pytest.mark.parametrize("functions", [{"spread": spread}, {"spread": spread, "red": tiny.red}])
def test_images_are_decoded_for_a_reward_that_looks_at_them_and_else_not(functions, monkeypatch):
    trainer, decoded = tiny.trainer(rewards=functions, reward=dict.fromkeys(functions, 1.0)), []
    picture = trainer.policy.image
    monkeypatch.setattr(trainer.policy, "image", lambda z, of: decoded.append(len(z)) or picture(z, of))
    parts, _, scores = sampling.sample(trainer, trainer.prompts)
    expected = torch.cat([part.finals[0].float().cpu().flatten(1).std(1) for part in parts])
    torch.testing.assert_close(scores[..., 0].flatten(), expected)
    if "red" in functions:
        assert sum(decoded) == sum(len(part.prompts) for part in parts)
        alone = sampling.sample(tiny.trainer(rewards={"red": tiny.red}, reward="red"), trainer.prompts)[2]
        torch.testing.assert_close(scores[..., 1:], alone)
    else:
        assert decoded == [] and trainer.scoring.extremes.as_json() == {"best": [], "worst": []}


def test_held_out_samples_are_those_of_the_stock_pipeline():
    policy, prompts, scored = tiny.policy(), [Prompt("red"), Prompt("blue")], []
    def kept(latents, prompts):
        scored.append(latents.clone())
        return latents.flatten(1).std(1)
    kept.scores = "latents"
    how = dict(steps=3, guidance=1.0, samples=1, micro_batch=2, keep=2)
    plain, both = (measure(policy, prompts, functions, **how)
                   for functions in ({"red": tiny.red}, {"red": tiny.red, "kept": kept}))
    torch.testing.assert_close(both.images, plain.images)
    assert both.scores["red"] == pytest.approx(plain.scores["red"])
    assert both.scores["kept"] == pytest.approx(torch.cat(scored).flatten(1).std(1).tolist())


def test_latents_and_groups_of_several_sizes():
    refused("reward 'spread' scores latents .* only decoded samples are known", rewards.score, {"spread": spread},
            torch.rand(2, 3, 4, 4), ["", ""], [{}, {}])
    assert "'spread' is not differentiable" in message(require_gradient, {"spread": spread})
    soft = rewards.differentiable(type("Soft", (), {"scores": "latents"}))
    assert "'spread' scores latents, and this method follows" in message(require_gradient, {"spread": soft})
    refused("scores latents .* and this model writes completions", rewards.require_for_tokens, {"spread": spread})
    reward, sizes = Mean(batch_size=2), [(4, 4), (6, 2), (4, 4), (4, 4), (6, 2)]
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=generator) for size in sizes]
    scores = rewards.score({"mean": reward}, images, ["a"] * 5, [{}] * 5)[:, 0]
    torch.testing.assert_close(scores, torch.stack([image.mean() for image in images]))
    assert reward.calls == [(2, 4, 4), (1, 4, 4), (2, 6, 2)]
    assert rewards.score({}, images, ["a"] * 5, [{}] * 5).shape == (5, 0)
    images, diversity = [torch.rand(3, 4, 4), torch.rand(3, 5, 5)], {"diversity": rewards.find("diversity")}
    assert "the samples of a group of 2 differ in size" in message(
        rewards.score, diversity, images, ["", ""], [{}, {}], group=2)


def test_the_example_of_the_docs_trains_the_starter(tmp_path, monkeypatch):
    [example] = re.findall(r"```python\n(# latents.py\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "latents.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    few = {"train.epochs": 1, "train.prompts": 1, "train.group": 2, "train.steps": 2, "train.micro_batch": 2,
           "eval.prompts": 1, "eval.steps": 1, "eval.grid": 1, "memory.rewards": "cpu"}
    assert main(["train", str(DOCS.parents[1] / "configs" / "starter.yaml"), "--reward", "latents.py:smooth",
         "--output", str(tmp_path), "--name", "smooth", "--parts.plan.size=1",
         *(f"--{key}={value}" for key, value in few.items())]) == 0
    [line] = (tmp_path / "smooth" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/latents.py:smooth/mean"] < 0
