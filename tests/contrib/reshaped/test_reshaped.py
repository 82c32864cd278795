"""Advantages over another comparison, by hand, and what they read in epochs of tiny models."""

import math

import pytest
import torch

from flowgrpo.advantages.baselines import Conditional, Signed
from flowgrpo.advantages.group import Advantage, group_relative
from flowgrpo.contrib.reshaped import (
    Confidence,
    Consistency,
    Difficulty,
    Unconfident,
    difficulty,
    outcome_entropy,
)
from flowgrpo.errors import UserError
from flowgrpo.methods.validate import resolve
from flowgrpo.samplers.replay import rescored
from flowgrpo.training.credit import context_of
from flowgrpo.types import Context, PromptGroups, SampleMeasures
from tests.helpers import tiny, tiny_text
from tests.helpers.tables import close, draw, f64

NAN = math.nan
CENTRED = Advantage(scale="none", order="rewards")


def columns(*rows: list) -> torch.Tensor:
    return f64([*rows])[..., None]


# Difficulty


def test_the_curves_of_difficulty_by_hand():
    mean = f64([0, 0.5, 1])
    close(difficulty(mean, "exp", 1), [math.e, math.exp(0.5), 1])
    close(difficulty(mean, "power", 2), [1.05 ** 2, 0.55 ** 2, 0.05 ** 2])
    close(difficulty(mean, "log", 1), [-math.log(0.02), -math.log(0.52), -math.log(1.02)])
    close(difficulty(mean, "none", 1), [1, 1, 1])
    with pytest.raises(ValueError, match="Difficulty: mean rewards from 0 to 2, expected within 0 to 1: scale"):
        difficulty(f64([0, 2]), "exp", 1)


def test_hard_groups_weigh_more_and_groups_that_agree_nothing():
    rewards = columns([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, NAN, 0, NAN])
    weighted, plain = Difficulty(CENTRED)(rewards, [1.0]), CENTRED(rewards, [1.0])
    close(weighted[0], [0.75 * math.exp(0.75)] + [-0.25 * math.exp(0.75)] * 3)
    close(weighted[1], [0.25 * math.exp(0.25)] * 3 + [-0.75 * math.exp(0.25)])
    assert (weighted[2] == 0).all() and weighted[3, 1] == 0
    assert torch.equal(Difficulty(CENTRED, curve="none")(rewards, [1.0]), plain)


def test_tasks_and_stated_difficulties_weigh_too():
    rewards = columns([1, 0], [1, 1], [0, 0], [1, 0])
    metadata = [{"task": "a", "level": 2}, {"task": "a"}, {"task": "b"}, {"task": "b", "level": 0.5}]
    context = Context(groups=PromptGroups(metadata=metadata))
    # Task a has the mean .75, b .25; both groups that differ have 1/2.
    found = Difficulty(CENTRED, task="task")(rewards, [1.0], context)
    close(found[[0, 3], 0], [0.5 * math.exp(0.5 + 0.25), 0.5 * math.exp(0.5 + 0.75)])
    stated = Difficulty(CENTRED, curve="none", given="level")(rewards, [1.0], context)
    close(stated[:, 0], [1, 0, 0, 0.25])
    context.groups.metadata[0]["level"] = "hard"
    with pytest.raises(ValueError, match="metadata has level: 'hard', expected a number of 0 or more"):
        Difficulty(given="level")(rewards, [1.0], context)


# Confidence


def test_overconfident_errors_are_pushed_harder_by_hand():
    # Sums of log-ratios over two decisions: +2 and -2. softplus(2) = 2.127, softplus(-2) = .127.
    context = Context(samples=SampleMeasures(f64([[-1, -3, -1, -3]]), reference=f64([[-2, -2, -2, -2]]),
                                             lengths=torch.full((1, 4), 2)))
    rewards = columns([0, 0, 1, 1])
    ace = Confidence(Signed(1.0, 1.0))
    found = ace(rewards, [1.0], context)
    close(found, [[-1 - math.log1p(math.exp(2)), -1 - math.log1p(math.exp(-2)), 1, 1]])
    assert found[0, :2].tolist() == pytest.approx([-3.13, -1.13], abs=5e-3)
    both = Confidence(Signed(1.0, 1.0), side="both")(rewards, [1.0], context)
    close(both, [[-3.126928011, -1.126928011, 1.126928011, 3.126928011]], 1e-8)
    assert torch.equal(Confidence(Signed(1.0, 1.0), alpha=0)(rewards, [1.0], context),
                       Signed(1.0, 1.0)(rewards, [1.0]))
    assert ace.needs == ("reference",) and Confidence(against="group").needs == ()
    assert Confidence(Conditional(metric="length")).needs == ("reference", "lengths")
    with pytest.raises(ValueError, match="reads the samples' log-probabilities under the reference, and this method"):
        ace(rewards, [1.0], Context(samples=SampleMeasures(context.samples.logp)))


def test_of_two_successes_the_less_likely_weighs_more():
    context = Context(samples=SampleMeasures(f64([[-1, -3, -2, -2]])))
    found = Confidence(CENTRED, side="positive", against="group")(columns([1, 1, 0, 0]), [1.0], context)[0]
    # Confidence +1 and -1 beside the group's mean, -2.
    close(found, [0.5 * (1 + math.log1p(math.exp(-1))), 0.5 * (1 + math.log1p(math.exp(1))), -0.5, -0.5])


# Unconfident


def test_of_equal_samples_the_less_likely_has_the_larger_advantage():
    context = Context(samples=SampleMeasures(f64([[-1, -2, -3, -2], [-1, -2, -3, -2]])))
    rewards = columns([1, 1, 1, 0], [0, 0.2, 0, 0])
    found, plain = Unconfident(CENTRED, 0.3)(rewards, [1.0], context), CENTRED(rewards, [1.0])
    close(found[0], [0.25 - 0.3, 0.25, 0.25 + 0.3, -0.75])
    assert torch.equal(found[1], plain[1])  # nothing is right there
    bounded = Unconfident(CENTRED, 0.3, kappa=2.0)(rewards, [1.0], context)
    close(bounded[0], [0.125, 0.25, 0.375, -0.75])


# Consistency


def test_the_entropy_of_outcomes_by_hand():
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    found = outcome_entropy(f64([[0, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 2, 3, 4], [1, 0, NAN, NAN], [NAN] * 4]))
    close(found, [1, 0, quarter, 1, 1, 0])


def test_groups_that_agree_learn_from_the_others_by_hand():
    rewards = columns([0] * 4, [1] * 4, [1, 1, 0, 0])
    found = Consistency()(rewards, [1.0])
    # Means 0, 1 and 1/2: deviation sqrt(1/6).
    apart = 0.5 / (math.sqrt(1 / 6) + 1e-4)
    close(found[:2], [[-apart] * 4, [apart] * 4])
    assert torch.equal(found[2], group_relative(rewards[2:, :, 0])[0])  # the most mixed group is GRPO's
    assert (Consistency()(columns([1, 1], [1, 1], [NAN, NAN]), [1.0]) == 0).all()


# All of them


@pytest.mark.parametrize("call", [
    lambda: Difficulty(curve="cubic"), lambda: Difficulty(power=0), lambda: Difficulty(advantage=None),
    lambda: Confidence(alpha=-1), lambda: Confidence(side="none"), lambda: Confidence(against="me"),
    lambda: Unconfident(alpha=-1), lambda: Unconfident(kappa=-1),
    lambda: Consistency(clamp=0)])
def test_mistakes_are_named(call):
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert "\n" not in str(error.value)


def test_a_missing_reward_has_no_advantage_whatever_the_change():
    samples = SampleMeasures(draw(1, 4), reference=draw(1, 4, seed=1), lengths=torch.ones(1, 4))
    rewards, context = columns([1, NAN, 0, 0.5]), Context(groups=PromptGroups(metadata=[{}]), samples=samples)
    for part in (Difficulty(), Confidence(side="both"), Unconfident(), Consistency()):
        found = part(rewards, [1.0], context)
        assert found[0, 1] == 0 and found.isfinite().all() and found.shape == (1, 4)


def test_measures_of_texts_are_refused_for_images():
    for parts in ({"advantage": {"type": "Conditional", "metric": "entropy"}}, {"advantage": {
            "type": "Consistency", "advantage": {"type": "Conditional", "metric": "length"}}}):
        with pytest.raises(UserError, match="of completions: the steps of a denoiser all have the same$"):
            resolve(tiny.config(parts=parts))
    with pytest.raises(UserError, match="log-probabilities under the reference, and noised finals have none$"):
        resolve(tiny.config(method="diffusion_nft", parts={"advantage": {"type": "Confidence"}}))


@pytest.mark.parametrize("make, options", [
    (lambda **options: tiny.trainer(tiny.stir(tiny.policy()), **options), {"method": "flow_grpo"}),
    (lambda **options: tiny_text.trainer(tiny.stir(tiny_text.policy()), {"short": tiny_text.short}, **options),
     {"method": "grpo"})])
def test_the_reference_of_a_sample_is_its_log_probability_under_the_base(make, options, monkeypatch):
    trainer = make(parts={"advantage": {"type": "Confidence"}}, **options)
    seen = []
    def context(run, epoch, keys):
        seen.append((epoch.parts, context_of(run, epoch, keys)))
        return seen[-1][1]
    monkeypatch.setattr("flowgrpo.training.credit.context_of", context)
    trainer.run_epoch()
    [(parts, found)] = seen
    reference, logp = found.samples.reference, found.samples.logp
    assert reference.shape == logp.shape and (reference - logp).abs().max() > 1e-3
    batch = [prompt for key in found.groups.prompts for prompt in trainer.prompts if prompt.key == key]
    conditioning = trainer.rollouts.conditioning(batch)
    with trainer.policy.reference([]), torch.no_grad():
        expected = [rescored(part, trainer.rollouts.replay(part, conditioning)).leaves()["logp"] for part in parts]
    torch.testing.assert_close(reference.flatten(), torch.cat(expected).float(), rtol=0, atol=1e-5)
