"""Steps of the optimizer, in closed form."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.training.optimizer import update_average
from tests.helpers import tiny


@pytest.mark.parametrize("most", [0.5, 1e6], ids=["clipped", "whole"])
def test_a_step_takes_the_gradient_scaled_to_the_largest_norm(most):
    """AdamW's first moment after one step from 0 is (1 - beta_1) g min(1, most / |g|)."""
    trainer = tiny.trainer(train__clip_grad=most)
    optimization = trainer.optimization
    torch.manual_seed(1)
    gradients = [torch.randn_like(parameter) for parameter in optimization.parameters]
    for parameter, gradient in zip(optimization.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(optimization.step(), norm)
    assert norm > 0.5
    factor = (1 - trainer.config.train.betas[0]) * min(1.0, most / norm.item())
    for parameter, gradient in zip(optimization.parameters, gradients, strict=True):
        torch.testing.assert_close(optimization.optimizer.state[parameter]["exp_avg"], factor * gradient,
                                   rtol=1e-4, atol=1e-7)


def test_a_moving_average_is_that_of_each_weight():
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.nn.Parameter(torch.randn(3, size, generator=generator)) for name, size in (("a", 2), ("b", 5))}
    average = {name: torch.randn(parameter.shape, generator=generator) for name, parameter in named.items()}
    expected = {name: value.clone().lerp_(named[name].detach(), 0.25) for name, value in average.items()}
    update_average(average, named, 0.75)
    assert all(torch.equal(average[name], expected[name]) for name in named)
    update_average({}, {}, 0.75)
