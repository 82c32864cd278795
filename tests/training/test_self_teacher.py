"""Self-teachers and self-correction: what they read in addition, a KL to them, and what counts in a KL."""

import pytest
import torch

from flowgrpo.advantages.group import group_relative
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.references import SelfTeacher
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.types import Scored
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.tables import close, f64

SIBLING = "{prompt}{right}="
TEACH = {"reference": {"type": "SelfTeacher", "template": SIBLING}, "kl": {"weight": 1.0, "estimator": "k2"},
         "surrogate": {"type": "KLOnly"}}


def test_a_teacher_reads_a_right_sibling_never_the_sample_itself_and_the_most_common_wrong_one():
    texts, written = ["q"] * 4, ["a", "b", "c", "c"]
    teacher = SelfTeacher(template=SIBLING)
    assert teacher.prompts(texts, written, [1.0, 0.0, 0.7, 0.2], [None] * 4) == ["qc=", "qa=", "qa=", "qa="]
    assert teacher.prompts(texts, written, [1.0, 0.0, 0.0, 0.2], [None] * 4) == ["q", "qa=", "qa=", "qa="]
    assert teacher.prompts(texts, written, [0.4] * 4, [None] * 4) == ["q"] * 4
    teacher = SelfTeacher("contrast", "{prompt}|{right}|{wrong}")
    found = teacher.prompts(["q"] * 5, ["a", "b", "c", "c", "d"], [1, 0, 0, 0, 1], [None] * 5)
    assert found == ["q|d|c", "q|a|c", "q|a|c", "q|a|c", "q|a|c"]
    assert teacher.prompts(["q"] * 2, ["a", "b"], [1, 1], [None] * 2) == ["q", "q"]
    assert SelfTeacher("answer", "{prompt}:{answer}").prompts(["q"] * 2, ["a", "b"], [0, 0], ["7", None]) == [
        "q:7", "q"]
    assert SelfTeacher("none", "{prompt}, sharp").prompts(["q"], [""], [0], [None]) == ["q, sharp"]


def test_the_kl_is_to_the_present_policy_under_the_richer_prompt():
    trainer = tiny_text.trainer(parts=TEACH, rewards={  # the first completion of each four is right
        "short": lambda texts, prompts: [float(place % 4 == 0) for place in range(len(texts))]})
    tiny_text.stir(trainer.policy)
    batch = trainer.prompts[:2]
    parts, asked, scores = sampling.sample(trainer, batch)
    parts = [part for part in loop.credit(trainer, parts, scores, [p.key for p in batch]) if part]
    trainer.kl_reference.start_epoch(loop.epoch(trainer, parts, asked, batch), trainer.rollouts, 0, 2)
    for part in parts:
        [taken], [rewards] = part.transitions, part.rewards
        assert rewards.tolist() == [1, 0, 0, 0]
        [found] = loop.reference(trainer, part, asked)
        text = trainer.policy.detokenize(taken.ids[:1], taken.old.mask[:1], [""])[0]
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
    assert tiny.trainer(parts=parts).run_epoch()["kl"] > 1e-6
    same = tiny.trainer(parts=parts | {"reference": parts["reference"] | {"template": "{prompt}"}})
    assert same.run_epoch()["kl"] == pytest.approx(0, abs=1e-9)


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
    assert trainer.geometry.generation_batch < trainer.geometry.samples and drawn.groups.turn == 2
    teacher.start_epoch(drawn, trainer.rollouts, 0, 2)
    assert teacher.prompts == [a, c]
    teacher.start_epoch(loop.epoch(trainer, own=[b]), trainer.rollouts, 1, 2)
    assert teacher.prompts == [b]


def test_the_kl_alone_trains_where_the_surrogate_is_none():
    assert preset("sdpo") == resolve(tiny_text.config(method="sdpo"), "tokens")


AGAIN, WEIGHT = "=+", 3.0


def sevens(texts, prompts):
    return [float(text.count("7")) - 0.1 * len(text) for text in texts]


def made(**kl):
    parts = {"draws": {"type": "SecondAttempt", "again": AGAIN},
             "spread": {"type": "StepScores", "kind": "last", "ends": AGAIN, "whole": False, "outcome": 0},
             "kl": {"type": "SpanKL", "weight": WEIGHT, "estimator": "k2"} | kl}
    own = tiny_text.stir(tiny_text.policy(max_tokens=10))
    return tiny_text.trainer(own, {"sevens": sevens}, reward="sevens", method="rloo", text__max_tokens=10,
                            train__micro_batch=8, parts=parts)


def seconds(trainer, taken):
    """The texts of the second attempts."""
    shown = [ids[:int(mask.nonzero().max()) + 1] for ids, mask in zip(taken.ids, taken.old.mask)]
    return [trainer.policy.tokenizer.decode(ids, skip_special_tokens=True).partition(AGAIN)[2] for ids in shown]


def test_the_gradient_by_hand():
    """-A log p of all tokens, A of the second attempts alone, and the k2 estimate on the tokens of the first."""
    trainer = made()
    parts, conditioning, scores = sampling.sample(trainer, trainer.prompts[:2])
    credited = loop.credit(trainer, parts, scores, ["1", "2"])
    trainer.kl_reference.start_epoch(loop.epoch(trainer), trainer.rollouts, 0, 1)
    [part], stats = credited, UpdateStats()
    loop.backward(trainer, part, conditioning, {0: 1.0}, 8, stats)
    found = [p.grad.clone() for p in trainer.policy.weights.parameters()]
    taken, own = part.transitions[0], trainer.policy
    advantage = group_relative(torch.tensor(sevens(seconds(trainer, taken), [])).view(2, 4), "group").flatten()
    assert advantage.abs().max() > 0.5
    torch.testing.assert_close(part.advantages[0], advantage[:, None] * taken.old.mask)
    given = conditioning, taken.prompts, taken.ids, taken.old.mask, Decoding()
    with torch.no_grad(), own.reference([]):
        base = own.log_probs(*given).logp
    trainer.optimization.optimizer.zero_grad()
    new = own.log_probs(*given).logp
    first = torch.arange(10) < taken.old.mask.int().argmin(1)[:, None]
    assert 0 < first.sum() < taken.old.mask.sum() and not base[first].equal(new[first])
    (-(advantage[:, None] * new).sum() + WEIGHT / 2 * (new - base)[first].square().sum()).div(8).backward()
    for one, parameter in zip(found, own.weights.parameters()):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)


def test_an_epoch_measures_the_kl_of_the_first_attempts():
    held, both = (made(factors=factors).run_epoch() for factors in ((1, 0), (1, 1)))
    assert held["grad_norm"] > 0 and 0 < held["kl"] < both["kl"]
