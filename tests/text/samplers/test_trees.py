"""Groups of completions that share beginnings: trees, lookahead, and thoughts that are left at several places."""

import math

import pytest
import torch

from flowgrpo import methods
from flowgrpo.methods import validate
from flowgrpo.text.credit import ExitDecay, with_gains
from flowgrpo.text.samplers import groups
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.lookahead import BranchingLookahead, edit_distance
from tests.helpers import tiny_text
from tests.helpers.refusals import message, refused


def drawn(part, micro_batch: int = 8, prompts: int = 2, group: int = 4, kernel=Decoding(), tokens: int = 9):
    own = tiny_text.policy(max_tokens=tokens)
    asked = own.encode(["1+2=", "33+4="][:prompts]).rows(torch.arange(prompts).repeat_interleave(group))
    greedy = torch.zeros(prompts * group, dtype=torch.bool)
    return own, asked, part(own, asked, kernel, own.generators(range(prompts * group)), greedy, group, micro_batch)


def test_groups_are_trees_that_split_what_goes_on():
    _, _, [made] = drawn(groups.Tree((2, 2), 2), group=8)
    kept = made.ids * made.mask
    for first in range(0, 16, 4):
        own = kept[first:first + 4]
        assert (own[:, :2] == own[0, :2]).all()  # a root
        assert torch.equal(own[0, :4], own[1, :4]) and torch.equal(own[2, :4], own[3, :4])
        assert torch.equal(made.logp[first, :2], made.logp[first + 3, :2])
    assert len({tuple(row.tolist()) for row in kept[:8]}) > 3 and not torch.equal(kept[0, :2], kept[4, :2])
    _, _, [made] = drawn(groups.Tree((4,), 9))
    assert all(len({tuple(row.tolist()) for row in (made.ids * made.mask)[at:at + 4]}) == 1 for at in (0, 4))
    refused("draws is Tree with 4 leaves", validate.resolve, tiny_text.config(method="spo_tree", train__group=6),
            "tokens")
    refused("Tree: children are", validate.resolve,
            tiny_text.config(method="spo_tree", parts={"draws": {"children": []}}), "tokens")


@pytest.mark.fast
def test_trees_and_branches_are_what_a_replay_finds():
    own, asked, [made] = drawn(groups.Tree((2, 2), 1), 16, group=8)
    found = own.log_probs(asked, torch.arange(16), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5
    [small] = drawn(groups.Tree((2, 2), 1), 3, group=8)[2]
    assert torch.equal(small.ids * small.mask, made.ids * made.mask) and small.texts == made.texts
    [alone] = drawn(groups.Tree((2, 2), 1), 16, prompts=1, group=8)[2]
    assert torch.equal(alone.ids * alone.mask, (made.ids * made.mask)[:8])
    own, asked, made = sample_groups(WAVERING)
    found = own.log_probs(asked, torch.arange(8), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5
    assert rows(sample_groups(WAVERING, 1)[2]) == rows(made)
    assert rows(sample_groups(WAVERING, 8, prompts=1)[2]) == rows(made)[:4]
    plain = own.sample(asked, Decoding(), own.generators(range(8)), torch.zeros(8, dtype=torch.bool))
    assert rows(made) != rows(plain) and rows(made)[0] == rows(plain)[0]


WAVERING = BranchingLookahead(likely=0.05, gap=0.5, ahead=4, apart=0.5)


def sample_groups(part, *sizes, **options):
    own, asked, sampled = drawn(part, *sizes, **options, tokens=8)
    return own, asked, sampled[0]


def rows(made) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(made.ids, made.mask)]


@pytest.mark.parametrize("one, other, distance", [
    ([], [], 0), ([1, 2], [1, 2], 0), ([1, 2, 3], [], 3), ([1, 2, 3], [2, 3], 1), ([1, 2, 3], [1, 9, 3], 1),
    ([11, 9, 20, 20, 5, 14], [19, 9, 20, 20, 9, 14, 7], 3)])
def test_edit_distances_by_hand(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


def test_the_likeliest_other_token():
    own, asked, made = sample_groups(BranchingLookahead(share=0.0))
    tokens, logp, likeliest = groups.alternatives(own, asked, made.ids, made.mask, Decoding(0.7))
    inputs = torch.cat([asked.ids[1], made.ids[1]])
    with torch.no_grad():
        whole = (own.model(inputs[None]).logits[0] / 0.7).log_softmax(-1)[len(asked.ids[1]) - 1:]
    for place in made.mask[1].nonzero().flatten().tolist():
        best = whole[place].clone()
        assert likeliest[1, place].item() == pytest.approx(best.max().item(), abs=1e-5)
        best[made.ids[1, place]] = -torch.inf
        assert tokens[1, place] == best.argmax() and logp[1, place].item() == pytest.approx(best.max().item(), abs=1e-5)
    assert (logp[~made.mask] == -torch.inf).all() and (tokens != made.ids)[made.mask].all()


def test_what_stays_goes_apart():
    _, _, made = sample_groups(WAVERING)
    for first in (0, 4):
        group = rows(made)[first:first + 4]
        for number, own in enumerate(group[1:], 1):
            shared = [next((at for at, (a, b) in enumerate(zip(own, other)) if a != b), min(len(own), len(other)))
                      for other in group[:number]]
            place = max(shared)  # where it left the one that it is nearest to
            one, other = own[place:place + 4], group[shared.index(place)][place:place + 4]
            assert edit_distance(one, other) >= 0.5 * max(len(one), len(other))


def test_sure_models_and_impossible_branches():
    _, _, made = sample_groups(WAVERING, kernel=Decoding(1e-4))
    assert all(len(set(map(tuple, rows(made)[first:first + 4]))) == 1 for first in (0, 4))
    _, _, alone = sample_groups(BranchingLookahead(likely=1.0))
    own, asked, none = sample_groups(BranchingLookahead(share=0.0))
    plain = own.sample(asked, Decoding(), own.generators(range(8)), torch.zeros(8, dtype=torch.bool))
    assert rows(alone) == rows(none) == rows(plain)


PART = groups.EarlyExits(exit="=", close="+")


def test_a_group_is_one_thought_left_at_ever_later_places():
    own, _, [made] = drawn(PART)
    [sign] = own.tokenizer("=", add_special_tokens=False)["input_ids"]
    for first in (0, 4):
        leader, shown = made.ids[first + 3], []
        for row in range(first, first + 3):
            forced = (made.ids[row] == sign) & ~made.mask[row]
            [place] = [at for at in forced.nonzero().flatten().tolist() if made.mask[row, :at].all()][:1]
            assert torch.equal(made.ids[row, :place], leader[:place]) and made.ids[row, place] == sign
            assert torch.equal(made.logp[row, :place], made.logp[first + 3, :place])
            assert made.logp[row, place] == 0 and made.mask[row, place + 1]
            shown.append(place)
        thought = groups.count_thought_tokens(own, leader[made.mask[first + 3]], "+")
        assert shown == sorted(shown) and 1 <= shown[0] <= shown[-1] <= thought
    assert len(made.texts) == 8


@pytest.mark.fast
def test_replays_find_what_was_drawn_alone():
    own, asked, [made] = drawn(PART)
    found = own.log_probs(asked, torch.arange(8), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5 and (found.logp[~made.mask] == 0).all()
    assert any((~row[:int(row.nonzero().max())]).any() for row in made.mask)  # with a hole in the midst
    [one], [other] = (drawn(PART, size)[2] for size in (1, 8))
    assert torch.equal(one.ids * one.mask, other.ids * other.mask) and one.texts == other.texts
    alone = drawn(PART, prompts=1)[2][0]
    assert torch.equal((alone.ids * alone.mask), (one.ids * one.mask)[:4])


def test_places_of_a_thought():
    own, asked, made = drawn(groups.Independent(), 3)
    assert [len(each.ids) for each in made] == [3, 3, 2]
    again = own.sample(asked.rows(torch.tensor([5])), Decoding(), own.generators([5]), torch.tensor([False]))
    assert again.texts[0] == made[1].texts[2]
    found = groups.EarlyExits().places(4, 4000, 100, torch.Generator().manual_seed(0))
    assert found.bincount().tolist()[0] == 0 and all(abs(count - 1000) < 150 for count in found.bincount()[1:].tolist())
    assert groups.EarlyExits().places(50, 3, 2, torch.Generator()).max() <= 2
    assert groups.EarlyExits().places(0, 2, 5, torch.Generator()).tolist() == [1, 1]
    own = tiny_text.policy()
    ids = {text: own.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("12+3", "123")}
    assert groups.count_thought_tokens(own, torch.tensor(ids["12+3"]), "+") == 2
    assert groups.count_thought_tokens(own, torch.tensor(ids["123"]), "+") == 3
    assert groups.count_thought_tokens(own, torch.tensor([*ids["12+3"], own.ends[0]]), "") == 4


@pytest.mark.fast
def test_serial_groups_halve_rewards():
    rewards = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [math.nan, 1.0, 1.0]],
                           dtype=torch.float64)[..., None]
    found = ExitDecay()(torch.cat([rewards, rewards], 2))
    assert found[:3, :, 0].tolist() == [[1, 0, 0.5], [0, 0, 0], [1, 0.5, 0.25]]
    assert found[3, :, 0].isnan().tolist() == [True, False, False] and found[3, 1:, 0].tolist() == [1, 0.5]
    assert torch.equal(found[:3, :, 1], rewards[:3, :, 0])
    trainer = tiny_text.trainer(tiny_text.policy(max_tokens=9), {"short": lambda texts, prompts: [
        float(len(text)) for text in texts]}, method="s_grpo", text__max_tokens=9,
        parts={"draws": {"exit": "=", "close": "+"}})
    assert trainer.run_epoch()["grad_norm"] > 0 and trainer.first_ratio.max_log_ratio <= 1e-5
    assert "max_tokens is 9, but the exit" in message(lambda: drawn(groups.EarlyExits(exit="12345678")))
    assert "a method of causal language models" in message(lambda: methods.preset("s_grpo").on("masks"))


def test_a_second_attempt_follows_the_first_and_a_text_that_is_not_trained():
    own, asked, pieces = drawn(groups.SecondAttempt(again="=+", share=0.5), micro_batch=3)
    made, again = groups.concatenate(pieces), own.tokenizer("=+", add_special_tokens=False)["input_ids"]
    alone = own.sample(asked, Decoding(), own.generators(range(8)), torch.zeros(8, dtype=torch.bool))
    for row in range(8):
        thought = groups.count_thought_tokens(own, alone.ids[row][alone.mask[row]], "")
        first = alone.ids[row, :min(3, thought)].tolist()  # 3 of 9 - 2 tokens
        assert made.ids[row, :len(first) + 2].tolist() == first + again
        assert made.mask[row, :len(first) + 3].tolist() == [True] * len(first) + [False] * 2 + [True]
        torch.testing.assert_close(made.logp[row, :len(first)], alone.logp[row, :len(first)], atol=1e-5, rtol=0)
        assert "=+" in made.texts[row]
    found = own.log_probs(asked, torch.arange(8), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5 and len({*made.texts}) > 4


def test_a_gain_by_hand():
    """Right then wrong is -2, wrong then right 3, alpha 2; no change adds nothing, and neither does a missing score."""
    nan = math.nan
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [nan, 1.0], [1.0, nan]])
    expected = torch.tensor([[1.0, -2.0], [0.0, 3.0], [1.0, 1.0], [nan, 1.0], [1.0, nan]])
    torch.testing.assert_close(with_gains(scores, 2.0), expected, equal_nan=True)
    assert with_gains(scores, 0.0) is scores
