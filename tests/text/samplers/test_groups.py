"""Groups of one thought that is left at several places: what they share, what is trained, and what it earns."""

import math

import pytest
import torch

from flowgrpo import methods
from flowgrpo.errors import UserError
from flowgrpo.text.credit import ExitDecay, StepScores, with_gains
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import EarlyExits, Independent, SecondAttempt, joined, thought
from tests.helpers import tiny_text

PART = EarlyExits(exit="=", close="+")


def drawn(part, micro_batch: int = 8, prompts: int = 2, group: int = 4):
    own = tiny_text.policy(max_tokens=9)
    asked = own.encode(["1+2=", "33+4="][:prompts]).rows(torch.arange(prompts).repeat_interleave(group))
    generators = own.generators(range(prompts * group))
    greedy = torch.zeros(prompts * group, dtype=torch.bool)
    return own, asked, part(own, asked, Decoding(), generators, greedy, group, micro_batch)


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
        assert shown == sorted(shown) and 1 <= shown[0] <= shown[-1] <= thought(own, leader[made.mask[first + 3]], "+")
    assert len(made.texts) == 8


def test_what_was_drawn_is_what_a_replay_finds():
    own, asked, [made] = drawn(PART)
    found = own.log_probs(asked, torch.arange(8), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5 and (found.logp[~made.mask] == 0).all()
    assert any((~row[:int(row.nonzero().max())]).any() for row in made.mask)  # with a hole in the midst


def test_the_draws_do_not_depend_on_what_goes_through_the_model_together():
    [one], [other] = (drawn(PART, size)[2] for size in (1, 8))
    assert torch.equal(one.ids * one.mask, other.ids * other.mask) and one.texts == other.texts
    alone = drawn(PART, prompts=1)[2][0]
    assert torch.equal((alone.ids * alone.mask), (one.ids * one.mask)[:4])


def test_in_parallel_every_row_is_for_itself():
    own, asked, made = drawn(Independent(), 3)
    assert [len(each.ids) for each in made] == [3, 3, 2]
    again = own.sample(asked.rows(torch.tensor([5])), Decoding(), own.generators([5]), torch.tensor([False]))
    assert again.texts[0] == made[1].texts[2]


def test_places_are_drawn_evenly_from_the_thought():
    found = EarlyExits().places(4, 4000, 100, torch.Generator().manual_seed(0))
    assert found.bincount().tolist()[0] == 0 and all(abs(count - 1000) < 150 for count in found.bincount()[1:].tolist())
    assert EarlyExits().places(50, 3, 2, torch.Generator()).max() <= 2
    assert EarlyExits().places(0, 2, 5, torch.Generator()).tolist() == [1, 1]


def test_the_thought_ends_before_its_mark_or_its_end():
    own = tiny_text.policy()
    ids = {text: own.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("12+3", "123")}
    assert thought(own, torch.tensor(ids["12+3"]), "+") == 2 and thought(own, torch.tensor(ids["123"]), "+") == 3
    assert thought(own, torch.tensor([*ids["12+3"], own.ends[0]]), "") == 4


def test_rewards_halve_from_right_answer_to_right_answer():
    rewards = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [math.nan, 1.0, 1.0]],
                           dtype=torch.float64)[..., None]
    found = ExitDecay()(torch.cat([rewards, rewards], 2))
    assert found[:3, :, 0].tolist() == [[1, 0, 0.5], [0, 0, 0], [1, 0.5, 0.25]]
    assert found[3, :, 0].isnan().tolist() == [True, False, False] and found[3, 1:, 0].tolist() == [1, 0.5]
    assert torch.equal(found[:3, :, 1], rewards[:3, :, 0])


def test_an_epoch_of_serial_groups():
    trainer = tiny_text.trainer(tiny_text.policy(max_tokens=9), {"short": lambda texts, prompts: [
        float(len(text)) for text in texts]}, method="s_grpo", text__max_tokens=9,
        parts={"draws": {"exit": "=", "close": "+"}})
    assert trainer.run_epoch()["grad_norm"] > 0 and trainer.first_ratio.max_log_ratio <= 1e-5


def test_an_exit_without_room_for_an_answer_is_told_in_a_line():
    with pytest.raises(UserError, match="max_tokens is 9, but the exit"):
        drawn(EarlyExits(exit="12345678"))
    with pytest.raises(UserError, match="a method of causal language models"):
        methods.preset("s_grpo").on("masks")


def test_a_second_attempt_follows_the_first_and_a_text_that_is_not_trained():
    own, asked, pieces = drawn(SecondAttempt(again="=+", share=0.5), micro_batch=3)
    made, again = joined(pieces), own.tokenizer("=+", add_special_tokens=False)["input_ids"]
    alone = own.sample(asked, Decoding(), own.generators(range(8)), torch.zeros(8, dtype=torch.bool))
    for row in range(8):
        first = alone.ids[row, :min(3, thought(own, alone.ids[row][alone.mask[row]], ""))].tolist()  # 3 of 9 - 2 tokens
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
    with pytest.raises(ValueError, match="gain is 1.0 with kind 'blame'"):
        StepScores(kind="blame", gain=1.0)
