"""Rewards inside rewards: what is true of a part is true of the whole, at any depth."""

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.contrib import verdicts
from flowgrpo.errors import UserError
from flowgrpo.rewards import combine
from flowgrpo.training import extensions
from tests.helpers import loop, tiny


def visiting(outputs, prompts, metadata, memory, epoch):
    """The epoch in which it scores, which its memory keeps; none outside of an epoch."""
    if epoch is not None:
        memory.setdefault("visits", []).append(epoch)
    return [None if epoch is None else float(epoch)] * len(prompts)


def own(outputs, prompts, metadata, policy):
    """The number that the policy is."""
    return [float(policy)] * len(prompts)


def nested(part, depth: int = 2):
    """The part inside of `depth` rewards."""
    for _ in range(depth):
        part = rewards.find("tiered", {"rewards": [part]})
    return part


def scored(reward, **run) -> float:
    return rewards.score({"it": reward}, ["x"], ["p"], [{}], **run).item()


@pytest.mark.parametrize("depth", [1, 3])
def test_an_epoch_reaches_nested_rewards_and_each_has_a_memory_of_its_own(depth):
    whole = rewards.find("tiered", {"rewards": [visiting, nested(visiting)], "thresholds": [0]})
    reward, memory = nested(whole, depth), {}
    assert scored(reward, memory=memory, epoch=7) == 14 and scored(reward, memory=memory, epoch=8) == 16
    def visits(kept) -> list:
        return [kept["visits"]] if "visits" in kept else [each for inner in kept.values() for each in visits(inner)]
    assert visits(memory) == [[7, 8]] * 2
    assert scored(reward, memory=memory) != scored(reward, memory=memory)  # NaN: of no epoch
    assert visits(memory) == [[7, 8]] * 2
    with pytest.raises(UserError, match="remembers all prompts, and got 2 processes: run it in one"):
        rewards.require_memory({"it": reward}, 2)


def test_the_memory_of_a_reward_by_itself_has_its_name():
    memory = {}
    scored(visiting, memory=memory, epoch=7)
    assert memory == {"it": {"visits": [7]}}


def test_a_run_gives_its_policy_memory_and_epoch_to_nested_rewards():
    seen = []
    def watching(images, prompts, metadata, policy, memory, epoch):
        seen.append((policy, memory, epoch))
        return [0.0] * len(prompts)
    trainer = tiny.trainer(rewards={"it": nested(watching)}, reward="it", train__epochs=2)
    for trainer.epoch in range(2):
        trainer.run_epoch()
    assert {epoch for _, _, epoch in seen} == {0, 1} and all(policy is trainer.policy for policy, _, _ in seen)
    assert all(memory is seen[0][1] for _, memory, _ in seen) and trainer.memory["rewards"]["it"]


def test_the_policy_reaches_nested_rewards():
    assert scored(nested(own), policy=5) == 5


@pytest.mark.parametrize("part, told", [
    (own, "scores with the model that is trained, which changes: set cache: false"),
    (visiting, "scores by the epoch or by earlier ones: set cache: false")])
def test_scores_that_change_are_not_kept_for_a_nested_reward_either(part, told, tmp_path):
    for reward in (part, nested(part)):
        with pytest.raises(UserError, match=told):
            rewards.compose({"it": RewardRule(cache=True)}, str(tmp_path), {"it": reward})


def test_a_nested_reader_of_the_policy_is_refused_where_epochs_are_drawn_ahead():
    config = tiny.config(train__staleness=1)
    with pytest.raises(UserError, match="the reward 'it', which reads the policy"):
        extensions.check(loop.setup(config, "pipeline", rewards={"it": nested(own)}))


@pytest.mark.parametrize("when", [{"tsk": "t"}, {"task": "u"}])
def test_a_typo_in_the_route_of_a_gate_is_told(when):
    gate = {"use": "over_saturation", "when": when}
    composed = rewards.compose({"whole": RewardRule(args={"rewards": [gate, "sharpness"], "thresholds": [0]},
                                                    use="gated", when={"task": "t"})})
    with pytest.raises(UserError, match=r"reward 'whole\[0\]' applies to no prompt: its `when` is .* has task") as told:
        rewards.require_routes(composed, [{"task": "t"}, {"task": "u"}])
    assert "\n" not in str(told.value) and "metadata of 1 prompt has" in str(told.value)  # to which the whole applies


def test_a_route_that_some_prompts_take_stays():
    gate = {"use": "over_saturation", "when": {"task": "t"}}
    rewards.require_routes(rewards.compose({"whole": RewardRule(
        use="gated", args={"rewards": [gate, "sharpness"], "thresholds": [0]})}), [{"task": "t"}, {}])


def test_a_key_of_a_nested_reward_that_no_prompt_has_is_told():
    composed = rewards.compose({"it": RewardRule(use="tiered", args={
        "rewards": [{"use": "ternary", "args": {"rewards": [{"use": "exact_match", "args": {"key": "anser"}}]}}]})})
    with pytest.raises(UserError, match=r"reward 'it\[0\]\[0\]' compares with metadata.anser, which none of the 1"):
        rewards.require_routes(composed, [{"answer": "x"}])


# --- gradients -------------------------------------------------------------------------------------------------------

@rewards.differentiable
def red(images, prompts):
    return images[:, 0].mean((1, 2))


@rewards.differentiable
def green(images, prompts):
    return images[:, 1].mean((1, 2))


def plain(images, prompts):
    return images[:, 2].mean((1, 2))


def test_a_combination_is_differentiable_if_all_its_parts_are():
    soft, hard = combine.Tiered([red, green], [0.5]), combine.Tiered([red, plain], [0.5])
    assert soft.differentiable and not hard.differentiable and nested(soft).differentiable
    assert not verdicts.Ternary([red]).differentiable  # a step has no slope
    rewards.require_gradient({"it": nested(soft)})
    with pytest.raises(UserError, match="reward 'it' is not differentiable"):
        rewards.require_gradient({"it": hard})
    with pytest.raises(UserError, match=r"reward 'it\[0\]' has on_error or timeout"):
        rewards.require_gradient({"it": combine.Tiered([{"use": "over_saturation", "timeout": 5}])})


def values(reward, images, metadata) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of each image and its gradient."""
    leaf = images.clone().requires_grad_()
    total = rewards.value({"it": reward}, {"it": 2.0}, leaf, [""] * len(images), metadata)
    total.sum().backward()
    return total.detach(), leaf.grad


def test_the_gradient_of_a_gate_is_that_of_what_it_lets_through():
    images = torch.tensor([[0.75, 0.5, 0], [0.25, 0.5, 0]])[:, :, None, None].expand(2, 3, 2, 2)
    value, gradient = values(combine.Gated([red, green], [0.5]), images, [{}, {}])
    assert value.tolist() == [1.0, 0.0]
    assert (gradient[0, 1] == 2 / 4).all() and not gradient[0, [0, 2]].any() and not gradient[1].any()


def test_the_gradient_of_a_harmonic_mean_by_hand():
    images = torch.tensor([[0.8, 0.2, 0]])[:, :, None, None].expand(1, 3, 2, 2)
    value, gradient = values(combine.Harmonic([red, green], 0.3), images, [{}])
    mean = 1 / (0.3 / 0.8 + 0.7 / 0.2)
    assert value.item() == pytest.approx(2 * mean, abs=1e-6)
    expected = [2 * mean**2 * 0.3 / 0.8**2 / 4, 2 * mean**2 * 0.7 / 0.2**2 / 4, 0]
    torch.testing.assert_close(gradient[0, :, 0, 0], torch.tensor(expected))


def test_parts_that_do_not_apply_have_no_gradient_and_the_values_are_the_scores():
    parts = [{"use": "over_saturation", "args": {"limit": 0.1}, "when": {"task": "t"}}, green]
    reward = combine.Tiered(parts, [-9])
    images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    metadata = [{"task": "t"}, {}, {"task": "t"}]
    value, gradient = values(reward, images, metadata)
    scores = rewards.score({"it": reward}, images, [""] * 3, metadata)[:, 0]
    assert torch.equal(value, 2 * scores) and gradient.isfinite().all()
    assert (gradient[1, 1] == 2 / 16).all() and not gradient[1, [0, 2]].any()
    rows = combine.Gated([green, {"use": "over_saturation", "when": {"task": "t"}}], [0])
    value, gradient = values(rows, images, metadata)  # nothing to let through in the second row
    assert value[1] == 0 and not gradient[1].any() and gradient.isfinite().all()
