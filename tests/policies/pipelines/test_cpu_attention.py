import pytest
import torch
import torch.nn.functional as F

from flowgrpo.policies.pipelines.call import plain_on_cpu
from flowgrpo.policies.weights.forwards import FUSED, plain


def qkv(requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)
            for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"attn_mask": torch.linspace(-2, 2, 25).double().view(5, 5)},
                                     {"is_causal": True}, {"attn_mask": torch.ones(5, 5).tril().bool()}])
def test_plain_attention_is_the_fused_one(options):
    assert torch.allclose(plain(*qkv(), **options), FUSED(*qkv(), **options), rtol=0, atol=1e-12)


def test_plain_attention_has_the_same_gradients():
    ours, theirs = qkv(True), qkv(True)
    plain(*ours).square().sum().backward()
    FUSED(*theirs).square().sum().backward()
    for a, b in zip(ours, theirs):
        assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12)


def test_it_is_in_place_only_inside_and_only_on_a_cpu():
    with plain_on_cpu(torch.device("cpu")):
        assert F.scaled_dot_product_attention is plain
    assert F.scaled_dot_product_attention is FUSED
    with plain_on_cpu(torch.device("cuda")):
        assert F.scaled_dot_product_attention is FUSED
