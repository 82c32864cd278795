"""Pairing of decisions with their credit where some rows have no decision that counts."""

from dataclasses import replace

import pytest
import torch

import flowgrpo
from flowgrpo.config import load
from flowgrpo.methods import presets
from flowgrpo.samplers.growth import explore
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.training import sampling
from flowgrpo.types import Completions, Scored, Segmented, Traces
from tests.helpers import loop, tiny, tiny_text
from tests.samplers.test_rollout import BINARY, exploration
from tests.test_recipes import FOLDER

TEXTS = presets.presets_for("tokens")
PARTS = tiny_text.PARTS | {"chord": {"data": {"source": {"type": "PassRate"}}}}


def worth(completions, prompts):
    """A number of its own for nearly every text."""
    return [sum((i + 1) * ord(letter) for i, letter in enumerate(text)) % 1009 / 1009 for text in completions]


def masked(mask: list[list[int]]) -> Completions:
    """Completions with the ids 0, 1, 2, ... of which `mask` counts."""
    counts = torch.tensor(mask).bool()
    ids = torch.arange(len(mask))[:, None].expand(counts.shape)
    return Completions(ids, torch.zeros(len(mask), dtype=torch.int64), Scored(-1.0 * counts, counts))


def part_of(taken, count: int) -> Part:
    return Part(range(1), torch.zeros(count, dtype=torch.int64), None, (taken,), ())


def test_a_row_without_a_decision_takes_its_advantage_with_it():
    taken = masked([[0, 0, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    whole = [torch.tensor([10.0, 11, 12, 13])], [torch.ones(4).bool()], [torch.tensor([0.0, 1, 2, 3])]
    found = part_of(taken, 4).with_advantages(*whole)
    assert found.transitions[0].ids[:, 0].tolist() == [1, 2, 3]
    assert found.advantages[0].tolist() == [11, 12, 13] and found.rewards[0].tolist() == [1, 2, 3]
    fewer = part_of(taken, 4).with_advantages(whole[0], [torch.tensor([True, True, False, True])])
    assert fewer.transitions[0].ids[:, 0].tolist() == [1, 3] and fewer.advantages[0].tolist() == [11, 13]
    assert part_of(taken, 4).with_advantages(whole[0], [torch.tensor([True, False, False, False])]) is None


def test_an_advantage_per_token_goes_with_its_row():
    taken = masked([[1, 1], [0, 0], [1, 0]])
    each = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    assert part_of(taken, 3).with_advantages([each], [torch.ones(3).bool()]).advantages[0].tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize("kind, wrong", [
    *((Part, each) for each in (
        {"advantages": (torch.zeros(3),)}, {"rewards": (torch.zeros(5),)}, {"measured": {"penalty": torch.zeros(3)}},
        {"finals": (torch.zeros(3, 2),)}, {"advantages": (torch.zeros(4), torch.zeros(4))})),
    *((Completions, each) for each in (
        {"prompts": torch.zeros(2, dtype=torch.int64)}, {"importance": torch.ones(2, 1)},
        {"expert": torch.ones(3).bool()}))])
def test_records_of_unequal_length_cannot_be_made(kind, wrong):
    taken = masked([[1]] * 4)
    with pytest.raises((AssertionError, ValueError)):
        replace(taken if kind is Completions else part_of(taken, 4), **wrong)


@pytest.mark.parametrize("kind, more", [
    (Completions, {}), (Traces, {"steps": torch.arange(6).view(3, 2)}),
    (Segmented, {"segments": torch.arange(6).view(3, 2), "values": torch.arange(3.0)[:, None]})])
def test_rows_keep_every_field(kind, more):
    taken = kind(**vars(masked([[1, 1], [1, 0], [1, 1]])) | more | {
        "importance": torch.arange(6.0).view(3, 2), "expert": torch.tensor([False, True, False])})
    found = taken.select(torch.tensor([False, True, True]))
    for name, value in vars(taken).items():
        got = getattr(found, name)
        if value is None:
            assert got is None, name
            continue
        same = torch.equal(got.logp, value.logp[1:]) if name == "old" else torch.equal(got, value[1:])
        assert same, name


@pytest.mark.parametrize("method", TEXTS)
def test_a_masked_completion_moves_no_other_ones_credit(method):
    trainer = tiny_text.trainer(tiny_text.policy(truncated="mask"), {"short": worth}, method=method,
                                parts=PARTS.get(method, {}), train__group=4, text__truncated="mask", train__prompts=4)
    batch = trainer.prompts[:4]
    parts, _, scores = sampling.sample(trainer, batch)
    drawn = [part.transitions[0] for part in parts]
    assert any(0 < taken.counts.sum() < len(taken.ids) for taken in drawn)
    prompts, ids = torch.cat([taken.prompts for taken in drawn]), torch.cat([taken.ids for taken in drawn])
    for part in loop.credit(trainer, parts, scores, [prompt.key for prompt in batch]):
        if part is None:
            continue
        [taken], [rewards] = part.transitions, part.rewards
        assert taken.counts.all() and len(part.advantages[0]) == len(taken.ids)
        for prompt, row, reward in zip(taken.prompts, taken.ids, rewards, strict=True):
            same = (prompts == prompt) & (ids == row).all(1)
            assert reward in scores[..., 0].flatten()[same]


def test_grpos_advantages_are_those_of_the_completions_that_are_left():
    trainer = tiny_text.trainer(tiny_text.policy(truncated="mask"), {"short": worth}, method="dr_grpo", train__group=6,
                                text__truncated="mask")
    batch = trainer.prompts[:2]
    parts, _, scores = sampling.sample(trainer, batch)
    counts = torch.cat([part.transitions[0].counts for part in parts])
    expected = (scores[..., 0] - scores[..., 0].mean(1, keepdim=True)).flatten()[counts]
    found = loop.credit(trainer, parts, scores, [prompt.key for prompt in batch])
    assert 0 < counts.sum() < len(counts)
    torch.testing.assert_close(torch.cat([part.advantages[0] for part in found if part is not None]), expected)


@pytest.mark.parametrize("plan", [exploration(), exploration(roots=4), exploration(BINARY)],
                         ids=["shared", "independent", "tree"])
def test_a_transition_of_images_that_is_left_out_takes_its_advantage_with_it(plan):
    policy = tiny.policy()
    [part, *_] = explore(policy, policy.encode(["red", "blue"]), [plan], 24, seeder(0, 0))
    generator = torch.Generator().manual_seed(3)
    keep = [torch.rand(len(taken.parent), generator=generator) < 0.6 for taken in part.transitions]
    advantages = [taken.x_next.flatten(1).double().sum(1) for taken in part.transitions]  # of its own state
    found = part.with_advantages(advantages, keep)
    assert [len(each) for each in found.advantages] == [int(at.sum()) for at in keep if at.any()]
    assert any(not at.all() for at in keep)
    for taken, advantage in zip(found.transitions, found.advantages, strict=True):
        torch.testing.assert_close(advantage, taken.x_next.flatten(1).double().sum(1))


def test_the_recipe_of_qwen3_masks_and_runs(tmp_path):
    """Method, text settings and batch sizes of qwen3_0_6b, on the text starter with completions that are cut."""
    recipe = load(FOLDER / "qwen3_0_6b.yaml")
    assert recipe.text.truncated == "mask" and recipe.train.micro_batch < recipe.train.group * recipe.train.prompts
    summary = flowgrpo.align(
        "starter_text", rewards="numeric_match", prompts="starter_text", method=recipe.method, output=str(tmp_path),
        name="masked", device="cpu", precision="fp32", tracker="none",
        text={"truncated": recipe.text.truncated, "max_tokens": 9}, adapter={"rank": recipe.adapter.rank},
        train={"epochs": 2, "prompts": 8, "group": recipe.train.group, "micro_batch": recipe.train.micro_batch,
               "lr": recipe.train.lr, "clip_grad": recipe.train.clip_grad}, eval={"prompts": 8, "grid": 4})
    assert summary["updates"] == 2
