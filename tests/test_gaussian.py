"""Densities of Gaussians, and shapes of the types."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowgrpo.gaussian import kl, log_prob, sample
from flowgrpo.types import Completions, Gaussian, Scored, Transitions, wide
from tests.helpers.refusals import message
from tests.helpers.tables import draw

F64 = torch.float64


@pytest.mark.parametrize("std_shape", [(), (4, 1, 1), (4, 2, 3)])
def test_log_prob_is_the_mean_of_the_normal_log_density(std_shape):
    mean, x = draw(4, 2, 3), draw(4, 2, 3, seed=1)
    std = draw(*std_shape, seed=2).exp()
    expected = Normal(mean, std).log_prob(x).mean(dim=(1, 2))
    torch.testing.assert_close(log_prob(Gaussian(mean, std), x), expected, rtol=0, atol=1e-12)


def test_log_prob_and_its_gradient():
    mean, x, std = draw(5), draw(5, seed=1), torch.tensor(0.3, dtype=F64)
    torch.testing.assert_close(log_prob(Gaussian(mean, std), x), Normal(mean, std).log_prob(x), rtol=0, atol=1e-12)
    # z = 1 and z = 2 at std 2: mean of -1/2 and -2, less log 2 + log(2 pi)/2 = 0.6931471806 + 0.9189385332.
    gaussian = Gaussian(torch.zeros(1, 2, dtype=F64), torch.tensor(2.0, dtype=F64))
    value = log_prob(gaussian, torch.tensor([[2.0, -4.0]], dtype=F64))
    assert value.item() == pytest.approx(-1.25 - 0.6931471805599453 - 0.9189385332046727, abs=1e-12)
    mean, noise, std = draw(2, 3).requires_grad_(), draw(2, 3, seed=1), torch.tensor(0.5, dtype=F64)
    log_prob(Gaussian(mean, std), mean.detach() + std * noise).sum().backward()
    torch.testing.assert_close(mean.grad, noise / 0.5 / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_scored_in_float32(dtype):
    mean, x = draw(2, 8).to(dtype), draw(2, 8, seed=1).to(dtype)
    value = log_prob(Gaussian(mean, torch.tensor(0.25, dtype=dtype)), x)
    assert value.dtype == torch.float32
    expected = Normal(mean.double(), torch.tensor(0.25, dtype=F64)).log_prob(x.double()).mean(dim=1)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_a_deterministic_step_has_no_density(std):
    gaussian = Gaussian(torch.zeros(1, 2), torch.tensor(std))
    assert "std 0" in message(log_prob, gaussian, torch.zeros(1, 2), error=ValueError)
    assert "std 0" in message(lambda: kl(gaussian, Gaussian(torch.ones(1, 2), gaussian.std)), error=ValueError)


def test_kl_of_gaussians_and_samples():
    mean, other, std = draw(3, 2, 2).requires_grad_(), draw(3, 2, 2, seed=1), torch.tensor(0.7, dtype=F64)
    value = kl(Gaussian(mean, std), Gaussian(other, std.clone()))
    expected = kl_divergence(Normal(mean, std), Normal(other, std)).mean(dim=(1, 2))
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    value.sum().backward()
    torch.testing.assert_close(mean.grad, (mean.detach() - other) / 0.49 / 4, rtol=0, atol=1e-12)
    mean = torch.zeros(1, 2)
    with pytest.raises(AssertionError):
        kl(Gaussian(mean, torch.tensor(1.0)), Gaussian(mean, torch.tensor(2.0)))
    mean, noise, std = draw(2, 3), draw(2, 3, seed=1), torch.tensor(0.5, dtype=F64)
    assert torch.equal(sample(Gaussian(mean, std), noise), mean + 0.5 * noise)
    assert torch.equal(sample(Gaussian(mean, torch.zeros((), dtype=F64)), noise), mean)
    assert sample(Gaussian(mean.float(), std.float()), noise.bfloat16()).dtype == torch.float32


def scored(decisions: int, **kept: torch.Tensor) -> Scored:
    logp = torch.arange(float(decisions))[:, None]
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), **kept)


@pytest.fixture
def taken() -> Transitions:
    """Three states of prompts 4, 4 and 7, which 2, 1 and 2 transitions left."""
    x, x_next = torch.arange(6.0).reshape(3, 2), torch.arange(10.0).reshape(5, 2) + 100
    old = scored(5, mean=torch.arange(10.0).reshape(5, 1, 2) + 200, std=torch.tensor([0.5]))
    return Transitions(3, x, torch.tensor([4, 4, 7]), torch.tensor([0, 0, 1, 2, 2]), x_next, old)


@pytest.mark.parametrize("keep, rows, states, parent", [
    ([0, 1, 0, 0, 0], [1], [0], [0]),
    ([1, 1, 0, 0, 1], [0, 1, 4], [0, 2], [0, 0, 1]),
    ([0, 0, 1, 1, 1], [2, 3, 4], [1, 2], [0, 1, 1]),
    ([1, 0, 1, 0, 1], [0, 2, 4], [0, 1, 2], [0, 1, 2])])
def test_kept_transitions_keep_their_states_and_no_other(taken, keep, rows, states, parent):
    found = taken.select(torch.tensor(keep, dtype=torch.bool))
    assert found.step == 3 and found.parent.tolist() == parent
    assert torch.equal(found.x, taken.x[states]) and torch.equal(found.prompts, taken.prompts[states])
    assert torch.equal(found.x_next, taken.x_next[rows]) and found.old.logp[:, 0].tolist() == rows
    assert torch.equal(found.old.mean, taken.old.mean[rows]) and torch.equal(found.old.std, taken.old.std)
    # The state and the prompt that every transition left are what they were.
    before = taken.parent[rows]
    assert torch.equal(found.x[found.parent], taken.x[before])
    assert torch.equal(found.prompts[found.parent], taken.prompts[before])


def test_transitions_that_are_kept(taken):
    corrected = replace(taken, importance=torch.arange(10.0).view(5, 2))
    assert corrected.select(torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool)).importance.tolist() == [[2, 3], [8, 9]]
    assert taken.select(torch.ones(5, dtype=torch.bool)) is taken
    assert taken.select(torch.zeros(5, dtype=torch.bool)) is None


@pytest.mark.parametrize("states, prompts, parents, following, scores", [
    (3, 2, 5, 5, 5), (3, 3, 4, 5, 5), (3, 3, 5, 4, 5), (3, 3, 5, 5, 4)])
def test_transitions_refuse_lengths_that_do_not_belong_together(states, prompts, parents, following, scores):
    with pytest.raises(AssertionError):
        Transitions(0, torch.zeros(states, 2), torch.zeros(prompts, dtype=torch.int64),
                    torch.zeros(parents, dtype=torch.int64), torch.zeros(following, 2), scored(scores))


def test_rows_and_shapes_of_records():
    logp, mask = torch.arange(6.0).reshape(3, 2), torch.tensor([[1, 1], [0, 1], [1, 0]], dtype=torch.bool)
    mean, each = torch.arange(24.0).reshape(3, 2, 4), torch.arange(6.0).reshape(3, 2) + 50
    step = torch.tensor([0.1, 0.2])
    for at in (torch.tensor([2, 0]), torch.tensor([True, False, True]), slice(1, 3)):
        found = Scored(logp, mask, mean, each).rows(at)
        for value, whole in ((found.logp, logp), (found.mask, mask), (found.mean, mean), (found.std, each)):
            assert torch.equal(value, whole[at])
        assert Scored(logp, mask, mean, step).rows(at).std is step  # one per decision, whatever the rows
        bare = Scored(logp, mask).rows(at)
        assert torch.equal(bare.logp, logp[at]) and bare.mean is None and bare.std is None
    logp, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for wrong in (lambda: Scored(logp, mask[:, :1]), lambda: Scored(logp, mask, mean=torch.zeros(3, 2, 4)),
                  lambda: Completions(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64),
                                      Scored(logp, mask))):
        with pytest.raises(AssertionError):
            wrong()


@pytest.mark.parametrize("given, expected", [
    ((torch.bfloat16,), torch.float32), ((torch.int64, torch.float16), torch.float32),
    ((torch.float16, torch.float32), torch.float32), ((torch.float32, torch.float64), torch.float64)])
def test_wide_is_the_common_dtype_and_float32_at_least(given, expected):
    assert {t.dtype for t in wide(*(torch.zeros(1, dtype=dtype) for dtype in given))} == {expected}
