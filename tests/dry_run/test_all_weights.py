"""Dry runs that train all weights: autocast as CUDA's, 16 bytes a weight, and shards of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flowgrpo.dry_run.estimate import dry_run
from flowgrpo.dry_run.meta_gpu import MetaGPU
from flowgrpo.gpus import GPUS
from flowgrpo.policies.weights.compiled import blocks
from tests.dry_run.test_estimate import config, model  # noqa: F401
from tests.helpers import tiny

ROUNDED = 512  # bytes to which the allocator rounds a tensor up
COUNT = sum(parameter.numel() for parameter in tiny.sd3().transformer.parameters())
TENSORS = len([*tiny.sd3().transformer.parameters()])


# --- autocast --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("operation", [
    lambda x: F.linear(x, x), lambda x: x @ x, lambda x: torch.bmm(x[None], x[None]),
    lambda x: F.conv2d(x[None, None], x[None, None, :2, :2]), lambda x: torch.einsum("ij,jk->ik", x, x),
    lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), lambda x: x + x,
    lambda x: torch.relu(x)])
def test_products_have_the_precision_of_cpu_autocast(operation):
    with torch.autocast("cpu", torch.bfloat16):
        expected = operation(torch.ones(4, 4)).dtype
    with MetaGPU(GPUS["H100"]).running(), torch.autocast("meta", torch.bfloat16):
        assert operation(torch.ones(4, 4, device="meta")).dtype == expected


def test_norms_are_in_fp32_and_an_inner_context_switches_casts_off():
    with MetaGPU(GPUS["H100"]).running():
        x = torch.ones(4, 4, device="meta")
        with torch.autocast("meta", torch.bfloat16):
            half = x @ x
            assert F.layer_norm(half, (4,)).dtype == half.softmax(-1).dtype == torch.float32
            with torch.autocast("meta", enabled=False):
                assert (x @ x).dtype == torch.float32 and F.layer_norm(half, (4,)).dtype == torch.bfloat16
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float32


def test_a_trained_weight_is_cast_once_in_a_context_and_its_copy_goes_with_it():
    meta = MetaGPU(GPUS["H100"])
    with meta.running():
        layer, x = torch.nn.Linear(64, 64, bias=False, device="meta"), torch.ones(1, 64, device="meta").bfloat16()
        before = meta.memory.in_use
        with torch.no_grad(), torch.autocast("meta", torch.bfloat16), meta.during("work"):
            layer(layer(x))
            assert meta.memory.in_use - before == 2 * 64 * 64
        assert meta.phases["work"].kernels == 3 and meta.memory.in_use == before


# --- a whole epoch ---------------------------------------------------------------------------------------------------

def test_a_weight_takes_sixteen_bytes(model):  # noqa: F811
    """Its value, its gradient and two moments in fp32; below a LoRA it is a frozen one of two bytes."""
    lora, whole = (dry_run(config(model, adapter__rank=rank)).phases for rank in (2, 0))
    adapter = sum(p.numel() for p in tiny.policy(rank=2).weights.parameters())
    expected = 14 * COUNT - 16 * adapter
    assert whole["reward"].allocated - lora["reward"].allocated == pytest.approx(expected, abs=4 * ROUNDED * TENSORS)
    assert list(whole) == list(lora) and whole["rollout"].flops < lora["rollout"].flops


@pytest.mark.parametrize("checkpointing, passes", [(False, 3), (True, 4)])
def test_a_replay_costs_the_gradients_of_all_weights(model, checkpointing, passes):  # noqa: F811
    """A forward, the gradients of inputs and of weights, and a recomputed forward. Attention's takes half more."""
    phases = dry_run(config(model, method="flow_grpo", parts__kl__weight=0.0, adapter__rank=0,
                            train__checkpointing=checkpointing)).phases
    replayed = phases["rollout"].flops * 5 / 6  # all steps but the last
    assert (passes - 0.5) * replayed < phases["update"].flops < (passes + 0.2) * replayed


@pytest.mark.parametrize("options", [
    {"method": "diffusion_nft", "train__micro_batch": 4}, {"train__ema": 0.9},
])
def test_an_old_policy_and_an_average_take_four_bytes_a_weight(model, options):  # noqa: F811
    plain, more = (dry_run(config(model, adapter__rank=0, **given)).phases["reward"].allocated
                   for given in ({}, options))
    assert 4 * COUNT <= more - plain <= 4 * COUNT + 2 * ROUNDED * TENSORS


def test_the_reference_takes_a_copy_while_it_scores(model):  # noqa: F811
    options = {"method": "flow_grpo", "adapter__rank": 0, "train__checkpointing": True}
    free, tied = (dry_run(config(model, parts__kl__weight=weight, **options)).phases["update"] for weight in (0.0, 0.1))
    assert tied.flops > free.flops and tied.allocated >= free.allocated


def test_shards_share_what_a_weight_takes(model):  # noqa: F811
    two, four = (dry_run(config(model, adapter__rank=0, memory__shard=True, train__prompts=4), processes=count).phases
                 for count in (2, 4))
    for name in ("encode", "reward"):
        saved = two[name].allocated - four[name].allocated
        assert saved == pytest.approx(16 * COUNT * (1 / 2 - 1 / 4), abs=5 * ROUNDED * TENSORS), name
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks(tiny.sd3().transformer))
    whole = dry_run(config(model, adapter__rank=0)).phases["reward"].allocated
    expected = 16 * COUNT * 3 / 4 - 10 * largest  # two collected blocks, the gradients of one and their sum
    assert whole - four["reward"].allocated == pytest.approx(expected, abs=5 * ROUNDED * TENSORS)
