from __future__ import annotations

import math

import pytest
import torch

from flowgrpo.objectives import Clip, DivergenceMask, DualClip, DynamicClip, KLOnly, Reinforce, surrogate_input
from flowgrpo.types import Scored

F64 = torch.float64


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tried(surrogate, advantage: float, ratio: float, q: float = 0.5) -> tuple[float, float, bool]:
    """The loss, its gradient by log r, and whether it counts as clipped."""
    log_ratio, a, old = f64([[math.log(ratio)]]).requires_grad_(), f64([[advantage]]), f64([[math.log(q)]])
    loss = surrogate(log_ratio, a, old)
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item(), surrogate.clipped(log_ratio, a, old).item()


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
    assert surrogate.clipped(log_ratio, advantage, old).shape == (5, 3)
    with pytest.raises(AssertionError):
        surrogate(log_ratio, advantage[:, 0], old)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_clipped_is_where_the_gradient_is_cut(surrogate):
    log_ratio, advantage, old = draw(60, 20).requires_grad_(), draw(60, 1, seed=1), -draw(60, 20, seed=2).abs() * 3
    surrogate(log_ratio, advantage, old).sum().backward()
    assert torch.equal(surrogate.clipped(log_ratio, advantage, old), log_ratio.grad == 0)


def test_clip_and_dual_clip_do_not_read_the_old_log_probability():
    log_ratio, advantage = draw(4, 6), draw(4, 1, seed=1)
    for surrogate in (Clip(0.2, 0.1), DualClip(0.2, 0.1), Reinforce()):
        assert torch.equal(surrogate(log_ratio, advantage), surrogate(log_ratio, advantage, draw(4, 6, seed=2)))


# Dual clip


@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient", "clipped"), [
    (-1, 10.0, 3.0, 0.0, True),
    (-2, 3.5, 6.0, 0.0, True),
    (-1, 2.9, 2.9, 2.9, False),
    (-1, 1.3, 1.3, 1.3, False),
    (-1, 0.7, 0.8, 0.0, True),
    (2, 10.0, -2.2, 0.0, True),
    (2, 1.05, -2.1, -2.1, False),
    (2, 0.1, -0.2, -0.2, False),
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


def test_dual_clip_has_the_unit_of_clip():
    log_ratio, advantage = torch.tensor([[1.9e-6, 2.05e-6]]), torch.ones(1, 1)
    dual, clip = DualClip(2e-6, 2e-6), Clip(2e-6, 2e-6)
    assert dual.clipped(log_ratio, advantage).tolist() == [[False, True]]
    assert torch.equal(dual(log_ratio, -advantage), clip(log_ratio, -advantage))


# Dynamic clip


@pytest.mark.parametrize(("q", "low", "high"), [
    (0.9, 0.5 + 0.5 * math.sqrt(1 - 0.64 / 0.9), 0.5 + 0.5 * math.sqrt(1 + 0.8 / 0.9)),
    (0.01, 0.5, 5.0),
    (1.0, 0.8, 0.5 + 0.5 * math.sqrt(1.8)),
    (1e-9, 0.5, 10.0)])
def test_dynamic_clip_by_hand(q, low, high):
    part = DynamicClip(low=0.16, high=0.2)
    assert tried(part, 1.0, high * 1.01, q) == (pytest.approx(-high, abs=1e-10), 0, True)
    assert tried(part, 1.0, high * 0.99, q)[1:] == (pytest.approx(-high * 0.99, abs=1e-10), False)
    assert tried(part, -1.0, low * 0.99, q) == (pytest.approx(low, abs=1e-10), 0, True)
    assert tried(part, -1.0, low * 1.01, q)[1:] == (pytest.approx(low * 1.01, abs=1e-10), False)


def test_the_published_bounds_of_dynamic_clip():
    assert -tried(DynamicClip(), 1.0, 99.0, 0.9)[0] == pytest.approx(1.19, abs=5e-3)
    # At a bound the new probability times the ratio's distance from 1 is the range: q r (r - 1) = high.
    q = torch.linspace(0.7, 1, 7, dtype=F64)[None]
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


def test_dynamic_clip_needs_the_old_log_probability():
    with pytest.raises(AssertionError):
        DynamicClip()(torch.zeros(1, 1), torch.ones(1, 1))


# REINFORCE


@pytest.mark.parametrize("ratio", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_reinforce_by_hand(advantage, ratio):
    loss = -advantage * (1 + math.log(ratio))
    assert tried(Reinforce(), advantage, ratio) == (pytest.approx(loss), pytest.approx(-advantage), False)


@pytest.mark.parametrize(
    "call",
    [
        lambda: DualClip(-0.1, 0.1),
        lambda: DualClip(0.1, 0.1, dual=1.0),
        lambda: DynamicClip(low=1.2),
        lambda: DynamicClip(high=-1),
        lambda: DynamicClip(cap=0.5)])
def test_mistakes_are_named(call):
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert "\n" not in str(error.value)


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
    assert loss.tolist() == [[0, 0]] and loss.requires_grad and not KLOnly().clipped(ratio, ratio, None).any()
