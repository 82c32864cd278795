import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowgrpo.gaussian import kl, log_prob, sample
from flowgrpo.types import Gaussian

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("std_shape", [(), (4, 1, 1), (4, 2, 3)])
def test_log_prob_is_the_mean_of_the_normal_log_density(std_shape):
    mean, x = draw(4, 2, 3), draw(4, 2, 3, seed=1)
    std = draw(*std_shape, seed=2).exp()
    expected = Normal(mean, std).log_prob(x).mean(dim=(1, 2))
    torch.testing.assert_close(log_prob(Gaussian(mean, std), x), expected, rtol=0, atol=1e-12)


def test_log_prob_of_rows_without_dimensions():
    mean, x, std = draw(5), draw(5, seed=1), torch.tensor(0.3, dtype=F64)
    torch.testing.assert_close(log_prob(Gaussian(mean, std), x), Normal(mean, std).log_prob(x), rtol=0, atol=1e-12)


def test_log_prob_by_hand():
    # z = 1 and z = 2 at std 2: mean of -1/2 and -2, less log 2 + log(2 pi)/2 = 0.6931471806 + 0.9189385332.
    gaussian = Gaussian(torch.zeros(1, 2, dtype=F64), torch.tensor(2.0, dtype=F64))
    value = log_prob(gaussian, torch.tensor([[2.0, -4.0]], dtype=F64))
    assert value.item() == pytest.approx(-1.25 - 0.6931471805599453 - 0.9189385332046727, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_scored_in_float32(dtype):
    mean, x = draw(2, 8).to(dtype), draw(2, 8, seed=1).to(dtype)
    value = log_prob(Gaussian(mean, torch.tensor(0.25, dtype=dtype)), x)
    assert value.dtype == torch.float32
    expected = Normal(mean.double(), torch.tensor(0.25, dtype=F64)).log_prob(x.double()).mean(dim=1)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


def test_gradient_of_log_prob_is_z_over_std_over_dims():
    mean, noise, std = draw(2, 3).requires_grad_(), draw(2, 3, seed=1), torch.tensor(0.5, dtype=F64)
    log_prob(Gaussian(mean, std), mean.detach() + std * noise).sum().backward()
    torch.testing.assert_close(mean.grad, noise / 0.5 / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_a_deterministic_step_has_no_density(std):
    gaussian = Gaussian(torch.zeros(1, 2), torch.tensor(std))
    with pytest.raises(ValueError, match="std 0") as error:
        log_prob(gaussian, torch.zeros(1, 2))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="std 0"):
        kl(gaussian, Gaussian(torch.ones(1, 2), gaussian.std))


def test_kl_is_the_mean_of_the_gaussian_kl_and_has_a_gradient():
    mean, other, std = draw(3, 2, 2).requires_grad_(), draw(3, 2, 2, seed=1), torch.tensor(0.7, dtype=F64)
    value = kl(Gaussian(mean, std), Gaussian(other, std.clone()))
    expected = kl_divergence(Normal(mean, std), Normal(other, std)).mean(dim=(1, 2))
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    value.sum().backward()
    torch.testing.assert_close(mean.grad, (mean.detach() - other) / 0.49 / 4, rtol=0, atol=1e-12)


def test_kl_of_two_kernels_is_refused():
    mean = torch.zeros(1, 2)
    with pytest.raises(AssertionError):
        kl(Gaussian(mean, torch.tensor(1.0)), Gaussian(mean, torch.tensor(2.0)))


def test_sample_is_mean_plus_std_noise():
    mean, noise, std = draw(2, 3), draw(2, 3, seed=1), torch.tensor(0.5, dtype=F64)
    assert torch.equal(sample(Gaussian(mean, std), noise), mean + 0.5 * noise)
    assert torch.equal(sample(Gaussian(mean, torch.zeros((), dtype=F64)), noise), mean)
    assert sample(Gaussian(mean.float(), std.float()), noise.bfloat16()).dtype == torch.float32
