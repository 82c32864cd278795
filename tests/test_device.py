"""Copies to a GPU go by pinned memory and are queued: seen with a stand-in for a GPU, the CPU under another name."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flowgrpo import device
from flowgrpo.device import put_away, rounded_products, to_device, without_cudnn_attention
from flowgrpo.errors import UserError
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment
from flowgrpo.types import RegressionTarget, Scored
from tests.helpers import tiny, tiny_text


class Gpu(TorchFunctionMode):
    """Inside, tensors "on cuda" are on the CPU, and copies to there are counted as (by pinned memory, queued)."""

    def __init__(self):
        super().__init__()
        self.pinned, self.copies = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if function is torch.Tensor.to and "cuda" in map(str, args[1:]):
            by = any(args[0] is each for each in self.pinned)
            self.copies.append((by, kwargs.get("non_blocking", False)))
            return args[0].clone()
        return function(*args, **kwargs)


SCORED = Scored(torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1, 4), torch.ones(1))


@pytest.mark.parametrize("moved, copies", [
    (lambda: to_device(torch.ones(2), "cuda"), 1),
    (lambda: SCORED.to("cuda"), 3),  # its numbers stay
    (lambda: RegressionTarget(torch.ones(2, 1, 4), torch.ones(2, 1)).to("cuda"), 2),
    (lambda: to_device(torch.ones(2), "cpu"), 0)])
def test_a_copy_is_queued(moved, copies):
    with Gpu() as gpu:
        moved()
    assert gpu.copies == [(True, True)] * copies


class Away(TorchFunctionMode):
    """Inside, a tensor is on a GPU by its device; what is copied to the CPU is noted as (pinned, queued)."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.pinned, self.copies = tensor, False, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.device.__get__ and args[0] is self.tensor:
            return torch.device("cuda")
        if function is torch.empty_like:
            self.pinned = kwargs.pop("pin_memory", False)
        if function is torch.Tensor.copy_:
            self.copies.append((self.pinned, kwargs.get("non_blocking", False)))
        return function(*args, **kwargs)


def test_copies_and_schedulers_wait_for_nothing():
    tensor = torch.arange(3.0)
    with Away(tensor) as seen:
        found = put_away(tensor, torch.device("cpu"))
    assert seen.copies == [(True, True)] and torch.equal(found, tensor) and found is not tensor
    assert put_away(tensor, torch.device("cpu")) is tensor
    scheduler = PolicyScheduler.over(tiny.sd3().scheduler)
    scheduler.follow(Segment(shifted(4, 3.0), range(4)))
    with Gpu() as gpu:
        scheduler.set_timesteps(4, device="cuda")
    assert gpu.copies == [(True, True)] * 2
    torch.testing.assert_close(scheduler.sigmas, shifted(4, 3.0).float())
    values = torch.arange(4.0)
    with Gpu():
        assert torch.equal(to_device(values, "cuda"), values)
    assert to_device(values, "cpu") is values and to_device(values, None) is values


@pytest.mark.parametrize("precision, name, before, inside", [
    ("bf16", "cuda:1", "highest", "high"), ("fp16", "cuda", "highest", "high"), ("fp32", "cuda", "highest", "highest"),
    ("bf16", "cpu", "highest", "highest"), ("bf16", "cuda", "medium", "medium")])
def test_fp32_products_are_rounded_on_a_gpu_below_fp32_alone(precision, name, before, inside):
    """A coarser setting of the user stays; every one is restored, after an error too."""
    first = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with pytest.raises(ArithmeticError), rounded_products(precision, name):
            assert torch.get_float32_matmul_precision() == inside
            raise ArithmeticError
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(first)


@pytest.mark.parametrize("precision, name, before, inside", [
    ("fp32", "cuda:1", True, False), ("bf16", "cuda", True, True), ("fp32", "cpu", True, True),
    ("fp32", "cuda", False, False)])
def test_fp32_convolutions_are_not_rounded_on_a_gpu(precision, name, before, inside):
    first, cudnn = torch.backends.cudnn.allow_tf32, torch.backends.cudnn
    cudnn.allow_tf32 = before
    try:
        with pytest.raises(ArithmeticError), rounded_products(precision, name):
            assert cudnn.allow_tf32 == inside and cudnn.conv.fp32_precision == ("tf32" if inside else "none")
            raise ArithmeticError
        assert cudnn.allow_tf32 == before
    finally:
        cudnn.allow_tf32 = first


def test_a_users_precision_of_one_operator_stays():
    cudnn = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"  # the older name raises RuntimeError from here on
    try:
        with rounded_products("fp32", "cuda"):
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("ieee", "tf32")
        assert cudnn.conv.fp32_precision == "ieee"
    finally:
        cudnn.allow_tf32 = True


@pytest.mark.parametrize("name, before, inside", [("cuda:1", True, False), ("cpu", True, True), ("cuda", False, False)])
def test_cudnns_attention_is_off_on_a_gpu_and_restored(name, before, inside):
    first, cuda = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda
    cuda.enable_cudnn_sdp(before)
    try:
        with pytest.raises(ArithmeticError), without_cudnn_attention(name), without_cudnn_attention(name):
            assert cuda.cudnn_sdp_enabled() == inside
            raise ArithmeticError
        assert cuda.cudnn_sdp_enabled() == before
    finally:
        cuda.enable_cudnn_sdp(first)


def test_a_language_model_on_a_gpu_computes_without_cudnns_attention():
    policy = tiny_text.policy()
    with policy._arithmetic():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    policy.device = torch.device("cuda")
    with policy._arithmetic():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("error, full", [
    (torch.OutOfMemoryError("CUDA out of memory"), True), (MemoryError(), True), (RuntimeError("a mistake"), False),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True), (ValueError("DefaultCPUAllocator"), False)])
def test_errors_that_say_that_memory_ran_out(error, full):
    assert device.ran_out(error) == full


def test_memory_that_is_not_there_is_told():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert device.ran_out(caught.value)
    assert len(torch.Generator().get_state()) == device.GENERATOR
    device.require_generators(1000, "samples")
    with pytest.raises(UserError, match="1,000,000,000 samples need 4,709 GiB .* ask for [0-9,]+ at most") as caught:
        device.require_generators(10**9, "samples")
    assert "\n" not in str(caught.value)
