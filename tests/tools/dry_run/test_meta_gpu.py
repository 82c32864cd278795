"""The pretended GPU's counts, by hand."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils._device import _device_constructors

from flowgrpo.device import to_device
from flowgrpo.errors import UserError
from flowgrpo.gpus import CONTEXT, GIB, GPU, GPUS, gpu_named
from flowgrpo.tools.dry_run.meta_gpu import META, Allocator, MetaGPU

SLOW = GPU(memory=1, half=1e-6, single=1e-6, bandwidth=1e-3)  # 10^6 FLOP/s, 10^9 bytes/s


def test_flops_bytes_and_seconds_of_a_product_by_hand():
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        a, b = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
        product = a @ b
    work = meta.phases["work"]
    assert product.device == META and work.kernels == 1 and work.flops == 2 * 64 * 32 * 16
    assert work.seconds == pytest.approx(2 * 64 * 32 * 16 / (0.63 * 1e6))
    assert work.allocated == meta.memory.in_use == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    del a, product
    gc.collect()
    assert meta.memory.in_use == 4 * 32 * 16 and work.allocated > meta.memory.in_use


OPERATIONS = {
    "integers": lambda x: x.long() + 1, "a whole float": lambda x: x.long() + 1.0, "true": lambda x: x.long() + True,
    "in half": lambda x: x.half() * x, "transposed": lambda x: x.mT @ x, "in place": lambda x: x.mul_(2).add_(x),
    "views": lambda x: x.split(2)[1].mT.reshape(-1), "two results": lambda x: torch.topk(x, 2)[1],
    "last channels": lambda x: F.conv2d(x.reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
                                        torch.ones(3, 2, 1, 1)),
    "other last channels": lambda x: F.conv2d(x.reshape(1, 2, 2, 4), torch.ones(3, 2, 1, 1)),
    "turned in place": lambda x: x.transpose_(0, 1) + 1, "indexed": lambda x: x[:, torch.tensor([0, 2])],
    "norm": lambda x: F.layer_norm(x, (4,)), "sums": lambda x: x.cumsum(0).sum(1, keepdim=True)}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_met_again_has_the_shapes_of_the_first_and_memory_of_its_own(name):
    with META:  # torch's own shapes
        expected = OPERATIONS[name](torch.empty(4, 4))
    meta, found = MetaGPU(SLOW), []
    with meta.running(), META:
        for phase in ("first", "second", "third"):
            x = torch.empty(4, 4)
            with meta.during(phase):
                found.append(OPERATIONS[name](x))
    for result in found:
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert len({result.untyped_storage()._cdata for result in found}) == 3  # all of them alive
    first, second, third = (meta.phases[phase] for phase in ("first", "second", "third"))
    assert first.kernels == second.kernels == third.kernels > 0
    assert (first.flops, first.seconds, first.traffic) == (third.flops, third.seconds, third.traffic)
    assert second.allocated - first.allocated == third.allocated - second.allocated


def test_products_in_place_and_the_room_of_a_gpu():
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        y, a, b = (torch.empty(shape, device="meta") for shape in ((64, 16), (64, 32), (32, 16)))
        y.addmm_(a, b)
    assert (meta.phases["work"].kernels, meta.phases["work"].flops) == (1, 2 * 64 * 32 * 16)
    meta = MetaGPU(SLOW)
    with meta.running():
        x, y = torch.empty(4096, device="meta"), torch.empty(4096, device="meta")
        for name, work in (("sum", x.add_), ("copy", x.copy_)):
            with meta.during(name):
                work(y)
    assert meta.phases["sum"].seconds == pytest.approx(3 * 4 * 4096 / (0.75 * 1e9))
    assert meta.phases["copy"].seconds == pytest.approx(2 * 4 * 4096 / (0.75 * 1e9))
    assert GPUS["H200"].room == 139.8 * GIB * 0.96 - CONTEXT


def test_peak_and_flops_of_a_linear_layers_training_step_by_hand():
    meta, rows, wide, narrow = MetaGPU(SLOW), 256, 128, 64
    with meta.running(), meta.during("work"):
        layer = torch.nn.Linear(wide, narrow, bias=False, device="meta")
        output = layer(torch.empty(rows, wide, device="meta", requires_grad=True))
        output.backward(torch.empty_like(output))
    work = meta.phases["work"]
    assert work.flops == 3 * 2 * rows * wide * narrow  # forward, and the gradients of input and weight
    # weight, input, output, the output's gradient; gradients of input and weight
    assert work.allocated == 4 * (2 * wide * narrow + 2 * rows * wide + 2 * rows * narrow)


def test_views_and_devices():
    meta = MetaGPU(SLOW)
    with meta.running():
        x = torch.empty(1024, device="meta")
        before = meta.memory.in_use
        x.view(2, 512).transpose(0, 1)[3:]
    assert meta.memory.in_use == before and meta.phase.kernels == 0
    with MetaGPU(SLOW).running(), pytest.raises(RuntimeError, match="device"):
        torch.ones(3) + torch.empty(3, device="meta")


def test_what_makes_the_host_wait_is_counted_with_its_place():
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        x = torch.empty(8, device="meta")
        assert x.sum().item() == 0.0 and bool((x > 0).all()) and torch.equal(x, x)
        assert x.cpu().tolist() == [0.0] * 8
        torch.ones(8).to("meta")
        assert len(x[x > 0]) == 8  # an unknown mask takes everything
        assert x[torch.tensor([0, 3])].shape == (2,)  # indices on the host
        counted = sum(meta.phases["work"].waits.values())
        to_device(torch.ones(8), META)
    waits = meta.phases["work"].waits
    assert sum(waits.values()) == counted == 7 and all("test_meta_gpu.py" in reason for reason in waits)


def test_values_that_come_from_the_host_stay_known():
    meta = MetaGPU(SLOW)
    with meta.running():
        grid = torch.tensor([1.0, 0.8, 0.3]).to("meta")
        assert (grid[1] * 1000).item() == pytest.approx(800) and bool(grid[2] >= 0.5) is False
        mask = torch.tensor([True, False, True]).to("meta")
        assert torch.empty(3, 5, device="meta")[mask].shape == (2, 5) and mask.sum().item() == 2
        assert torch.arange(4, device="meta").tolist() == [0, 1, 2, 3]
        grid.mul_(2)
        assert grid[0].item() == 2
        grid.add_(torch.empty(3, device="meta"))
        assert grid[0].item() == 0  # forgotten


def test_sizes_that_depend_on_values_are_the_true_ones():
    """Of values from the host; of unknown ones the largest."""
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        lengths, mask = torch.tensor([2, 3], device="meta"), torch.tensor([True, False, True], device="meta")
        assert torch.repeat_interleave(lengths).tolist() == [0, 0, 1, 1, 1]
        assert torch.unique_consecutive(lengths.repeat_interleave(lengths)).tolist() == [2, 3]
        assert mask[mask].tolist() == [True, True] and mask.nonzero().tolist() == [[0], [2]]
        unknown = torch.empty(4, dtype=torch.int64, device="meta")
        assert unknown.unique_consecutive().shape == (4,) and torch.repeat_interleave(unknown).shape == (4,)
    assert {reason.partition(":")[0] for reason in meta.phases["work"].waits} >= {"length", "unique", "mask"}


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


def test_attention_of_other_ranks_and_grouped_heads_keeps_its_shape():
    with MetaGPU(SLOW).running():
        three = torch.empty(4, 16, 8, device="meta")
        assert F.scaled_dot_product_attention(three, three, three).shape == three.shape
        five = torch.empty(2, 3, 4, 16, 8, device="meta")
        assert F.scaled_dot_product_attention(five, five, five).shape == five.shape
        query, key = torch.empty(1, 4, 16, 8, device="meta"), torch.empty(1, 2, 16, 8, device="meta")
        assert F.scaled_dot_product_attention(query, key, key, enable_gqa=True).shape == query.shape


def test_functions_are_themselves_afterwards():
    """transformers asks for the device of `torch.tensor([])` whether it is about to load weights."""
    _device_constructors.cache_clear()  # as in a process whose first context of a device is within a dry run
    with MetaGPU(GPUS["4090"]).running(), META:
        torch.empty(0)
    with META:
        assert torch.tensor([]).device == META
    assert torch.tensor([]).device.type == "cpu"
    before, norm = F.scaled_dot_product_attention, F.rms_norm
    with MetaGPU(SLOW).running():
        assert F.scaled_dot_product_attention is not before and F.rms_norm is not norm
        cpu = torch.randn(1, 2, 4, 8)
        torch.testing.assert_close(F.scaled_dot_product_attention(cpu, cpu, cpu), before(cpu, cpu, cpu))
        assert torch.equal(F.rms_norm(cpu, [8]), norm(cpu, [8]))
    assert F.scaled_dot_product_attention is before and F.rms_norm is norm


@pytest.mark.parametrize("weighted", [True, False])
def test_an_rms_normalisation_is_one_kernel_each_way(weighted):
    meta, norm, rows, wide = MetaGPU(SLOW), torch.nn.RMSNorm(64, 1e-6, weighted, device="meta").bfloat16(), 256, 64
    norm.requires_grad_(False)
    x = torch.empty(rows, wide, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with meta.running():
        with meta.during("forward"):
            y = norm(x)
        with meta.during("backward"):
            y.backward(y.detach())
    forward, backward = meta.phases["forward"], meta.phases["backward"]
    assert y.dtype == torch.bfloat16 and x.grad.shape == x.shape and forward.kernels == backward.kernels == 1
    weight = 2 * wide * weighted
    assert forward.seconds == pytest.approx((2 * 2 * rows * wide + 4 * rows + weight) / (0.75 * 1e9))
    assert backward.seconds == pytest.approx((3 * 2 * rows * wide + 4 * rows + weight) / (0.75 * 1e9))
    assert forward.allocated == 2 * rows * wide + 4 * rows  # y and the rows' rstd: no fp32 copy


def test_repeated_work_counts_like_the_first():
    meta = MetaGPU(SLOW)
    with meta.running(), meta.during("work"):
        held = torch.empty(1024, device="meta")
        with meta.measure() as work:
            torch.empty(256, device="meta").exp().sum().item()
        once = sum(meta.phases["work"].waits.values()), meta.phases["work"].kernels, meta.phases["work"].seconds
        more = torch.empty(4096, device="meta")
        meta.repeat(work)
    counts = meta.phases["work"]
    assert (sum(counts.waits.values()), counts.kernels, counts.seconds) == pytest.approx(tuple(2 * n for n in once))
    assert work.allocated >= 2 * 256 * 4
    assert counts.allocated == 4 * (held.numel() + more.numel()) + work.allocated


# --- memory ----------------------------------------------------------------------------------------------------------
def test_reserved_memory_by_the_allocators_rules():
    memory, small, large = Allocator(), 2 * 2**20, 20 * 2**20
    block = memory.take(1000)
    assert memory.in_use == 1024 and memory.reserved == small
    other = memory.take(2**20)  # fits beside it in the small pool
    assert memory.reserved == small
    big = memory.take(3 * 2**20)
    assert memory.reserved == small + large
    whole = memory.take(11 * 2**20 - 1)  # in the rest of the large segment
    assert memory.reserved == small + large and whole.size == 11 * 2**20 - 1 + 1
    memory.take(10 * 2**20 + 1)
    assert memory.reserved == small + large + 12 * 2**20
    for freed in (block, other, big, whole):
        memory.give(freed)
    assert memory.in_use == 10 * 2**20 + 512 and memory.reserved == small + large + 12 * 2**20
    memory.take(20 * 2**20)  # the joined large segment
    assert memory.reserved == small + large + 12 * 2**20


@pytest.mark.parametrize("name, key", [
    ("h100", "H100"), ("RTX4090", "4090"), ("NVIDIA GeForce RTX 3090", "3090"), ("rtx a6000", "A6000"),
    ("A100-80GB", "A100"), ("A100 40GB", "A100-40GB"), ("NVIDIA RTX 6000 Ada Generation", "6000-ADA"),
    ("Tesla V100", "V100"), ("AMD Instinct MI300X", "MI300X"), ("mi300", "MI300X"), ("RTX PRO 6000", "PRO-6000")])
def test_gpus_by_name(name, key):
    assert gpu_named(name) is GPUS[key]


@pytest.mark.parametrize("name", ["H10", "3060", "A5000", "", "RTX"])
def test_no_other_gpu_is_guessed(name):
    with pytest.raises(UserError, match=f"--gpu is '{name}', whose numbers are not known: expected one of A10, A100"):
        gpu_named(name)
