"""Log-ratios, surrogates, step weights and Gaussian KL against tables worked by hand."""

import math

import pytest
import torch

from flowgrpo.gaussian import kl, log_prob
from flowgrpo.objectives.kl import GaussianKL
from flowgrpo.objectives.ratios import CompletionRatio, Guard, PlainRatio, SequenceRatio, SquaredErrorRatio
from flowgrpo.objectives.reductions import InverseDelta, NoiseLevel, Uniform
from flowgrpo.objectives.surrogates import (
    Clip,
    DivergenceMask,
    DualClip,
    DynamicClip,
    KLOnly,
    Reinforce,
    SoftGate,
    surrogate_input,
)
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.kernels import CPS, DanceSDE, FlowDDIM, FlowSDE
from flowgrpo.types import Gaussian, Scored
from tests.helpers.tables import draw, f64

F64 = torch.float64


def scored(mean: torch.Tensor, std: torch.Tensor, x_next: torch.Tensor) -> Scored:
    """The score of x_next [B, N, *D] under transitions of mean [B, N, *D] and std [N] or [B, N]."""
    flat = std.expand(mean.shape[:2]).reshape(-1, *[1] * (mean.ndim - 2))
    logp = log_prob(Gaussian(mean.flatten(0, 1), flat), x_next.flatten(0, 1)).view(mean.shape[:2])
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), mean, std)


# Log-ratios
def test_both_log_ratios_by_hand():
    # From 0 with std 1/2, x' = 1/2, so z = 1; the new mean is 0.2. logp changes by (0.25 - 0.09) / 0.5 = 0.32,
    # b = 0.04 / 0.5 = 0.08, and 0.5 * 0.4 = 0.2 = z * 0.2.
    x_next, std = torch.full((1, 1, 1), 0.5, dtype=F64), torch.tensor([0.5], dtype=F64)
    old, new = scored(0 * x_next, std, x_next), scored(0.4 * x_next, std, x_next)
    assert PlainRatio()(new, old).item() == pytest.approx(0.32, abs=1e-12)
    assert Guard()(new, old).item() == pytest.approx(0.2, abs=1e-12)


def test_a_sequences_ratio_leaves_out_what_is_behind_its_end():
    # Log-ratios 0.2 and 0.4 of the first row's two tokens, 0.3 of the second's only one; 9 stands behind the ends.
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    new = Scored(torch.tensor([[0.2, 0.4, 9.0], [0.3, 9.0, 9.0]], dtype=F64), mask)
    old = Scored(torch.zeros(2, 3, dtype=F64), mask)
    torch.testing.assert_close(SequenceRatio()(new, old), torch.tensor([[0.3], [0.3]], dtype=F64).expand(2, 3))
    torch.testing.assert_close(CompletionRatio()(new, old), torch.tensor([[0.6], [0.3]], dtype=F64).expand(2, 3))


@pytest.mark.parametrize("std", [torch.tensor([0.3, 1.7, 0.05], dtype=F64), draw(4, 3, seed=9).exp()])
def test_guard_is_the_mean_of_noise_times_shift_with_its_gradient(std):
    mean, shift, noise = draw(4, 3, 2, 5), draw(4, 3, 2, 5, seed=1).requires_grad_(), draw(4, 3, 2, 5, seed=2)
    x_next = mean + std.expand(4, 3)[..., None, None] * noise
    ratio = Guard()(scored(mean + shift, std, x_next), scored(mean, std, x_next))
    torch.testing.assert_close(ratio, (noise * shift).mean(dim=(2, 3)), rtol=0, atol=1e-10)
    # Only with b in the graph is the gradient free of the shift.
    ratio.sum().backward()
    torch.testing.assert_close(shift.grad, noise / 10, rtol=0, atol=1e-10)


def test_plain_ratios_sit_below_guards_by_b_over_std():
    mean, noise, shift = (draw(2, 1, 6, seed=seed) for seed in range(3))
    std = torch.tensor([0.4], dtype=F64)
    old, new = (scored(m, std, mean + std * noise) for m in (mean, mean + shift))
    b = shift.square().mean(dim=2) / (2 * 0.16)
    torch.testing.assert_close(Guard()(new, old) / 0.4 - PlainRatio()(new, old), b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("std", [torch.tensor([0.3, 1.7, 0.05], dtype=F64), draw(4, 3, seed=9).exp()])
def test_squared_error_ratios_are_those_of_the_released_cps(std):
    """Its log-probability is -mean((x' - mean)^2), whatever the std; the gradient is that of this."""
    mean, shift, noise = draw(4, 3, 2, 5), draw(4, 3, 2, 5, seed=1).requires_grad_(), draw(4, 3, 2, 5, seed=2)
    x_next = mean + std.expand(4, 3)[..., None, None] * noise
    ratio = SquaredErrorRatio()(scored(mean + shift, std, x_next), scored(mean, std, x_next))
    released = (x_next - mean).square().mean((2, 3)) - (x_next - mean - shift).square().mean((2, 3))
    torch.testing.assert_close(ratio, released, rtol=0, atol=1e-9)
    ratio.sum().backward()
    torch.testing.assert_close(shift.grad, (x_next - mean - shift.detach()) / 5, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ratio", [PlainRatio(), Guard(), SquaredErrorRatio()])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_same_policy_has_a_ratio_of_exactly_one(ratio, dtype):
    mean, std = draw(3, 2, 7).to(dtype), torch.tensor([0.2, 0.9], dtype=dtype)
    score = scored(mean, std, mean + draw(3, 2, 7, seed=1).to(dtype))
    assert (ratio(score, score) == 0).all()


@pytest.mark.parametrize("ratio", [Guard(), SquaredErrorRatio()])
def test_ratios_in_other_units_need_deviations(ratio):
    bare = Scored(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(AssertionError):
        ratio(bare, bare)


# Surrogates
def tried(surrogate, advantage: float, ratio: float, q: float = 0.5) -> tuple[float, float, bool]:
    """The loss, its gradient by log r, and whether it counts as clipped."""
    log_ratio, a, old = f64([[math.log(ratio)]]).requires_grad_(), f64([[advantage]]), f64([[math.log(q)]])
    loss = surrogate(log_ratio, a, old)
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item(), surrogate.clip_mask(log_ratio, a, old).item()


# low 0.2, high 0.1. A, r, loss, gradient of the loss by log r (-A r, or 0 where the clip cuts).
@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient"), [
    (2, 0.7, -1.4, -1.4), (2, 0.9, -1.8, -1.8), (2, 1.0, -2.0, -2.0), (2, 1.05, -2.1, -2.1), (2, 1.3, -2.2, 0.0),
    (-2, 0.7, 1.6, 0.0), (-2, 0.9, 1.8, 1.8), (-2, 1.0, 2.0, 2.0), (-2, 1.05, 2.1, 2.1), (-2, 1.3, 2.6, 2.6),
    (0, 0.7, 0.0, 0.0), (0, 1.0, 0.0, 0.0), (0, 1.3, 0.0, 0.0)])
def test_clip_by_hand(advantage, ratio, loss, gradient):
    found = tried(Clip(low=0.2, high=0.1), advantage, ratio)
    clipped = advantage != 0 and gradient == 0
    assert found == (pytest.approx(loss, abs=1e-12), pytest.approx(gradient, abs=1e-12), clipped)


def test_clip_is_the_published_formula():
    log_ratio, advantage = draw(20, 30) * 0.2, draw(20, 1, seed=1)
    ratio = log_ratio.exp()
    expected = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.2))
    torch.testing.assert_close(Clip(0.1, 0.2)(log_ratio, advantage), expected, rtol=0, atol=1e-12)


def test_the_range_of_guard_is_told_apart_in_float32():
    # 1 + 2e-6 and 1 + 2.05e-6 are the same float32 number.
    log_ratio = torch.tensor([[1.9e-6, 2.05e-6]], requires_grad=True)
    clip, advantage = Clip(2e-6, 2e-6), torch.ones(1, 1)
    assert clip.clip_mask(log_ratio, advantage).tolist() == [[False, True]]
    clip(log_ratio, advantage).sum().backward()
    assert log_ratio.grad.tolist() == [[pytest.approx(-1, abs=1e-5), 0]]
    dual, moved = DualClip(2e-6, 2e-6), log_ratio.detach()
    assert dual.clip_mask(moved, advantage).tolist() == [[False, True]]
    assert torch.equal(dual(moved, -advantage), clip(moved, -advantage))


# Step weights, regulariser, reduction
def test_step_weights_by_hand():
    grid, kernel = torch.tensor([1, 0.9, 0.65, 0], dtype=F64), DanceSDE(0.3)
    assert Uniform()(kernel, grid, (0, 2)).tolist() == [1, 1]
    assert InverseDelta()(kernel, grid, (0, 1)).tolist() == pytest.approx([10, 4], abs=1e-12)
    assert InverseDelta()(kernel, grid, (1,)).tolist() == pytest.approx([4], abs=1e-12)
    torch.testing.assert_close(InverseDelta()(kernel, shift_grid(8, 1), range(7)), torch.full((7,), 8.0, dtype=F64))
    # Of DanceSDE std is 0.3 sqrt(delta): sqrt(0.1) and sqrt(0.25) over their mean, whatever the level.
    roots = torch.tensor([0.1, 0.25], dtype=F64).sqrt()
    torch.testing.assert_close(NoiseLevel()(kernel, grid, (0, 1)), roots / roots.mean(), rtol=0, atol=1e-12)
    assert NoiseLevel()(kernel, grid, (1,)).tolist() == [1]


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.8), FlowDDIM(1.0)])
@pytest.mark.parametrize("steps", [range(9), (0, 3, 5), (4,)])
def test_noise_levels_have_mean_one_and_the_proportions_of_the_deviations(kernel, steps):
    grid, x = shift_grid(10, 3), torch.zeros(1, 1, dtype=F64)
    weights = NoiseLevel()(kernel, grid, steps)
    std = torch.stack([kernel(x, x, grid, step).std for step in steps])
    assert weights.shape == (len(steps),) and weights.mean().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(weights * std[0], std * weights[0], rtol=0, atol=1e-12)


def test_gaussian_kl_is_the_weighted_kl_of_each_decision():
    std = torch.tensor([0.3, 0.8], dtype=F64)
    mean, other, x_next = draw(3, 2, 4, 5).requires_grad_(), draw(3, 2, 4, 5, seed=1), draw(3, 2, 4, 5, seed=2)
    new, reference = scored(mean, std, x_next), scored(other, std, x_next)
    value = GaussianKL(0.04)(new, reference)
    for k in range(2):
        expected = 0.04 * kl(Gaussian(mean[:, k], std[k]), Gaussian(other[:, k], std[k]))
        torch.testing.assert_close(value[:, k], expected, rtol=0, atol=1e-12)
    value.sum().backward()
    slope = 0.04 * (mean.detach() - other) / std[:, None, None].square() / 20
    torch.testing.assert_close(mean.grad, slope, rtol=0, atol=1e-12)
    # 0.5 * (0.3^2 + 0.1^2) / 2 / (2 * 0.25) = 0.05
    std, zero = torch.tensor([0.5], dtype=F64), torch.zeros(1, 1, 2, dtype=F64)
    new = scored(torch.tensor([[[0.3, -0.1]]], dtype=F64), std, zero)
    assert GaussianKL(0.5)(new, scored(zero, std, zero)).item() == pytest.approx(0.05, abs=1e-12)


SURROGATES = [Clip(0.2, 0.1), DualClip(0.2, 0.1), DynamicClip(), Reinforce()]


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 3.0])
def test_an_unchanged_policy_follows_the_advantage(surrogate, advantage):
    assert tried(surrogate, advantage, 1.0) == (pytest.approx(-advantage), pytest.approx(-advantage), False)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_one_advantage_serves_all_decisions_of_a_row(surrogate):
    log_ratio, advantage, old = draw(5, 3) * 0.3, draw(5, 1, seed=1), -draw(5, 3, seed=2).abs()
    loss = surrogate(log_ratio, advantage, old)
    assert loss.shape == (5, 3) and torch.equal(loss, surrogate(log_ratio, advantage.expand(5, 3), old))
    assert surrogate.clip_mask(log_ratio, advantage, old).shape == (5, 3)
    with pytest.raises(AssertionError):
        surrogate(log_ratio, advantage[:, 0], old)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_decision_counts_as_clipped_where_its_gradient_is_cut(surrogate):
    log_ratio, advantage, old = draw(60, 20).requires_grad_(), draw(60, 1, seed=1), -draw(60, 20, seed=2).abs() * 3
    surrogate(log_ratio, advantage, old).sum().backward()
    assert torch.equal(surrogate.clip_mask(log_ratio, advantage, old), log_ratio.grad == 0)


def test_clip_and_dual_clip_do_not_read_the_old_log_probability():
    log_ratio, advantage = draw(4, 6), draw(4, 1, seed=1)
    for surrogate in (Clip(0.2, 0.1), DualClip(0.2, 0.1), Reinforce()):
        assert torch.equal(surrogate(log_ratio, advantage), surrogate(log_ratio, advantage, draw(4, 6, seed=2)))


# Dual clip
@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient", "clipped"), [
    (-1, 10.0, 3.0, 0.0, True), (-2, 3.5, 6.0, 0.0, True), (-1, 2.9, 2.9, 2.9, False), (-1, 1.3, 1.3, 1.3, False),
    (-1, 0.7, 0.8, 0.0, True), (2, 10.0, -2.2, 0.0, True), (2, 1.05, -2.1, -2.1, False), (2, 0.1, -0.2, -0.2, False),
    (0, 10.0, 0.0, 0.0, False)])
def test_dual_clip_by_hand(advantage, ratio, loss, gradient, clipped):
    found = tried(DualClip(low=0.2, high=0.1, dual=3.0), advantage, ratio)
    assert found == (pytest.approx(loss, abs=1e-12), pytest.approx(gradient, abs=1e-12), clipped)


def test_dual_clip_is_the_published_objective():
    log_ratio, advantage = draw(50, 20) * 2, draw(50, 1, seed=1)
    ratio = log_ratio.exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    objective = torch.where(advantage < 0, torch.maximum(clipped, 3 * advantage), clipped)
    torch.testing.assert_close(DualClip(0.2, 0.2)(log_ratio, advantage), -objective, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient"), [
    (1, 1.0, -2.0, -1.0),  # of an unchanged policy: 4 sigmoid(0), and the plain gradient
    (-2, 1.0, 4 / 1.05, 2.0),
    (1, 3.0, -4 / (1 + math.exp(-2)), -3 / math.cosh(1.0) ** 2),
    (-1, 3.0, 4 / 1.05 / (1 + math.exp(-2.1)), 3 / math.cosh(1.05) ** 2),
    (1, 0.5, -4 / (1 + math.exp(0.5)), -0.5 / math.cosh(0.25) ** 2)])
def test_soft_gate_by_hand(advantage, ratio, loss, gradient):
    assert tried(SoftGate(), advantage, ratio) == (pytest.approx(loss), pytest.approx(gradient), False)


# Dynamic clip
@pytest.mark.parametrize(("q", "low", "high"), [
    (0.9, 0.5 + 0.5 * math.sqrt(1 - 0.64 / 0.9), 0.5 + 0.5 * math.sqrt(1 + 0.8 / 0.9)), (0.01, 0.5, 5.0),
    (1.0, 0.8, 0.5 + 0.5 * math.sqrt(1.8)), (1e-9, 0.5, 10.0)])
def test_dynamic_clip_by_hand(q, low, high):
    part = DynamicClip(low=0.16, high=0.2)
    assert tried(part, 1.0, high * 1.01, q) == (pytest.approx(-high, abs=1e-10), 0, True)
    assert tried(part, 1.0, high * 0.99, q)[1:] == (pytest.approx(-high * 0.99, abs=1e-10), False)
    assert tried(part, -1.0, low * 0.99, q) == (pytest.approx(low, abs=1e-10), 0, True)
    assert tried(part, -1.0, low * 1.01, q)[1:] == (pytest.approx(low * 1.01, abs=1e-10), False)


def test_the_published_bounds_of_dynamic_clip():
    assert -tried(DynamicClip(), 1.0, 99.0, 0.9)[0] == pytest.approx(1.19, abs=5e-3)
    # At a bound the new probability times the ratio's distance from 1 is the range: q r (r - 1) = high.
    q = torch.linspace(0.7, 1, 7, dtype=torch.float64)[None]
    part = DynamicClip(low=0.16, high=0.2)
    highest, lowest = -part(f64([[5]]), f64([[1]]), q.log()), part(f64([[-5]]), f64([[-1]]), q.log())
    torch.testing.assert_close(q * highest * (highest - 1), torch.full_like(q, 0.2), rtol=0, atol=1e-10)
    torch.testing.assert_close(q * lowest * (1 - lowest), torch.full_like(q, 0.16), rtol=0, atol=1e-10)


def test_dynamic_clip_of_a_vanishing_probability_is_finite():
    old = torch.tensor([[-200.0]])
    for ratio in (-3.0, 3.0):
        loss = DynamicClip(cap=math.inf)(torch.tensor([[ratio]]), torch.ones(1, 1), old)
        assert loss.item() == pytest.approx(-math.exp(ratio), rel=1e-6)
    assert DynamicClip()(torch.tensor([[5.0]]), torch.ones(1, 1), old).item() == pytest.approx(-10)
    with pytest.raises(AssertionError):
        DynamicClip()(torch.zeros(1, 1), torch.ones(1, 1))  # without it


# REINFORCE
@pytest.mark.parametrize("ratio", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_reinforce_by_hand(advantage, ratio):
    loss = -advantage * (1 + math.log(ratio))
    assert tried(Reinforce(), advantage, ratio) == (pytest.approx(loss), pytest.approx(-advantage), False)


@pytest.mark.parametrize("advantage, ratio, divergence, gradient, cut", [
    (2.0, 1.5, 0.9e-5, -3.0, False), (2.0, 1.5, 1.1e-5, 0.0, True), (2.0, 0.5, 1.1e-5, -1.0, False),
    (-2.0, 0.5, 0.9e-5, 1.0, False), (-2.0, 0.5, 1.1e-5, 0.0, True), (-2.0, 1.5, 1.0, 3.0, False),
    (0.0, 2.0, 1.0, 0.0, False),
])
def test_the_divergence_mask_by_hand(advantage, ratio, divergence, gradient, cut):
    # Far away only steps back have a gradient, which is -A r by log r.
    found = tried(DivergenceMask(1e-5), advantage, ratio, math.exp(divergence))
    assert found[1:] == (pytest.approx(gradient), cut)


def test_the_mask_reads_the_divergence_and_the_others_the_old_log_probability():
    mean, mask = f64([[[1.0, 2.0]]]), torch.ones(1, 1, dtype=torch.bool)
    new, old = (Scored(f64([[-1.0]]), mask, each, f64([0.5])) for each in (mean + f64([0.1, 0.3]), mean))
    assert surrogate_input(DivergenceMask(), new, old).item() == pytest.approx((0.01 + 0.09) / 2 / (2 * 0.25))
    assert surrogate_input(Clip(), new, old) is old.logp


def test_beside_a_kl_alone_there_is_no_loss_of_samples():
    ratio = torch.tensor([[0.3, -2.0]], requires_grad=True)
    loss = KLOnly()(ratio, torch.tensor([[5.0]]))
    assert loss.tolist() == [[0, 0]] and loss.requires_grad and not KLOnly().clip_mask(ratio, ratio, None).any()
