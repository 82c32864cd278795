"""Hints on a machine, on a model and on rewards: each on its condition, once, with the numbers."""

import pytest
import torch

from flowgrpo import device
from flowgrpo.advantages.group import Advantage
from flowgrpo.config import Config, validate
from flowgrpo.contrib.reward_weights import Influence
from flowgrpo.methods import preset
from flowgrpo.rewards.about import About, built_in
from flowgrpo.tools.check.tiny import make
from flowgrpo.tools.check.tiny.parts import flux_transformer
from flowgrpo.training import loading
from flowgrpo.training.extensions import rewards
from tests.helpers import tiny, tiny_runs


def test_bf16_that_a_cpu_emulates_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(loading, "bf16_speed", lambda: 0.28)
    [line] = loading.machine_hints("bf16", "cpu")
    assert "multiplies it 0.28 times as fast as fp32: --precision=fp32" in line
    for asked in (("auto", "cpu"), ("fp32", "cpu"), ("bf16", "cuda")):
        assert [*loading.machine_hints(*asked)] == []
    monkeypatch.setattr(loading, "bf16_speed", lambda: 4.0)
    assert [*loading.machine_hints("bf16", "cpu")] == []
    assert device.bf16_speed() > 0


def told(pipe, method="mix_grpo", **given):
    return [*loading.few_step_hints(validate({"model": "m", "method": method, **given}), preset(method), pipe)]


def test_a_model_that_only_its_weights_show_to_be_of_few_steps_is_hinted_at():
    schnell = tiny.flux(transformer=flux_transformer(guidance_embeds=False))
    assert told(schnell) == [
        "hint: m is taken for a model of few steps (its transformer has no guidance, as that of FLUX schnell), whose "
        "steps and guidance are not those of other models: --train.steps=4 --eval.steps=4 --eval.guidance=1, or those "
        "of its card"]
    [rest] = told(schnell, train={"steps": 6}, eval={"steps": 6})
    assert "other models: --eval.guidance=1, or" in rest
    assert told(schnell, train={"steps": 6}, eval={"steps": 6, "guidance": 1.0}) == []
    assert told(make("StableDiffusionPipeline")[0]) == [] == [*loading.few_step_hints(Config(model="calcms"), preset(
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
    functions = {"large": large, "small": small, "constant": lambda images, prompts: [0.5] * len(prompts)}
    trainer = tiny.trainer(rewards=functions, reward={"large": 1.0, "small": 2.0, "constant": 1.0}, train__group=4,
                           parts={"advantage": {"type": "Advantage", "order": "rewards"}})
    lines: list[str] = []
    trainer.log = lines.append
    tiny_runs.epochs(trainer)
    silent, scale = [line for line in lines if "reward" in line]
    assert silent == ("epoch 1: reward 'constant' is the same for all samples of every group (mean 0.5), so that it "
                      "teaches nothing")
    # deviations of 0, 1, 2, 3: 1.291; times 1000, and 0.25 with the weight 2
    assert scale.startswith("epoch 1: reward 'large' varies by 1.29e+03 within groups and 'small' by 0.645, weights")


NOTHING = "in every group all samples earn the same, so nothing is learned: take a reward with values in between"
DONE = "all samples have the best score of a, so that nothing is left to learn from these prompts: take harder ones"
UNIT = (0.0, 1.0)


@pytest.mark.parametrize("rewards_of, said", [
    # (weight, range, mean, share of groups without differences, spread) of each reward.
    ({"a": (1, UNIT, 1.0, 1, 0)}, DONE), ({"a": (1, (None, 1.0), 1.0, 1, 0)}, DONE),
    ({"a": (-1, UNIT, 0.0, 1, 0)}, DONE), ({"a": (-1, (0.0, None), 0.0, 1, 0)}, DONE),
    ({"a": (1, UNIT, 1.0, 1, 0), "b": (2, UNIT, 1.0, 1, 0)}, "all samples have the best score of a and of b, so"),
    ({"a": (1, UNIT, 1.0, 1, 0), "b": (0, UNIT, 0.5, 1, 0)}, DONE),  # b is not trained on
    ({"a": (1, None, 1.0, 1, 0)}, NOTHING), ({"a": (1, (0.0, None), 1.0, 1, 0)}, NOTHING),  # its best is not known
    ({"a": (1, UNIT, 0.0, 1, 0)}, NOTHING), ({"a": (-1, UNIT, 1.0, 1, 0)}, NOTHING),  # all wrong
    ({"a": (1, UNIT, 0.5, 1, 0)}, NOTHING), ({"a": (1, UNIT, 0.96, 1, 0)}, NOTHING),  # some prompts right, others wrong
    ({"a": (1, UNIT, 1.0, 1, 0), "b": (1, UNIT, 0.0, 1, 0)}, NOTHING),
    ({"a": (1, UNIT, 1.0, 0.5, 0.1)}, ""), ({"a": (1, UNIT, 0.2, 0.9, 0.1)}, ""),
    ({"a": (1, UNIT, 1.0, 1, 0), "b": (1, UNIT, 0.5, 0, 0.1)},
     "reward 'a' is at its best score for all samples, so that it teaches nothing more"),
    ({"a": (1, UNIT, 0.0, 1, 0), "b": (1, UNIT, 0.5, 0, 0.1)},
     "reward 'a' is the same for all samples of every group (mean 0), so that it teaches nothing"),
    ({"a": (1, UNIT, 0.5, 0, 0.001), "b": (1, None, 9.0, 0, 5)}, "reward 'b' varies by 5 within groups and 'a' by"),
    ({"a": (1, UNIT, 0.99, 0, 0.001), "b": (1, None, 9.0, 0, 5)}, "")])  # a has nothing left to count for
def test_what_is_said_of_rewards_where_all_went_well_and_where_it_did_not(rewards_of, said):
    functions = {name: built_in(name, about=About(range=of[1]))(lambda images, prompts: [0.0] * len(prompts))
                 for name, of in rewards_of.items()}
    trainer = tiny.trainer(rewards=functions, reward={name: float(of[0]) for name, of in rewards_of.items()},
                           parts={"advantage": {"type": "Advantage", "order": "rewards"}})
    hints, lines = rewards.RewardHints(trainer), list[str]()
    metrics = {f"reward/{name}/{key}": value for name, of in rewards_of.items()
               for key, value in zip(("mean", "zero_variance_groups"), of[2:])}
    trainer.log, trainer.scoring.spreads = lines.append, {name: of[4] for name, of in rewards_of.items()}
    for trainer.epoch in range(2):
        hints.epoch(metrics)
    assert len(lines) == bool(said) and "".join(lines).startswith("epoch 1: " * bool(said) + said)


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
    tiny_runs.epochs(trainer)
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
