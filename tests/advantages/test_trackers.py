"""Baselines from the history of a prompt, by hand, and in epochs of tiny models."""

import json
import math
from collections import Counter

import pytest
import torch
from torch.distributions import Beta

from flowgrpo.advantages.trackers import PriorBlend, SmoothStandardised, ValueTracker, prior_weight
from flowgrpo.methods.validate import resolve
from flowgrpo.training import sampling
from tests.helpers import tiny, tiny_runs, tiny_text
from tests.helpers.contexts import of_epoch
from tests.helpers.refusals import refused
from tests.helpers.tables import close, f64

NAN = math.nan


# Value tracker
def test_value_tracker_by_hand():
    part, context = ValueTracker(least=0.5, most=0.5), of_epoch(["a", "b"])
    # A = +-1/2, with deviation 1/2. Then a has evidence 5 of which 3 successes, b 2: rates .6 and .4.
    close(part(f64([[[1]], [[0]]]), [1.0], context), [[0.5 / 0.5001], [-0.5 / 0.5001]])
    tracked = context.run.memory["ValueTracker"]
    assert tracked["a"]["after"] == [5, 3, 0] and tracked["b"]["after"] == [5, 2, 0]
    # A = .4 and -.4, and c from the prior: .5 - .5 = 0. Squares .16, .16, 0 over 3.
    context = of_epoch(["a", "b", "c"], 1, json.loads(json.dumps(context.run.memory)))
    scale = math.sqrt(0.32 / 3) + 1e-4
    close(part(f64([[[1]], [[0]], [[0.5]]]), [1.0], context), [[0.4 / scale], [-0.4 / scale], [0]])
    assert context.run.memory["ValueTracker"]["a"]["after"] == [3.5, 2.5, 0]


def test_a_tracker_that_forgets_nothing_is_a_posterior_mean():
    part, context = ValueTracker(least=1, most=1, prior=0.3, evidence=10, floor=0), of_epoch(["a"])
    outcomes = (torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) < 0.6).double()
    for epoch, rewards in enumerate(outcomes):
        context = of_epoch(["a"], epoch, context.run.memory)
        part(rewards[None, :, None], [1.0], context)
    rate = Beta(3 + outcomes.sum(), 7 + (1 - outcomes).sum()).mean
    torch.testing.assert_close(part.prompt_weights(context.run.memory, ["a"]), (rate * (1 - rate)).sqrt()[None])


def test_the_baseline_is_the_one_before_the_batch_for_every_group_of_a_prompt():
    part, context = ValueTracker(least=0.5, most=0.5), of_epoch(["a", "b", "a"])
    rewards = f64([[[1], [0]], [[1], [1]], [[1], [NAN]]])
    first = part(rewards, [1.0], context)
    assert context.run.memory["ValueTracker"]["a"]["after"] == [7, 4, 0] and first[2, 1] == 0
    # Called again in the same epoch it says the same and counts nothing twice.
    memory = json.dumps(context.run.memory)
    assert torch.equal(part(rewards, [1.0], context), first) and json.dumps(context.run.memory) == memory
    part, context = ValueTracker(), of_epoch(["a"])  # a prompt without a reward keeps its rate
    assert (part(f64([[[NAN], [NAN]]]), [1.0], context) == 0).all() and not context.run.memory


def test_prompt_weights_by_hand():
    tracked = {name: {"epoch": 0, "after": [50, 50 * rate]} for name, rate in (("x", 0.02), ("y", 0.5), ("z", 0.98))}
    weights = ValueTracker().prompt_weights({"ValueTracker": tracked}, ["x", "y", "z", "new"])
    close(weights, [0.19, 0.55, 0.19, 0.55])
    close(ValueTracker(prior=0.0).prompt_weights({}, ["new"]), [0.05])


@pytest.mark.parametrize("part, rewards", [(ValueTracker(), [[0.5], [1.5], [NAN]]), (PriorBlend(), [[2], [0]]),
                                           (ValueTracker(), [[0.5], [-0.2], [NAN]])])
def test_rewards_that_are_no_rates_are_refused(part, rewards):
    with pytest.raises(ValueError, match=f"{type(part).__name__}: rewards from .* expected within 0 to 1"):
        part(f64([rewards]), [1.0], of_epoch(["a"]))


def test_a_policy_that_moved_half_way_forgets_half():
    part, context = ValueTracker(half=0.06, least=0.0, most=1.0), of_epoch(["a"])
    part(f64([[[1]]]), [1.0], context)
    assert context.run.memory["ValueTracker"]["a"]["after"] == [9, 5, 0]
    context = of_epoch(["a"], 1, context.run.memory | {"drift": 0.06})
    part(f64([[[1]]]), [1.0], context)
    assert context.run.memory["ValueTracker"]["a"]["after"] == [5.5, 3.5, 0.06]
    # Twice as far since then: a quarter is kept. Within bounds of SPO's, 0.875 at least and 0.96 at most.
    context = of_epoch(["a"], 2, context.run.memory | {"drift": 0.18})
    part(f64([[[0]]]), [1.0], context)
    assert context.run.memory["ValueTracker"]["a"]["after"] == pytest.approx([2.375, 0.875, 0.18])
    for drift, keep in ((0.0, 0.96), (0.006, 2 ** -0.1), (9.0, 0.875)):
        context = of_epoch(["a"], memory={"drift": drift})
        ValueTracker()(f64([[[0]]]), [1.0], context)
        assert context.run.memory["ValueTracker"]["a"]["after"][1] == pytest.approx(4 * keep)


def test_groups_of_one_are_for_parts_that_compare_no_samples():
    for advantage in ({"type": "ValueTracker"}, {"type": "Difficulty", "advantage": {"type": "Signed"}}):
        settings = tiny.config(method="flow_grpo", train__group=1, parts={"advantage": advantage, "roots": 1})
        assert resolve(settings).credit.advantage.single


@pytest.mark.parametrize("make, options", [
    (tiny.trainer, {"method": "flow_grpo"}),
    (tiny_text.trainer, {"method": "grpo", "reward": "short", "rewards": {"short": tiny_text.short}})])
def test_a_run_of_single_samples_learns_and_measures_how_far_it_moved(make, options):
    settings = options | {"parts": {"advantage": {"type": "ValueTracker"}}}
    trainer = make(**settings, train__group=1, train__prompts=4, train__micro_batch=4)
    before = trainer.policy.weights.snapshot()
    tiny_runs.epochs(trainer, 2)
    moved = any(not torch.equal(before[key], now) for key, now in trainer.policy.weights.snapshot().items())
    assert moved and trainer.memory["drift"] > 0
    counts = [entry["after"][0] for entry in trainer.memory["ValueTracker"].values()]
    assert 4 <= len(counts) and all(0 < count <= 8 + 2 for count in counts)


def test_a_run_draws_prompts_by_what_the_tracker_remembers(monkeypatch):
    trainer = tiny.trainer(parts={"advantage": {"type": "ValueTracker", "floor": 0.01}}, train__prompts=1)
    drawn = []
    def sampled(trainer, batch, turn):
        drawn.extend(prompt.text for prompt in batch)
        raise InterruptedError
    monkeypatch.setattr(sampling, "sample", sampled)
    def epochs(count: int) -> list[str]:
        drawn.clear()
        for trainer.epoch in range(count):
            with pytest.raises(InterruptedError):
                trainer.run_epoch()
        return list(drawn)
    assert sorted(epochs(6)) == sorted(tiny.PROMPTS)  # nothing is known: a walk through all
    rates = dict(zip(tiny.PROMPTS, (0.5, 0.5, 0.0, 1.0, 0.2, 0.8)))
    trainer.memory["ValueTracker"] = {name: {"epoch": 0, "after": [10, 10 * rate]} for name, rate in rates.items()}
    found = Counter(epochs(3000))
    weights = [math.sqrt(rate * (1 - rate)) + 0.01 for rate in rates.values()]
    for name, weight in zip(tiny.PROMPTS, weights):
        share = weight / sum(weights)
        assert abs(found[name] - 3000 * share) < 5 * math.sqrt(3000 * share * (1 - share))


# Smooth standardisation
def test_smooth_standardisation_by_hand():
    part, context = SmoothStandardised(), of_epoch(["a"])
    first = 0.5 / (math.sqrt(1 / 3) + 1e-8)
    close(part(f64([[[1], [0], [0], [1]]]), [1.0], context), [[first, -first, -first, first]])
    # The second group agrees, so N = 0. Of all eight, six are right: mean 3/4, T = (1/4) / sqrt(1.5 / 7).
    context = of_epoch(["a"], 1, json.loads(json.dumps(context.run.memory)))
    later = 0.25 / (math.sqrt(1.5 / 7) + 1e-8) / 2
    close(part(f64([[[1]] * 4]), [1.0], context), [[later] * 4])
    # Third visit: 1, 0, 0, 0. N = .75 / .5 and -.25 / .5; of twelve, seven right: T by mean 7/12.
    context = of_epoch(["a"], 2, context.run.memory)
    spread = math.sqrt((7 * 25 + 5 * 49) / 144 / 11) + 1e-8
    n, t = (1.5, -0.5), ((5 / 12) / spread, (-7 / 12) / spread)
    both = [((2 * a + b) / 3, (a + 2 * b) / 3) for a, b in zip(n, t)]
    right, wrong = (min(pair, key=abs) for pair in both)
    close(part(f64([[[1], [0], [0], [0]]]), [1.0], context), [[right] + [wrong] * 3], 1e-7)
    part, context = SmoothStandardised(), of_epoch(["a", "b"])  # a prompt that always agreed has none
    for epoch in range(3):
        context = of_epoch(["a", "b"], epoch, context.run.memory)
        assert (part(f64([[[1], [1]], [[NAN], [NAN]]]), [1.0], context) == 0).all()
    assert list(context.run.memory["SmoothStandardised"]) == ["a"]


# Blend with a prior
def test_the_weight_of_a_prior_by_hand():
    # Variance of a mean of four at 0.5: 1/16. One deviation, 1/4, away both weigh the same; at two, bias^2 is 1/4.
    assert prior_weight(0.5, 0.5, 4) == 1.0 and prior_weight(0.5, 0.25, 4) == prior_weight(0.5, 0.75, 4) == 0.5
    assert prior_weight(0.5, 1.0, 4) == pytest.approx(0.2)
    # A certain prior that is wrong has no weight.
    assert prior_weight(0.0, 0.5, 4) == 0.0 and prior_weight(1.0, 1.0, 4) == 1.0


def test_a_good_prior_halves_the_error_of_the_baseline_and_a_bad_one_adds_little():
    # All outcomes of four draws at a rate of .3, with their probabilities: mean squared errors of the baselines.
    outcomes = [(k / 4, math.comb(4, k) * 0.3 ** k * 0.7 ** (4 - k)) for k in range(5)]
    def error(prior: float) -> float:
        return sum(p * (w * prior + (1 - w) * mean - 0.3) ** 2
                   for mean, p in outcomes for w in (prior_weight(prior, mean, 4),))
    alone = sum(p * (mean - 0.3) ** 2 for mean, p in outcomes)
    assert alone == pytest.approx(0.0525) and error(0.35) < 0.5 * alone and error(0.9) < 1.15 * alone


def test_a_blended_baseline_by_hand():
    part, context = PriorBlend(keep=0.5, prior=0.5, evidence=2), of_epoch(["a", "b"])
    # a has the mean 1, two deviations of 1/4 from the prior: baseline .2 * .5 + .8 = .9. b confirms the prior.
    rewards = f64([[[1]] * 4, [[1], [0], [1], [0]]])
    close(part(rewards, [1.0], context), [[0.1] * 4, [0.5, -0.5, 0.5, -0.5]])
    # a: evidence 5, successes 4.5: prior .9.
    assert context.run.memory["PriorBlend"]["a"]["after"] == [5, 4.5]
    context = of_epoch(["a"], 1, context.run.memory)
    weight = 0.0225 / (0.0225 + 0.01)
    close(part(f64([[[1]] * 4]), [1.0], context), [[weight * 0.1] * 4])


@pytest.mark.parametrize("part", [ValueTracker(), SmoothStandardised(), PriorBlend()])
def test_a_tracker_needs_a_context(part):
    refused("needs a context", part, f64([[[1], [0]]]), [1.0], error=AssertionError)
