"""Attention kernels: by name, and the plain one of a CPU."""

import importlib.util
import re

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from flowgrpo.config import load
from flowgrpo.config.sections import Memory
from flowgrpo.policies.options import require_memory
from flowgrpo.policies.pipelines.attention import KERNELS, require_attention
from flowgrpo.policies.pipelines.call import plain_on_cpu
from flowgrpo.policies.weights.forwards import FUSED, plain
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.scheduler import Segment
from tests.helpers import loop, tiny
from tests.helpers.refusals import message
from tests.helpers.tables import draw


def backends(policy) -> set:
    """What the attention processors of the denoiser have been set to."""
    return {part.processor._attention_backend for part in policy.denoisers["transformer"].modules()
            if hasattr(getattr(part, "processor", None), "_attention_backend")}


def drawn(policy) -> torch.Tensor:
    return policy.run(Segment(shift_grid(2, 3.0), range(2)), policy.encode(["red"]), None, policy.generators([3]))[0]


def test_torchs_kernel_by_name_draws_what_the_default_draws():
    plain = tiny.policy(tiny.flux())
    named = tiny.policy(tiny.flux(), memory=Memory(attention="native"))
    assert backends(plain) == {None} and backends(named) == {AttentionBackendName.NATIVE}
    assert torch.equal(drawn(named), drawn(plain))


def test_another_kernel_is_that_of_the_denoiser_alone():
    """diffusers has a kernel for all models besides; it stays."""
    before = _AttentionBackendRegistry._active_backend
    policy = tiny.policy(tiny.flux(), memory=Memory(attention="cudnn"))
    assert backends(policy) == {AttentionBackendName._NATIVE_CUDNN}
    assert _AttentionBackendRegistry._active_backend == before


@pytest.mark.parametrize("pipe, kernel, told", [
    (tiny.sd3, "cudnn", "'cudnn', but the attention of SD3Transformer2DModel calls torch's "
                        "scaled_dot_product_attention itself: use auto"),
    (tiny.flux, "flash", "'flash', which diffusers refuses .*flash-attn")])
def test_a_kernel_that_a_denoiser_or_diffusers_does_not_take_is_told(pipe, kernel, told):
    tiny.policy(pipe(), memory=Memory(attention="native"))
    assert re.search(f"memory.attention is {told}", message(tiny.policy, pipe(), memory=Memory(attention=kernel)))


@pytest.mark.parametrize("name, capability, precision, refusal", [
    ("flash", (9, 0), "bf16", "needs the package flash_attn: install it, or use auto"),
    ("flash3", (8, 9), "bf16", "needs a GPU of compute capability 9.0, and cuda has 8.9: use auto"),
    ("cudnn", (7, 5), "bf16", "needs a GPU of compute capability 8.0, and cuda has 7.5: use auto"),
    ("cudnn", (9, 0), "fp32", "computes in bf16 and fp16, and precision is 'fp32': use auto, or precision: bf16"),
    ("cudnn", (0, 0), "bf16", "needs a GPU of compute capability 8.0, and cpu has none: use auto")])
def test_what_a_kernel_lacks_is_told_before_a_model_loads(name, capability, precision, refusal, monkeypatch):
    here = {"flash3": "kernels"}.get(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object() if package == here else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = load(None, {"memory.attention": name, "precision": precision})
    told = message(require_memory, loop.setup(config, device="cuda" if any(capability) else "cpu"))
    assert told == f"memory.attention is {name!r}, which {refusal}"


def test_a_gpu_with_the_package_takes_every_kernel(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("auto", *KERNELS):
        require_attention(name, torch.device("cuda"), "bf16")
    assert ("auto", *KERNELS) == Memory.model_fields["attention"].annotation.__args__


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"attn_mask": torch.linspace(-2, 2, 25).double().view(5, 5)},
                                     {"is_causal": True}, {"attn_mask": torch.ones(5, 5).tril().bool()}])
def test_plain_attention_is_the_fused_one_with_its_gradients(options):
    found = []
    for attention in (plain, FUSED):
        qkv = [draw(2, 3, 5, 4, seed=seed).requires_grad_() for seed in range(3)]
        output = attention(*qkv, **options)
        found.append([output, *torch.autograd.grad(output.square().sum(), qkv)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_it_is_in_place_only_inside_and_only_on_a_cpu():
    with plain_on_cpu(torch.device("cpu")):
        assert F.scaled_dot_product_attention is plain
    assert F.scaled_dot_product_attention is FUSED
    with plain_on_cpu(torch.device("cuda")):
        assert F.scaled_dot_product_attention is FUSED
