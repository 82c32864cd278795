"""Hints on a machine, on a model and on rewards: each on its condition, once, with the numbers."""

import pytest
import torch

from flowgrpo import device
from flowgrpo.advantages.group import Advantage
from flowgrpo.config import Config, validate
from flowgrpo.contrib.reward_weights import Influence
from flowgrpo.methods import preset
from flowgrpo.tools.check.tiny import make
from flowgrpo.tools.check.tiny.images import flux
from flowgrpo.tools.check.tiny.parts import flux_transformer
from flowgrpo.training import loading
from flowgrpo.training.extensions import rewards
from tests.helpers import tiny


def test_bf16_that_a_cpu_emulates_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(loading, "bf16_speed", lambda: 0.28)
    [line] = loading.of_machine("bf16", "cpu")
    assert "multiplies it 0.28 times as fast as fp32: --precision=fp32" in line
    for asked in (("auto", "cpu"), ("fp32", "cpu"), ("bf16", "cuda")):
        assert [*loading.of_machine(*asked)] == []
    monkeypatch.setattr(loading, "bf16_speed", lambda: 4.0)
    assert [*loading.of_machine("bf16", "cpu")] == []
    assert device.bf16_speed() > 0


def told(pipe, method="mix_grpo", **given):
    return [*loading.of_steps(validate({"model": "m", "method": method, **given}), preset(method), pipe)]


def test_a_model_that_only_its_weights_show_to_be_of_few_steps_is_hinted_at():
    schnell = flux(transformer=flux_transformer(guidance_embeds=False))
    assert told(schnell) == [
        "hint: m is taken for a model of few steps (its transformer has no guidance, as that of FLUX schnell), whose "
        "steps and guidance are not those of other models: --train.steps=4 --eval.steps=4 --eval.guidance=1, or those "
        "of its card"]
    [rest] = told(schnell, train={"steps": 6}, eval={"steps": 6})
    assert "other models: --eval.guidance=1, or" in rest
    assert told(schnell, train={"steps": 6}, eval={"steps": 6, "guidance": 1.0}) == []
    assert told(make("StableDiffusionPipeline")[0]) == [] == [*loading.of_steps(Config(model="calcms"), preset(
        "mix_grpo"), make("FluxPipeline")[0])]


@pytest.mark.parametrize("method, blurs", [("diffusion_nft", True), ("awm", True), ("sol_rl+diffusion_nft", True),
                                           ("mix_grpo", False), ("draft", False)])
def test_a_method_that_blurs_models_of_few_steps_says_so_whatever_is_given(method, blurs):
    lcm = make("LatentConsistencyModelPipeline")[0]
    lines = told(lcm, method, train={"steps": 4, "guidance": 8.0}, eval={"steps": 4, "guidance": 8.0})
    assert lines == [f"hint: {method} trains on noised samples, which blurs a model of few steps (its scheduler is a "
                     "LCMScheduler): take --method=rlcm, which trains the model's own steps, or set a limit: "
                     "docs/reward_hacking.md"] * blurs


def test_one_reward_that_never_varies_and_one_of_another_scale_are_named_once(capsys):
    def large(images, prompts):
        return [float(1000 * (i % 4)) for i in range(len(prompts))]
    def small(images, prompts):
        return [0.25 * (i % 4) for i in range(len(prompts))]
    def constant(images, prompts):
        return [0.5] * len(prompts)
    functions = {"large": large, "small": small, "constant": constant}
    trainer = tiny.trainer(rewards=functions, reward={"large": 1.0, "small": 2.0, "constant": 1.0}, train__group=4,
                           parts={"advantage": {"type": "Advantage", "order": "rewards"}})
    lines: list[str] = []
    trainer.log = lines.append
    for trainer.epoch in range(2):
        trainer.run_epoch()
    silent, scale = [line for line in lines if "reward" in line]
    assert silent == ("epoch 1: reward 'constant' is the same for all samples of every group (mean 0.5), so that it "
                      "teaches nothing")
    # deviations of 0, 1, 2, 3: 1.291; times 1000, and 0.25 with the weight 2
    assert scale.startswith("epoch 1: reward 'large' varies by 1.29e+03 within groups and 'small' by 0.645, weights")


@pytest.mark.parametrize("scale, told", [("batch", True), ("group", False)])
def test_a_batch_whose_deviation_is_far_above_that_within_groups_is_told_once(scale, told):
    """One prompt of two scores 1 throughout; the others 0, 0.01, 0.02, 0.03."""
    def uneven(images, prompts):
        return [1.0 if prompt == prompts[0] else 0.01 * (i % 4) for i, prompt in enumerate(prompts)]
    trainer = tiny.trainer(rewards={"uneven": uneven}, reward="uneven", train__group=4, train__prompts=2,
                           train__micro_batch=8, parts={"advantage": {"type": "Advantage", "scale": scale,
                                                                      "order": "rewards"}})
    lines: list[str] = []
    trainer.log = lines.append
    for trainer.epoch in range(2):
        trainer.run_epoch()
    said = [line for line in lines if "the batch's deviation" in line]
    # 8 scores of 1, 1, 1, 1, 0, .01, .02, .03: .5268; within the group .01291
    assert [line.partition(" times ")[0] for line in said] == [
        "epoch 1: the batch's deviation of the rewards is 41"] * told
    assert all("+dynamic_sampling" in line and "scale: group" in line for line in said)


@pytest.mark.parametrize("rule, expected", [
    (Advantage(), False), (Advantage(order="gdpo"), False), (Advantage(order="rewards"), True),
    (Advantage(scale="none"), True), (Influence(), False)])
def test_rules_that_add_rewards_of_any_scale(rule, expected):
    assert rewards.adds(rule) is expected
