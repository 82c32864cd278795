"""The pretended GPU's counts, by hand."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from flowgrpo.device import queued
from flowgrpo.dry_run.gpus import GPU, GPUS, named
from flowgrpo.dry_run.meta_gpu import META, MetaGPU
from flowgrpo.errors import UserError

SLOW = GPU(memory=1, half=1e-6, single=1e-6, bandwidth=1e-3)  # 10^6 FLOP/s, 10^9 bytes/s


def test_a_products_flops_bytes_and_seconds_by_hand():
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        a, b = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
        made = a @ b
    work = meta.phases["work"]
    assert made.device == META and work.kernels == 1 and work.flops == 2 * 64 * 32 * 16
    assert work.seconds == pytest.approx(2 * 64 * 32 * 16 / (0.63 * 1e6))
    assert work.peak == meta.bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    del a, made
    gc.collect()
    assert meta.bytes == 4 * 32 * 16 and work.peak > meta.bytes


def test_views_start_no_kernel_and_hold_no_memory():
    meta = MetaGPU(SLOW)
    with meta.running():
        x = torch.empty(1024, device="meta")
        before = meta.bytes
        x.view(2, 512).transpose(0, 1)[3:]
    assert meta.bytes == before and meta.phase.kernels == 0


def test_what_makes_the_host_wait_is_counted_with_its_place():
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        x = torch.empty(8, device="meta")
        assert x.sum().item() == 0.0 and bool((x > 0).all()) and torch.equal(x, x)
        assert x.cpu().tolist() == [0.0] * 8
        torch.ones(8).to("meta")
        calm = sum(meta.phases["work"].waits.values())
        queued(torch.ones(8), META)
        torch.empty((), device="meta").copy_(torch.zeros(()))
    waits = meta.phases["work"].waits
    assert sum(waits.values()) == calm == 5 and all("test_meta_gpu.py" in reason for reason in waits)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_has_the_flops_of_two_products_and_a_backward(masked):
    meta = MetaGPU(GPUS["H100"])
    shape, flops = (2, 4, 128, 64), 2 * 2 * 2 * 4 * 128 * 128 * 64
    with meta.running(), meta.during("work"):
        query, key, value = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
                             for _ in range(3))
        mask = torch.empty(2, 1, 128, 128, dtype=torch.bool, device="meta") if masked else None
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        assert meta.phases["work"].flops == flops and out.shape == shape
        out.sum().backward()
    assert meta.phases["work"].flops == pytest.approx(3.5 * flops) and query.grad.shape == shape


def test_attention_is_itself_again_afterwards():
    before = F.scaled_dot_product_attention
    with MetaGPU(SLOW).running():
        assert F.scaled_dot_product_attention is not before
        cpu = torch.randn(1, 2, 4, 8)
        torch.testing.assert_close(F.scaled_dot_product_attention(cpu, cpu, cpu), before(cpu, cpu, cpu))
    assert F.scaled_dot_product_attention is before


def test_gpus_by_name():
    assert named("h100") is GPUS["H100"] and GPUS["H200"].room > 130e9 / 1.02
    with pytest.raises(UserError, match="--gpu is 'H10': did you mean 'H100'?"):
        named("H10")
