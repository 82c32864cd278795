import math
from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from flowgrpo.gaussian import kl, log_prob
from flowgrpo.methods import preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.objectives import kl as penalties
from flowgrpo.objectives.kl import ESTIMATORS, Adaptive, GaussianKL, Linear, OutputError, SampledKL, SpanKL, at_epoch
from flowgrpo.samplers.growth import score
from flowgrpo.samplers.kernels import CPS, DDIM, DanceSDE, Euler, FlowDDIM, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.training import state
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from flowgrpo.types import Gaussian, RunState, Scored
from tests.helpers import loop, tiny, tiny_runs, updates
from tests.helpers.refusals import message
from tests.helpers.tables import draw

F64 = torch.float64
k1, k2, k3 = penalties.k1, penalties.k2, penalties.k3


@pytest.mark.parametrize(("estimator", "value", "slope"), [
    (k1, math.log(2), 1.0), (k2, math.log(2) ** 2 / 2, math.log(2)), (k3, math.log(2) - 0.5, 0.5)])
def test_estimators_by_hand(estimator, value, slope):
    # p = 1/2, q = 1/4, so that q/p = 1/2; the slope is the factor of grad log p.
    new = torch.tensor([[math.log(0.5)]], dtype=F64, requires_grad=True)
    found = estimator(new, torch.tensor([[math.log(0.25)]], dtype=F64))
    found.sum().backward()
    assert found.item() == pytest.approx(value, abs=1e-12) and new.grad.item() == pytest.approx(slope, abs=1e-12)


def expected(estimator, theta: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact mean of an estimator over samples of softmax(theta), and the mean of its gradient."""
    theta = theta.clone().requires_grad_()
    new, p = theta.log_softmax(0), theta.detach().softmax(0)
    value = (p * estimator(new, reference.log_softmax(0))).sum()
    (gradient,) = torch.autograd.grad(value, theta)
    return value.detach(), gradient


def divergence_gradient(theta: torch.Tensor, reference: torch.Tensor, forward: bool) -> torch.Tensor:
    theta = theta.clone().requires_grad_()
    p, q = Categorical(logits=theta), Categorical(logits=reference)
    return torch.autograd.grad(kl_divergence(q, p) if forward else kl_divergence(p, q), theta)[0]


def test_the_means_of_the_estimators_and_of_their_gradients():
    theta, reference = draw(9), draw(9, seed=1)
    exact = kl_divergence(Categorical(logits=theta), Categorical(logits=reference))
    for estimator, gradient in [
        (k1, torch.zeros(9, dtype=F64)),
        (k2, divergence_gradient(theta, reference, forward=False)),
        (k3, divergence_gradient(theta, reference, forward=True))]:
        value, found = expected(estimator, theta, reference)
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-10)
        if estimator is not k2:
            torch.testing.assert_close(value, exact, rtol=0, atol=1e-10)


def test_k2_is_biased_only_in_the_third_order():
    theta, direction = draw(9), draw(9, seed=1)
    bias = []
    for size in (1e-2, 1e-3):
        reference = theta + size * direction
        exact = kl_divergence(Categorical(logits=theta), Categorical(logits=reference))
        bias.append((expected(k2, theta, reference)[0] - exact).abs().item())
    assert bias[0] / bias[1] == pytest.approx(1000, rel=0.1)


def test_k3_is_never_negative_and_exact_next_to_zero():
    new, reference = draw(4, 50), draw(4, 50, seed=1)
    assert (k3(new, reference) > 0).all() and (k3(new, new) == 0).all()
    # In float32 exp(x) - 1 - x would be all rounding at x = 1e-3.
    assert k3(torch.tensor([0.0]), torch.tensor([1e-3])).item() == pytest.approx(0.5e-6, rel=1e-3)


def test_k1_of_transitions_is_the_gaussian_kl_per_value():
    # The mean over the noise, exactly: log p - log q is linear in it, and 0 and its mirror image average to its mean.
    mean, other, std = draw(3, 6), draw(3, 6, seed=1), torch.tensor(0.4, dtype=F64)
    noise = draw(3, 6, seed=2)
    p, q = Gaussian(mean, std), Gaussian(other, std)
    both = [k1(log_prob(p, x), log_prob(q, x)) for x in (mean + std * noise, mean - std * noise)]
    torch.testing.assert_close(sum(both) / 2, kl(p, q), rtol=0, atol=1e-10)
    exact = kl_divergence(Normal(mean, std), Normal(other, std)).mean(dim=1)
    torch.testing.assert_close(kl(p, q), exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sampled_kl_is_the_weighted_estimate(name):
    mask = torch.ones(3, 4, dtype=torch.bool)
    new, reference = Scored(draw(3, 4), mask), Scored(draw(3, 4, seed=1), mask)
    expected_value = 0.04 * ESTIMATORS[name](new.logp, reference.logp)
    assert torch.equal(SampledKL(0.04, name)(new, reference), expected_value)


def test_the_default_is_k3_and_weight_zero_needs_no_reference():
    new = Scored(draw(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert SampledKL(1.0) == SampledKL(1.0, "k3")
    for part in (SampledKL, GaussianKL, OutputError):
        assert torch.equal(part()(new, None), torch.zeros(2, 3, dtype=F64))
        with pytest.raises(AssertionError):
            part(0.1)(new, None)


# The error of the model's outputs
GRID = torch.tensor([1, 0.9, 0.65, 0.3, 0], dtype=F64)
BARS = torch.tensor([0.01, 0.2, 0.5, 0.8, 0.99], dtype=F64)


@pytest.mark.parametrize(("kernel", "grid", "noise"), [
    (FlowSDE(0.7), GRID, ()), (DanceSDE(0.3), GRID, (1.0, 1.5, 2.0)), (CPS(0.8), GRID, ()), (FlowDDIM(1.0), GRID, ()),
    (DDIM(1.0), BARS, ()), (DDIM(0.5), BARS, (1.0, 1.5, 2.0)),
])
def test_the_output_error_is_the_mean_squared_difference_of_outputs(kernel, grid, noise):
    exploration = RolloutSpec(grid, Schedule((0, 1, 2), (0, 1, 2), (), noise), kernel, Euler(), group=1)
    x, other = draw(3, 2, 5), draw(3, 2, 5, seed=1)
    for step in range(3):
        v = draw(3, 2, 5, seed=2).requires_grad_()
        new, reference = (score(exploration.transition(x, output, grid, step), draw(3, 2, 5, seed=3), True,
                                exploration.slope(step)) for output in (v, other))
        found = OutputError(0.1)(new, reference)
        apart = (v - other).square().mean((1, 2))[:, None]
        torch.testing.assert_close(found, 0.1 * apart, rtol=1e-10, atol=1e-10)
        found.sum().backward()
        torch.testing.assert_close(v.grad, 0.2 * (v.detach() - other) / 10, rtol=1e-10, atol=1e-10)


def test_the_gaussian_kl_weighs_the_output_error_by_the_step():
    # Euler-Maruyama at sigma 1 has slope -D and std g sqrt(D): KL = D / (2 g^2) times the squared error.
    exploration = RolloutSpec(GRID, Schedule((0,), (0,)), DanceSDE(0.3), Euler(), group=1)
    x, outputs = draw(2, 6), (draw(2, 6, seed=1), draw(2, 6, seed=2))
    new, reference = (score(exploration.transition(x, v, GRID, 0), x, True, exploration.slope(0)) for v in outputs)
    assert exploration.slope(0).item() == pytest.approx(-0.1, abs=1e-12)
    torch.testing.assert_close(GaussianKL(1.0)(new, reference), 0.1 / 0.18 * OutputError(1.0)(new, reference))


# Schedules
def run_at(epoch: int, epochs: int = 5, **last: float | None) -> RunState:
    return RunState(epoch, epochs, {"kl": last} if last else {})


def test_constant_and_linear_by_hand():
    assert [at_epoch(GaussianKL(0.3), run_at(epoch)).weight for epoch in range(5)] == [0.3] * 5
    assert [Linear(0.0)(0.4, run_at(epoch)) for epoch in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert [Linear(0.2)(0.1, run_at(epoch, 2)) for epoch in range(2)] == pytest.approx([0.1, 0.2])
    assert Linear(0.2)(0.1, run_at(0, 1)) == 0.1


@pytest.mark.parametrize(("measured", "factor", "weight"), [
    (0.5, 2, 0.08), (0.31, 2, 0.08), (0.3, 2, 0.04), (0.2, 2, 0.04), (0.14, 2, 0.04), (0.13, 2, 0.02), (1e-9, 4, 0.01),
    (0.0, 2, 0.04), (None, 2, 0.04),
])
def test_adaptive_by_hand(measured, factor, weight):
    # The target is 0.2: nothing happens between 0.1333 and 0.3, nor where nothing was measured. 1 is the recipe's.
    schedule = Adaptive(0.2, factor)
    assert schedule(1.0, run_at(3, weight=0.04, measured=measured)) == pytest.approx(weight)
    assert schedule(1.0, run_at(0)) == 1.0


def test_a_kl_is_read_where_its_weight_is_ever_above_zero():
    silent = [GaussianKL(), SampledKL(0.0), GaussianKL(0.0, Linear(0.0))]
    read = [GaussianKL(0.1), OutputError(0.0, Linear(0.1)), SampledKL(0.1, schedule=Linear(0.0)),
            GaussianKL(0.1, Adaptive(0.2))]
    assert not any(penalties.is_active(kl) for kl in silent) and all(penalties.is_active(kl) for kl in read)
    assert at_epoch(SampledKL(1.0, "k2", Linear(0.0)), run_at(1)) == SampledKL(0.75, "k2")


# In a run
def parts_of(**kl) -> dict:
    return {"kl": {"weight": 0.01} | kl}


def stirred(kl: dict, **options):
    trainer = tiny.trainer(parts=kl, **options)
    tiny.stir(trainer.policy)
    return trainer


def one_update(kl: dict) -> tuple[dict, torch.Tensor]:
    """The statistics and the gradient of the KL alone of an epoch's loss."""
    trainer, stats = stirred(kl), UpdateStats()
    credited, conditioning = updates.credited(trainer)
    credited = [replace(part, advantages=tuple(0 * each for each in part.advantages)) for part in credited]
    for part in credited:
        loop.backward(trainer, part, conditioning, tiny.step_weights(trainer, credited), decisions(credited), stats)
    stats.norms.append(torch.zeros(()))
    return stats.summary(), torch.cat([p.grad.flatten() for p in trainer.policy.weights.parameters()])


CHOICES = {"gaussian": parts_of(), "output": parts_of(type="OutputError"),
           **{name: parts_of(type="SampledKL", estimator=name) for name in ESTIMATORS}}


@pytest.fixture(scope="module")
def measured():
    return {name: one_update(kl) for name, kl in CHOICES.items()}


@pytest.mark.parametrize("name", CHOICES)
def test_every_kl_of_a_recipe_has_a_gradient_and_a_loss_of_its_own(measured, name):
    stats, gradient = measured[name]
    assert gradient.isfinite().all() and gradient.abs().max() > 1e-6
    assert stats["loss"] == pytest.approx(0.01 * stats["kl"], rel=1e-4) and stats["kl"] != 0
    others = [found["loss"] for other, (found, _) in measured.items() if other != name]
    assert all(abs(stats["loss"] - other) > 1e-9 for other in others)


def test_a_run_without_a_kl_measures_none():
    stats, gradient = one_update({})
    assert "kl" not in stats and gradient.abs().max() == 0


def test_the_weight_follows_the_kl_that_was_measured_even_after_a_checkpoint(tmp_path):
    recipe = parts_of(weight=0.04, schedule={"type": "Adaptive", "target": 1e-9})
    trainer, again, found = stirred(recipe, train__epochs=3), stirred(recipe, train__epochs=3), []
    for trainer.epoch in range(3):
        if trainer.epoch == 2:
            trainer.progress.saved_counters = state.counters(trainer)
            tiny_runs.resume(trainer, again, tmp_path)
        found.append(trainer.run_epoch())
    assert [metrics["kl_weight"] for metrics in found] == pytest.approx([0.04, 0.08, 0.16])
    assert all(metrics["kl"] > 1.5e-9 for metrics in found)
    assert trainer.memory["kl"] == {"weight": 0.16, "measured": found[2]["kl"]}
    assert again.epoch == 2 and again.run_epoch()["kl_weight"] == 0.16


def test_the_measured_kl_is_the_mean_over_decisions():
    trainer = stirred(parts_of(schedule={"type": "Linear", "last": 0.0}))
    credited, conditioning = updates.credited(trainer)
    each = []
    for part in credited:
        for taken in part.transitions:
            for row, parent in enumerate(taken.parent):
                x, of = taken.x[parent][None], conditioning.rows(taken.prompts[parent][None])
                with torch.no_grad():
                    v = trainer.policy.replay(of, x, trainer.rollouts.grid, taken.step)
                    with trainer.policy.reference():
                        base = trainer.policy.replay(of, x, trainer.rollouts.grid, taken.step)
                kernel = trainer.method.rollout.kernel
                p, q = (kernel(x, output, trainer.rollouts.grid, taken.step) for output in (v, base))
                each.append((p.mean - q.mean).square().mean() / (2 * p.std**2))
    metrics = loop.learn(trainer, credited, conditioning)
    assert metrics["kl"] == pytest.approx(torch.stack(each).mean().item(), rel=1e-3)
    assert metrics["kl_weight"] == 0.01


def test_a_schedule_belongs_to_a_kl_alone():
    for schedule, told in (({"type": "Clip"}, "parts.kl.schedule.type: got Clip, expected one of Adaptive, "),
                           ({"type": "Adaptive", "target": 0.1},
                            "parts.kl: Adaptive: the KL's weight is 0, which no factor raises")):
        assert told in message(with_parts, preset("mix_grpo"), {"kl": {"schedule": schedule}})


# By span
def test_spans_are_counted_by_the_holes_between_them():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0]]).bool()
    found = penalties.spans(mask)
    assert found[0][mask[0]].tolist() == [0, 0, 1, 2] and not found[1].any() and (found[2][mask[2]] == 1).all()


def test_each_span_has_its_factor_and_later_ones_the_last():
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    new, reference = Scored(draw(3, 6), mask), Scored(draw(3, 6, seed=1), mask)
    whole = SampledKL(0.5, "k2")(new, reference)
    for factors, expected in (((1, 0), [[1, 1, 0, 0], [0] * 5, [1] * 6]), ((1,), [[1] * 4, [1] * 5, [1] * 6]),
                              ((2.0, 3.0), [[2, 2, 3, 3], [3] * 5, [2] * 6]),
                              ((0, 1, 4), [[0, 0, 1, 4], [1] * 5, [0] * 6])):
        found = SpanKL(0.5, "k2", factors=factors)(new, reference)
        by_hand = torch.zeros(3, 6, dtype=F64).masked_scatter(mask, torch.tensor(sum(expected, []), dtype=F64))
        torch.testing.assert_close(found[mask], (by_hand * whole)[mask])
    assert at_epoch(SpanKL(1.0, schedule=Linear(0.0), factors=[1, 0]), run_at(1)) == SpanKL(0.75)
