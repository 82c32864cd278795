"""Forwards in fewer kernels, and layouts for a CPU: results stay those of peft, diffusers and the stock pipeline."""

import copy

import pytest
import torch
from diffusers.models.normalization import MochiRMSNorm, RMSNorm
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.forwards import contiguous_inputs, folded, fuse_norms, fuse_text_norms, without_casts
from flowgrpo.policies.weights.trainable import lora_layers
from flowgrpo.starter import CALL
from flowgrpo.tools.check.tiny import make_language_model
from tests.helpers import tiny, tiny_text


def net(dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """Two linear layers with LoRAs in fp32 whose B is not zero."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4, bias=False)).to(dtype).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=["0", "2"], **options), made, "default")
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) / 4
    return made


def gradients(made: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    made.zero_grad()
    y = made(x)
    y.float().square().sum().backward()
    return y.detach(), {name: p.grad for name, p in made.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_in_fp32_it_is_pefts(shape):
    theirs, ours, x = net(), net(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert without_casts(lora_layers(ours).values())
    (expected, wanted), (found, grads) = gradients(theirs, x), gradients(ours, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert grads.keys() == wanted.keys() and len(grads) == 4
    for key, grad in grads.items():
        torch.testing.assert_close(grad, wanted[key], rtol=1e-6, atol=1e-6 * wanted[key].abs().max().item())


def test_in_bf16_it_is_autocasts_with_gradients_in_fp32():
    theirs, ours = net(torch.bfloat16), net(torch.bfloat16)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert without_casts(lora_layers(ours).values())
    found, grads = gradients(ours, x)
    with torch.autocast("cpu", torch.bfloat16):
        expected, wanted = gradients(theirs, x)
    assert found.dtype == expected.dtype == torch.bfloat16
    exact, true = gradients(net().double(), x.double())
    for (ours_of, theirs_of), of in [((found, expected), exact), *(((grads[k], wanted[k]), true[k]) for k in true)]:
        size = of.abs().max()
        errors = [(value.double() - of).abs().max() / size for value in (ours_of, theirs_of)]
        assert errors[0] <= max(1.5 * errors[1], 2**-7), errors  # no further from the truth than autocast's
    assert all(grad.dtype == torch.float32 for grad in grads.values())


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8)])
def test_folded_layers_multiply_by_w_plus_s_b_a_until_the_end(shape):
    made, x = net(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    layers = [*lora_layers(made).values()]
    assert without_casts(layers)
    before, weights = made(x), [layer.weight.clone() for layer in layers]
    with folded(layers), torch.no_grad():
        torch.testing.assert_close(made(x), before, rtol=1e-6, atol=1e-6)
        [first, _] = layers
        torch.testing.assert_close(first.folded, first.weight + 5 / 3 * first.lora_B["default"].weight
                                   @ first.lora_A["default"].weight)
        first.lora_B["default"].weight.data.zero_()
        torch.testing.assert_close(made(x), before, rtol=1e-6, atol=1e-6)
        with torch.enable_grad():  # a call with gradients reads the LoRA
            assert not torch.allclose(made(x), before, atol=1e-3)
    assert all(layer.folded is None for layer in layers) and not torch.allclose(made(x), before, atol=1e-3)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights))


def test_a_quantised_weight_is_not_folded():
    class Packed(torch.nn.Parameter):
        """Of a class of its own, as bitsandbytes' and torchao's."""

    first, second = layers = [*lora_layers(net()).values()]
    assert without_casts(layers)
    first.get_base_layer().weight = Packed(first.weight.data)
    with folded(layers):
        assert first.folded is None and second.folded is not None


def test_switched_off_layers_are_the_base():
    made, x = net(), torch.randn(3, 8)
    assert without_casts(lora_layers(made).values())
    for layer in lora_layers(made).values():
        layer.enable_adapters(False)
    bare = nn.Sequential(made[0].base_layer, nn.GELU(), made[2].base_layer)
    assert torch.equal(made(x), bare(x))


def convolution() -> nn.Module:
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), nn.Sequential(nn.Conv2d(3, 4, 3)), "default")


@pytest.mark.parametrize("made", [lambda: net(use_dora=True), lambda: net(lora_dropout=0.1),
                                  lambda: net(lora_bias=True), convolution])
def test_layers_of_another_kind_keep_their_forward(made):
    layers = lora_layers(made()).values()
    assert not without_casts(layers) and not without_casts([])
    assert all("forward" not in vars(layer) for layer in layers)


def test_rows_that_are_not_contiguous_are_taken():
    theirs, ours = net(), net()
    x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    assert without_casts(lora_layers(ours).values())
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind, weighted", [(RMSNorm, True), (RMSNorm, False), (MochiRMSNorm, True)])
def test_a_fused_norm_is_no_further_from_the_formula_than_stock(kind, weighted):
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.rand(48, generator=generator) + 0.5, 3 * torch.randn(2, 70, 48, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        layer = kind(48, 1e-6, weighted).to(dtype)
        if weighted:
            layer.weight.data.copy_(weight)
        given = x.to(dtype)
        exact = given.double() * (given.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        exact = exact * layer.weight.double() if weighted else exact
        stock = layer(given)
        assert fuse_norms(layer, torch.device("cpu")) == 0 and fuse_norms(layer, torch.device("cuda")) == 1
        fused = layer(given)
        errors = [((y.double() - exact) / exact.abs().max()).abs().max().item() for y in (fused, stock)]
        assert fused.dtype == stock.dtype == dtype and errors[0] <= max(errors[1], torch.finfo(dtype).eps), errors


def test_a_norm_whose_weight_has_another_dtype_answers_as_stock():
    layer, x = RMSNorm(8, 1e-6), torch.randn(3, 8).bfloat16()
    stock = layer(x)
    assert fuse_norms(layer, torch.device("cuda")) == 1 and torch.equal(layer(x), stock)
    assert fuse_norms(RMSNorm(8, 1e-6, bias=True), torch.device("cuda")) == 0


@pytest.mark.parametrize("name, count", [
    ("LlamaForCausalLM", 5), ("MistralForCausalLM", 5), ("Qwen2ForCausalLM", 5), ("Qwen3ForCausalLM", 9),
    ("Olmo2ForCausalLM", 9), ("SmolLM3ForCausalLM", 5), ("Gemma3ForCausalLM", 0)])
def test_fused_norms_of_language_models_agree_with_stock_and_between_rollout_and_replay(name, count):
    """Two layers with two norms each, the last, and Qwen3's of queries and keys; Gemma's adds 1 to its weight."""
    model, tokenizer = make_language_model(name)
    with torch.no_grad():
        for weight in (p for key, p in model.named_parameters() if "norm" in key):
            weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) + 0.5)
        ids = torch.arange(3, 15)[None]
        expected = model(ids).logits
        assert fuse_text_norms(model, torch.device("cpu")) == 0
        assert fuse_text_norms(model, torch.device("cuda")) == count
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    own = tiny_text.trainer(tiny_text.CausalLM(model, tokenizer, Adapter(rank=2), tiny_text.Text(max_tokens=6)))
    own.run_epoch()
    assert own.first_ratio.max_log_ratio <= 1e-5 and any(p.grad.any() for p in own.policy.weights.parameters())


@pytest.mark.parametrize("adapter, casts", [({}, False), ({"dora": True}, True), ({"rank": 0}, True)])
def test_autocast_is_left_out_where_all_frozen_weights_have_the_runs_precision(adapter, casts):
    pipe = tiny.sd3().to(torch.bfloat16)
    policy = PipelinePolicy(pipe, Adapter(**{"rank": 2} | adapter), call=tiny.call_of(pipe), precision="bf16")
    assert policy.driver.casts == casts and not tiny.policy().driver.casts


@pytest.mark.parametrize("adapter", [{}, {"dora": True}, {"rank": 0}])
def test_images_are_decoded_as_the_stock_pipeline_does(adapter):
    pipe, kinds = tiny.sd3().to(torch.bfloat16), []
    with torch.no_grad():
        expected = pipe.vae.decode(torch.ones(1, *tiny.LATENTS).bfloat16()).sample
    policy = PipelinePolicy(pipe, Adapter(**{"rank": 2} | adapter), call=tiny.call_of(pipe), precision="bf16")
    conditioning = policy.encode(["red"])
    pipe.vae.decoder.register_forward_pre_hook(lambda *_: kinds.append(torch.is_autocast_enabled("cpu")))
    policy.generate(conditioning, policy.generators([0]), 1, 1.0)
    latents = torch.ones(1, *tiny.LATENTS) - (pipe.vae.config.shift_factor or 0.0)
    found = policy.decode((latents * pipe.vae.config.scaling_factor).bfloat16(), conditioning)
    torch.testing.assert_close(found, (expected / 2 + 0.5).clamp(0, 1).float(), rtol=0, atol=2**-7)
    assert kinds == [False, False] and "decode" not in vars(pipe.vae)


def test_a_soup_of_other_ranks_is_the_mean_of_its_parts():
    policy = tiny.stir(tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16"))
    first = policy.weights.snapshot()
    tiny.stir(policy)
    conditioning, outputs = policy.encode(["red", "blue"]), []
    for held in ([first], [policy.weights.snapshot()], [first, policy.weights.snapshot()]):
        with policy.reference(held):
            assert next(iter(policy.weights.named.values())).shape[0] == len(held) * Adapter(rank=2).rank
            outputs.append(policy.generate(conditioning, policy.generators([1, 2]), 2, 1.0, "latent"))
    assert not torch.equal(outputs[0], outputs[1]) and outputs[2].isfinite().all()


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
    stock, prompts, seen = load_pipeline("starter"), ["three red stars", "a ring left of a cross"], []
    policy = PipelinePolicy(load_pipeline("starter"), Adapter(rank=rank) if rank else None, call=CALL)
    for layer in policy.pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    ours = policy.generate(policy.encode(prompts), policy.generators((1, 2)), 3, 2.0)
    theirs = stock(prompts, num_inference_steps=3, guidance_scale=2.0, generator=policy.generators((1, 2)),
                   output_type="pt", **CALL).images
    assert seen and all(seen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_another_device_changes_nothing():
    module = Halves()
    contiguous_inputs([module], torch.device("meta"))
    assert not module.first._forward_pre_hooks
