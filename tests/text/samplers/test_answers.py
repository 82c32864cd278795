"""A prompt's own answer as the last sample of its group."""

from dataclasses import replace

import pytest
import torch

from flowgrpo.advantages.group import Advantage
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.resampling import TeacherAnswers, solutions_of
from flowgrpo.data.prompts import Prompt, answer_of
from flowgrpo.distributed.processes import Processes
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.surrogates import Clip, Reinforce
from flowgrpo.text.credit import ExpertReward
from flowgrpo.text.losses import Calibrated, ExpertMixture
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training.credit import context_of
from flowgrpo.types import CompletionBatch, Context, GroupStatistics, RewardColumns, SampleMeasures, Scored
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message, refused
from tests.helpers.tables import close, f64


def right(completions, prompts, metadata):
    return [float(text == entry.get("answer")) for text, entry in zip(completions, metadata)]


def trainer(**options):
    own = tiny_text.trainer(rewards={"short": right}, **{"method": "visurf"} | options)
    own.prompts = [Prompt("1+2=", metadata={"answer": "3"}), Prompt("33+4=", metadata={"answer": "1234567890"}),
                   Prompt("7+8="), Prompt("9+1=", metadata={"answer": "8", "solution": "9"})]
    return own


def test_what_has_no_answer_is_refused():
    assert [answer_of(prompt) for prompt in trainer().prompts] == ["3", "1234567890", None, "9"]
    assert answer_of(Prompt("x", metadata={"answer": 0})) == "0"
    assert preset("visurf").fits("tokens") and not preset("visurf").fits("masks")
    assert "got a method of causal language models" in message(lambda: preset("visurf").on("masks"))
    refused("4 answers leave none of the group to train", resolve,
            tiny_text.config(method="visurf", parts={"decoding": {"expert": 4}}), "tokens")


def test_the_last_sample_is_the_answer():
    own = trainer(train__micro_batch=3)
    asked = own.rollouts.conditioning(own.prompts)
    made = [(part, texts) for part, [texts] in own.rollouts.sample(asked, 0, None)]
    texts = [each for _, own_texts in made for each in own_texts]
    assert texts[3] == "3" and texts[3].tokens == 2 and texts[15] == "9"
    drawn = tiny_text.trainer(method="grpo", train__micro_batch=3)
    drawn.prompts = own.prompts
    plain = [each for _, [found] in drawn.rollouts.sample(drawn.rollouts.conditioning(own.prompts), 0, None)
             for each in found]
    assert [text for i, text in enumerate(texts) if i not in (3, 15)] == [
        text for i, text in enumerate(plain) if i not in (3, 15)]  # too long an answer, and none, keep the sample
    for part, _ in made:
        [taken] = part.transitions
        for _, rows, new in own.rollouts.replay(part, asked):
            torch.testing.assert_close(new.logp.detach(), taken.old.logp[rows], rtol=0, atol=1e-5)
    first = made[0][0].transitions[0]
    assert first.old.mask[3].tolist() == [True, True, False, False, False, False]
    assert first.ids[3, 1] == own.policy.ends[0]


def test_an_answer_among_failures_is_pulled_up():
    # 8 failures and the answer: (1 - 1/9) / (1/3) and (0 - 1/9) / (1/3).
    rewards = torch.tensor([[0.0] * 8 + [1.0], [1.0] * 9], dtype=torch.float64)[..., None]
    advantage = Advantage("group", "rewards")(rewards, [1.0])
    torch.testing.assert_close(advantage[0], torch.tensor([-1 / 3] * 8 + [8 / 3], dtype=torch.float64), rtol=0,
                               atol=1e-6)
    assert (advantage[1] == 0).all()
    own = trainer(train__lr=3e-2, train__epochs=6)
    own.prompts = own.prompts[:1] * 2
    def likely():
        asked = own.rollouts.conditioning(own.prompts[:1])
        ids = torch.tensor([[*own.policy.tokenizer("3", add_special_tokens=False)["input_ids"], own.policy.ends[0]]])
        with torch.no_grad():
            decoding = own.method.rollout.decoding
            return own.policy.log_probs(asked, torch.tensor([0]), ids, ids == ids, decoding).logp.sum().item()
    before = likely()
    for own.epoch in range(6):
        own.run_epoch()
    assert own.first_ratio.max_log_ratio <= 1e-5 and likely() > before + 0.5


# RL-PLUS
def compared(new, old, expert) -> CompletionBatch:
    new, old = (Scored(each.log(), each > 0) for each in (new, old))
    return CompletionBatch(new, old, new.logp - old.logp, torch.arange(len(expert)), torch.zeros_like(new.mask).long(),
                           new.mask, expert=torch.tensor(expert))


def test_the_mixtures_ratio_by_hand():
    # p = p_old = 0.1 and p_expert = 1e-6: r is 2, not 1e5; likely tokens count less: 0.81 and 0.01.
    part = ExpertMixture(Clip(0.2, 0.2), 0.0, 1e-6)
    same = compared(f64([[0.1]]), f64([[0.1]]), [True])
    close(part(same.log_ratio, f64([[1]]), same), [[-0.2 / 0.100001]])
    for focus, weights in ((2.0, [0.81, 0.01]), (0.0, [1, 1])):
        read = compared(f64([[0.1, 0.9]]), f64([[0.2, 0.6]]), [True])
        loss = ExpertMixture(focus=focus, probability=1.0)(read.log_ratio, f64([[-3]]), read)
        close(loss, [[3 * weights[0] * 0.2 / 1.2, 3 * weights[1] * 1.8 / 1.6]])
    # The factor is held constant: the gradient by log p is the loss itself.
    logp = f64([[0.1, 0.9]]).log().requires_grad_()
    old = Scored(f64([[0.2, 0.6]]).log(), torch.ones(1, 2).bool())
    new = Scored(logp, old.mask)
    read = CompletionBatch(new, old, logp - old.logp, torch.tensor([0]), old.mask.long(), old.mask,
                           expert=torch.tensor([True]))
    loss = ExpertMixture()(read.log_ratio, f64([[-3]]), read)
    loss.sum().backward()
    close(logp.grad, loss.detach().tolist())


def test_the_released_mixture_is_of_answers():
    # Per token, the loss that RL-PLUS's compute_token_on_off_policy_loss gives for advantage 1.5.
    read = compared(f64([[0.6, 0.1, 0.75]]), f64([[0.5, 0.2, 0.9]]), [True])
    close(ExpertMixture()(read.log_ratio, f64([[1.5]]), read), [[-0.9107359631, -0.3557562356, -0.6081081081]], 1e-7)
    new, old, advantage = f64([[0.5, 0.2], [0.5, 0.2]]), f64([[0.4, 0.4], [0.4, 0.4]]), f64([[1], [1]])
    read = compared(new, old, [False, True])
    loss = ExpertMixture(Reinforce(), 2.0, 1.0)(read.log_ratio, advantage, read)
    close(loss[:1], Reinforce()(read.log_ratio, advantage)[:1].tolist())
    close(loss[1:], [[-0.25 * 1 / 1.4, -0.64 * 0.4 / 1.4]])
    clip = ExpertMixture().clip_mask(read.log_ratio, -advantage, read)
    assert clip.tolist() == [[False, True], [False, False]]


# CalibRL
def test_the_calibrated_loss_is_that_of_the_released_code():
    # CalibRL's compute_mix_policy_loss gives .268, the mean over five tokens, for these right and wrong completions
    # beside their answer, and -.4 for the plain loss; a second group has no answer.
    logp = f64([[-1, -0.5, -2], [-0.2, -1.5, 0], [-1, -1, -1], [-3, -3, -3]])
    mask = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [True] * 3])
    scored, advantage, group = Scored(logp, mask), f64([1.2, -0.8, 0.4, 0.7]), torch.tensor([5, 5, 5, 6])
    whole = CompletionBatch(scored, scored, torch.zeros_like(logp), torch.arange(4), mask.long(), mask,
                            expert=torch.tensor([False, False, True, False]))
    part = Calibrated(Reinforce(), weight=1.0)
    read = replace(whole, peers=GroupStatistics(part.statistic(whole), advantage, group))
    loss = part(read.log_ratio, advantage[:, None], read)
    plain = Reinforce()(read.log_ratio, advantage[:, None])
    term = (loss - plain)[:2][mask[:2]]
    close(term, [0, -0.3, 1.2, 0.64, -0.2])
    assert term.mean().item() == pytest.approx(0.268) and plain[:2][mask[:2]].mean().item() == pytest.approx(-0.4)
    assert (loss[2] == 0).all() and torch.equal(loss[3], plain[3])
    cut = replace(read, new=scored.rows(slice(1, 2)), old=scored.rows(slice(1, 2)), rows=torch.tensor([1]),
                  log_ratio=read.log_ratio[1:2])
    assert torch.equal(part(cut.log_ratio, advantage[1:2, None], cut), loss[1:2])
    close(Calibrated(Reinforce())(read.log_ratio, advantage[:, None], read)[:2][mask[:2]] - plain[:2][mask[:2]],
          (0.1 * term).tolist())


def test_a_right_text_below_the_answer_is_pulled_twice_as_hard_as_one_above():
    logp = f64([[-1, -3], [-2, -2]]).requires_grad_()
    mask = torch.ones(2, 2).bool()
    old = Scored(logp.detach(), mask)
    read = CompletionBatch(Scored(logp, mask), old, torch.zeros(2, 2), torch.arange(2), mask.long(), mask,
                           expert=torch.tensor([False, True]))
    for sign in (1, -1):
        advantage = f64([sign, 0])
        of = replace(read, peers=GroupStatistics(old.logp, advantage, torch.zeros(2).long()))
        loss = Calibrated(Clip(0.2, 0.2), 1.0)(of.log_ratio, advantage[:, None], of)
        [slope] = torch.autograd.grad(loss.sum(), logp)
        close(slope, [[-0.5, -1] if sign > 0 else [1, 0.5], [0, 0]])


@pytest.mark.parametrize("size", [2, 8])
def test_a_run_is_calibrated_by_its_answers(size):
    parts = {"decoding": {"expert": 1}, "surrogate": {"type": "Calibrated"}}
    metrics = trainer(method="grpo", parts=parts, train__micro_batch=size).run_epoch()
    assert metrics["grad_norm"] > 0
    refused("Calibrated is about answers .*parts.decoding.expert: 1", resolve,
            tiny_text.config(method="grpo", parts={"surrogate": {"type": "Calibrated"}}), "tokens")
    assert "Calibrated: slope is 2, expected 0 to 1" in message(Calibrated, slope=2, error=ValueError)


@pytest.mark.parametrize("size", [2, 8])
def test_the_loop_knows_which_samples_are_answers(size):
    own = trainer(method="rl_plus", train__micro_batch=size)
    asked = own.rollouts.conditioning(own.prompts)
    parts = [part for part, _ in own.rollouts.sample(asked, 0, None)]
    expert = torch.cat([part.transitions[0].expert for part in parts])
    assert expert.nonzero()[:, 0].tolist() == [3, 15]
    kept = parts[0].transitions[0].select(torch.tensor([False, True, True, True] * (len(parts[0].prompts) // 4)))
    assert kept.expert[2] and kept.expert.sum() == parts[0].transitions[0].expert.sum()
    metrics = own.run_epoch()
    assert metrics["grad_norm"] > 0 and own.first_ratio.max_log_ratio <= 1e-5


def test_answers_join_engines_and_are_needed():
    refused("ExpertMixture is about answers .*parts.decoding.expert: 1", resolve,
            tiny_text.config(method="rl_plus", parts={"decoding": {"expert": 0}}), "tokens")
    own = trainer(text__engine_precision="bf16")
    asked = own.rollouts.conditioning(own.prompts)
    made = [(part, texts) for part, [texts] in own.rollouts.sample(asked, 0, None)]
    texts = [text for _, found in made for text in found]
    assert texts[3] == "3" and texts[15] == "9"
    [taken] = made[0][0].transitions
    assert taken.expert.tolist() == [False] * 3 + [True]
    torch.testing.assert_close(taken.importance[3], torch.ones(6), rtol=0, atol=1e-4)


# --- the reward of an answer -----------------------------------------------------------------------------------------
def shaped(rewards, part, expert, names=("right", "thought"), weights=()):
    context = Context(rewards=RewardColumns(names, weights), samples=SampleMeasures(expert=torch.tensor(expert)))
    return part(f64(rewards), context)


def test_an_answer_has_the_samples_mean_where_one_of_them_is_as_good():
    # Groups of 3 samples and an answer: all samples fail, one is right, and a prompt without an answer.
    rewards = [[[0.0], [0.0], [0.0], [1.0]], [[0.0], [1.0], [0.5], [1.0]], [[0.0], [1.0], [0.0], [1.0]]]
    expert = [[False, False, False, True]] * 2 + [[False] * 4]
    smooth = shaped(rewards, ExpertReward(), expert, ["right"])
    close(smooth[..., 0], [[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.5, 0.5], [0.0, 1.0, 0.0, 1.0]])
    advantage = Advantage("group", "rewards")(smooth, [1.0])
    # 3 failures and the answer: (1 - 1/4) / (1/2); no advantage where a sample is right.
    assert advantage[0, 3].item() == pytest.approx(1.5, abs=1e-6) and advantage[1, 3].item() == pytest.approx(0)
    same = shaped(rewards, ExpertReward(smooth=False), expert, ["right"])
    assert torch.equal(same, f64(rewards))


def test_answers_earn_as_they_lack_and_are_written_like_completions():
    rewards = [[[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]]
    expert = [[False, False, True]]
    close(shaped(rewards, ExpertReward(["thought"], smooth=False), expert), [[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
    # Without it the answer has 1, as the second sample, of weights 1 and 1: both columns are the samples' means.
    close(shaped(rewards, ExpertReward(["thought"]), expert), [[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]])
    # With a weight of 3 on the first reward, its 3 is what the second sample has.
    close(shaped(rewards, ExpertReward(), expert, weights=[3.0, 1.0]), [[[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]])
    own = trainer(parts={"decoding": {"type": "WithAnswers", "form": "{{answer} {x}}"}})
    assert own.rollouts.conditioning(own.prompts).answers == [["{3 {x}}"], ["{1234567890 {x}}"], [], ["{9 {x}}"]]
    refused("expected a text with {answer}", resolve,
            tiny_text.config(method="visurf", parts={"decoding": {"type": "WithAnswers", "form": "x"}}), "tokens")


def test_the_answers_of_a_run_are_known_to_its_credit():
    own = trainer(train__prompts=4)
    epoch = loop.draw(own)
    prompts = epoch.groups.prompts
    context = context_of(own, epoch, [prompt.key for prompt in prompts])
    fits = [prompt.text in ("1+2=", "9+1=") for prompt in prompts]
    assert context.samples.expert.tolist() == [[False] * 3 + [fit] for fit in fits]
    assert context.rewards.names == ["short"]
    refused("names 'thought', which is no reward of the run: expected names among short", resolve,
            tiny_text.config(method="visurf", parts={"shaping": {"without": ["thought"]}}), "tokens")


# AMPO
TAUGHT = {"redraw": {"type": "TeacherAnswers"}, "decoding": {"expert": 2}, "surrogate": {"type": "PolicyShaping"}}
LESSONS = ["9;1=8", {"text": "7+1=8"}, {"text": "1+1=2", "right": False}, "2+6=8"]


def test_teachers_only_for_failing_groups_with_a_place():
    solved, failed = (Prompt(text, metadata={"answer": "8", "solutions": LESSONS}) for text in ("2+2=", "5;1="))
    silent = Prompt("7+7=", metadata={"answer": "14"})
    found = EpochBatch([], 0, 1, 0, Processes())
    found.add([solved, failed, silent], torch.zeros(3, 2, 1), torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    [(place, taught)] = TeacherAnswers()(found)
    assert place == 1 and taught.guided.answers and taught.shown == taught.text == "5;1=" and taught.key != failed.key
    found.add(found.replace([(place, taught)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    assert TeacherAnswers()(found) == []  # they come once
    assert solutions_of(taught) == ["9;1=8", "7+1=8", "2+6=8"]
    refused("set parts.decoding.expert to their number", resolve,
            tiny_text.config(parts={"redraw": {"type": "TeacherAnswers"}}), "tokens")
    refused("got TeacherAnswers, which reads completions", resolve,
            tiny.config(parts={"redraw": {"type": "TeacherAnswers"}}))


def test_the_answers_that_the_policy_comprehends_best_join_a_group_that_failed():
    failing = {"short": lambda texts, prompts: [0.0] * len(texts)}
    own = tiny_text.trainer(rewards=failing, train__prompts=1, parts=TAUGHT)
    tiny_text.stir(own.policy)
    own.prompts = [Prompt("5;1=", metadata={"answer": "8", "solutions": LESSONS})]
    scores = []
    for reasoning in ("9;1=", "7+1=", "2+6="):  # the likelihood of the answer behind the reasoning, as one prompt
        ids = torch.tensor([own.policy.tokenizer("8", add_special_tokens=False)["input_ids"]])
        asked = own.policy.encode([f"5;1={reasoning}"])
        scores.append(own.policy.log_probs(asked, torch.tensor([0]), ids, ids == ids, Decoding()).logp.mean().item())
    best = sorted(zip(scores, ("9;1=8", "7+1=8", "2+6=8")), reverse=True)
    epoch = loop.draw(own)
    drawn, parts, learned = epoch.groups, epoch.parts, epoch.conditioning
    [first], [second] = (part.transitions for part in parts)
    assert drawn.turn == 2 and not first.expert.any() and second.expert.tolist() == [False, False, True, True]
    written = own.policy.detokenize(second.ids, second.old.mask, [""] * len(second.ids))
    assert written[2:] == [text for _, text in best[:2]]
    assert epoch.sampled is None and second.old.guided is None
    credited = loop.credit(own, parts, torch.rand(2, 4, 1), ["5;1=", "x"])
    metrics = loop.learn(own, credited, learned, epoch.own)
    assert own.first_ratio.max_log_ratio <= 1e-5 and metrics["grad_norm"] > 0
