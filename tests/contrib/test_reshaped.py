"""Advantages over another comparison: reshaped, risk-averse, episodic, consistent; by hand and in runs."""

import json
import math

import pytest
import torch

from flowgrpo.advantages.baselines import Conditional, Signed
from flowgrpo.advantages.group import Advantage, group_relative
from flowgrpo.contrib.reshaped import Confidence, Consistency, Difficulty, Unconfident, difficulty, outcome_entropy
from flowgrpo.contrib.risk import RiskAverse, risk_weights
from flowgrpo.contrib.shapings import Episodic, LikelihoodConsistency
from flowgrpo.errors import UserError
from flowgrpo.methods.validate import resolve
from flowgrpo.samplers.growth import rescore
from flowgrpo.training import sampling
from flowgrpo.training.credit import context_of
from flowgrpo.types import Completions, Context, PromptGroups, RewardColumns, RunState, SampleMeasures, Scored
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message, refused
from tests.helpers.tables import close, draw, f64

NAN = math.nan
CENTRED = Advantage(scale="none", order="rewards")


def columns(*rows: list) -> torch.Tensor:
    return f64([*rows])[..., None]


# Difficulty


def test_the_curves_of_difficulty_and_entropy_of_outcomes_by_hand():
    mean = f64([0, 0.5, 1])
    close(difficulty(mean, "exp", 1), [math.e, math.exp(0.5), 1])
    close(difficulty(mean, "power", 2), [1.05 ** 2, 0.55 ** 2, 0.05 ** 2])
    close(difficulty(mean, "log", 1), [-math.log(0.02), -math.log(0.52), -math.log(1.02)])
    close(difficulty(mean, "none", 1), [1, 1, 1])
    with pytest.raises(ValueError, match="Difficulty: mean rewards from 0 to 2, expected within 0 to 1: scale"):
        difficulty(f64([0, 2]), "exp", 1)
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    found = outcome_entropy(f64([[0, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 2, 3, 4], [1, 0, NAN, NAN], [NAN] * 4]))
    close(found, [1, 0, quarter, 1, 1, 0])


def test_hard_and_unanimous_groups_by_hand():
    rewards = columns([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, NAN, 0, NAN])
    weighted, plain = Difficulty(CENTRED)(rewards, [1.0]), CENTRED(rewards, [1.0])
    close(weighted[0], [0.75 * math.exp(0.75)] + [-0.25 * math.exp(0.75)] * 3)
    close(weighted[1], [0.25 * math.exp(0.25)] * 3 + [-0.75 * math.exp(0.25)])
    assert (weighted[2] == 0).all() and weighted[3, 1] == 0
    assert torch.equal(Difficulty(CENTRED, curve="none")(rewards, [1.0]), plain)
    rewards = columns([0] * 4, [1] * 4, [1, 1, 0, 0])
    found = Consistency()(rewards, [1.0])
    # Means 0, 1 and 1/2: deviation sqrt(1/6).
    apart = 0.5 / (math.sqrt(1 / 6) + 1e-4)
    close(found[:2], [[-apart] * 4, [apart] * 4])
    assert torch.equal(found[2], group_relative(rewards[2:, :, 0])[0])  # the most mixed group is GRPO's
    assert (Consistency()(columns([1, 1], [1, 1], [NAN, NAN]), [1.0]) == 0).all()


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
    assert torch.equal(Confidence(Signed(1.0, 1.0), alpha=0)(rewards, [1.0], context), Signed(1.0, 1.0)(rewards, [1.0]))
    assert ace.needs == ("reference",) and Confidence(against="group").needs == ()
    assert Confidence(Conditional(metric="length")).needs == ("reference", "lengths")
    with pytest.raises(ValueError, match="reads the samples' log-probabilities under the reference, and this method"):
        ace(rewards, [1.0], Context(samples=SampleMeasures(context.samples.logp)))


def test_the_less_likely_of_equal_samples_weighs_more():
    context = Context(samples=SampleMeasures(f64([[-1, -3, -2, -2]])))
    found = Confidence(CENTRED, side="positive", against="group")(columns([1, 1, 0, 0]), [1.0], context)[0]
    # Confidence +1 and -1 beside the group's mean, -2.
    close(found, [0.5 * (1 + math.log1p(math.exp(-1))), 0.5 * (1 + math.log1p(math.exp(1))), -0.5, -0.5])
    context = Context(samples=SampleMeasures(f64([[-1, -2, -3, -2], [-1, -2, -3, -2]])))
    rewards = columns([1, 1, 1, 0], [0, 0.2, 0, 0])
    found, plain = Unconfident(CENTRED, 0.3)(rewards, [1.0], context), CENTRED(rewards, [1.0])
    close(found[0], [0.25 - 0.3, 0.25, 0.25 + 0.3, -0.75])
    assert torch.equal(found[1], plain[1])  # nothing is right there
    bounded = Unconfident(CENTRED, 0.3, kappa=2.0)(rewards, [1.0], context)
    close(bounded[0], [0.125, 0.25, 0.375, -0.75])


@pytest.mark.parametrize("settings, got", [
    ({"alpha": 0}, "alpha is 0, beta 0.8 and rate 0.2"), ({"alpha": 0.8}, "alpha is 0.8, beta 0.8 and rate 0.2"),
    ({"beta": 1.1}, "alpha is 0.2, beta 1.1 and rate 0.2"), ({"rate": 0}, "alpha is 0.2, beta 0.8 and rate 0")])
def test_quantiles_of_risk_lie_in_order(settings, got):
    line = f"RiskAverse: {got}, expected 0 < alpha < beta <= 1, and a rate above 0 to 1"
    assert message(RiskAverse, **settings, error=ValueError) == line
    line = "Difficulty: advantage is None, expected a comparison such as "
    assert line in message(Difficulty, advantage=None, error=ValueError)


def test_missing_rewards_and_measures_of_texts():
    samples = SampleMeasures(draw(1, 4), reference=draw(1, 4, seed=1), lengths=torch.ones(1, 4))
    rewards, context = columns([1, NAN, 0, 0.5]), Context(groups=PromptGroups(metadata=[{}]), samples=samples)
    for part in (Difficulty(), Confidence(side="both"), Unconfident(), Consistency()):
        found = part(rewards, [1.0], context)
        assert found[0, 1] == 0 and found.isfinite().all() and found.shape == (1, 4)
    for parts in ({"advantage": {"type": "Conditional", "metric": "entropy"}}, {"advantage": {
            "type": "Consistency", "advantage": {"type": "Conditional", "metric": "length"}}}):
        refused("of completions: the steps of a denoiser all have the same$", resolve, tiny.config(parts=parts))
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
        expected = [rescore(part, trainer.rollouts.replay(part, conditioning)).leaves()["logp"] for part in parts]
    torch.testing.assert_close(reference.flatten(), torch.cat(expected).float(), rtol=0, atol=1e-5)


F64 = torch.float64


def test_risk_weights_by_hand_and_as_a_gradient():
    # 0 to 10 in steps of 2: the quantiles .2 and .8 are 2 and 8. Tail (r-2)/.2 below 2, band (clip(r, 2, 8) - 8) / .6.
    weights = risk_weights(f64([[0, 2, 4, 6, 8, 10]]), 2.0, 8.0, 0.2, 0.8, 0.5)
    close(weights, [[1.5 * -10 - 10, -10, -20 / 3, -10 / 3, 0, 0]])
    # A policy softmax(theta) over six outcomes, whose quantiles .2 and .8 lie inside the second and the fifth.
    outcomes, alpha, beta, omega = f64([-3, -1, 0, 2, 5, 6]), 0.2, 0.8, 0.7
    theta = torch.zeros(6, dtype=F64, requires_grad=True)
    p = theta.softmax(0)
    ends = p.cumsum(0)
    def between(low: float, high: float) -> torch.Tensor:
        mass = (ends.clamp(max=high) - (ends - p).clamp(min=low)).clamp(min=0)
        return (mass * outcomes).sum() / (high - low)
    ((1 + omega) * between(0, alpha) + between(alpha, beta)).backward()
    low, high = outcomes.quantile(f64([alpha, beta]))
    weights = risk_weights(outcomes[None], low, high, alpha, beta, omega)[0]
    torch.testing.assert_close(theta.grad, (weights - weights.mean()) / 6, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "alpha"), [(10, 0.2), (20, 0.35), (5, 0.4)])
def test_the_tail_weights_give_the_mean_of_the_lowest_share(size, alpha):
    rewards = draw(4, size)
    low = rewards.quantile(alpha, dim=1)
    value = low + (rewards - low[:, None]).clamp(max=0).mean(dim=1) / alpha
    lowest = rewards.sort(dim=1).values[:, : round(alpha * size)].mean(dim=1)
    torch.testing.assert_close(value, lowest, rtol=0, atol=1e-12)
    # With beta 1 and omega 0 the two terms are these and the rest's: together they bring back both means.
    high = rewards.amax(dim=1)
    weights = risk_weights(rewards, low[:, None], high[:, None], alpha, 1.0, 0.0).mean(dim=1)
    rest = rewards.sort(dim=1).values[:, round(alpha * size) :].mean(dim=1)
    torch.testing.assert_close(weights + low + (high - alpha * low) / (1 - alpha), lowest + rest, rtol=0, atol=1e-12)


def test_a_bundle_of_wrong_groups_is_pushed_hardest():
    # Bundles of two groups: of nothing right, with scores 0, 0, 0, 0, and of half and all right, with 1, 1, 1/2, 1/2.
    rewards = f64([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])[..., None]
    scores = f64([0, 0, 0, 0, 1, 1, 0.5, 0.5])
    low, high = scores.quantile(f64([0.2, 0.8])).tolist()
    assert (low, high) == pytest.approx((0, 0.8))
    scale = 2.5 * (scores.std(correction=0).item() + 1e-8)
    wrong, half = -0.8 / 0.6 / scale, (0.5 - 0.8) / 0.6 / scale
    advantages = RiskAverse(bundle=2, rate=1.0)(rewards, [1.0], Context())
    close(advantages, [[wrong] * 4] * 2 + [[0, 0, half, half]] * 2)


def test_an_epoch_of_wrong_answers_is_pushed_by_what_earlier_ones_reached():
    part, context = RiskAverse(alpha=0.5, beta=1.0, omega=0.0, bundle=1, rate=0.5), Context()
    assert (part(f64([[[1], [1]]]), [1.0], context) == 0).all()  # nothing to spread yet
    context = Context()
    part(f64([[[0], [1]], [[0], [1]]]), [1.0], context)
    assert context.run.memory["RiskAverse"]["scores"]["after"] == [0.5, 1.0, 0.5]
    # Now the quantiles of 0, 0, 0, 0 are 0: tracked .25, .5 and .25. Tail (0 - .25) / .5, band (.25 - .5) / .5.
    context = Context(RunState(1, memory=json.loads(json.dumps(context.run.memory))))
    pushed = (-0.5 - 0.5) / (2 * (0.25 + 1e-8))
    wrong = f64([[[0], [0]], [[0], [0]]])
    close(part(wrong, [1.0], context), [[pushed] * 2] * 2)
    memory = json.dumps(context.run.memory)
    close(part(wrong, [1.0], context), [[pushed] * 2] * 2)
    assert json.dumps(context.run.memory) == memory


def test_missing_rewards_and_single_samples():
    # The last bundle has one group; a score is the mean of those that there are.
    rewards = f64([[[1], [NAN]], [[0], [NAN]], [[0], [NAN]]])
    found = RiskAverse(bundle=2, rate=1.0)(rewards, [1.0], Context())
    assert (found[:, 1] == 0).all() and found[2, 0] < found[0, 0] == found[1, 0] <= 0
    assert (RiskAverse()(f64([[[NAN], [NAN]]]), [1.0]) == 0).all()
    alone = RiskAverse(bundle=1)(f64([[[1]], [[0]], [[0]]]), [1.0])
    assert RiskAverse().single and alone[0, 0] == 0 and alone[1, 0] < 0
    assert RiskAverse(clamp=1)(f64([[[0], [0], [10]]]), [1.0]).min() >= -1


def of_epoch(prompt, epoch, memory):
    rewards = RewardColumns(["right", "shape"], [1.0, 0.0])
    return Context(RunState(epoch, memory=memory), rewards, PromptGroups([prompt]))


def shaped(part, values, epoch, memory, right=0.0):
    """The bonuses of samples described by `values` [G], whose total reward is `right`."""
    rewards = torch.tensor([[[right, value] for value in values]])
    return (part(rewards, of_epoch("a prompt", epoch, memory))[0, :, 0] - right).tolist()


def test_novelty_nearness_and_the_bounded_memory():
    memory, part = {}, Episodic(("shape",), explore=1.0, exploit=1.0, nearest=2)
    assert shaped(part, [0.0, 1.0, 5.0], 0, memory) == [0, 0, 0]
    memory = json.loads(json.dumps(memory))  # as a checkpoint keeps it
    for _ in range(2):  # a repeated call of the epoch starts from the epochs before
        assert shaped(part, [0.0, 3.0, 5.0], 1, memory) == pytest.approx([0.5, 2.0, 2.0])
    assert shaped(Episodic(("shape",), 1.0, nearest=1), [0.0, 3.0, 4.0], 2, memory) == pytest.approx([0, 0, 1.0])
    memory, part = {}, Episodic(("shape",), explore=0.0, exploit=0.5)
    assert shaped(part, [2.0, 4.0], 0, memory, right=1.0) == [0, 0]
    assert shaped(part, [2.0, 3.0, 7.0], 1, memory) == pytest.approx([0.5, 0.25, 0.125])
    memory, part = {}, Episodic(("shape",), size=3)
    for epoch in range(4):
        shaped(part, [float(epoch), 10.0 + epoch], epoch, memory)
    assert [row[0] for row in memory["Episodic"]["a prompt"]["past"]] == [11.0, 2.0, 12.0]
    assert part(torch.tensor([[[0.0, 5.0]]]), of_epoch("another", 4, memory)).item() == 0
    memory, part = {}, Episodic(("shape",), explore=1.0, exploit=0.0, nearest=1)
    shaped(part, [0.0, 1.0], 0, memory)
    rewards = torch.tensor([[[0.5, torch.nan], [torch.nan, torch.nan], [0.5, 3.0]]])
    found = part(rewards, of_epoch("a prompt", 1, memory))[0, :, 0]
    assert found[0] == 0.5 and found[1].isnan() and found[2] == 2.5


CARE = {"shaping": {"type": "LikelihoodConsistency", "right": 0.5}, "reference": {"type": "EMA"}, "kl": {"weight": 0.0}}


def test_the_likelihood_bonus_by_hand():
    rewards = f64([[1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0]])[..., None]
    likelihood = f64([[-1, -3, 0, -2], [-1, -1, -1, -9], [-2, -2, 0, 0]])
    context = Context(samples=SampleMeasures(likelihood=likelihood))
    found = LikelihoodConsistency(0.5)(rewards, context)
    close(found[..., 0], [[1.5, 1, 0, 1.5], [0, 0, 0, 1], [1.5, 1.5, 0, 0]])
    both = LikelihoodConsistency(0.5)(torch.cat([rewards, rewards + 7], 2), context)
    close(both[..., 1], (rewards[..., 0] + 7).tolist())
    ids = torch.tensor([[7, 8, 5, 7, 8, 6], [1, 2, 3, 4, 0, 0], [7, 8, 1, 2, 0, 0]])
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]).bool()
    logp = f64([[-1, -2, -3, -4, -5, -6], [-1, -1, -1, -5, 0, 0], [-9, -9, -1, -2, 0, 0]])
    taken = Completions(ids, torch.zeros(3).long(), Scored(logp, mask))
    close(LikelihoodConsistency(behind=[7, 8]).likelihood(taken, logp), [-6, -2, -1.5])
    close(LikelihoodConsistency().likelihood(taken, logp), [-3.5, -2, -5.25])
    with pytest.raises(UserError, match="got LikelihoodConsistency, which reads completions or"):
        resolve(tiny.config(parts={"shaping": {"type": "LikelihoodConsistency"}}))
    assert "bonus is 0, expected above 0" in message(LikelihoodConsistency, 0, error=ValueError)


def test_a_run_reads_the_likelihood_of_its_slow_reference():
    trainer = tiny_text.trainer(rewards={"short": lambda texts, prompts: [1.0] * len(texts)}, parts=CARE)
    tiny_text.stir(trainer.policy)
    trainer.run_epoch()
    assert len(trainer.kl_reference.snapshots) == 1 and trainer.kl_reference.likelihood.shape == (2, 4)
    parts, asked, _ = sampling.sample(trainer, trainer.prompts[:2])
    trainer.kl_reference.score_samples(parts, lambda part: trainer.rollouts.replay(part, asked), trainer.processes)
    found = trainer.kl_reference.likelihood
    with trainer.policy.reference(trainer.kl_reference.snapshots):
        expected = torch.cat([(new.logp * new.mask).sum(1) / new.mask.sum(1) for part in parts
                              for _, _, new in trainer.rollouts.replay(part, asked)])
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=1e-5)
    context = loop.context(trainer, parts, ["a", "b"])
    assert torch.equal(context.samples.likelihood, found)
