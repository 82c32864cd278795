"""Samples that are left out of a group, and groups that are trained again."""

import math

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.contrib.downsampling import Consistent, ResampleCorrect
from flowgrpo.contrib.group_replay import GroupReplay, priority
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import validate
from flowgrpo.training import extensions, sampling
from flowgrpo.types import Context, RewardColumns, RunState
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message, refused


def by_place(outputs, prompts):
    """1 for every other sample of prompts that differ; all samples of the others score the same."""
    return [float(prompt in ("1+2=", "red") and place % 2) for place, prompt in enumerate(prompts)]


def trainer(kind: str, prompts: list[str], **replay):
    made = tiny_text.trainer if kind == "text" else tiny.trainer
    parts = {"replay": {"type": "GroupReplay"} | replay} | ({} if kind == "text" else {"plan": {"size": 2}})
    found = made(rewards={"short" if kind == "text" else "red": by_place}, train__prompts=len(prompts), parts=parts)
    found.prompts = [Prompt(text) for text in prompts]
    return found


KINDS = [("text", ["1+2=", "33+4="]), ("pictures", ["red", "blue"])]


def test_odds_and_kinds_of_groups_by_hand():
    part = GroupReplay(alpha=2.0, certain=math.log(2))
    assert part.odds([1.0, 2.0, 0.5], [0.0, -1.0, 0.0]).tolist() == pytest.approx([4 / 13, 8 / 13, 1 / 13])
    drawn = [GroupReplay(alpha=3.0).choose([0.1, 1.0, 0.1, 0.1], [0.0] * 4, 1, [0, number])[0] for number in range(40)]
    assert drawn.count(1) > 35 and sorted(part.choose([1.0, 2.0], [0.0, 0.0], 9, [0])) == [0, 1]
    assert part.choose([], [], 3, [0]) == []
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    lengths = torch.tensor([3, 9, 5, 2, 8, 8, 1])
    assert priority(advantages, lengths).tolist() == [True, False, True, False, True, True, False]
    first = priority(advantages, lengths)
    assert torch.corrcoef(torch.stack([advantages[first], lengths[first].float()]))[0, 1] < 0
    assert not priority(torch.zeros(3), lengths[:3]).any()


@pytest.mark.parametrize("kind, texts", KINDS)
def test_groups_that_agree_are_replaced_and_keep_the_old_ratio(kind, texts):
    made = trainer(kind, texts)
    first = made.run_epoch()
    [group] = loop.extension(made, "ReplayedGroups").groups
    assert first["replayed_groups"] == 0 and group.prompt.text == texts[0] and group.epoch == 0
    made.prompts, made.epoch = [Prompt(texts[1])] * 2, 1
    seen = []
    backward = made.backward
    def spied(epoch, part, *rest):
        taken = part.transitions[0]
        replayed = made.rollouts.replay(part, epoch.conditioning)
        new = torch.cat([score.logp for k, _, score in replayed if k == 0]).detach()
        seen.append((part, taken, (new - taken.old.logp).abs().max().item(), (part.advantages[0] != 0).all().item()))
        backward(epoch, part, *rest)
    made.backward = spied
    second = made.run_epoch()
    assert second["replayed_groups"] == 1 and second["replay_age"] == 1
    again = [entry for entry in seen if entry[0].weights is not None]
    assert len(again) == 1 and again[0][3] and again[0][2] > 1e-7  # against the policy that drew it
    assert torch.equal(again[0][1].old.logp, group.part.transitions[0].old.logp)
    assert again[0][1].prompts.unique().tolist() == [2] and second["grad_norm"] > 0


def test_a_batch_without_silent_groups_is_as_it_was_and_old_groups_go():
    made = trainer("text", ["1+2="], age=2, size=3)
    for made.epoch in range(4):
        assert made.run_epoch()["replayed_groups"] == 0
    known = loop.extension(made, "ReplayedGroups").groups
    assert [group.epoch for group in known] == [2, 3]  # at most 2 epochs old in the next one
    made = trainer("text", ["1+2="], more=1.0)
    counts = []
    for made.epoch in range(3):
        counts.append(made.run_epoch()["replayed_groups"])
    assert counts == [0, 1, 1]


def test_samples_that_wait_train_in_a_later_epoch():
    made = trainer("text", ["1+2="], recompose=True, more=1.0, alpha=0.0)
    trained = []
    backward = made.backward
    made.backward = lambda epoch, part, *rest: (
        trained.append((made.epoch, len(part.transitions[0].ids), part.weights)), backward(epoch, part, *rest))
    for made.epoch in range(2):
        made.run_epoch()
    assert [(epoch, rows, old is None) for epoch, rows, old in trained] == [(0, 2, True), (1, 2, True), (1, 2, False)]


@pytest.mark.parametrize("kind, texts", KINDS)
def test_recorded_groups_are_in_the_checkpoint_and_the_next_epoch_is_the_same(kind, texts, tmp_path):
    _, _, [line] = tiny_runs.assert_resumes(lambda: trainer(kind, texts, more=0.5), tmp_path, 1, 1)
    assert line["replayed_groups"] == 1


@pytest.mark.parametrize("learned", [True, False])
def test_a_group_of_a_checkpoint_is_learned_under_its_own_input(learned):
    parts = {"replay": {"type": "GroupReplay"},
             "expansion": {"type": "Expansion", "text": "{prompt}7", "learned": learned}}
    made, other = (tiny_text.trainer(rewards={"short": by_place}, train__prompts=2, parts=parts) for _ in range(2))
    made.prompts = [Prompt("1+2="), Prompt("33+4=")]
    made.run_epoch()
    loop.extension(other, "ReplayedGroups").load_state(*loop.extension(made, "ReplayedGroups").state())
    [group] = loop.extension(other, "ReplayedGroups").groups
    assert group.prompt.text == "1+2=" and group.prompt.shown == ("1+2=7" if learned else "1+2=")
    guided = group.part.transitions[0].old.guided
    assert guided is None if learned else guided.all()


@pytest.mark.parametrize("parts, options, told", [
    ({}, dict(image__sizes=[[16, 16]]), "image.sizes"), ({"replay": {"type": "GroupReplay", "recompose": True}}, {},
                                                         "reads lengths of texts"),
    ({"plan": {"type": "EachStep"}}, {}, "several groups"), ({}, dict(method="diffusion_nft"), "reads no replay"),
    ({"selection": {"type": "ResampleCorrect", "n": 2, "rewards": ["proces"]}}, {},
     "parts.selection.rewards: unknown reward 'proces'"),
    ({"selection": {"type": "ResampleCorrect", "n": 9, "rewards": ["red"]}}, {},
     "n is 9, expected at most the 4 samples")])
def test_what_cannot_be_recorded_or_left_out_is_refused(parts, options, told):
    settings = tiny.config(parts={"replay": {"type": "GroupReplay"}} | parts, **options)
    refused(told, lambda: extensions.check(loop.setup(settings)))


@pytest.mark.parametrize("options", [dict(size=0), dict(age=0), dict(alpha=-1.0), dict(more=-0.1)])
def test_impossible_numbers(options):
    assert "GroupReplay: " in message(GroupReplay, **options, error=ValueError)


#           right, the process
SAMPLES = [(1, 0.9), (1, 0.1), (1, 0.5), (1, 0.7), (0, 0.8), (0, 0.2), (1, 0.3), (0, 0.4)]
REWARDS = torch.tensor([SAMPLES])
WEIGHTS = [1.0, 0.0]


def kept(part, rewards=REWARDS, epoch: int = 0) -> list[int]:
    context = Context(RunState(epoch), rewards=RewardColumns(["right", "process"], weights=WEIGHTS))
    return part.before(rewards, WEIGHTS, context)[0].nonzero().flatten().tolist()


def test_consistent_and_right_samples_stay_in_balance_and_of_the_best_quality():
    assert kept(Consistent(4, ("process",))) == [0, 3, 5, 7]
    assert kept(Consistent(6, ("process",))) == [0, 2, 3, 4, 5, 7]
    # three are wrong: one right sample more than that, and no more.
    assert kept(Consistent(8, ("process",))) == [0, 2, 3, 4, 5, 6, 7]
    found = [kept(ResampleCorrect(4, ("process",)), epoch=epoch) for epoch in range(60)]
    for places in found:
        right = [place for place in places if SAMPLES[place][0]]
        assert len(places) == 4 and right == ([0, 3] if len(right) == 2 else [0, 2, 3])
        assert len(right) == round(4 * 5 / 8)
    counts = [sum(place in places for places in found) for place in (4, 5, 7)]
    assert all(8 <= count for count in counts)  # wrong ones by lot: about 40 of 60 or 20, whatever their quality
    one = torch.tensor([[(1, 0.5)] + [(0, 0.5)] * 7])
    assert 0 in kept(ResampleCorrect(2, ("process",)), one) and len(kept(ResampleCorrect(2, ("process",)), one)) == 2
    alike = torch.tensor([[(0.0, 0.1 * place) for place in range(8)]])
    assert len(kept(ResampleCorrect(4, ("process",)), alike)) == 4
    assert kept(Consistent(4, ("process",)), alike) == [0, 1, 2, 3]


def test_what_is_left_out_is_neither_compared_nor_trained():
    made = tiny.trainer(rewards={"right": tiny.red, "process": tiny.red}, method="flow_grpo", parts={
        "selection": {"type": "Consistent", "n": 2, "rewards": ["process"]},
        "advantage": {"scale": "none", "order": "rewards"}}, reward={"right": 1.0, "process": {"weight": 0.0}})
    assert validate.resolve(made.config, "flow").credit.selection == Consistent(2, ("process",))
    drawn, conditioning, scores = sampling.sample(made, made.prompts[:1])
    given = torch.tensor([[(1.0, 0.2), (1.0, 0.9), (0.0, 0.7), (0.0, 0.1)]])
    [credited] = loop.credit(made, drawn, given, conditioning.prompts)
    assert all(len(taken.parent) == 2 for taken in credited.transitions)
    torch.testing.assert_close(credited.advantages[0], group_relative(torch.tensor([[1.0, 0.0]]), "none")[0])
