"""Advantages of segments, steps and clean predictions: by hand, and in epochs of a tiny model."""

import math

import pytest
import torch

from flowgrpo.advantages import token_credit as credit
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import continue_prefixes, with_segment_values
from flowgrpo.text.samplers.language_model import TokenizedPrompts
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from flowgrpo.types import Completions, Context, RewardColumns, SampleMeasures, Scored, Segmented, Transitions
from tests.helpers import loop, tiny, tiny_text

P = torch.tensor([[0.5, 0.95, 0.8, 0.99, 0.1, 0.2], [0.99, 0.3, 0.99, 0.4, 0.5, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[True] * 6, [True, True, True, True, False, False]])


def old(p=P, mask=MASK) -> Scored:
    return Scored(p.log() * mask, mask)


# --- SPO -------------------------------------------------------------------------------------------------------------
def test_segments_begin_at_cut_points():
    cuts = credit.cut_points(P.log(), MASK, 0.9)
    assert cuts.long().tolist() == [[1, 0, 1, 0, 1, 1], [0, 1, 0, 1, 0, 0]]
    assert credit.segments_of(cuts, 1).tolist() == [[0, 0, 1, 1, 2, 3], [0, 0, 0, 1, 1, 1]]
    assert credit.segments_of(cuts, 2).tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    assert credit.starts_of(credit.segments_of(cuts, 1), MASK) == [(0, 1, 2), (0, 2, 4), (0, 3, 5), (1, 1, 3)]
    assert credit.segments_of(credit.cut_points(P.log(), MASK, 0.01), 3).tolist() == [[0] * 6] * 2  # nothing to cut at


def test_a_chain_adds_up_to_the_reward_less_the_first_value():
    nan = math.nan
    segments = credit.segments_of(credit.cut_points(P.log(), MASK, 0.9), 1)
    values = torch.tensor([[0.5, 0.25, 0.75, 1.0], [0.5, 0.125, nan, nan]], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = credit.chain(values, segments, rewards)
    assert found[0].tolist() == [-0.25, -0.25, 0.5, 0.5, 0.25, 0.0]
    assert found[1, :4].tolist() == [-0.375, -0.375, -0.375, -0.125]
    assert [-0.25 + 0.5 + 0.25 + 0, -0.375 - 0.125] == (rewards - values[:, 0]).tolist()


def test_a_spread_reads_the_groups_mean_and_trains_cut_points():
    segments = credit.segments_of(credit.cut_points(P.log(), MASK, 0.9), 1)
    values = torch.tensor([[math.nan, 0.25, 0.75, 1.0], [math.nan, 0.125, math.nan, math.nan]], dtype=torch.float64)
    taken = Segmented(torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, dtype=torch.long), old(), segments, values)
    totals = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = credit.SegmentChain(interval=1)(taken, torch.tensor([1.0, -1.0]), totals)
    assert found.tolist() == [[-0.25, 0, 0.5, 0, 0.25, 0], [0, -0.375, 0, -0.125, 0, 0]]
    whole = credit.SegmentChain(interval=1, masked=False)(taken, torch.tensor([1.0, -1.0]), totals)
    assert whole[1].tolist() == [-0.375, -0.375, -0.375, -0.125, 0, 0] and taken.values[:, 0].isnan().all()
    silent = credit.SegmentChain(interval=1)(taken, torch.zeros(2), totals.where(totals > 0, math.nan))
    assert silent[1, 3] == 0 and not silent.isnan().any()
    assert torch.equal(taken.rows(torch.tensor([1])).segments, segments[1:])


def sampled(method: str, **options):
    """(trainer, parts with advantages, what was asked) of two prompts."""
    trainer = tiny_text.trainer(tiny_text.policy(), {"short": many}, method=method, **options)
    batch = trainer.prompts[:2]
    parts, asked, scores = sampling.sample(trainer, batch)
    credited = loop.credit(trainer, parts, scores, [p.key for p in batch])
    return trainer, [part for part in credited if part], asked, scores


def many(completions, prompts):
    return [float(text.count("7") + len(text) > 3) for text in completions]


def test_a_continuation_keeps_its_prefix_and_needs_no_neighbour():
    own = tiny_text.policy()
    asked = own.encode(["1+2=", "33+4="])
    prefixes = [torch.tensor([5, 6]), torch.tensor([7])]
    made = continue_prefixes(own, asked, prefixes, Decoding(), own.generators([1, 2]))
    assert made.ids.shape == (2, 6) and made.ids[0, :2].tolist() == [5, 6] and made.ids[1, 0] == 7
    assert (made.logp[0, :2] == 0).all() and made.mask[:, 0].all()
    alone = continue_prefixes(own, asked.rows(torch.tensor([1])), prefixes[1:], Decoding(), own.generators([2]))
    assert torch.equal(alone.ids[0][alone.mask[0]], made.ids[1][made.mask[1]]) and alone.texts[0] == made.texts[1]
    longer = TokenizedPrompts(asked.prompts, [torch.cat(both) for both in zip(asked.ids, prefixes)])
    plain = own.sample(longer, Decoding(),
                       own.generators([1, 2]), torch.zeros(2, dtype=torch.bool))
    kept = min(int(plain.mask[0].sum()), 4)
    assert torch.equal(made.ids[0, 2:2 + kept], plain.ids[0, :kept])
    assert torch.equal(made.logp[0, 2:2 + kept], plain.logp[0, :kept])


def test_the_value_of_a_state_is_the_mean_reward_of_its_continuations():
    own = tiny_text.policy()
    asked, told = own.encode(["1+2=", "33+4="]), []
    ids = torch.randint(3, 12, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 6, dtype=torch.bool)
    taken = Completions(ids, torch.tensor([0, 0, 1, 1]), Scored(torch.zeros(4, 6), mask))
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6, [0, 0, 0, 1, 1, 1], [0] * 6])
    def judge(texts, group, prompts):
        told.append((texts, prompts.tolist()))
        return torch.arange(len(texts)).float().view(-1, group)
    found = [with_segment_values(own, asked, taken, segments, credit.starts_of(segments, mask), 3, Decoding(),
                                 lambda prompt, sample: 1000 * prompt + sample, 2, size, judge) for size in (2, 9)]
    means = torch.tensor([[-1, 1, 4.0], [-1, -1, -1], [-1, 7, -1], [-1, -1, -1]])
    assert torch.equal(found[0].values.nan_to_num(-1), means)
    assert told[0] == told[1] and told[0][1] == [0] * 6 + [1] * 3  # however many go through the model at once
    assert len(set(told[0][0])) > 3
    def skipping(texts, group, prompts):
        scored = torch.tensor([[False, True, True], [False] * 3, [True] * 3])
        return judge(texts, group, prompts).where(scored, math.nan)
    found = with_segment_values(own, asked, taken, segments, credit.starts_of(segments, mask), 3, Decoding(),
                                lambda prompt, sample: 1000 * prompt + sample, 2, 9, skipping)
    means = torch.tensor([[-1, 1.5, -1], [-1, -1, -1], [-1, 7, -1], [-1, -1, -1]])  # of continuations with a reward
    assert torch.equal(found.values.nan_to_num(-1), means)


@pytest.mark.parametrize("method, options", [("spo_chain", {"parts": {"spread": {"interval": 1, "samples": 2}}}),
                                             ("spo_tree", {"parts": tiny_text.PARTS["spo_tree"]}),
                                             ("gigpo", {"parts": {"spread": {"every": 1}}})])
def test_tokens_have_advantages_of_their_own(method, options):
    trainer, parts, asked, _ = sampled(method, **options)
    found = torch.cat([part.advantages[0] for part in parts])
    masks = torch.cat([part.transitions[0].old.mask for part in parts])
    assert found.shape == masks.shape and any(len(set(row[kept].tolist())) > 1 for row, kept in zip(found, masks))
    tiny_text.stir(trainer.policy, 0.05)
    gradients = []
    for size in (1, 8):
        trainer.geometry = trainer.rollouts.geometry = type(trainer.geometry)(2, 4, size, 1)
        trainer.optimization.optimizer.zero_grad()
        trainer.kl_reference.start_epoch(loop.epoch(trainer), trainer.rollouts, 0, 1)
        count = decisions(parts, trainer.method.loss.reduction)
        for part in parts:
            loop.backward(trainer, part, asked, {0: 1.0}, count, UpdateStats())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.policy.weights.parameters()]))
    assert gradients[0].norm() > 0 and (gradients[0] - gradients[1]).norm() <= 1e-4 * gradients[0].norm()
    assert parts[0].advantage(0, slice(1, 3)).shape == found[1:3].shape  # one for each decision


def test_values_of_a_tree_are_means_of_the_leaves_below():
    ids = torch.tensor([[4, 5, 6, 7], [4, 5, 8, 9], [4, 6, 2, 0], [4, 6, 2, 0]])  # the last two ended: the same leaf
    mask = torch.tensor([[True] * 4, [True] * 4, [True, True, True, False], [True, True, True, False]])
    states = credit.anchors(ids, credit.steps_of(ids, mask, 2), mask, torch.zeros(4, dtype=torch.long))
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    values, count = credit.shared_values(states, rewards)
    assert values.tolist() == [[0.75, 0.5, 1], [0.75, 0.5, 0], [0.75, 1, 1], [0.75, 1, 1]]
    assert count.tolist() == [[4, 2, 1], [4, 2, 1], [4, 2, 2], [4, 2, 2]]
    taken = Completions(ids, torch.zeros(4, dtype=torch.long), Scored(torch.full((4, 4), -1.0) * mask, mask))
    found = credit.SegmentTree(every=2)(taken, torch.zeros(4), rewards[None])
    assert found.tolist() == [[-0.125, -0.125, 0.5, 0.5], [-0.125, -0.125, -0.5, -0.5], [0.125, 0.125, 0, 0],
                              [0.125, 0.125, 0, 0]]
    edges = found[0, 0] + found[1, 0], found[2, 0] + found[3, 0]
    assert edges == (0.5 - 0.75, 1 - 0.75)  # each edge once, however many leaves are below
    likely = Completions(ids, taken.prompts, Scored(torch.full((4, 4), -0.01) * mask, mask))
    assert credit.SegmentTree(every=2)(likely, torch.zeros(4), rewards[None]).abs().max() == 0  # the probability mask


# --- GiGPO -----------------------------------------------------------------------------------------------------------
IDS = torch.tensor([[4, 5, 6, 7], [4, 5, 8, 9], [4, 9, 6, 7], [4, 5, 6, 0]])
DRAWN = torch.tensor([[True] * 4, [True] * 4, [True] * 4, [True, True, True, False]])


def test_steps_that_begin_behind_the_same_tokens_share_a_state():
    steps = credit.steps_of(IDS, DRAWN, 2)
    assert steps.tolist() == [[0, 0, 1, 1]] * 4
    found = credit.anchors(IDS, steps, DRAWN, torch.zeros(4, dtype=torch.long))
    assert found.tolist() == [[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 1, 6]]
    apart = credit.anchors(IDS, steps, DRAWN, torch.tensor([0, 0, 1, 1]))
    assert apart[0, 0] == apart[1, 0] != apart[2, 0] == apart[3, 0] and apart[3, 1] != apart[0, 1]
    ended = credit.steps_of(IDS, DRAWN, 1, ends=(5, 6)).tolist()
    assert ended == [[0, 0, 1, 2], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]
    one = credit.steps_of(IDS, DRAWN, 1)
    ends = credit.anchors(IDS, one, DRAWN, torch.zeros(4, dtype=torch.long))
    assert one[3].tolist() == [0, 1, 2, 2] and ends.shape == (4, 5) and ends[3, 3] == ends[0, 3] and ends[3, 4] == -1


def test_step_advantages_by_hand():
    states = torch.tensor([[0, 1], [0, 1], [0, 2], [0, -1]])
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    found = credit.step_advantages(states, rewards, 0.5, divide=False)
    first = [0.5 - 0.5, 0 - 0.5, 0.5 - 0.5, 1 - 0.5]  # returns 0.5, 0, 0.5 and, with one step, 1
    assert found[:, 0].tolist() == pytest.approx(first, abs=1e-10)
    assert found[:, 1].tolist() == pytest.approx([0.5, -0.5, 0, 0], abs=1e-10)  # state 2 was left once
    divided = credit.step_advantages(states, rewards, 0.5)
    spread = math.sqrt((0.25 + 0.25) / 3) + 1e-6
    assert divided[:, 0].tolist() == pytest.approx([value / spread for value in first], abs=1e-10)
    assert divided[:2, 1].tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])
    assert found.sum() == pytest.approx(0, abs=1e-12)
    assert credit.step_advantages(states, torch.full((4,), 0.3), 1.0).abs().max() == 0
    missing = credit.step_advantages(states, torch.tensor([1.0, 0.0, math.nan, 1.0]), 1.0, divide=False)
    assert missing[2].tolist() == [0, 0] and missing[0, 0] == pytest.approx(1 / 3)


def test_states_that_are_left_once_leave_the_samples_advantage():
    taken = Completions(IDS, torch.zeros(4, dtype=torch.long), Scored(torch.zeros(4, 4), DRAWN))
    advantages, totals = torch.tensor([1.0, -1.0, 0.5, 0.25]), torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    found = credit.StepGroups(every=2, gamma=1.0, weight=2.0, divide=False)(taken, advantages, totals)
    assert found[2].tolist() == pytest.approx([0.5 + 0.5, 1.0, 0.5, 0.5])
    assert found[1].tolist() == pytest.approx([-1 - 1.5, -2.5, -1 - 4 / 3, -1 - 4 / 3])
    nothing = credit.StepGroups(every=2, weight=0.0)(taken, advantages, totals)
    assert torch.equal(nothing, advantages[:, None].expand(4, 4))


def test_planning_tokens_have_larger_advantages_by_hand():
    ids, mask = torch.tensor([[5, 7, 9, 7], [7, 3, 4, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    taken = Completions(ids, torch.zeros(2, dtype=torch.long), Scored(torch.zeros(2, 4), mask))
    advantages = torch.tensor([1.0, -1.0])
    raised = credit.Planning(0.2, first=0, ids=[7])(taken, advantages, advantages)
    torch.testing.assert_close(raised, torch.tensor([[1, 1.2, 1, 1.2], [-0.8, -1, -1, -1]]))
    first = credit.Planning(0.2, first=2)(taken, advantages, advantages)
    torch.testing.assert_close(first, torch.tensor([[1.2, 1.2, 1, 1], [-0.8, -0.8, -1, -1]]))
    # Of denoisers the planning steps are the first of the grid.
    scored = Scored(torch.zeros(2, 1), torch.ones(2, 1).bool())
    steps = [Transitions(number, torch.zeros(2, 3), torch.zeros(2).long(), torch.arange(2), torch.zeros(2, 3), scored)
             for number in range(3)]
    found = [credit.Planning(0.5, first=2)(step, advantages, advantages).tolist() for step in steps]
    assert found == [[1.5, -0.5], [1.5, -0.5], [1.0, -1.0]]


def test_planning_steps_of_a_run_of_images():
    trainer = tiny.trainer(method="flow_grpo", parts={"spread": {"type": "Planning", "first": 1}})
    plain = tiny.trainer(method="flow_grpo")
    keys = [prompt.key for prompt in trainer.prompts[:2]]
    (raised, alike) = (loop.credit(own, *sampling.sample(own, own.prompts[:2])[::2], keys)[0]
                       for own in (trainer, plain))
    assert [taken.step for taken in raised.transitions][:2] == [0, 1]
    expected = alike.advantages[0] + 0.2 * alike.advantages[0].abs()
    torch.testing.assert_close(raised.advantages[0], expected)
    assert torch.equal(raised.advantages[1], alike.advantages[1]) and alike.advantages[0].abs().max() > 0
    assert alike.advantage(0, slice(1, 3)).shape == (2, 1)  # one for each row


def test_uncertain_tokens_are_pulled_up_more_and_no_sign_turns_around():
    entropy = torch.tensor([[0.0, 0.5, 2.0], [0.0, 0.5, 2.0]])
    logp = torch.zeros(2, 3)
    taken = Completions(torch.zeros(2, 3).long(), torch.zeros(2).long(), Scored(logp, logp == 0, entropy=entropy))
    found = credit.Exploring(alpha=0.4, kappa=2.0)(taken, torch.tensor([1.0, -1.0]), torch.zeros(1, 2))
    torch.testing.assert_close(found, torch.tensor([[1, 1.2, 1.5], [-1, -0.8, -0.5]]))
    assert (credit.Exploring(alpha=9.0, kappa=1.1)(taken, torch.tensor([1.0, -1.0]), torch.zeros(1, 2))[1] < 0).all()
    assert torch.equal(credit.Exploring(alpha=0.0)(taken, torch.tensor([1.0, 0.0]), torch.zeros(1, 2)),
                       torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_the_entropies_of_a_run_are_those_of_the_policy_that_drew():
    trainer = tiny_text.trainer(tiny_text.policy(), {"short": many}, method="grpo",
                                parts={"spread": {"type": "Exploring"}})
    seen = []
    loop.watch(trainer, on_drawn=lambda epoch: seen.extend(epoch.parts))
    trainer.run_epoch()
    assert seen
    for part in seen:
        [taken] = part.transitions
        assert taken.old.entropy.shape == taken.ids.shape and (taken.old.entropy[taken.old.mask] > 0).all()
        assert part.leaves()["entropy"].isfinite().all() and "reference" not in part.leaves()


def test_of_two_right_paths_from_one_state_the_shorter_has_the_larger_advantage():
    """The length-aware credit of branches (ROSE): a prefix of two tokens, then right in 2, right in 4, wrong in 2."""
    ids = torch.tensor([[5, 6, 1, 2, 0, 0], [5, 6, 3, 4, 1, 1], [5, 6, 7, 7, 0, 0]])
    mask = torch.tensor([[1] * 4 + [0] * 2, [1] * 6, [1] * 4 + [0] * 2], dtype=torch.bool)
    taken = Completions(ids, torch.zeros(3, dtype=torch.long), Scored(torch.zeros(3, 6), mask))
    part = credit.StepGroups(every=2, gamma=0.9, divide=False)
    found = part(taken, torch.zeros(3), torch.tensor([[1.0, 1.0, 0.0]]))
    # Behind the prefix the returns are 1, 0.9 and 0.
    expected = torch.tensor([1.0, 0.9, 0.0]) - 1.9 / 3
    torch.testing.assert_close(found[:, 2], expected)
    assert found[0, 2] > found[1, 2] > 0 > found[2, 2]


# --- SALT ------------------------------------------------------------------------------------------------------------
def test_steps_that_completions_share_have_the_mean_of_their_advantages():
    # Steps of one token; of three completions two begin with 1, all have 2 behind it, and 9 ends two.
    ids = torch.tensor([[1, 2, 9], [1, 2, 8], [3, 2, 9], [1, 2, 9]])
    mask = torch.tensor([[True] * 3] * 3 + [[True, True, False]])
    taken = Completions(ids, torch.tensor([0, 0, 0, 1]), Scored(torch.zeros(4, 3), mask))
    advantages, totals = torch.tensor([1.0, -1.0, 0.5, 4.0]), torch.zeros(4, 1)
    groups = torch.tensor([0, 0, 0, 1])
    def found(history: int) -> list:
        steps = credit.steps_of(ids, mask, 1)
        return credit.mean_step_advantage(ids, steps, mask, groups, advantages, history).tolist()
    # The other group shares nothing, and its masked token has no credit.
    last = [4.0, 4.0, 0.0]
    assert found(-1) == [[0, 0, 1], [0, 0, -1], [0.5, 0.5, 0.5], last]  # shared beginnings alone
    assert found(1) == [[0, 0, 0.75], [0, 0, -1], [0.5, 0.5, 0.75], last]  # 2 then 9 twice
    third = (1 - 1 + 0.5) / 3
    assert [[pytest.approx(value) for value in row] for row in found(0)] == [
        [0, third, 0.75], [0, third, -1], [0.5, third, 0.75], last]
    alone = credit.MergedSteps(every=3)(taken, advantages, totals)  # groups of one: GRPO's own
    assert alone[:3].tolist() == [[1.0] * 3, [-1.0] * 3, [0.5] * 3]


# Two samples of one prompt: the values before three trained steps, and the reward at the end.
VALUES, FINAL = torch.tensor([[[0.1, 0.4, 0.4], [0.5, 0.3, 0.2]]]), torch.tensor([[0.9, 0.6]])


def test_progress_telescopes_to_the_reward_less_the_first_value():
    steps = credit.progress(VALUES, FINAL)
    torch.testing.assert_close(steps, torch.tensor([[[0.3, 0.0, 0.5], [-0.2, -0.1, 0.4]]]))
    assert steps[0, 0, 1] == 0  # a step that changes nothing
    torch.testing.assert_close(steps.sum(2), FINAL - VALUES[..., 0])
    # A discount of 0.5: from the end, 0.5; 0 + 0.25; 0.3 + 0.125.
    torch.testing.assert_close(credit.progress(VALUES, FINAL, 0.5)[0, 0], torch.tensor([0.425, 0.25, 0.5]))
    # Of 1: potential-based shaping, the reward less the potential of the state.
    torch.testing.assert_close(credit.progress(VALUES, FINAL, 1.0), FINAL[..., None] - VALUES)
    values = VALUES.clone()
    values[0, 0, 1] = torch.nan  # which leaves the two steps beside it without progress
    assert credit.progress(values, FINAL)[0, 0].isnan().tolist() == [True, True, False]


def test_the_rewards_that_are_named_score_the_end_too():
    rewards = torch.stack([FINAL, torch.tensor([[5.0, 7.0]])], 2)
    context = Context(rewards=RewardColumns(["red", "green"], [0.0, 2.0]), samples=SampleMeasures(predicted=VALUES))
    for part, final in ((credit.Progress(rewards=("red",)), FINAL), (credit.Progress(), 2 * rewards[..., 1])):
        torch.testing.assert_close(part.bonuses(rewards, context), credit.progress(VALUES, final))
    assert credit.select_weights({"red": 0.0, "green": 2.0}, ["red"]) == {"red": 1.0}
