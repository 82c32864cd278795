"""Group-relative advantages by hand: scales, orders, running statistics, trimming, nodes of a tree."""

import json
import math
from collections import deque

import numpy as np
import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.group import (
    Advantage,
    below,
    running,
    trim_extremes,
    weighted_sum,
    whiten,
    zero_variance,
)
from flowgrpo.types import Context
from tests.helpers.contexts import of_epoch
from tests.helpers.refusals import refused
from tests.helpers.tables import close, draw, f64

F64 = torch.float64
NAN = math.nan
SCALES = ["group", "batch", "none"]


def test_the_scales_by_hand():
    # Deviations with ddof 1: 1 and 2. eps is 1e-8.
    one, two = 1 / (1 + 1e-8), 2 / (2 + 1e-8)
    close(group_relative(f64([[1, 2, 3], [4, 0, 2]])), [[-one, 0, one], [two, -two, 0]], 1e-12)
    close(group_relative(f64([[0.28, 0.2801, 0.2802]])), [[-1, 0, 1]], 1e-3)  # a small spread is scaled like any other
    # Mean of all 4, squares 9 + 1 + 0 + 16 + 4 + 4 over 6: ddof 0. Groups have means 2.666.. and 5.333...
    scale = math.sqrt(34 / 6) + 1e-4
    rewards, expected = f64([[1, 3, 4], [8, 6, 2]]), [[-5 / 3, 1 / 3, 4 / 3], [8 / 3, 2 / 3, -10 / 3]]
    close(group_relative(rewards, "batch"), [[a / scale for a in row] for row in expected], 1e-12)
    close(group_relative(rewards, "none"), expected, 1e-12)
    # Means of the others: 4, 3.5, 1.5. A missing reward is nobody's other.
    close(group_relative(f64([[1, 2, 6]]), "leave_one_out"), [[-3, -1.5, 4.5]])
    close(group_relative(f64([[1, NAN, 2, 6]]), "leave_one_out"), [[-3, 0, -1.5, 4.5]])
    for dtype in (torch.bfloat16, torch.int64):
        advantages = group_relative(torch.tensor([[1, 2, 3]], dtype=dtype))
        assert advantages.dtype == torch.float32 and advantages.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("scale", [*SCALES, "leave_one_out"])
def test_groups_without_variance_give_exact_zeros(scale):
    advantages = group_relative(f64([[0.7, 0.7, 0.7], [0, 0, 0], [1, 2, 3]]), scale)
    assert (advantages[:2] == 0).all() and (advantages[2] != 0).tolist() == [True, False, True]
    for rewards in ([[3], [5]], [[NAN, NAN], [NAN, NAN]], [[NAN, 4, NAN]]):
        assert (group_relative(f64(rewards), scale) == 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_rounding_is_not_variance(scale):
    assert 0.1 + 0.2 != 0.3
    assert (group_relative(f64([[0.1 + 0.2, 0.3, 0.3]]), scale) == 0).all()
    base = torch.tensor(21.7)
    ulps = torch.stack([base, base.nextafter(torch.tensor(99.0)), base.nextafter(torch.tensor(0.0))])[None]
    assert ulps.std() > 0 and (group_relative(ulps, scale) == 0).all()


def test_the_threshold_is_a_millionth_of_the_largest_reward():
    groups = f64([[1, 1, 1], [1, 1, 2], [NAN, 5, NAN], [NAN, NAN, NAN], [NAN, 5, 6], [0, 0, 0]])
    assert zero_variance(groups).tolist() == [True, False, True, True, False, True]
    # The deviation of (r, r + d) is d / sqrt(2).
    for reward in (1.0, -20.0, 1e-5):
        below, above = (abs(reward) * 1e-6 * math.sqrt(2) * k for k in (0.99, 1.01))
        groups = f64([[reward, reward - math.copysign(below, reward)], [reward, reward - math.copysign(above, reward)]])
        assert zero_variance(groups).tolist() == [True, False]


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_sum_to_zero_and_ignore_the_offset_of_a_group(scale):
    rewards = torch.randn(5, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    advantages = group_relative(rewards, scale)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(5, dtype=F64), rtol=0, atol=1e-12)
    if scale != "batch":
        moved = group_relative(rewards + torch.arange(5, dtype=F64)[:, None], scale)
        torch.testing.assert_close(moved, advantages, rtol=0, atol=1e-12)


def test_missing_rewards_are_left_out_of_the_statistics():
    full, gaps = (group_relative(f64(rows)) for rows in ([[1, 2, 3], [4, 0, 2]], [[1, NAN, 2, 3], [4, 0, 2, NAN]]))
    assert torch.equal(gaps[0, [0, 2, 3]], full[0]) and torch.equal(gaps[1, :3], full[1])
    assert gaps[0, 1] == 0 and gaps[1, 3] == 0
    # Batch: of 1, 3 and 8 the mean is 4 and the squares 9 + 1 + 16 over 3; one reward alone has no advantage.
    scale = math.sqrt(26 / 3) + 1e-4
    close(group_relative(f64([[1, 3, NAN], [NAN, NAN, 8]]), "batch"), [[-1 / scale, 1 / scale, 0], [0, 0, 0]], 1e-12)


REWARDS = f64([[[1, 10], [2, 30], [3, 20]]])  # one prompt, three samples, two rewards


def test_combining_advantages_by_hand():
    # Per reward -1, 0, 1 and -1, 1, 0.
    close(Advantage()(REWARDS, [1, 0.5]), [[-1.5, 0.5, 1]], 1e-7)
    # Sums 6, 17, 13 have mean 12 and deviation sqrt((36 + 25 + 1) / 2).
    std = math.sqrt(31)
    close(Advantage(order="rewards")(REWARDS, f64([1, 0.5])), [[-6 / std, 5 / std, 1 / std]], 1e-7)
    # The clamp comes after the sum: two rewards push the same way by 1 each with weight 4: 8 clamped to 5, once.
    rewards = f64([[[1, 1], [2, 2], [3, 3]]])
    close(Advantage()(rewards, [4, 4]), [[-5, 0, 5]], 1e-12)
    close(Advantage(clamp=math.inf)(rewards, [4, 4]), [[-8, 0, 8]], 1e-6)
    close(Advantage("none", "rewards", clamp=3)(rewards, [4, 4]), [[-3, 0, 3]], 1e-12)
    # Group scale gives -1, 0, 1 and -1, 1, 0 for the first prompt, 1, -1, 0 and zeros for the second; weights 1 and 2.
    rewards = f64([[[1, 10], [2, 30], [3, 20]], [[9, 5], [3, 5], [6, 5]]])
    spread = math.sqrt((9 + 4 + 1 + 1 + 1) / 6) + 1e-4
    expected = [[-3, 2, 1], [1, -1, 0]]
    close(Advantage(order="gdpo")(rewards, [1, 2]), [[a / spread for a in row] for row in expected], 1e-7)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", ["advantages", "rewards"])
def test_one_reward_of_weight_one_is_group_relative(scale, order):
    rewards = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Advantage(scale, order)(rewards[..., None], [1.0]), group_relative(rewards, scale))


def test_a_missing_reward_adds_nothing_or_stands_at_its_groups_mean():
    rewards, whole_group = f64([[[1, NAN], [2, 30], [3, 10]]]), f64([[[1, NAN], [2, NAN], [3, NAN]]])
    root = 1 / math.sqrt(2)
    close(Advantage()(rewards, [1, 1]), [[-1, root, 1 - root]], 1e-7)
    for order in ("advantages", "rewards"):
        close(Advantage(order=order)(whole_group, [1, 1]), [[-1, 0, 1]], 1e-7)
    # In a sum the second reward, 30 and 10, stands at 20 for the first sample: sums 21, 32, 13.
    close(Advantage("none", "rewards", clamp=99)(rewards, [1, 1]), [[-1, 10, -9]], 1e-12)
    # A sample to which nothing applies is left out, of the statistics too.
    rewards = f64([[[NAN, NAN], [2, 30], [3, 10]]])
    close(Advantage(order="rewards")(rewards, [1, 1]), [[0, root, -root]], 1e-7)
    # The missing 30 stands at the mean of 10 and 20; a sample without any reward is NaN.
    total = weighted_sum(f64([[[1, 10], [2, NAN], [3, 20], [NAN, NAN]]]), [1, 0.5])
    close(total[:, :3], [[6, 9.5, 13]])
    assert total[0, 3].isnan()


LEAVES = f64([[[1, 10], [3, 20], [5, NAN], [9, 40]], [[0, NAN], [2, NAN], [4, 8], [6, 0]]])  # 2 prompts, 4, 2 rewards


def test_values_of_nodes_by_hand():
    pairs = f64([[[2, 15], [7, 40]], [[1, NAN], [5, 4]]])  # a reward that is missing does not count, or is missing
    torch.testing.assert_close(below(LEAVES, 2), pairs, rtol=0, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(below(LEAVES, 4), f64([[[4.5, 70 / 3]], [[3, 4]]]), rtol=0, atol=1e-12)
    assert below(LEAVES, 1) is LEAVES
    rewards = torch.randn(3, 12, 2, dtype=F64, generator=torch.Generator().manual_seed(3))
    for inner, outer in ((2, 2), (3, 2), (2, 3), (1, 4)):  # the means of their children's
        twice = below(below(rewards, inner), outer)
        torch.testing.assert_close(twice, below(rewards, inner * outer), rtol=0, atol=1e-12)
    assert below(rewards, 4).shape == (3, 3, 2)
    # Values 2 and 7 of two nodes with two leaves each: mean 4.5, deviation 5 / sqrt(2).
    root = 1 / math.sqrt(2)
    close(Advantage()(below(LEAVES[:1, :, :1], 2), [1.0]), [[-root, root]], 1e-7)
    assert (Advantage()(below(LEAVES[:1, :, :1], 4), [1.0]) == 0).all()  # one node alone says nothing


def test_a_context_remembers_for_itself():
    one, other = Context(), Context()
    one.run.memory["seen"] = 1
    assert other.run.memory == {} and (other.run.epoch, other.run.epochs) == (0, 1)
    assert other.samples.logp is None and not other.groups.prompts


def test_leave_one_out_is_each_reward_less_the_mean_of_the_others():
    rewards = draw(5, 7)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / 6
    torch.testing.assert_close(group_relative(rewards, "leave_one_out"), rewards - others, rtol=0, atol=1e-12)


# Running statistics
def test_running_by_hand():
    part, context = Advantage(scale="running", buffer=4, least=3), of_epoch(["a", "b"])
    # Two rewards of each prompt are too few: the batch, 1, 3, 0, 4, has mean 2 and squares 1, 1, 4, 4.
    spread = math.sqrt(2.5) + 1e-6
    close(part(f64([[[1], [3]], [[0], [4]]]), [1.0], context), [[-1 / spread, 1 / spread], [-2 / spread, 2 / spread]])
    # a: 1, 3, 5, 7 with mean 4 and squares 9, 1, 1, 9. b: 0, 4, 2, 2 with mean 2 and squares 4, 4, 0, 0.
    context, spread = of_epoch(["a", "b"], 1, context.run.memory), math.sqrt(5) + 1e-6
    close(part(f64([[[5], [7]], [[2], [2]]]), [1.0], context), [[1 / spread, 3 / spread], [0, 0]])
    # Only the last four count: a has 5, 7, 6, 10 with mean 7 and squares 4, 0, 1, 9; the 1 and the 3 are gone.
    context, spread = of_epoch(["a"], 2, context.run.memory), math.sqrt(3.5) + 1e-6
    close(part(f64([[[6], [10]]]), [1.0], context), [[-1 / spread, 3 / spread]])


def reference_tracker(epochs: list, buffer: int, least: int) -> list:
    """DDPO's tracker written plainly: a deque per prompt, numpy's population statistics."""
    seen, found = {}, []
    for prompts, rewards in epochs:
        for prompt, row in zip(prompts, rewards.tolist()):
            seen.setdefault(prompt, deque(maxlen=buffer)).extend(row)
        advantages = []
        for prompt, row in zip(prompts, rewards.tolist()):
            known = seen[prompt] if len(seen[prompt]) >= least else rewards.flatten().tolist()
            advantages.append([(r - np.mean(known)) / (np.std(known) + 1e-6) for r in row])
        found.append(advantages)
    return found


def test_running_is_the_tracker_of_ddpo_and_survives_a_checkpoint():
    # Prompts come back, also twice in one epoch.
    prompts = [["a", "b", "a"], ["b", "c", "d"], ["a", "a", "b"], ["c", "c", "c"], ["a", "b", "c"], ["d", "a", "b"]]
    epochs = [(names, draw(3, 4, seed=seed)) for seed, names in enumerate(prompts)]
    context = Context()
    for epoch, ((names, rewards), expected) in enumerate(zip(epochs, reference_tracker(epochs, 10, 8))):
        context = of_epoch(names, epoch, json.loads(json.dumps(context.run.memory)))
        close(running(rewards, context, buffer=10, least=8), expected)


def test_a_second_call_in_an_epoch_starts_from_the_same_past():
    context = of_epoch(["a"])
    for epoch in range(3):
        context, rewards = of_epoch(["a"], epoch, context.run.memory), draw(1, 4, seed=epoch)
        first = running(rewards, context, buffer=6, least=2)
        assert torch.equal(running(rewards, context, buffer=6, least=2), first)
    memory = json.dumps(context.run.memory)
    # The inner nodes of a tree read the same past and leave no trace.
    assert running(rewards[:, :2] * 9, context, buffer=6, least=2).shape == (1, 2)
    assert json.dumps(context.run.memory) == memory


def test_equal_rewards_have_the_advantage_of_their_history():
    running(f64([[0, 0]]), context := of_epoch(["a"]), least=1)
    context = of_epoch(["a"], 1, context.run.memory)
    # 0, 0, 1, 1: mean 1/2, deviation 1/2.
    close(running(f64([[1, 1]]), context, least=1), [[0.5 / (0.5 + 1e-6)] * 2])
    assert 0.1 + 0.2 != 0.3  # and where that has no variance or no reward either, none
    context = of_epoch(["a", "b"])
    assert (running(f64([[0.1 + 0.2, 0.3], [NAN, NAN]]), context, least=2) == 0).all()
    assert list(context.run.memory["running"]["0"]) == ["a"]
    context = of_epoch(["a", "b"], 1, context.run.memory)
    close(running(f64([[1.3, NAN], [NAN, NAN]]), context, least=2), [[math.sqrt(2), 0], [0, 0]], 1e-5)


def test_running_keeps_rewards_apart_unless_they_are_added_first():
    rewards = f64([[[0, 10], [1, 10], [2, 40]]])
    apart, context = Advantage(scale="running", least=3), of_epoch(["a"])
    # Means 1 and 20, deviations sqrt(2/3) and sqrt(200).
    first, second = math.sqrt(2 / 3) + 1e-6, math.sqrt(200) + 1e-6
    close(apart(rewards, [1, 2], context), [[-1 / first - 20 / second, -20 / second, 1 / first + 40 / second]])
    assert sorted(context.run.memory["running"]) == ["0", "1"]
    added, context = Advantage(scale="running", order="rewards", least=3), of_epoch(["a"])
    added(rewards, [1, 2], context)
    assert context.run.memory["running"] == {"0": {"a": {"epoch": 0, "past": [], "present": [20.0, 21.0, 82.0]}}}


def test_running_alone_reads_a_context():
    for call in (lambda: Advantage(scale="running")(f64([[[1], [2]]]), [1.0]),
                 lambda: running(f64([[1, 2], [3, 4]]), of_epoch(["a"]))):
        with pytest.raises(AssertionError):
            call()
    rewards, context = draw(2, 4, 3), of_epoch(["a", "b"])
    assert torch.equal(Advantage()(rewards, [1, 2, 3], context), Advantage()(rewards, [1, 2, 3]))
    assert context.run.memory == {}


def test_gdpo_has_unit_deviation_and_the_shape_of_summed_advantages():
    rewards = draw(6, 8, 3)
    advantages = Advantage(order="gdpo", clamp=math.inf)(rewards, [1, 5, 2])
    summed = Advantage(clamp=math.inf)(rewards, [1, 5, 2])
    assert advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(advantages, summed / (summed.std(correction=0) + 1e-4), rtol=0, atol=1e-12)
    # What does not apply is left out. -1/sqrt(2), 1/sqrt(2) and three zeros: the deviation is sqrt(1/5).
    advantages = Advantage(order="gdpo")(f64([[[1], [NAN], [3]], [[4], [4], [4]], [[NAN], [NAN], [NAN]]]), [1.0])
    high = math.sqrt(0.5) / (math.sqrt(0.2) + 1e-4)
    close(advantages, [[-high, 0, high], [0, 0, 0], [0, 0, 0]], 1e-7)
    assert (advantages[1:] == 0).all()


def test_groups_of_zeros_stay_zeros_where_the_batch_has_a_mean():
    running(f64([[0, 0, 0, 0]]), context := of_epoch(["a"]), buffer=8, least=1)
    context = of_epoch(["a", "b"], 1, context.run.memory)
    part = Advantage(scale="running", order="gdpo", buffer=8, least=1)
    advantages = part(f64([[[1], [2], [3], [4]], [[7], [7], [7], [7]]]), [1.0], context)
    assert (advantages[0] > 0).any() and (advantages[1] == 0).all()


def test_whitened_by_hand():
    applies = torch.tensor([[True, True], [True, False]])
    scale = math.sqrt(2) + 1e-4  # of 1, 1, 4 the mean is 2 and the squares 1, 1, 4
    close(whiten(f64([[1, 1], [4, 99]]), applies), [[-1 / scale, -1 / scale], [2 / scale, 0]])
    assert (whiten(f64([[0.1 + 0.2, 0.3]]), torch.ones(1, 2, dtype=torch.bool)) == 0).all()
    assert (whiten(f64([[NAN, NAN]]), torch.zeros(1, 2, dtype=torch.bool)) == 0).all()


# Trim
@pytest.mark.parametrize(("share", "size", "cut"), [(0, 6, 0), (0.16, 6, 0), (0.17, 6, 1), (0.29, 100, 29),
                                                     (0.49, 7, 3)])
def test_trim_silences_both_tails_and_rounds_down(share, size, cut):
    advantages = torch.arange(1, size + 1, dtype=F64)[None]
    kept = trim_extremes(advantages, share)[0]
    assert (kept[:cut] == 0).all() and (kept[size - cut :] == 0).all()
    assert torch.equal(kept[cut : size - cut], advantages[0, cut : size - cut])
    # A fifth of five is one sample at either end; ties go by position.
    rewards = f64([[[5], [1], [4], [2], [3]], [[0], [0], [9], [0], [0]]])
    close(Advantage(scale="none", trim=0.2)(rewards, [1.0]), [[0, 0, 1, -1, 0], [0, -1.8, 0, -1.8, -1.8]])


@pytest.mark.parametrize("call, told", [
    (lambda: group_relative(f64([1, 2])), r"rewards have shape \(2,\), expected \[prompts, samples per prompt\]"),
    (lambda: group_relative(f64([[1, 2]]), "std"), "scale is 'std', expected one of group, batch, none, leave_one_out"),
    (lambda: group_relative(f64([[1, 2]]), "running"), "scale is 'running', expected one of group, batch, none"),
    (lambda: Advantage()(REWARDS, [1.0]), r"shape \(1, 3, 2\) and weights \(1,\), expected .* one weight per reward"),
    (lambda: Advantage()(REWARDS[0], [1.0, 1.0]), r"shape \(3, 2\) and weights \(2,\), expected \[prompts, samples, r"),
    (lambda: Advantage(order="sum")(REWARDS, [1.0, 1.0]), "order is 'sum', expected one of advantages, rewards, gdpo"),
    (lambda: Advantage(scale="std")(REWARDS, [1.0, 1.0]), "scale is 'std', expected one of group, batch, none"),
    (lambda: weighted_sum(f64([[[1, 2]]]), [1.0]), r"shape \(1, 1, 2\) and weights \(1,\), expected")])
def test_impossible_arguments_are_named(call, told):
    refused(told, call, error=ValueError)
