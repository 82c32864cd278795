"""What makes each preset the method that it is."""

import math
from itertools import accumulate

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.group import below
from flowgrpo.methods import preset
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.kernels import FlowSDE
from flowgrpo.samplers.plans import Branches, EachStep, Sliding, TreeWindow
from flowgrpo.samplers.preview import Preview, contrasting
from flowgrpo.samplers.rollout import seeder
from flowgrpo.training import sampling, state
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny, tiny_runs
from tests.helpers.refusals import message

# What a preset needs beside the six steps and four samples of tests/helpers/tiny.py: room for its splits.
SIZES = {"branch_grpo": dict(train__steps=12, train__group=16, train__micro_batch=32),
         "tree_rpo": dict(train__group=16, train__micro_batch=32),
         "b2_diffurl": dict(train__group=16, train__micro_batch=32),
         "mix_grpo+sol_rl": dict(parts__preview__pool=12, parts__preview__steps=2)}


def green(images, prompts):
    return images[:, 1].mean((1, 2))


def made(method: str, **options):
    """A trainer of the method on the tiny SD3, its weights off their start."""
    trainer = tiny.trainer(method=method, **SIZES.get(method, {}) | options)
    tiny.stir(trainer.policy)
    return trainer


def sampled(trainer):
    """(parts, conditioning, scores [groups,G,R]) of two prompts."""
    return sampling.sample(trainer, trainer.prompts[:2])


def credited(trainer, parts, conditioning, grouped):
    """The parts with their advantages, where the rewards are the given ones."""
    return list(loop.credit(trainer, parts, torch.as_tensor(grouped, dtype=torch.float32), conditioning.prompts))


# --- ddpo ------------------------------------------------------------------------------------------------------------
def test_ddpo_compares_with_the_epochs_before_even_after_a_checkpoint(tmp_path):
    trainer = made("ddpo", parts__advantage__least=8)
    parts, conditioning, _ = sampled(trainer)
    first, second = [[1.0, 2, 3, 4], [0, 0, 2, 2]], [[5.0, 6, 7, 8], [1, 1, 1, 1]]
    grouped = [torch.tensor(values)[..., None] for values in (first, second)]
    credited(trainer, parts, conditioning, grouped[0])
    trainer.epoch = 1
    trainer.progress.saved_counters = state.counters(trainer)
    again = made("ddpo", parts__advantage__least=8)
    tiny_runs.resume(trainer, again, tmp_path)
    assert again.epoch == 1 and again.memory == trainer.memory
    # The eight rewards 1 to 8 have mean 4.5 and variance 5.25; 0, 0, 2, 2 and four ones have mean 1 and variance 1/2.
    expected = torch.tensor([[(r - 4.5) / 5.25**0.5 for r in second[0]], [0, 0, 0, 0]])
    for each in (trainer, again):
        found = torch.cat([part.advantages[0] for part in credited(each, parts, conditioning, grouped[1])])
        torch.testing.assert_close(found.view(2, 4), expected, rtol=1e-5, atol=1e-6)


# --- tempflow_grpo ---------------------------------------------------------------------------------------------------
def test_tempflow_has_a_schedule_per_step():
    assert [(each.stochastic, each.trained) for each in EachStep()(6, 0, 0)] == [((step,),) * 2 for step in range(5)]
    assert len(EachStep()(10, 3, 7)) == 9 and len(EachStep(stop=0.5)(16, 0, 0)) == 8 and len(EachStep()(2, 0, 0)) == 1


def test_tempflow_branches_of_a_step_share_its_state_on_one_deterministic_trunk():
    trainer = made("tempflow_grpo", train__micro_batch=8)
    parts, conditioning, grouped = sampled(trainer)
    assert grouped.shape == (5 * 2, 4, 1) and [part.transitions[0].step for part in parts] == list(range(5))
    for part in parts:
        [taken] = part.transitions
        assert len(taken.x) == 2 and taken.parent.tolist() == [0] * 4 + [1] * 4
        assert all((torch.pdist(branches.flatten(1)) > 0.1).all() for branches in taken.x_next.view(2, 4, -1))
    for part, later in zip(parts, parts[1:]):
        step, x = part.transitions[0].step, part.transitions[0].x
        with torch.no_grad():
            v = trainer.policy.replay(conditioning, x, trainer.rollouts.grid, step)
        ode = x - (trainer.rollouts.grid[step] - trainer.rollouts.grid[step + 1]).float() * v
        torch.testing.assert_close(ode, later.transitions[0].x, rtol=1e-5, atol=1e-5)
    for part in credited(trainer, parts, conditioning, grouped):  # the branches of one step alone are compared
        own = grouped[part.groups.start:part.groups.stop, :, 0]
        torch.testing.assert_close(part.advantages[0], group_relative(own).flatten())


def test_tempflow_weights_go_with_the_noise_and_have_mean_one():
    trainer = made("tempflow_grpo")
    found = tiny.step_weights(trainer, sampled(trainer)[0])
    sigma = shift_grid(6, 3.0).tolist()
    # At sigma 1 the released 1 - sigmas[1] stands for 1 - sigma.
    std = [0.7 * math.sqrt(s / (1 - (s if s < 1 else sigma[1])) * (s - after)) for s, after in zip(sigma, sigma[1:6])]
    assert found == pytest.approx({step: s * len(std) / sum(std) for step, s in enumerate(std)}, rel=1e-6)
    assert sum(found.values()) / len(found) == pytest.approx(1, rel=1e-6)


# --- granular_grpo ---------------------------------------------------------------------------------------------------
def test_granular_sums_the_advantages_of_three_granularities():
    trainer = made("granular_grpo", reward={"red": 1.0, "green": 0.5}, rewards={"red": tiny.red, "green": green},
                   train__micro_batch=8)
    parts, conditioning, grouped = sampled(trainer)
    assert [part.transitions[0].step for part in parts] == [0, 1, 2]  # the first half of six steps
    assert all(len(part.finals) == 3 for part in parts) and grouped.shape == (3 * 2, 4, 3 * 2)
    for part, given in zip(parts, credited(trainer, parts, conditioning, grouped)):
        at = slice(part.groups.start, part.groups.stop)
        pictures = [trainer.rollouts.decode(final, conditioning.rows(part.prompts)) for final in part.finals]
        each = [score(picture, None).view(2, 4) for picture in pictures for score in (tiny.red, green)]
        torch.testing.assert_close(grouped[at], torch.stack(each, 2))
        assert (torch.stack(each[::2]).diff(dim=0).abs() > 1e-5).any()  # the granularities are not one image
        summed = sum(weight * group_relative(rewards) for weight, rewards in zip([1, 0.5] * 3, each))
        torch.testing.assert_close(given.advantages[0], summed.clamp(-5, 5).flatten(), rtol=1e-3, atol=1e-3)


# --- branch_grpo -----------------------------------------------------------------------------------------------------
def test_branch_edges_have_the_advantage_of_the_mean_below_them_among_their_depth():
    trainer = made("branch_grpo")
    parts, conditioning, _ = sampled(trainer)
    rewards = torch.arange(16.0).expand(2, 16)
    [part] = credited(trainer, parts, conditioning, rewards[..., None])
    # Means of the 8, 4, 2 and 1 leaves below, less their mean 7.5, over their deviation (ddof 1).
    depths = [torch.tensor([-4.0, 4]) / 32**0.5,
              torch.tensor([-6.0, -2, 2, 6]) / (80 / 3)**0.5,
              torch.tensor([-7.0, -5, -3, -1, 1, 3, 5, 7]) / 24**0.5,
              (torch.arange(16.0) - 7.5) / (340 / 15)**0.5]
    assert [taken.step for taken in part.transitions] == list(range(11))
    for taken, advantage in zip(part.transitions, part.advantages):
        torch.testing.assert_close(advantage, depths[min(taken.step // 3, 3)].repeat(2))


def test_branch_depth_pruning_leaves_out_steps_that_slide_to_the_last_split():
    def left_out(plan: Branches, epoch: int) -> list[int]:
        schedule = plan(12, epoch, 0)
        assert schedule.stochastic == tuple(range(11))
        return sorted(set(schedule.stochastic) - set(schedule.trained))
    plan = Branches((0, 3, 6), pruned=2, every=30)
    assert [left_out(plan, epoch) for epoch in (0, 29, 30, 60, 90, 120, 999)] == [
        [9, 10], [9, 10], [8, 9], [7, 8], [6, 7], [6, 7], [6, 7]]
    assert left_out(Branches(pruned=4), 500) == [7, 8, 9, 10] and left_out(Branches(), 0) == []
    assert message(Branches(pruned=11), 12, 0, 0, error=ValueError).startswith(
        "Branches: pruned is 11, expected at most 10 of 12 steps")
    assert "a split at step 9 of 10 steps: the last is never split" in message(Branches(), 10, 0, 0, error=ValueError)
    trainer = made("branch_grpo", parts__plan={"splits": [0, 3, 5, 7], "pruned": 2, "every": 1})
    for trainer.epoch, missing in enumerate(({9, 10}, {8, 9}, {7, 8}, {7, 8})):
        [part] = sampled(trainer)[0]
        assert {taken.step for taken in part.transitions} == set(range(11)) - missing
        assert part.exploration.splits == {0: 2, 3: 2, 5: 2, 7: 2} and len(part.prompts) == 32


LATE, EVEN = [0, 1, 2, 3, 12, 13, 14, 15], list(range(16))


# Splits 0, 3, 6, 9 of 12 steps: 2, 4, 8 and 16 edges. The rewards rise from leaf to leaf, so that the better one of two
# siblings is the second.
@pytest.mark.parametrize("settings, kept, states", [
    ({}, [[1, 3, 5, 7, 9, 11, 13, 15], range(8), range(4), range(2)], [1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8]),
    ({"of": "depth"}, [LATE, range(8), range(4), range(2)], [1, 2, 2, 2, 4, 4, 4, 8, 8, 4, 8]),
    ({"depths": "all"}, [EVEN[1::2], [1, 3, 5, 7], [1, 3], [1]], [1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8]),
    ({"of": "depth", "depths": "all"}, [LATE, [0, 1, 6, 7], [0, 3], [0, 1]], [1, 2, 2, 2, 2, 2, 2, 4, 4, 4, 8])])
def test_branch_width_pruning_neither_replays_nor_counts_what_it_leaves_out(settings, kept, states):
    trainer = made("branch_grpo", parts__selection={"type": "WidthPruning"} | settings)
    parts, conditioning, _ = sampled(trainer)
    [part] = credited(trainer, parts, conditioning, torch.arange(16.0).expand(2, 16)[..., None])
    per_depth = [list(edges) for edges in kept][::-1]
    for whole, taken, advantage in zip(parts[0].transitions, part.transitions, part.advantages):
        edges = per_depth[min(taken.step // 3, 3)]
        count = len(whole.parent) // 2
        both = torch.tensor([group * count + edge for group in range(2) for edge in edges])
        assert torch.equal(taken.x_next, whole.x_next[both])
        values = below(torch.arange(16.0).expand(2, 16)[..., None], 16 // count)[..., 0]  # of all nodes, pruned or not
        torch.testing.assert_close(advantage, group_relative(values)[:, edges].flatten())
    assert decisions([part]) == 2 * sum(len(per_depth[min(step // 3, 3)]) for step in range(11))
    before = trainer.policy.evaluations
    with torch.no_grad():
        assert all(torch.isfinite(new.logp).all() for _, _, new in trainer.rollouts.replay(part, conditioning))
    assert [len(taken.x) for taken in part.transitions] == [2 * n for n in states]
    assert trainer.policy.evaluations - before == 2 * sum(states)


# --- tree_rpo --------------------------------------------------------------------------------------------------------
def test_tree_noise_grows_linearly_with_the_depth():
    trainer = made("tree_rpo", parts__kl__weight=0.004)  # a KL has deviations recorded
    [part] = sampled(trainer)[0]
    assert [len(taken.parent) for taken in part.transitions] == [2 * 2, 2 * 4, 2 * 8, 2 * 16]
    x = torch.zeros(1, 1)
    for depth, taken in enumerate(part.transitions):
        plain = FlowSDE(0.7)(x, x, trainer.rollouts.grid, taken.step).std
        torch.testing.assert_close(taken.old.std, (1 + 0.5 * depth / 4) * plain.reshape(1))


def test_weights_by_noise_follow_the_noise_that_grows_in_a_tree():
    weights = []
    for growth in (0.0, 1.0):
        trainer = made("tree_rpo", parts={"plan": {"growth": growth}, "step_weight": {"type": "NoiseLevel"}})
        weights.append(tiny.step_weights(trainer, sampled(trainer)[0]))
    std = [FlowSDE(0.7)(torch.zeros(1, 1), torch.zeros(1, 1), shift_grid(6, 3.0), step).std.item() for step in range(4)]
    for found, factors in zip(weights, ((1, 1, 1, 1), (1, 1.25, 1.5, 1.75))):
        grown = [s * factor for s, factor in zip(std, factors)]
        assert found == pytest.approx({step: 4 * s / sum(grown) for step, s in enumerate(grown)}, rel=1e-5)


def test_a_tree_moves_with_its_window():
    plan = TreeWindow(Sliding(size=3, every=2), growth=1.0)
    for epoch, first in ((0, 0), (1, 0), (2, 1), (4, 2)):
        schedule = plan(8, epoch, 0)
        assert schedule.stochastic == schedule.trained == (first, first + 1, first + 2)
        assert schedule.children == (2, 2, 2) and schedule.noise == pytest.approx((1, 4 / 3, 5 / 3))


# --- pref_grpo -------------------------------------------------------------------------------------------------------
def test_pref_trains_on_win_rates_which_sum_to_half_the_group():
    trainer = made("pref_grpo")
    parts, conditioning, grouped = sampled(trainer)
    rates = trainer.method.credit.shaping(grouped)
    torch.testing.assert_close(rates.sum(1), torch.full((2, 1), 4 / 2))
    assert sorted(rates[0, :, 0].tolist()) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    found, stretched = (credited(trainer, parts, conditioning, rewards) for rewards in (grouped, (9 * grouped).exp()))
    for part, other in zip(found, stretched):  # how far one image is from the other does not count
        assert all(torch.equal(a, b) for a, b in zip(part.advantages, other.advantages))
    torch.testing.assert_close(found[0].advantages[0], group_relative(rates[..., 0])[0])


# --- b2_diffurl ------------------------------------------------------------------------------------------------------
def test_b2_trains_an_interval_that_grows_from_the_end_and_splits_where_it_begins():
    plan = preset("b2_diffurl").parts()["plan"]
    for epoch, count in ((0, 13), (50, 16), (99, 18), (100, 19), (500, 19)):  # of 19: 70 %, 85 %, 99.7 %, all
        schedule = plan(20, epoch, 0)
        assert schedule.stochastic == tuple(range(19)) and schedule.trained == tuple(range(19 - count, 19))
        assert [n for n in schedule.children if n > 1] == [4] and schedule.children[19 - count] == 4
    counts = [len(plan(20, epoch, 0).trained) for epoch in range(120)]
    assert counts == list(accumulate(counts, max))


def test_b2_trains_only_extremes_past_the_thresholds():
    trainer = made("b2_diffurl")
    parts, conditioning, _ = sampled(trainer)
    # Four branch groups of four, of mean 0 and variance 77/32: the second is too near to 0, the third has no extremes.
    rewards = torch.tensor([[3.0, 0, 0, -3, 0.5, 0, 0, -0.5, 0, 0, 0, 0, 3, 1, -1, -3], [1.0] * 16])
    [part] = credited(trainer, parts, conditioning, rewards[..., None])
    z = 3 / (77 / 32)**0.5
    assert [taken.step for taken in part.transitions] == [2, 3, 4]
    for taken, was, advantage in zip(part.transitions, parts[0].transitions, part.advantages):
        assert torch.equal(taken.x_next, was.x_next[[0, 3, 12, 15]])
        torch.testing.assert_close(advantage, torch.tensor([z, -z, z, -z]))
    assert [len(taken.x) for taken in part.transitions] == [2, 4, 4]  # at its beginning a branch group is one state


def test_b2_takes_its_branch_groups_from_the_plan_and_a_second_number_is_refused():
    """Of five branches the best and the worst: samples 0 and 4, 7 and 9, in units of the prompt's deviation."""
    trainer = made("b2_diffurl", train__group=10, parts__plan__branch=5)
    parts, conditioning, _ = sampled(trainer)
    rewards = torch.tensor([[4.0, 0, 0, 0, -4, 0, 0, 4, 0, -4], [1.0] * 10])
    [part] = credited(trainer, parts, conditioning, rewards[..., None])
    assert torch.equal(part.transitions[-1].x_next, parts[0].transitions[-1].x_next[[0, 4, 7, 9]])
    options = dict(parts__plan__branch=5, parts__selection__branch=4)
    assert "unknown key parts.selection.branch" in message(made, "b2_diffurl", **options)


# --- sol_rl ----------------------------------------------------------------------------------------------------------
def noises(prompt: int, samples) -> torch.Tensor:
    """The initial noises of epoch 0, from their seeds."""
    generators = [torch.Generator().manual_seed(seeder(0, 0)(prompt, int(sample))) for sample in samples]
    return torch.cat([torch.randn(1, *tiny.LATENTS, generator=generator) for generator in generators])


def previewed(trainer, conditioning, prompt: int, grid: torch.Tensor, pool: int) -> torch.Tensor:
    """How red every noise of the pool becomes on the grid, by Euler's steps one after the other: [pool]."""
    x, rows = noises(prompt, range(pool)), conditioning.rows(torch.full((pool,), prompt))
    for step, delta in enumerate((grid[:-1] - grid[1:]).float()):
        with torch.no_grad():
            x = x - delta * trainer.policy.replay(rows, x, grid, step)
    return tiny.red(trainer.rollouts.decode(x, rows), None)


def test_sol_rl_starts_from_the_very_noises_that_previewed_best_and_worst():
    trainer = made("mix_grpo+sol_rl", parts__preview={"pool": 9, "steps": 2})
    parts, conditioning, _ = sampled(trainer)
    for prompt, part in enumerate(parts):
        ranked = previewed(trainer, conditioning, prompt, shift_grid(2, 3.0), pool=9).argsort(descending=True)
        chosen = [*ranked[:2], *ranked[-2:]]
        assert part.transitions[0].step == 0 and torch.equal(part.transitions[0].x, noises(prompt, chosen))


def test_sol_rl_scores_its_images_anew():
    calls = []
    def red_then_its_opposite(images, prompts):  # the previews are scored in one call, before all others
        calls.append(tiny.red(images, prompts) * (-1 if calls else 1))
        return calls[-1]
    trainer = made("mix_grpo+sol_rl", parts__preview={"pool": 9, "steps": 2}, rewards={"red": red_then_its_opposite})
    parts, conditioning, grouped = sampled(trainer)
    assert [len(call) for call in calls] == [18, 4, 4]
    for part, scores, given in zip(parts, grouped, credited(trainer, parts, conditioning, grouped)):
        pictures = trainer.rollouts.decode(part.finals[0], conditioning.rows(part.prompts))
        torch.testing.assert_close(scores[:, 0], -tiny.red(pictures, None))
        torch.testing.assert_close(given.advantages[0], group_relative(scores.T)[0])


def test_the_best_and_the_worst_of_a_pool_by_hand():
    published = preset("sol_rl").parts()
    assert (published["preview"], published["roots"]) == (Preview(96, 6), None)
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.7, 0.3], [1.0, 1.0, 0.0, 1.0, 0.0]])
    assert contrasting(scores, 4).tolist() == [[1, 3, 4, 0], [0, 1, 2, 4]]
    nan = float("nan")
    lost = torch.tensor([[nan, 0.9, nan, 0.7, 0.3], [0.1, nan, nan, nan, 0.2], [nan] * 5])
    assert contrasting(lost, 2).tolist() == [[1, 4], [4, 0], [0, 4]]
    assert contrasting(lost, 4).tolist() == [[1, 0, 3, 4], [4, 1, 3, 0], [0, 1, 3, 4]]
    for group in (3, 6):
        told = message(contrasting, scores, group, error=ValueError)
        assert f"a group of {group} cannot be the best and the worst of a pool of 5" in told
