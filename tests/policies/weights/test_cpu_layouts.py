"""Layouts for a CPU: what they change, and that results stay those of the stock layouts."""

from __future__ import annotations

import copy

import pytest
import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.forwards import contiguous_inputs
from flowgrpo.starter import CALL

PROMPTS = ["three red stars", "a ring left of a cross"]


class Halves(torch.nn.Module):
    """Two linear layers, each on one half of the rows, as after a joint attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x[:, :5]), self.second(x[:, 5:])], 1)


def test_linear_layers_read_contiguous_rows_and_gradients_stay():
    torch.manual_seed(0)
    plain = Halves().double()
    ours, seen = copy.deepcopy(plain), []
    contiguous_inputs([ours], torch.device("cpu"))
    for layer in (ours.first, ours.second):
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    x = torch.randn(6, 9, 4, dtype=torch.float64, requires_grad=True)
    assert not x[:, :5].is_contiguous()
    found, expected = (torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
                       for module in (ours, plain))
    assert seen == [True, True]
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_policys_images_are_those_of_the_stock_pipeline(rank):
    """LoRA layers read contiguous rows too."""
    stock = load_pipeline("starter")
    policy = PipelinePolicy(load_pipeline("starter"), Adapter(rank=rank) if rank else None, call=CALL)
    seen = []
    for layer in policy.pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    ours = policy.generate(policy.encode(PROMPTS), policy.generators((1, 2)), 3, 2.0)
    theirs = stock(PROMPTS, num_inference_steps=3, guidance_scale=2.0, generator=policy.generators((1, 2)),
                   output_type="pt", **CALL).images
    assert seen and all(seen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_another_device_changes_nothing():
    module = Halves()
    contiguous_inputs([module], torch.device("meta"))
    assert not module.first._forward_pre_hooks
