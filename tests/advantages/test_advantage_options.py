from __future__ import annotations

import json
import math
from collections import deque

import numpy as np
import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.advantages.group import Advantage, combine, running, trimmed, weighted_sum, whitened
from flowgrpo.types import Context
from tests.helpers.contexts import of_epoch
from tests.helpers.tables import close, draw, f64

F64 = torch.float64
NAN = math.nan


def test_a_context_remembers_for_itself():
    one, other = Context(), Context()
    one.run.memory["seen"] = 1
    assert other.run.memory == {} and (other.run.epoch, other.run.epochs) == (0, 1)
    assert other.samples.logp is None and not other.groups.prompts


# Leave one out


def test_leave_one_out_by_hand():
    # Means of the others: 4, 3.5, 1.5. A missing reward is nobody's other.
    close(group_relative(f64([[1, 2, 6]]), "leave_one_out"), [[-3, -1.5, 4.5]])
    close(group_relative(f64([[1, NAN, 2, 6]]), "leave_one_out"), [[-3, 0, -1.5, 4.5]])


def test_leave_one_out_is_each_reward_less_the_mean_of_the_others():
    rewards = draw(5, 7)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / 6
    torch.testing.assert_close(group_relative(rewards, "leave_one_out"), rewards - others, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", [[3.0], [2, 2, 2], [NAN, 4, NAN]])
def test_leave_one_out_of_nothing_is_zero(group):
    assert (group_relative(f64([group]), "leave_one_out") == 0).all()


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


def test_equal_rewards_with_another_history_have_an_advantage():
    context = of_epoch(["a"])
    running(f64([[0, 0]]), context, least=1)
    context = of_epoch(["a"], 1, context.run.memory)
    # 0, 0, 1, 1: mean 1/2, deviation 1/2.
    close(running(f64([[1, 1]]), context, least=1), [[0.5 / (0.5 + 1e-6)] * 2])


def test_running_without_variance_or_rewards_is_zero():
    assert 0.1 + 0.2 != 0.3
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


def test_running_needs_a_context():
    with pytest.raises(AssertionError):
        Advantage(scale="running")(f64([[[1], [2]]]), [1.0])
    with pytest.raises(AssertionError):
        running(f64([[1, 2], [3, 4]]), of_epoch(["a"]))


def test_the_other_scales_read_no_context():
    rewards, context = draw(2, 4, 3), of_epoch(["a", "b"])
    assert torch.equal(Advantage()(rewards, [1, 2, 3], context), Advantage()(rewards, [1, 2, 3]))
    assert context.run.memory == {}


# GDPO


def test_gdpo_by_hand():
    # Group scale gives -1, 0, 1 and -1, 1, 0 for the first prompt, 1, -1, 0 and zeros for the second; weights 1 and 2.
    rewards = f64([[[1, 10], [2, 30], [3, 20]], [[9, 5], [3, 5], [6, 5]]])
    spread = math.sqrt((9 + 4 + 1 + 1 + 1) / 6) + 1e-4
    expected = [[-3, 2, 1], [1, -1, 0]]
    close(combine(rewards, [1, 2], order="gdpo"), [[a / spread for a in row] for row in expected], 1e-7)


def test_gdpo_has_unit_deviation_and_the_shape_of_summed_advantages():
    rewards = draw(6, 8, 3)
    advantages = combine(rewards, [1, 5, 2], order="gdpo", clamp=math.inf)
    summed = combine(rewards, [1, 5, 2], clamp=math.inf)
    assert advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(advantages, summed / (summed.std(correction=0) + 1e-4), rtol=0, atol=1e-12)


def test_gdpo_leaves_out_what_does_not_apply():
    rewards = f64([[[1], [NAN], [3]], [[4], [4], [4]], [[NAN], [NAN], [NAN]]])
    # -1/sqrt(2), 1/sqrt(2) and three zeros: the deviation is sqrt(1/5).
    high = math.sqrt(0.5) / (math.sqrt(0.2) + 1e-4)
    advantages = combine(rewards, [1.0], order="gdpo")
    close(advantages, [[-high, 0, high], [0, 0, 0], [0, 0, 0]], 1e-7)
    assert (advantages[1:] == 0).all()


def test_groups_of_zeros_stay_zeros_where_the_batch_has_a_mean():
    context = of_epoch(["a"])
    running(f64([[0, 0, 0, 0]]), context, buffer=8, least=1)
    context = of_epoch(["a", "b"], 1, context.run.memory)
    part = Advantage(scale="running", order="gdpo", buffer=8, least=1)
    advantages = part(f64([[[1], [2], [3], [4]], [[7], [7], [7], [7]]]), [1.0], context)
    assert (advantages[0] > 0).any() and (advantages[1] == 0).all()


def test_whitened_by_hand():
    applies = torch.tensor([[True, True], [True, False]])
    scale = math.sqrt(2) + 1e-4  # of 1, 1, 4 the mean is 2 and the squares 1, 1, 4
    close(whitened(f64([[1, 1], [4, 99]]), applies), [[-1 / scale, -1 / scale], [2 / scale, 0]])
    assert (whitened(f64([[0.1 + 0.2, 0.3]]), torch.ones(1, 2, dtype=torch.bool)) == 0).all()
    assert (whitened(f64([[NAN, NAN]]), torch.zeros(1, 2, dtype=torch.bool)) == 0).all()


# Trim


def test_trim_silences_both_tails():
    rewards = f64([[[5], [1], [4], [2], [3]], [[0], [0], [9], [0], [0]]])
    # A fifth of five is one sample at either end; ties go by position.
    advantages = combine(rewards, [1.0], scale="none", trim=0.2)
    close(advantages, [[0, 0, 1, -1, 0], [0, -1.8, 0, -1.8, -1.8]])


@pytest.mark.parametrize(("share", "size", "cut"), [
    (0, 6, 0), (0.16, 6, 0), (0.17, 6, 1), (0.29, 100, 29), (0.49, 7, 3),
])
def test_trim_rounds_down(share, size, cut):
    advantages = torch.arange(1, size + 1, dtype=F64)[None]
    kept = trimmed(advantages, share)[0]
    assert (kept[:cut] == 0).all() and (kept[size - cut :] == 0).all()
    assert torch.equal(kept[cut : size - cut], advantages[0, cut : size - cut])


def test_the_part_passes_its_options_on():
    rewards = draw(3, 10, 2)
    part = Advantage(scale="leave_one_out", order="gdpo", clamp=1.2, trim=0.2)
    assert torch.equal(part(rewards, [1, 2]), combine(rewards, [1, 2], "leave_one_out", "gdpo", 1.2, 0.2))


def test_weighted_sum_by_hand():
    # The missing 30 stands at the mean of 10 and 20; a sample without any reward is NaN.
    total = weighted_sum(f64([[[1, 10], [2, NAN], [3, 20], [NAN, NAN]]]), [1, 0.5])
    close(total[:, :3], [[6, 9.5, 13]])
    assert total[0, 3].isnan()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Advantage(trim=0.5),
        lambda: Advantage(trim=-0.1),
        lambda: Advantage(least=33),
        lambda: Advantage(buffer=8, least=0),
        lambda: group_relative(f64([[1, 2]]), "running"),
        lambda: weighted_sum(f64([[[1, 2]]]), [1.0])])
def test_mistakes_are_named(call):
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert "\n" not in str(error.value)
