"""Groups that are trained again: which are drawn, which take part in an epoch, and by which ratio."""

import math

import pytest
import torch

from flowgrpo.contrib.group_replay import GroupReplay, priority
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods.validate import resolve
from flowgrpo.training import extensions, state
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message


def by_place(outputs, prompts):
    """1 for every other sample of prompts that differ; all samples of the others score the same."""
    return [float(prompt in ("1+2=", "red") and place % 2) for place, prompt in enumerate(prompts)]


def trainer(kind: str, prompts: list[str], **replay):
    made = tiny_text.trainer if kind == "text" else tiny.trainer
    parts = {"replay": {"type": "GroupReplay"} | replay} | (
        {} if kind == "text" else {"plan": {"size": 2}})
    found = made(rewards={"short" if kind == "text" else "red": by_place}, train__prompts=len(prompts), parts=parts)
    found.prompts = [Prompt(text) for text in prompts]
    return found


def test_odds_and_kinds_of_groups_by_hand():
    part = GroupReplay(alpha=2.0, certain=math.log(2))
    assert part.odds([1.0, 2.0, 0.5], [0.0, -1.0, 0.0]).tolist() == pytest.approx([4 / 13, 8 / 13, 1 / 13])
    drawn = [GroupReplay(alpha=3.0).chosen([0.1, 1.0, 0.1, 0.1], [0.0] * 4, 1, [0, number])[0] for number in range(40)]
    assert drawn.count(1) > 35 and sorted(part.chosen([1.0, 2.0], [0.0, 0.0], 9, [0])) == [0, 1]
    assert part.chosen([], [], 3, [0]) == []
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    lengths = torch.tensor([3, 9, 5, 2, 8, 8, 1])
    assert priority(advantages, lengths).tolist() == [True, False, True, False, True, True, False]
    first = priority(advantages, lengths)
    assert torch.corrcoef(torch.stack([advantages[first], lengths[first].float()]))[0, 1] < 0
    assert not priority(torch.zeros(3), lengths[:3]).any()


@pytest.mark.parametrize("kind, texts", [("text", ["1+2=", "33+4="]), ("pictures", ["red", "blue"])])
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


@pytest.mark.parametrize("kind, texts", [("text", ["1+2=", "33+4="]), ("pictures", ["red", "blue"])])
def test_recorded_groups_are_in_the_checkpoint_and_the_next_epoch_is_the_same(kind, texts, tmp_path):
    made, other = (trainer(kind, texts, more=0.5) for _ in range(2))
    made.run_epoch()
    made.epoch = 1
    made.progress.saved_counters = state.counters(made)
    state.save(made, tmp_path)
    state.restore(other, tmp_path / "checkpoints" / "epoch-00001")
    other.epoch = 1
    one, two = made.run_epoch(), other.run_epoch()
    assert one["replayed_groups"] == 1 and one["grad_norm"] == two["grad_norm"] and one["loss"] == two["loss"]
    for key, tensor in made.policy.weights.snapshot().items():
        assert torch.equal(tensor, other.policy.weights.snapshot()[key])


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


@pytest.mark.parametrize("options, told", [
    (dict(parts={"replay": {"type": "GroupReplay"}}, image__sizes=[[16, 16]]), "image.sizes"),
    (dict(parts={"replay": {"type": "GroupReplay", "recompose": True}}), "reads lengths of texts"),
    (dict(parts={"replay": {"type": "GroupReplay"}, "plan": {"type": "EachStep"}}), "several groups")])
def test_what_cannot_be_recorded_is_refused(options, told):
    settings = tiny.config(**options)
    with pytest.raises(UserError, match=told):
        extensions.check(loop.setup(settings))


def test_a_target_that_cannot_be_recorded_reads_no_replay():
    with pytest.raises(UserError, match="reads no replay"):
        resolve(tiny.config(method="diffusion_nft", parts={"replay": {"type": "GroupReplay"}}))


@pytest.mark.parametrize("options", [dict(size=0), dict(age=0), dict(alpha=-1.0), dict(more=-0.1)])
def test_impossible_numbers(options):
    assert "GroupReplay: " in message(GroupReplay, **options, error=ValueError)
