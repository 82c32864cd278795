from __future__ import annotations

import math

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.group import Advantage, below, combine, zero_variance

F64 = torch.float64
NAN = math.nan
SCALES = ["group", "batch", "none"]


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def close(actual: torch.Tensor, expected: list, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=atol)


def test_group_scale_by_hand():
    # Deviations with ddof 1: 1 and 2. eps is 1e-8.
    one, two = 1 / (1 + 1e-8), 2 / (2 + 1e-8)
    close(group_relative(f64([[1, 2, 3], [4, 0, 2]])), [[-one, 0, one], [two, -two, 0]], 1e-12)


def test_batch_scale_by_hand():
    # Mean of all 4, squares 9 + 1 + 0 + 16 + 4 + 4 over 6: ddof 0. Groups have means 2.666.. and 5.333...
    scale = math.sqrt(34 / 6) + 1e-4
    rewards = f64([[1, 3, 4], [8, 6, 2]])
    expected = [[-5 / 3, 1 / 3, 4 / 3], [8 / 3, 2 / 3, -10 / 3]]
    close(group_relative(rewards, "batch"), [[a / scale for a in row] for row in expected], 1e-12)
    close(group_relative(rewards, "none"), expected, 1e-12)


@pytest.mark.parametrize("scale", SCALES)
def test_groups_without_variance_give_exact_zeros(scale):
    advantages = group_relative(f64([[0.7, 0.7, 0.7], [0, 0, 0], [1, 2, 3]]), scale)
    assert (advantages[:2] == 0).all() and (advantages[2] != 0).tolist() == [True, False, True]


@pytest.mark.parametrize("scale", SCALES)
def test_rounding_is_not_variance(scale):
    assert 0.1 + 0.2 != 0.3
    assert (group_relative(f64([[0.1 + 0.2, 0.3, 0.3]]), scale) == 0).all()
    base = torch.tensor(21.7)
    ulps = torch.stack([base, base.nextafter(torch.tensor(99.0)), base.nextafter(torch.tensor(0.0))])[None]
    assert ulps.std() > 0 and (group_relative(ulps, scale) == 0).all()


def test_the_threshold_is_a_millionth_of_the_largest_reward():
    # The deviation of (r, r + d) is d / sqrt(2).
    for reward in (1.0, -20.0, 1e-5):
        below, above = (abs(reward) * 1e-6 * math.sqrt(2) * k for k in (0.99, 1.01))
        groups = f64([[reward, reward - math.copysign(below, reward)], [reward, reward - math.copysign(above, reward)]])
        assert zero_variance(groups).tolist() == [True, False]


def test_a_small_spread_is_scaled_like_any_other():
    close(group_relative(f64([[0.28, 0.2801, 0.2802]])), [[-1, 0, 1]], 1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_groups_of_one_give_zeros(scale):
    assert (group_relative(f64([[3], [5]]), scale) == 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_sum_to_zero_and_ignore_the_offset_of_a_group(scale):
    rewards = torch.randn(5, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    advantages = group_relative(rewards, scale)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(5, dtype=F64), rtol=0, atol=1e-12)
    if scale != "batch":
        moved = group_relative(rewards + torch.arange(5, dtype=F64)[:, None], scale)
        torch.testing.assert_close(moved, advantages, rtol=0, atol=1e-12)


def test_missing_rewards_are_left_out_of_the_statistics():
    full = group_relative(f64([[1, 2, 3], [4, 0, 2]]))
    gaps = group_relative(f64([[1, NAN, 2, 3], [4, 0, 2, NAN]]))
    assert torch.equal(gaps[0, [0, 2, 3]], full[0]) and torch.equal(gaps[1, :3], full[1])
    assert gaps[0, 1] == 0 and gaps[1, 3] == 0
    # Batch: of 1, 3 and 8 the mean is 4 and the squares 9 + 1 + 16 over 3; one reward alone has no advantage.
    scale = math.sqrt(26 / 3) + 1e-4
    close(group_relative(f64([[1, 3, NAN], [NAN, NAN, 8]]), "batch"), [[-1 / scale, 1 / scale, 0], [0, 0, 0]], 1e-12)


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_that_apply_nowhere_give_zeros(scale):
    assert (group_relative(f64([[NAN, NAN], [NAN, NAN]]), scale) == 0).all()


def test_zero_variance():
    groups = f64([[1, 1, 1], [1, 1, 2], [NAN, 5, NAN], [NAN, NAN, NAN], [NAN, 5, 6], [0, 0, 0]])
    assert zero_variance(groups).tolist() == [True, False, True, True, False, True]


def test_rewards_in_half_or_integers_are_computed_in_float32():
    for dtype in (torch.bfloat16, torch.int64):
        advantages = group_relative(torch.tensor([[1, 2, 3]], dtype=dtype))
        assert advantages.dtype == torch.float32 and advantages.tolist() == [[-1, 0, 1]]


REWARDS = f64([[[1, 10], [2, 30], [3, 20]]])  # one prompt, three samples, two rewards


def test_combining_advantages_by_hand():
    # Per reward -1, 0, 1 and -1, 1, 0.
    close(combine(REWARDS, [1, 0.5]), [[-1.5, 0.5, 1]], 1e-7)


def test_combining_rewards_by_hand():
    # Sums 6, 17, 13 have mean 12 and deviation sqrt((36 + 25 + 1) / 2).
    std = math.sqrt(31)
    close(combine(REWARDS, f64([1, 0.5]), order="rewards"), [[-6 / std, 5 / std, 1 / std]], 1e-7)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", ["advantages", "rewards"])
def test_one_reward_of_weight_one_is_group_relative(scale, order):
    rewards = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(combine(rewards[..., None], [1.0], scale, order), group_relative(rewards, scale))


def test_the_clamp_comes_after_the_sum():
    # Two rewards push the same way by 1 each with weight 4: 8 clamped to 5, once.
    rewards = f64([[[1, 1], [2, 2], [3, 3]]])
    close(combine(rewards, [4, 4]), [[-5, 0, 5]], 1e-12)
    close(combine(rewards, [4, 4], clamp=math.inf), [[-8, 0, 8]], 1e-6)
    close(combine(rewards, [4, 4], "none", "rewards", clamp=3), [[-3, 0, 3]], 1e-12)


def test_a_missing_reward_adds_nothing_to_the_advantage():
    rewards = f64([[[1, NAN], [2, 30], [3, 10]]])
    root = 1 / math.sqrt(2)
    close(combine(rewards, [1, 1]), [[-1, root, 1 - root]], 1e-7)
    whole_group = f64([[[1, NAN], [2, NAN], [3, NAN]]])
    for order in ("advantages", "rewards"):
        close(combine(whole_group, [1, 1], order=order), [[-1, 0, 1]], 1e-7)


def test_in_a_sum_of_rewards_a_missing_one_stands_at_its_groups_mean():
    # The second reward, 30 and 10, stands at 20 for the first sample: sums 21, 32, 13.
    rewards = f64([[[1, NAN], [2, 30], [3, 10]]])
    close(combine(rewards, [1, 1], "none", "rewards", clamp=99), [[-1, 10, -9]], 1e-12)
    # A sample to which nothing applies is left out, of the statistics too.
    rewards = f64([[[NAN, NAN], [2, 30], [3, 10]]])
    root = 1 / math.sqrt(2)
    close(combine(rewards, [1, 1], order="rewards"), [[0, root, -root]], 1e-7)


LEAVES = f64([[[1, 10], [3, 20], [5, NAN], [9, 40]], [[0, NAN], [2, NAN], [4, 8], [6, 0]]])  # 2 prompts, 4, 2 rewards


def test_values_of_nodes_by_hand():
    pairs = f64([[[2, 15], [7, 40]], [[1, NAN], [5, 4]]])  # a reward that is missing does not count, or is missing
    torch.testing.assert_close(below(LEAVES, 2), pairs, rtol=0, atol=1e-12, equal_nan=True)
    roots = f64([[[4.5, 70 / 3]], [[3, 4]]])
    torch.testing.assert_close(below(LEAVES, 4), roots, rtol=0, atol=1e-12)
    assert below(LEAVES, 1) is LEAVES


def test_values_of_nodes_are_the_means_of_their_childrens():
    rewards = torch.randn(3, 12, 2, dtype=F64, generator=torch.Generator().manual_seed(3))
    for inner, outer in ((2, 2), (3, 2), (2, 3), (1, 4)):
        twice = below(below(rewards, inner), outer)
        torch.testing.assert_close(twice, below(rewards, inner * outer), rtol=0, atol=1e-12)
    assert below(rewards, 4).shape == (3, 3, 2)


def test_the_advantage_of_a_node_is_among_its_equals():
    # Values 2 and 7 of two nodes with two leaves each: mean 4.5, deviation 5 / sqrt(2).
    root = 1 / math.sqrt(2)
    close(Advantage()(below(LEAVES[:1, :, :1], 2), [1.0]), [[-root, root]], 1e-7)
    assert (Advantage()(below(LEAVES[:1, :, :1], 4), [1.0]) == 0).all()  # one node alone says nothing


def test_the_part_of_a_method_is_combine_with_its_settings():
    rewards = torch.randn(3, 4, 2, dtype=F64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(Advantage()(rewards, [1, 2]), combine(rewards, [1, 2]))
    part = Advantage(scale="batch", order="rewards", clamp=0.7)
    assert torch.equal(part(rewards, [1, 2]), combine(rewards, [1, 2], "batch", "rewards", 0.7))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Advantage(scale="std"),
        lambda: Advantage(order="sum"),
        lambda: Advantage(clamp=0),
        lambda: group_relative(f64([1, 2])),
        lambda: group_relative(f64([[1, 2]]), "std"),
        lambda: combine(REWARDS, [1.0]),
        lambda: combine(REWARDS[0], [1.0, 1.0]),
        lambda: combine(REWARDS, [1.0, 1.0], order="sum"),
        lambda: combine(REWARDS, [1.0, 1.0], scale="std")])
def test_mistakes_are_named(call):
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert "\n" not in str(error.value)
