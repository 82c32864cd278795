"""Large groups: in parts they have the gradient of the whole, and they lift more of the right answers (BroRL)."""

from __future__ import annotations

import torch

from flowgrpo.advantages import group_relative
from tests.helpers import tiny_runs


def gradient(micro_batch: int) -> torch.Tensor:
    made = tiny_runs.trainer("flow", tiny_runs.config("flow", "flow_grpo", train__steps=2, train__prompts=1,
                                                      train__group=64, train__micro_batch=micro_batch))
    made.prompts = made.prompts[1:2]
    tiny_runs.epochs(made, 1)
    return torch.cat([parameter.grad.flatten() for parameter in made.policy.weights.parameters()])


def test_a_group_of_64_in_micro_batches_of_8_has_the_gradient_of_one_batch():
    whole, parts = gradient(64), gradient(8)
    assert whole.norm() > 1e-6 and (whole - parts).norm() <= 1e-3 * whole.norm()


def lifted(group: int, seed: int) -> float:
    """The share of the right ones of 20 answers whose probability a small step of the group's gradient raises."""
    generator = torch.Generator().manual_seed(seed)
    logits = 0.3 * torch.randn(20, generator=generator, dtype=torch.float64)
    right = torch.arange(20) < 6
    before = logits.softmax(0)
    taken = before.multinomial(group, replacement=True, generator=generator)
    advantages = group_relative(right[taken][None].double(), "none")[0]
    step = torch.zeros(20, dtype=torch.float64).index_add(0, taken, advantages / group) - before * advantages.mean()
    return ((logits + 1e-3 * step).softmax(0) > before)[right].double().mean().item()


def test_the_share_of_right_answers_that_rise_goes_to_one_with_the_group():
    shares = [sum(lifted(group, seed) for seed in range(40)) / 40 for group in (8, 64, 512)]
    assert shares[0] < 0.75 < shares[1] < shares[2] and shares[2] > 0.97, shares
