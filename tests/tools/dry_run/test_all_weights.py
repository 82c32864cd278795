"""Dry runs that train all weights: autocast as CUDA's, 16 bytes a weight, and shards of them."""

import pytest
import torch
import torch.nn.functional as F

from flowgrpo.gpus import GPUS
from flowgrpo.policies.weights import trainable
from flowgrpo.policies.weights.forwards import blocks
from flowgrpo.tools.dry_run.estimate import dry_run
from flowgrpo.tools.dry_run.meta_gpu import MetaGPU, Phase
from tests.helpers import tiny
from tests.tools.dry_run.test_estimate import config, model  # noqa: F401

ROUNDED = 512  # bytes to which the allocator rounds a tensor up
SIZES = [parameter.numel() for parameter in tiny.sd3().transformer.parameters()]


def held(each: float) -> int:
    """Bytes of one tensor for every weight of the transformer, of so many bytes a value."""
    return sum(-(-round(each * size) // ROUNDED) * ROUNDED for size in SIZES)


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
    adapter = sum(-(-4 * p.numel() // ROUNDED) * ROUNDED for p in tiny.policy(rank=2).weights.parameters())
    expected = 4 * held(4) - held(2) - 4 * adapter
    assert whole["reward"].allocated - lora["reward"].allocated == pytest.approx(expected, rel=0.02)
    assert list(whole) == list(lora) and whole["rollout"].flops < lora["rollout"].flops


@pytest.mark.parametrize("checkpointing, passes", [(False, 3), (True, 4)])
def test_a_replay_costs_the_gradients_of_all_weights(model, checkpointing, passes):  # noqa: F811
    """A forward, the gradients of inputs and of weights, and a recomputed forward. Attention's takes half more."""
    phases = dry_run(config(model, method="flow_grpo", parts__kl__weight=0.0, adapter__rank=0,
                            train__checkpointing=checkpointing)).phases
    replayed = phases["rollout"].flops * 5 / 6  # all steps but the last
    assert (passes - 0.5) * replayed < phases["update"].flops < (passes + 0.2) * replayed


NFT = {"method": "diffusion_nft", "train__micro_batch": 4}


@pytest.mark.parametrize("without, options", [
    (NFT | {"parts__lag": {"most": 0.0}}, NFT), ({}, {"train__ema": 0.9}),
])
def test_an_old_policy_and_an_average_take_four_bytes_a_weight(model, without, options):  # noqa: F811
    plain, more = (dry_run(config(model, adapter__rank=0, **given)).phases["reward"].allocated
                   for given in (without, options))
    assert more - plain == pytest.approx(held(4), rel=0.02)


def brought(update: Phase) -> int:
    """Waits for weights that come from the host."""
    return sum(count for reason, count in update.waits.items() if "trainable.py" in reason)


def test_the_reference_comes_from_the_host_and_scores(model):  # noqa: F811
    options = {"method": "flow_grpo", "adapter__rank": 0, "train__prompts": 1}
    free, tied = (dry_run(config(model, parts__kl__weight=weight, **options)).phases["update"]
                  for weight in (0.0, 0.1))
    assert tied.flops > free.flops
    assert [brought(free), brought(tied)] == [0, len(SIZES)]


@pytest.mark.parametrize("kept, times", [(trainable.KEPT, 4), (0, 1)])
def test_a_large_reference_comes_once_an_epoch_and_a_small_one_for_each_part(model, monkeypatch, kept,  # noqa: F811
                                                                             times):
    monkeypatch.setattr(trainable, "KEPT", kept)
    update = dry_run(config(model, method="flow_grpo", parts__kl__weight=0.1, adapter__rank=0, train__prompts=8,
                            train__group=4, train__micro_batch=8)).phases["update"]
    assert brought(update) == times * len(SIZES)


def test_shards_share_what_a_weight_takes(model):  # noqa: F811
    two, four = (dry_run(config(model, adapter__rank=0, memory__shard=True, train__prompts=2 * count),
                         processes=count).phases for count in (2, 4))
    for name in ("encode", "reward"):
        saved = two[name].allocated - four[name].allocated
        assert saved == pytest.approx(4 * (held(4 / 2) - held(4 / 4)), rel=0.05), name
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks(tiny.sd3().transformer))
    whole = dry_run(config(model, adapter__rank=0)).phases["reward"].allocated
    expected = 4 * (held(4) - held(4 / 4)) - 10 * largest  # two collected blocks, the gradients of one and their sum
    assert whole - four["reward"].allocated == pytest.approx(expected, rel=0.05)
