from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from flowgrpo.gaussian import kl, log_prob
from flowgrpo.objectives import ESTIMATORS, SampledKL, adaptive, constant, k1, k2, k3, linear
from flowgrpo.types import Gaussian, Scored

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("estimator", "value", "slope"), [
    (k1, math.log(2), 1.0),
    (k2, math.log(2) ** 2 / 2, math.log(2)),
    (k3, math.log(2) - 0.5, 0.5),
])
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
        (k3, divergence_gradient(theta, reference, forward=True)),
    ]:
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
    assert torch.equal(SampledKL()(new, None), torch.zeros(2, 3, dtype=F64))
    with pytest.raises(AssertionError):
        SampledKL(0.1)(new, None)


# Schedules


def test_constant_and_linear_by_hand():
    assert [constant(0.3, epoch, 5) for epoch in range(5)] == [0.3] * 5
    assert [linear(0.4, 0.0, epoch, 5) for epoch in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert [linear(0.1, 0.2, epoch, 2) for epoch in range(2)] == pytest.approx([0.1, 0.2])
    assert linear(0.1, 0.2, 0, 1) == 0.1


@pytest.mark.parametrize(("kl_seen", "factor", "weight"), [
    (0.5, 2, 0.08), (0.31, 2, 0.08), (0.3, 2, 0.04), (0.2, 2, 0.04), (0.14, 2, 0.04), (0.13, 2, 0.02), (0.0, 4, 0.01),
])
def test_adaptive_by_hand(kl_seen, factor, weight):
    # The target is 0.2: nothing happens between 0.1333 and 0.3.
    assert adaptive(0.04, kl_seen, 0.2, factor) == pytest.approx(weight)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SampledKL(-1),
        lambda: SampledKL(0.1, "k4"),
        lambda: adaptive(0.1, 0.1, target=0),
        lambda: adaptive(0.1, 0.1, target=1, factor=1),
    ],
)
def test_mistakes_are_named(call):
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert "\n" not in str(error.value)
