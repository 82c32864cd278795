"""Self-teachers: what they read in addition, and a KL to them; what counts in a KL by the reward."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.references import SelfTeacher
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling
from flowgrpo.types import Scored
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.tables import close, f64

SIBLING = "{prompt}{right}="
TEACH = {"reference": {"type": "SelfTeacher", "template": SIBLING}, "kl": {"weight": 1.0, "estimator": "k2"},
         "surrogate": {"type": "KLOnly"}}


def test_a_teacher_reads_the_best_right_sibling_and_never_the_sample_itself():
    texts, written = ["q"] * 4, ["a", "b", "c", "c"]
    teacher = SelfTeacher(template=SIBLING)
    assert teacher.prompts(texts, written, [1.0, 0.0, 0.7, 0.2], [None] * 4) == ["qc=", "qa=", "qa=", "qa="]
    assert teacher.prompts(texts, written, [1.0, 0.0, 0.0, 0.2], [None] * 4) == ["q", "qa=", "qa=", "qa="]
    assert teacher.prompts(texts, written, [0.4] * 4, [None] * 4) == ["q"] * 4


def test_a_contrast_reads_a_right_sibling_and_the_most_common_wrong_one():
    teacher = SelfTeacher("contrast", "{prompt}|{right}|{wrong}")
    found = teacher.prompts(["q"] * 5, ["a", "b", "c", "c", "d"], [1, 0, 0, 0, 1], [None] * 5)
    assert found == ["q|d|c", "q|a|c", "q|a|c", "q|a|c", "q|a|c"]
    assert teacher.prompts(["q"] * 2, ["a", "b"], [1, 1], [None] * 2) == ["q", "q"]


def test_answers_and_templates():
    assert SelfTeacher("answer", "{prompt}:{answer}").prompts(["q"] * 2, ["a", "b"], [0, 0], ["7", None]) == [
        "q:7", "q"]
    assert SelfTeacher("none", "{prompt}, sharp").prompts(["q"], [""], [0], [None]) == ["q, sharp"]
    with pytest.raises(ValueError, match="template has prompt, right, expected answer, prompt for feedback answer"):
        SelfTeacher("answer", SIBLING)
    with pytest.raises(ValueError, match="feedback is 'hint', expected one of sibling, contrast, answer, none"):
        SelfTeacher("hint")


def first_right(texts, prompts):
    """1 for the first completion of each four."""
    return [float(place % 4 == 0) for place in range(len(texts))]


def test_the_kl_is_to_the_present_policy_under_the_richer_prompt():
    trainer = tiny_text.trainer(rewards={"short": first_right}, parts=TEACH)
    tiny_text.stir(trainer.policy)
    batch = trainer.prompts[:2]
    parts, asked, scores = sampling.sample(trainer, batch)
    parts = [part for part in loop.credit(trainer, parts, scores, [p.key for p in batch]) if part]
    trainer.kl_reference.start_epoch(loop.epoch(trainer, parts, asked, batch), trainer.rollouts, 0, 2)
    for part in parts:
        [taken], [rewards] = part.transitions, part.rewards
        assert rewards.tolist() == [1, 0, 0, 0]
        [found] = loop.reference(trainer, part, asked)
        text = trainer.policy.written(taken.ids, taken.old.mask)[0]
        prompt = batch[int(taken.prompts[0])].text
        rich = trainer.policy.encode([prompt, f"{prompt}{text}="])
        expected = trainer.policy.log_probs(rich, torch.tensor([0, 1, 1, 1]), taken.ids, taken.old.mask, Decoding())
        torch.testing.assert_close(found.logp, expected.logp.detach(), rtol=0, atol=1e-4)
        assert not found.logp.requires_grad
        [new] = [score for _, _, score in trainer.rollouts.replay(part, asked)]
        kl = trainer.kl_reference.penalty(new, found, rewards)
        assert kl[0].abs().max() < 1e-6 < 1e-4 < kl[1:].abs().max()  # without a right sibling there is no feedback


def test_feedback_without_information_changes_nothing():
    trainer = tiny_text.trainer(rewards={"short": lambda texts, prompts: [0.0] * len(texts)}, parts=TEACH)
    tiny_text.stir(trainer.policy)
    metrics = trainer.run_epoch()
    assert metrics["kl"] == pytest.approx(0, abs=1e-8) and metrics["grad_norm"] < 1e-5


def test_a_richer_prompt_teaches_the_plain_one_of_images():
    parts = {"reference": {"type": "SelfTeacher", "feedback": "none", "template": "{prompt}, old, old"},
             "kl": {"weight": 1.0}, "surrogate": {"type": "KLOnly"}}
    trainer = tiny.trainer(parts=parts)
    assert trainer.run_epoch()["kl"] > 1e-6
    same = tiny.trainer(parts=parts | {"reference": parts["reference"] | {"template": "{prompt}"}})
    assert same.run_epoch()["kl"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(UserError, match="feedback is sibling, completions of the group, and images have none"):
        resolve(tiny.config(parts={"reference": {"type": "SelfTeacher"}, "kl": {"weight": 1.0}}))


def test_only_samples_of_smaller_rewards_are_held_where_that_is_set():
    trainer = tiny_text.trainer(parts={"reference": {"type": "Teacher", "only_below": 0.5}, "kl": {"weight": 2.0}})
    trainer.kl_reference.start_epoch(loop.epoch(trainer), trainer.rollouts, 0, 2)
    mask = torch.ones(3, 2).bool()
    new, other = (Scored(f64(logp), mask) for logp in ([[-1, -2], [-1, -1], [-3, -1]], [[-2, -2], [-2, -3], [-1, -1]]))
    plain = trainer.kl_reference.kl(new, other)
    close(trainer.kl_reference.penalty(new, other, torch.tensor([1.0, 0.4, 0.5])), [[0, 0], plain[1].tolist(), [0, 0]])


def test_prompts_of_later_turns_follow_those_of_the_first_and_a_repeated_turn_is_one():
    trainer = tiny_text.trainer(parts=TEACH)
    teacher, sample, drawn = trainer.kl_reference, trainer.rollouts.sample, sampling.new_epoch(trainer)
    a, b, c = trainer.prompts[:3]
    sampling.draw_groups(trainer, drawn, [a])
    failures = iter([torch.OutOfMemoryError("no room")])
    def failing(*given):
        for error in failures:
            raise error
        return sample(*given)
    trainer.rollouts.sample = failing
    sampling.draw_groups(trainer, drawn, [c])
    assert trainer.geometry.micro_batch < trainer.config.train.micro_batch and drawn.groups.turn == 2
    teacher.start_epoch(drawn, trainer.rollouts, 0, 2)
    assert teacher.prompts == [a, c]
    teacher.start_epoch(loop.epoch(trainer, own=[b]), trainer.rollouts, 1, 2)
    assert teacher.prompts == [b]


def test_the_kl_alone_trains_where_the_surrogate_is_none():
    assert preset("sdpo") == resolve(tiny_text.config(method="sdpo"), "tokens")
    with pytest.raises(UserError, match="KLOnly trains nothing beside a KL of weight 0"):
        resolve(tiny_text.config(method="gspo", parts={"surrogate": {"type": "KLOnly"}}), "tokens")
