"""Which groups teach, and what a completion counts in that the loss leaves out: every preset of texts, by its run's own
path from rewards to the gradient.
"""

import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.advantages.baselines import Correctness
from flowgrpo.advantages.group import Advantage, Pooled, group_relative, weighted_sum, zero_variance
from flowgrpo.advantages.shaping import BradleyTerry, Compressed, Overlong, Unlikely, WinRate, shape
from flowgrpo.advantages.trackers import SmoothStandardised
from flowgrpo.contrib.reshaped import Confidence, Consistency
from flowgrpo.contrib.reward_weights import Influence
from flowgrpo.curriculum.resampling import DynamicSampling
from flowgrpo.methods import presets
from flowgrpo.objectives.reductions import SequenceMean, SequenceSum, TokenMean, reduce_loss
from flowgrpo.text.credit import ExitDecay, LengthSwitch
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.samplers.language_model import SampledCompletions
from flowgrpo.training import credit as credits
from flowgrpo.training.optimizer import shares
from flowgrpo.types import Context, PromptGroups, RunState, SampleMeasures
from tests.helpers import loop, tiny_masked, tiny_text
from tests.helpers.refusals import refused

TEXTS = [*presets.presets_for("tokens"), "trace_rl", "trace_rl_value"]
PARTS = tiny_text.PARTS | {"chord": {"data": {"source": {"type": "PassRate"}}}}
MODES = ("keep", "mask", "penalise")
# Of each of two groups: the tokens of its completions, which of them have no end, and their rewards.
CASES = {"one truncated": ([4, 4, 4, 6], [0, 0, 0, 1], [1, 0, 1, 0]),
         "all truncated": ([6, 6, 6, 6], [1, 1, 1, 1], [1, 0, 1, 0]),
         "all equal": ([2, 3, 5, 6], [0, 0, 0, 1], [1, 1, 1, 1]),
         "all wrong": ([2, 3, 5, 6], [0, 0, 0, 1], [0, 0, 0, 0])}
SILENT = ("all equal", "all wrong")
# Presets that learn of groups whose samples earn the same, by their definition: in which of SILENT, and of what.
OWN_SIGNAL = {
    "entropy_bonus": (SILENT, "the entropy of every trained token"),
    "grpo_lambda": (("all equal",), "lengths of right answers, in groups that are mostly right"),
    "s_grpo": (("all equal",), "the place of a right answer in its chain of exits"),
    "real": (SILENT, "labels, of which groups of one class are trained too"),
    "ppo": (SILENT, "rewards less the values of a model"),
    "trace_rl_value": ((), "rewards less the values of a model; it drops groups that agree"),
    "w_reinforce": (SILENT, "right and wrong are absolute"),
    "sdpo": (("all equal",), "the policy that reads a right completion of the group"),
    "hypo": (SILENT, "pairs of a file")}
# Their rewards are absolute: less the penalty 1, a right completion is a wrong one.
ABSOLUTE = {"real", "pacs", "w_reinforce", "ppo", "trace_rl_value"}
UNSIGNED = {"sdpo": "a teacher's distribution decides, not the reward", "hypo": "pairs of a file decide"}


def made(method, mode="keep", **options):
    own = tiny_masked.policy(truncated=mode) if method.startswith("trace") else tiny_text.policy(truncated=mode)
    return tiny_text.trainer(own, method=method, text__truncated=mode, **{
        "parts": PARTS.get(method, {}), "train__micro_batch": 8, "train__clip_grad": 1e9} | options)


def tokens(lengths, cut):
    """Completions [4,6] of these lengths, each of two tokens of its own, with an end (2) unless they are cut."""
    rows = [[4 + (2 * row + place % 2) % 9 for place in range(length)] for row, length in enumerate(lengths)]
    for row, endless in zip(rows, cut):
        row[-1] = row[-1] if endless else 2
    return torch.tensor([row + [0] * (6 - len(row)) for row in rows])


def scored(trainer, lengths, cut, rewards):
    """An epoch of two groups of the same completions with these rewards, measured as credit reads them."""
    batch, rollouts = trainer.prompts[:2], trainer.rollouts
    asked, prompts = rollouts.conditioning(batch), torch.arange(2).repeat_interleave(4)
    ids, mask = tokens(lengths, cut).repeat(2, 1), (torch.arange(6) < torch.tensor(lengths)[:, None]).repeat(2, 1)
    steps = {"steps": torch.arange(6).repeat(8, 1)} if isinstance(trainer.policy, MaskedLM) else {}
    with torch.no_grad():
        logp = trainer.policy.log_probs(asked, prompts, ids, mask, trainer.method.generation.decoding,
                                        *((steps["steps"], 8) if steps else ())).logp
    drawn = SampledCompletions(
        ids, logp, mask, torch.tensor(cut).bool().repeat(2),
        trainer.policy.detokenize(ids, mask, [asked.prompts[row] for row in prompts]),
        expert=torch.zeros(8).bool(), **steps)
    size, parts = trainer.geometry.micro_batch, []
    for start in range(0, 8, size):
        at = slice(start, start + size)
        own = replace(drawn, **{name: value[at] for name, value in vars(drawn).items() if value is not None})
        greedy = torch.arange(8)[at] % 4 < trainer.method.generation.decoding.greedy
        part = rollouts.record(range(start // 4, (start + size) // 4), prompts[at], [own],
                               greedy if trainer.method.generation.decoding.greedy else None)
        part = rollouts.rescore(part, asked) if trainer.method.loss.surrogate.reads_uniform else part
        parts.append(rollouts.add_values(part, asked, rollouts.seeds(0, 0, 2), lambda texts, count, *_: torch.full(
            (len(texts) // count, count), sum(rewards) / 4)))
    scores = torch.tensor([rewards] * 2, dtype=torch.float32)[..., None]
    epoch = loop.scored(trainer, parts, scores, [prompt.key for prompt in batch])
    epoch.conditioning, epoch.own = asked, [*batch]
    epoch.metrics |= trainer.scoring.epoch_metrics(epoch.groups, 0, trainer.log)
    trainer.extensions.on_drawn(epoch)
    return epoch


def flat_gradient(trainer):
    """The gradients of the trained weights in one vector; 0 where none has any."""
    return torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).flatten().clone()
                      for each in trainer.policy.weights.parameters()])


def learned(trainer, *case):
    """(gradient, metrics, epoch) of an update on such an epoch, whose step is taken back."""
    weights = trainer.policy.weights.parameters()
    before = [each.detach().clone() for each in weights]
    trainer.memory.clear()
    trainer.optimization.zero_grad()
    epoch = scored(trainer, *case)
    sampled, epoch.parts = epoch.parts, credits.compare(trainer, epoch)
    metrics = trainer.train_on(epoch)
    gradient = flat_gradient(trainer)
    with torch.no_grad():
        for each, old in zip(weights, before, strict=True):
            each.copy_(old)
    epoch.sampled_parts = sampled
    return gradient, metrics, epoch


def logp_gradient(trainer, epoch, rows):
    """The gradient of the log-probability of these rows of an epoch's completions."""
    trainer.optimization.zero_grad()
    [part] = epoch.sampled_parts
    replayed = trainer.rollouts.replay(part, epoch.conditioning)
    sum((new.logp * rows[at, None]).sum() for _, at, new in replayed).backward()
    return flat_gradient(trainer)


@pytest.mark.parametrize("method", TEXTS)
def test_a_preset_learns_where_there_is_something_to_learn_and_nowhere_else(method):
    own, _ = OWN_SIGNAL.get(method, ((), ""))
    for mode in MODES:
        trainer = made(method, mode)
        least = None
        for name, case in CASES.items():
            gradient, metrics, epoch = learned(trainer, *case)
            assert gradient.isfinite().all(), (mode, name)
            assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float)), (mode, name)
            least = 1e-5 * gradient.norm() if least is None else least  # the first case has a signal
            left = torch.tensor(case[2] * 2).bool() & ~(torch.tensor(case[1] * 2).bool() & (mode == "mask"))
            if mode == "mask" and name == "all truncated" or name in SILENT and name not in own:
                assert gradient.norm() <= least, (mode, name)
            elif mode != "penalise" or method not in ABSOLUTE:
                assert gradient.norm() > least > 0, (mode, name)
                if name not in SILENT and method not in UNSIGNED:
                    assert gradient @ logp_gradient(trainer, epoch, left) < 0, (mode, name)


def test_a_completion_that_is_left_out_is_measured_punished_and_compared():
    """DAPO with 6 tokens at most punishes those beyond 4.8: 6 by 1 and 5 by 1/6. So the rewards 1, 0, 1, 0 become 0,
    -1, 5/6 and -1/6, of mean -1/12, and the two that are trained have the signs of their rewards."""
    trainer = made("dapo", "mask")
    epoch = scored(trainer, [6, 6, 5, 5], [1, 1, 0, 0], [1, 0, 1, 0])
    context = loop.context(trainer, epoch.parts, [prompt.key for prompt in epoch.own])
    assert context.samples.lengths.tolist() == [[6, 6, 5, 5]] * 2
    taken = epoch.parts[0].transitions[0]
    assert torch.equal(context.samples.logp.flatten(), (taken.old.logp.sum(1) / taken.old.mask.sum(1)).float())
    [part] = credits.compare(trainer, epoch)
    shaped = torch.tensor([0, -1, 5 / 6, -1 / 6], dtype=torch.float64)
    expected = ((shaped - shaped.mean()) / (shaped.std() + 1e-8))[2:].float()
    torch.testing.assert_close(part.advantages[0], expected.repeat(2))
    assert expected.sign().tolist() == [1, -1] and part.left_out == (0, 0, 1, 1)
    assert part.rewards[0].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("method, parts, weights, divisor", [
    ("grpo", {"kl": {"weight": 0.0}}, [1 / 3, 1 / 4], 8), ("dr_grpo", {}, [1 / 6, 1 / 6], 8), ("rloo", {}, [1, 1], 8),
    ("dapo", {"shaping": None}, [1, 1], 2 * (3 + 4)), ("cispo", {}, [1, 1], 2 * (3 + 4))])
@pytest.mark.parametrize("size", [4, 8])
def test_a_loss_of_rows_divides_by_all_rows_and_one_of_tokens_by_the_trained_ones(
        method, parts, weights, divisor, size):
    """Of two groups of four, two completions each are left out."""
    trainer = made(method, "mask", parts=parts, train__micro_batch=size)
    gradient, _, epoch = learned(trainer, [6, 6, 3, 4], [1, 1, 0, 0], [0, 1, 1, 0])
    trainer.optimization.zero_grad()
    for part in epoch.parts:
        for _, at, new in trainer.rollouts.replay(part, epoch.conditioning):
            own = part.advantages[0][at]
            (-(new.logp.sum(1) * own * torch.tensor(weights * (len(own) // 2))).sum() / divisor).backward()
    torch.testing.assert_close(gradient, flat_gradient(trainer), rtol=1e-4, atol=1e-6)
    assert gradient.norm() > 0.01 and sum(len(part.advantages[0]) for part in epoch.parts) == 4


@pytest.mark.parametrize("updates, divisors", [(1, [8]), (2, [4])])
def test_a_group_that_is_left_out_whole_counts_in_the_divisor_of_its_step(updates, divisors):
    trainer = made("dr_grpo", "mask", train__micro_batch=4, train__updates=updates)
    epoch = scored(trainer, [6, 6, 3, 4], [1, 1, 0, 0], [0, 1, 1, 0])
    epoch.parts[1] = replace(epoch.parts[1], transitions=(replace(
        epoch.parts[1].transitions[0], left_out=torch.ones(4).bool()),))
    epoch.parts = credits.compare(trainer, epoch)
    [trained], [other] = epoch.parts, epoch.left_out
    assert trained.groups.start == 0 and trained.left_out == (0, 0) and other.left_out == (1,) * 4
    steps = shares(epoch.parts + epoch.left_out, trainer.geometry, trainer.processes, SequenceMean())
    assert [count for _, count in steps] == divisors and [count.tokens for _, count in steps] == [7]
    assert [count for _, count in shares(epoch.parts + epoch.left_out, trainer.geometry, trainer.processes,
                                         TokenMean())] == [7]
    for reduction in (SequenceMean(), SequenceSum(), SequenceSum(budgeted=True)):
        assert reduction.count(torch.zeros(8, 6).bool()) == 8 and TokenMean().count(torch.zeros(8, 6).bool()) == 0
        assert reduce_loss(torch.ones(8, 6), reduction(torch.zeros(8, 6).bool()), 0) == 0


@pytest.mark.parametrize("reduction", ["TokenMean", "SequenceMean", "SequenceSum"])
def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_loss_is_a_mean_over(reduction):
    """Where all rewards are the same, nothing else has a gradient."""
    trainer = made("dr_grpo+entropy_bonus", parts={"reduction": {"type": reduction}}, train__micro_batch=4)
    gradient, _, epoch = learned(trainer, [2, 3, 5, 6], [0, 0, 0, 1], [0, 0, 0, 0])
    trainer.optimization.zero_grad()
    for part in epoch.parts:
        for _, _, new in trainer.rollouts.replay(part, epoch.conditioning):
            (-0.01 * (new.entropy * new.mask).sum() / (2 * 16)).backward()
    torch.testing.assert_close(gradient, flat_gradient(trainer), rtol=1e-4, atol=1e-8)
    assert gradient.norm() > 1e-3


# --- which groups teach ----------------------------------------------------------------------------------------------
SAMPLES = SampleMeasures(logp=torch.tensor([[-1.0, -2, -3, -4]] * 3), lengths=torch.tensor([[1, 2, 3, 4]] * 3),
                         longest=4, penalty=torch.tensor([[0.0, 0, 0, 1]] * 3))
REWARDS = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])[..., None]


@pytest.mark.parametrize("shaping, teaches", [
    (None, False), (Overlong(0.5), False), (BradleyTerry(), False), (WinRate(), False), (Compressed(), False),
    (Unlikely(), True), (ExitDecay(), True), (LengthSwitch(top=1.0), True)])
def test_neither_penalties_nor_shaping_make_a_group_teach_but_where_they_are_the_methods_own_signal(shaping, teaches):
    context = Context(samples=replace(SAMPLES, penalty=None) if isinstance(shaping, Unlikely) else SAMPLES)
    shaped = shape(REWARDS, [1.0], shaping, context, alone=False)
    assert zero_variance(shaped[..., 0]).tolist() == [not teaches, True, False]
    if not teaches:
        assert torch.equal(shaped[:2], REWARDS[:2])


def test_a_penalty_is_taken_off_where_samples_differ_and_everywhere_by_a_method_that_compares_none():
    less = REWARDS[..., 0] - SAMPLES.penalty
    found = shape(REWARDS, [1.0], None, Context(samples=SAMPLES), alone=False)[..., 0]
    assert torch.equal(found, torch.cat([REWARDS[:2, :, 0], less[2:]]))
    assert torch.equal(shape(REWARDS, [1.0], None, Context(samples=SAMPLES), alone=True)[..., 0], less)


def test_the_filter_the_redraw_and_the_metric_name_the_same_groups():
    trainer = made("dapo", "penalise")
    for rewards, silent in (([1, 1, 1, 1], True), ([0, 0, 0, 0], True), ([1, 0, 1, 1], False)):
        epoch = scored(trainer, [2, 3, 5, 6], [0, 0, 0, 1], rewards)
        assert bool(credits.compare(trainer, epoch)) is not silent
        assert [place for place, _ in DynamicSampling()(epoch.groups)] == [0, 1] * silent
        assert trainer.scoring.metrics(epoch.groups.first, print)["reward/short/zero_variance_groups"] == silent


@pytest.mark.parametrize("method, said", [("grpo", True), ("dapo", True), ("grpo_lambda", False), ("ppo", False),
                                          ("spo_chain", False), ("w_reinforce", False)])
def test_that_nothing_is_learned_is_said_of_methods_that_learn_nothing_then(method, said):
    trainer, lines = made(method), []
    trainer.log, trainer.scoring.spreads = lines.append, {"short": 0.0}
    loop.extension(trainer, "RewardHints").epoch({"reward/short/zero_variance_groups": 1.0, "reward/short/mean": 1.0})
    assert any("nothing is learned" in line for line in lines) is said


# --- large rewards ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("largest", [1e20, 1e38, 3e38])
@pytest.mark.parametrize("method", ["grpo", "dapo", "reinforce_pp", "rloo", "dcpo", "nft", "gigpo"])
def test_rewards_up_to_the_largest_float32_are_compared_like_small_ones(method, largest):
    small, large = made(method), made(method)
    case = [2, 3, 4, 4], [0, 0, 0, 0]
    [one], [other] = (credits.compare(trainer, scored(trainer, *case, [1 * scale, 0, 0.5 * scale, 0]))
                      for trainer, scale in ((small, 1.0), (large, largest)))
    scale = largest if method == "rloo" else 1.0
    torch.testing.assert_close(other.advantages[0] / scale, one.advantages[0], rtol=1e-3, atol=1e-4)
    assert large.scoring.metrics(torch.tensor([[[largest], [0.0], [-largest], [largest]]]), print) == pytest.approx({
        "reward/short/mean": largest / 4, "reward/short/std": largest * (2.75 / 3) ** 0.5, "reward/short/failed": 0,
        "reward/short/zero_variance_groups": 0.0})


def test_each_comparison_is_in_float64_and_comes_back_as_it_was_given():
    rewards = 3e38 * torch.tensor([[1.0, 0, -1, 1], [0, 0, 1, 0]])
    known = Context(groups=PromptGroups(["a", "b"]), samples=SampleMeasures(
        logp=torch.arange(8.0).view(2, 4), lengths=torch.ones(2, 4).long()))
    for rule in (Advantage(), Advantage("batch"), Advantage("running", least=1), Advantage(order="gdpo"), Pooled(),
                 Correctness(), Consistency(), Confidence(against="group"), SmoothStandardised(), Influence()):
        found = rule(rewards[..., None], [1.0], replace(known, run=RunState()))
        assert found.dtype == torch.float32 and found.isfinite().all() and found.abs().max() > 0.1, rule
    for scale in ("group", "batch"):
        torch.testing.assert_close(group_relative(rewards, scale), group_relative(rewards.double(), scale).float())
        assert group_relative(rewards.half(), scale).dtype == torch.float32
    assert weighted_sum(rewards[:, :, None].repeat(1, 1, 2), [0.25, 0.25]).isfinite().all()


def test_a_reward_at_its_groups_mean_is_not_right_by_rounding():
    """5/12, 1/4, 1/3 and 1/3 have the mean 1/3, which no float has; so do .1, .2 and .3."""
    for values in ([5 / 12, 1 / 4, 1 / 3, 1 / 3], [0.1, 0.2, 0.3, 0.2]):
        found = Correctness()(torch.tensor([values])[..., None], [1.0])
        assert (found > 0).sum() == 1 and found.argmax() == torch.tensor(values).argmax()


def test_a_shaped_reward_that_overflows_is_one_line():
    refused("parts.shaping Compressed: rewards from -1e.06 to 1 overflow, expected", shape,
            torch.tensor([[[1.0], [-1e6]]]).double(), [1.0], Compressed(), Context(), alone=False)
