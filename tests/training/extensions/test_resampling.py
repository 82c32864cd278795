"""Sampling under guidance that the loss does not read: texts, guidance scales, the ratio and who sees what."""

import math

import torch

from flowgrpo.curriculum.resampling import Expansion
from flowgrpo.data.prompts import Guidance, Prompt
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training.extensions.credit import drift
from tests.helpers import loop, tiny, tiny_text

GUIDE = {"redraw": {"type": "Hints", "text": "{prompt}{hint}", "learned": False}}
LOUD = {"expansion": {"type": "Expansion", "scale": 3.0}}


def test_prompts_as_they_are_shown_and_learned():
    part = Expansion("{prompt}, sharp", key="rich")
    own, plain = Prompt("a cat", metadata={"rich": "a grey cat"}), Prompt("a dog")
    hinted = Prompt("x", guided=Guidance("x y", level=1.0))
    first, second, third = part([own, plain, hinted])
    assert [each.shown for each in (first, second, third)] == ["a grey cat", "a dog, sharp", "x y"]
    assert [each.text for each in (first, second, third)] == ["a cat", "a dog", "x"]
    assert first.learned == own and first.key == own.key and third.learned is hinted and third.key == "x y"
    kept = Expansion(scale=2.0, learned=True)([plain])[0]
    assert kept.learned is kept and kept.guided == Guidance("a dog", 2.0)


def guided_texts(**options):
    """A trainer after the sampling of an epoch in which the first prompt fails and gets a hint: (trainer,
    epoch)."""
    def reward(texts, prompts, metadata):
        return [float(len(text)) if prompt == "7+7=" else 0.0 for text, prompt in zip(texts, prompts)]
    trainer = tiny_text.trainer(rewards={"short": reward}, train__prompts=2, train__epochs=1,
                                **{"parts": GUIDE} | options)
    tiny_text.stir(trainer.policy)
    trainer.prompts = [Prompt("2+2=", metadata={"hints": ["5"]}), Prompt("7+7=", metadata={"hints": ["8"]})]
    return trainer, loop.draw(trainer)


def test_the_first_ratio_of_a_hinted_text_is_that_of_both_prompts():
    trainer, epoch = guided_texts()
    parts, learned = epoch.parts, epoch.conditioning
    assert sorted(learned.prompts) == ["2+2=", "2+2=", "7+7="]
    [taken] = parts[-1].transitions
    assert [bool(part.transitions[0].old.guided is not None) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert taken.old.guided.all()
    plain, hinted = (trainer.policy.log_probs(trainer.policy.encode([text]), torch.zeros(4, dtype=torch.int64),
                                              taken.ids, taken.old.mask, Decoding()).logp for text in ("2+2=", "2+2=5"))
    [new] = [score for _, _, score in trainer.rollouts.replay(parts[-1], learned)]
    torch.testing.assert_close(taken.old.logp, hinted.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(new.logp, plain, rtol=0, atol=1e-5)
    assert (new.logp - taken.old.logp).abs().max() > 1e-3
    credited = loop.credit(trainer, parts, torch.rand(3, 4, 1), ["2+2=", "7+7=", "2+2=5"])
    metrics = loop.learn(trainer, credited, learned, epoch.own, epoch.sampled)
    assert trainer.first_ratio.max_log_ratio <= 1e-5 < 1e-3 < metrics["log_ratio_max"]


def test_an_expanded_prompt_of_images_is_sampled_and_the_plain_one_is_learned():
    trainer = tiny.trainer(parts={"expansion": {"type": "Expansion", "text": "{prompt}, old, old"}})
    seen = []
    judge = trainer.scoring.functions["red"]
    trainer.scoring.functions["red"] = lambda pictures, prompts: seen.append([*prompts]) or judge(pictures, prompts)
    epoch = loop.draw(trainer)
    parts, learned, rich = epoch.parts, epoch.conditioning, epoch.sampled
    assert not any("old" in prompt for prompts in (*seen, learned.prompts) for prompt in prompts)
    assert all(prompt.endswith(", old, old") for prompt in rich.prompts)
    for conditioning, low, high in ((rich, 0.0, 1e-6), (learned, 1e-6, math.inf)):
        ratios = [(new.logp - part.transitions[k].old.logp[rows]).abs().max().item() for part in parts
                  for k, rows, new in trainer.rollouts.replay(part, conditioning)]
        assert low <= max(ratios) <= high
    assert trainer.run_epoch()["grad_norm"] > 0 and trainer.first_ratio.max_log_ratio <= 1e-6


def test_images_are_sampled_at_one_scale_and_learned_at_another():
    trainer, loud = tiny.trainer(parts=LOUD), tiny.trainer(train__guidance=3.0)
    epoch = loop.draw(trainer)
    [part, *_], learned, [other, *_] = epoch.parts, epoch.conditioning, loop.draw(loud).parts
    assert torch.equal(part.finals[0], other.finals[0])
    new, there = (next(iter(each.rollouts.replay(part, learned)))[2].logp for each in (trainer, loud))
    assert (there - part.transitions[0].old.logp[:len(there)]).abs().max() <= 1e-6
    assert (new - there).abs().max() > 1e-6
    kept = tiny.trainer(parts={"expansion": LOUD["expansion"] | {"learned": True}})
    again = loop.draw(kept)
    [same, *_], both = again.parts, again.conditioning
    assert both.scales == [3.0, 3.0] and same.transitions[0].old.guided is None
    torch.testing.assert_close(next(iter(kept.rollouts.replay(same, both)))[2].logp, there, rtol=0, atol=1e-6)


def test_groups_that_fail_are_sampled_again_at_the_larger_scale():
    trainer = tiny.trainer(rewards={"red": lambda pictures, prompts: [0.0] * len(prompts)},
                           parts={"redraw": {"type": "Hints", "scale": 3.0, "learned": False}})
    epoch = loop.draw(trainer)
    drawn = epoch.groups
    assert drawn.turn == 2 and drawn.standing() == [2, 3] and epoch.conditioning.scales == []
    assert epoch.sampled.scales == [1.0, 1.0, 3.0, 3.0]
    assert [prompt.text for prompt in drawn.prompts[2:]] == [prompt.text for prompt in drawn.prompts[:2]]


def test_noised_finals_of_an_expansion_are_scored_under_the_prompt_itself():
    trainer = tiny.trainer(method="diffusion_nft", parts=LOUD)
    epoch = loop.draw(trainer)
    [part, *_], learned = epoch.parts, epoch.conditioning
    ratios = [(new.logp - part.transitions[k].old.logp[rows]).abs().max().item()
              for k, rows, new in trainer.rollouts.replay(part, learned)]
    assert max(ratios) <= 1e-6 and epoch.sampled is None
    assert part.transitions[0].old.guided is None


def test_the_drift_of_the_policy_is_that_of_its_own_samples_and_replayed_groups_keep_their_mark():
    trainer, epoch = guided_texts()
    parts, learned = epoch.parts, epoch.conditioning
    assert drift(parts, lambda part: trainer.rollouts.replay(part, learned), trainer.processes) <= 1e-9
    assert drift(parts[-1:], lambda part: trainer.rollouts.replay(part, learned), trainer.processes) == 0
    [taken] = epoch.parts[-1].transitions
    assert taken.select(torch.tensor([True, False, True, True])).old.guided.tolist() == [True] * 3
