"""Distribution matching: tables worked by hand, Gaussians in closed form, and finite differences."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowgrpo.methods.distillation import (
    consistency_target,
    matching_direction,
    preference_weights,
    pull,
)
from flowgrpo.samplers.kernels import predict_x0, x0_from_noise
from flowgrpo.samplers.noised_finals import add_noise
from tests.helpers.tables import close, f64

TEACHER = Normal(f64(0.7), f64(0.4))
POINTS, MASSES = np.polynomial.hermite_e.hermegauss(40)
Z, EPS = (torch.tensor(each.flatten())[:, None] for each in np.meshgrid(POINTS, POINTS))
MASS = torch.tensor(np.outer(MASSES, MASSES).flatten() / (2 * math.pi))[:, None]  # of standard normal (z, eps)


def test_direction_and_pull_by_hand():
    x0, real, fake = f64([[1.0, 2.0], [0.0, 0.0]]), f64([[0.0, 0.0], [0.0, 0.0]]), f64([[0.5, 1.0], [1e-5, 0.0]])
    # The first is divided by (1 + 2) / 2, the second by the least size, 1e-5.
    close(matching_direction(x0, real, fake), [[1 / 3, 2 / 3], [1.0, 0.0]], 1e-12)
    # Half the mean square of a direction is the value, and direction / D the gradient.
    moved = x0.clone().requires_grad_()
    loss = pull(moved, f64([[3.0, 4.0], [0.0, -2.0]]))
    close(loss, [25 / 4, 1.0], 1e-12)
    close(torch.autograd.grad(loss.sum(), moved)[0], [[1.5, 2.0], [0.0, -1.0]], 1e-12)


def data_of(at: Normal, x, t: float, vp: bool):
    """E[x0 | x_t = x] for x0 of a Gaussian, from the regression of x0 on x_t."""
    keep, add = (t**0.5, (1 - t)**0.5) if vp else (1 - t, t)
    return at.loc + keep * at.variance / (keep**2 * at.variance + add**2) * (x - keep * at.loc)


def noised(at: Normal, t: float) -> Normal:
    return Normal((1 - t) * at.loc, ((1 - t)**2 * at.variance + t**2).sqrt())


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_the_gradient_is_that_of_the_kl_of_noised_gaussians(t):
    parameters = f64([-0.3, 0.9])
    def divergence(parameters):
        return kl_divergence(noised(Normal(*parameters), t), noised(TEACHER, t))
    def matched(parameters):
        """E of the difference of scores times d x_t / d parameters, from the direction without its divisor."""
        student = Normal(*parameters.detach())
        x0 = parameters[0] + parameters[1] * Z
        x = (1 - t) * x0.detach() + t * EPS
        real, fake = data_of(TEACHER, x, t, False), data_of(student, x, t, False)
        size = (x0.detach() - real).abs()
        direction = matching_direction(x0.detach(), real, fake) * size  # (fake - real)
        return (MASS * ((1 - t) / t)**2 * direction * x0).sum()
    found = torch.autograd.grad(matched(parameters.requires_grad_()), parameters)[0]
    expected = torch.autograd.grad(divergence(parameters), parameters)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    step = 1e-5
    with torch.no_grad():
        differences = [(divergence(parameters + step * way) - divergence(parameters - step * way)) / (2 * step)
                       for way in torch.eye(2, dtype=torch.float64)]
    torch.testing.assert_close(found, torch.stack(differences), rtol=0, atol=1e-7)


def test_a_student_that_is_the_teacher_has_no_gradient_and_every_direction_leads_to_the_teacher():
    x = f64(torch.linspace(-2, 2, 9).tolist())[:, None]
    for t in (0.2, 0.8):
        real = data_of(TEACHER, x, t, False)
        close(matching_direction(x, real, data_of(TEACHER, x, t, False)), torch.zeros(9, 1))
        above = Normal(TEACHER.loc + 0.5, TEACHER.scale)
        assert (matching_direction(x, real, data_of(above, x, t, False)) > 0).all()  # its negative leads down


@pytest.mark.parametrize("vp", [False, True])
@pytest.mark.parametrize("t", [0.25, 0.7])
def test_the_denoising_loss_is_least_at_the_fake_score_whose_prediction_is_the_posterior_mean(t, vp):
    student = Normal(f64(-0.3), f64(0.9))
    x0 = student.loc + student.scale * Z
    x, target = add_noise(x0.float(), EPS.float(), t, torch.device("cpu"), vp)
    assert x.dtype == torch.float32
    keep, add = (t**0.5, (1 - t)**0.5) if vp else (1 - t, t)
    x, target = keep * x0 + add * EPS, EPS if vp else EPS - x0  # the same, unrounded
    # The least squares of a + b x on the target, over all (z, eps): the model of a Gaussian is linear.
    design = torch.cat([torch.ones_like(x), x], 1)
    best = torch.linalg.solve(design.T @ (MASS * design), design.T @ (MASS * target))
    predicted = (x0_from_noise if vp else predict_x0)(x, design @ best, torch.tensor(t, dtype=torch.float64))
    torch.testing.assert_close(predicted, data_of(student, x, t, vp), rtol=0, atol=1e-9)


def test_preference_weights_by_hand():
    # Mean of A (e - e_base): (1 * (-0.02) - 1 * 0.02) / 2 = -0.02, times 100; the second group has not moved.
    advantage, base = f64([[1.0, -1.0], [2.0, -2.0]]), f64([[0.3, 0.5], [1.0, 0.1]])
    errors = base + f64([[-0.02, 0.02], [0.0, 0.0]])
    close(preference_weights(advantage, errors, base, 100.0), [[1 / (1 + math.exp(2))], [0.5]], 1e-12)


def test_consistency_targets_by_hand():
    # ((1/2 - 1/4) v + 1/4 u) / (1/2), and v itself where the teacher's step ends at the data.
    close(consistency_target(f64([[1.0, 0.0]]), f64([[2.0, -4.0]]), 0.5, 0.25), [[1.5, -2.0]], 1e-12)
    close(consistency_target(f64([[1.0, 0.0]]), f64([[2.0, -4.0]]), 0.05, 0.0), [[1.0, 0.0]], 1e-12)


def test_the_consistency_function_of_a_gaussian_is_its_own_target_but_for_the_error_of_an_euler_step():
    """The flow of N(m, c^2) keeps z: x_s = (1-s) m + r(s) z with r^2 = (1-s)^2 c^2 + s^2, and f(x_s, s) = m + c z."""
    m, c, z = TEACHER.loc, TEACHER.scale, f64(torch.linspace(-2, 2, 9).tolist())[:, None]
    def spread(s):
        return math.sqrt((1 - s)**2 * c**2 + s**2)
    def mean_velocity(x, s):
        return (x - m - c * (x - (1 - s) * m) / spread(s)) / s
    s, errors = 0.6, []
    x = (1 - s) * m + spread(s) * z
    velocity = -m + ((s - 1) * c**2 + s) / spread(s) * z  # d x_s / d s
    for jump in (0.04, 0.02, 0.01):
        after = s - jump
        target = consistency_target(velocity, mean_velocity(x - jump * velocity, after), s, after)
        errors.append((target - mean_velocity(x, s)).abs().max().item())
    assert errors[0] < 5e-3  # of second order in the jump
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1) and errors[1] / errors[2] == pytest.approx(4, rel=0.1)
