"""Dry runs of further kinds: all weights, one pass, image tokens, and every packaged recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo import published
from flowgrpo.config import load
from flowgrpo.errors import UserError
from flowgrpo.gpus import GPUS
from flowgrpo.policies import build
from flowgrpo.policies.weights import trainable
from flowgrpo.policies.weights.forwards import blocks
from flowgrpo.published import LANGUAGE
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.tools.dry_run import fit, from_configs, tokens
from flowgrpo.tools.dry_run.estimate import dry_run
from flowgrpo.tools.dry_run.meta_gpu import MetaGPU, Phase
from tests.helpers import tiny, tiny_vision
from tests.helpers.refusals import message, printed
from tests.tools.dry_run.test_estimate import config, gpu, model  # noqa: F401 fixtures

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


@pytest.mark.parametrize("without, options", [(NFT | {"parts__lag": {"most": 0.0}}, NFT), ({}, {"train__ema": 0.9})])
def test_an_old_policy_and_an_average_take_four_bytes_a_weight(model, without, options):  # noqa: F811
    plain, more = (dry_run(config(model, adapter__rank=0, **given)).phases["reward"].allocated
                   for given in (without, options))
    assert more - plain == pytest.approx(held(4), rel=0.02)


def brought(update: Phase) -> int:
    """Waits for weights that come from the host."""
    return sum(count for reason, count in update.waits.items() if "trainable.py" in reason)


def test_the_reference_and_updates_cost_their_passes(model):  # noqa: F811
    options = {"method": "flow_grpo", "adapter__rank": 0, "train__prompts": 1}
    free, tied = (dry_run(config(model, parts__kl__weight=weight, **options)).phases["update"] for weight in (0.0, 0.1))
    assert tied.flops > free.flops
    assert [brought(free), brought(tied)] == [0, len(SIZES)]
    plain, held = (dry_run(config(model, train__one_pass=one_pass, **OPTIONS)).phases for one_pass in (False, True))
    trained = plain["rollout"].flops * 5 / 6  # all steps but the last
    assert held["rollout"].flops == plain["rollout"].flops
    assert plain["update"].flops - held["update"].flops == pytest.approx(trained, rel=1e-6)
    assert 0 < held["update"].seconds < plain["update"].seconds
    assert min(held["update"].waits.values(), default=0) >= 0


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


OPTIONS = dict(method="flow_grpo", parts__kl__weight=0.0, train__prompts=4)


def test_graphs_of_all_trained_states_are_kept_from_the_rollout_to_the_update(model):  # noqa: F811
    def more(**options):
        plain, held = (dry_run(config(model, train__one_pass=one_pass, **OPTIONS | options)).phases
                       for one_pass in (False, True))
        assert held["encode"].allocated == plain["encode"].allocated
        return {name: held[name].allocated - plain[name].allocated for name in ("rollout", "decode", "update")}
    one, two = more(train__prompts=4), more(train__prompts=8)
    graph = one["rollout"] - one["update"]  # of a micro-batch, which a replay has at a time
    assert one["rollout"] == one["decode"] == pytest.approx(4 * 5 * graph, rel=0.01)  # prompts, trained steps
    assert two["rollout"] == pytest.approx(2 * one["rollout"], rel=0.01)


@pytest.mark.parametrize("room, expected", [(1.2, True), (0.9, False)])
def test_auto_is_true_where_the_graphs_fit(model, room, expected):  # noqa: F811
    need = dry_run(config(model, train__one_pass=True, **OPTIONS)).peak
    assert fit.settle(config(model, train__one_pass="auto", **OPTIONS), gpu(room * need)).train.one_pass is expected


def test_auto_and_recipes_that_do_not_fit(model):  # noqa: F811
    settled = fit.settle(config(model, train__one_pass="auto", train__inner_epochs=2, **OPTIONS), GPUS["H100"])
    assert settled.train.one_pass is False
    with pytest.raises(UserError, match="train.one_pass is true, which does not go with train.inner_epochs 2"):
        dry_run(config(model, train__one_pass=True, train__inner_epochs=2, **OPTIONS))
    given = config(model, train__one_pass=True, **OPTIONS)
    whole = dry_run(given)
    settings, better = fit.nearest_settings(given, gpu(0.95 * whole.peak), whole)
    assert settings == {"train.one_pass": False} and better.peak < whole.peak


@pytest.fixture(scope="module")
def janus(tmp_path_factory):
    """A folder with the config.json of the tiny Janus alone."""
    folder = tmp_path_factory.mktemp("janus")
    tiny_vision.janus()[0].config.save_pretrained(folder)
    return folder


def recipe(janus, **options):
    usual = {"model": str(janus), "method": "grpo", "text.generates": "image", "precision": "fp32",
             "reward": "red.py:red", "train.guidance": 3.0, "train.prompts": 2, "train.group": 4,
             "train.micro_batch": 4}
    return load(None, usual | {key.replace("__", "."): value for key, value in options.items()})


def test_memory_and_phases_of_an_epoch(janus):
    counts = tokens.dry_run(recipe(janus), GPUS["4090"])
    assert list(counts.phases) == ["rollout", "decode", "base", "update"]
    assert all(phase.flops > 0 and phase.allocated > 0 for phase in counts.phases.values())
    weights = sum(tensor.numel() for tensor in tiny_vision.janus()[0].parameters()) * 4
    assert weights < counts.peak < 3 * weights
    assert counts.seconds == pytest.approx(sum(phase.duration for phase in counts.phases.values()))
    # Both halves go through the model: twice the work of a rollout and of a replay, and the same decoder.
    plain = tokens.dry_run(recipe(janus, train__guidance=1.0), GPUS["4090"])
    for name, times in (("rollout", 2), ("base", 2), ("update", 2), ("decode", 1)):
        assert counts.phases[name].flops == pytest.approx(times * plain.phases[name].flops, rel=0.02)
    # An epoch of four times the prompts has four times the batches, in the memory of one.
    counts, more = (tokens.dry_run(recipe(janus, train__prompts=prompts, train__generation_batch=8), GPUS["4090"])
                    for prompts in (4, 16))
    assert more.phases["rollout"].flops == 4 * counts.phases["rollout"].flops
    assert more.phases["rollout"].allocated == counts.phases["rollout"].allocated


def test_a_replay_has_the_flops_of_the_models_own(janus):
    config = recipe(janus, train__guidance=1.0, parts__kl__weight=0.0, train__prompts=1)
    counted = tokens.dry_run(config, GPUS["4090"]).phases["update"].flops
    own = build.make_policy(config, "cpu", tiny_vision.janus())
    asked = own.encode(["5"])
    prompt = tokens._Epoch(config, tokens._policy(config), MetaGPU(GPUS["4090"]), 4).prompt
    asked.ids[0] = torch.full((len(prompt),), 3)
    ids = torch.full((4, own.grid), own.first)
    # A LoRA's product, in place, which torch's counter leaves out.
    counting = FlopCounterMode(display=False, custom_mapping={
        torch.ops.aten.addmm_: lambda y, a, b, **_: 2 * a[0] * a[1] * b[1]})
    with sdpa_kernel(SDPBackend.MATH), counting as flops:  # others are not counted on a CPU
        own.log_probs(asked, torch.zeros(4, dtype=torch.int64), ids, torch.ones_like(ids, dtype=torch.bool),
                      Decoding()).logp.sum().backward()
    assert counted == pytest.approx(flops.get_total_flops(), rel=0.05)


def test_questions_and_settings_of_tokens(janus):
    counts = tokens.dry_run(recipe(janus, method="unirl", parts__data__batch=4, parts__data__length=3), GPUS["4090"])
    assert list(counts.phases)[-1] == tokens.ANSWERS and counts.phases[tokens.ANSWERS].flops > 0
    config = recipe(janus, train__micro_batch=8)
    room = tokens.dry_run(recipe(janus, train__micro_batch=4), GPUS["4090"]).peak
    settings, found = fit.nearest_settings(config, gpu(room), tokens.dry_run(config, gpu(room)))
    assert not found.above(gpu(room).room) and set(settings) <= {"train.checkpointing", "train.micro_batch"}
    with pytest.raises(UserError, match="the sizes of 'someone/else' are not known: give a folder that has its config"):
        tokens.dry_run(recipe("someone/else"), GPUS["4090"])
    assert "does not cover adapter.dora" in message(tokens.dry_run, recipe(janus, adapter__dora=True), GPUS["4090"])


def test_the_recipe_fits_a_4090_and_its_7b_too(monkeypatch, capsys):
    for name, whole in [*LANGUAGE.items()]:
        monkeypatch.setitem(LANGUAGE, name, whole | {"text_config": whole["text_config"] | TEXT})
        told = json.loads(printed(capsys, "check", name, "--recipe", "janus_pro_1b", "--gpu", "4090", "--json"))
        assert told["hours"] > 0 and not told["above"] and {"rollout", "decode", "update"} <= set(told["phases"])


CONFIGS = Path(__file__).parents[3] / "configs"
TEXT = {"num_hidden_layers": 2}
SHALLOW = {
    **dict.fromkeys(("HunyuanVideo15Transformer3DModel", "Krea2Transformer2DModel", "LTX2VideoTransformer3DModel",
                     "QwenImageTransformer2DModel", "SanaTransformer2DModel", "WanTransformer3DModel", "T5EncoderModel",
                     "UMT5EncoderModel"), {"num_layers": 2}),
    **dict.fromkeys(("ChromaTransformer2DModel", "FluxTransformer2DModel", "HunyuanVideoTransformer3DModel"), {
        "num_layers": 2, "num_single_layers": 2}),
    **dict.fromkeys(("CLIPTextModel", "CLIPTextModelWithProjection", "Gemma2Model", "Qwen3Model"), TEXT),
    "SD3Transformer2DModel": {"num_layers": 2, "dual_attention_layers": (0,)},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "ZImageTransformer2DModel": {"n_layers": 2, "n_refiner_layers": 1},
    "UNet2DConditionModel": {"layers_per_block": 1, "transformer_layers_per_block": 1},
    "LlamaModel": {"num_hidden_layers": 3}, "Qwen2_5_VLTextModel": {"num_hidden_layers": 4},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": published.QWEN_VL_7B[1]["text_config"] | TEXT,
        "vision_config": published.QWEN_VL_7B[1]["vision_config"] | {"depth": 2}}}
SMALL = {"train.prompts": "2", "image.height": "128", "image.width": "128"}
CLIPS = {"image.frames": "5", "memory.vae": "whole"}
# Where the pipeline makes no images of those sizes, or clips of so many frames: the least that it makes.
MADE = {"flux_kontext_8x80": {"image.height": "512", "image.width": "512"}, "ltx2": {"image.frames": "9"},
        "ltx25_80gb": {"train.steps": "8", "image.frames": "9"}}
RECIPES = {file.stem: load(file) for file in sorted(CONFIGS.glob("*.yaml")) if load(file).model in published.MODELS}

# One recipe of each class of a pipeline and of its parts, the one with the most settings of memory: the others repeat
# what it runs.
RUN: dict[tuple[str, ...], str] = {}
for each in sorted(RECIPES, key=lambda name: len(RECIPES[name].memory.model_dump(exclude_defaults=True))):
    released = published.MODELS[RECIPES[each].model]
    RUN[released.pipeline, *sorted(kind for kind, _ in released.parts.values())] = each


def shallow(known: published.Published) -> published.Published:
    """Few blocks of the published widths."""
    return replace(known, parts={name: (kind, config | SHALLOW.get(kind, {}))
                                 for name, (kind, config) in known.parts.items()})


def test_every_recipe_of_a_pipeline_has_its_models_configuration():
    others = ("starter", "qwen3", "smollm2", "janus")
    pipelines = {file.stem for file in CONFIGS.glob("*.yaml") if not file.stem.startswith(others)}
    assert set(RECIPES) == pipelines


@pytest.mark.parametrize("name", sorted(RUN.values()))
def test_a_recipe_runs_through_all_phases(name, monkeypatch):
    recipe = load(CONFIGS / f"{name}.yaml")
    options = SMALL | (CLIPS if recipe.image.frames else {}) | {
        "train.group": "8" if name == "hunyuan_video" else "4", "train.micro_batch": "2", "train.steps": "6"}
    config = load(CONFIGS / f"{name}.yaml", options | MADE.get(name, {}))
    monkeypatch.setitem(published.MODELS, config.model, shallow(published.MODELS[config.model]))
    counts = dry_run(config)
    assert {"encode", "rollout", "decode", "reward", "update"} <= set(counts.phases)
    assert all(counts.phases[phase].flops > 0 for phase in ("encode", "rollout", "decode", "update"))
    assert counts.phases["update"].flops > counts.phases["rollout"].flops / 4
    # Of diffusers: a pipeline's loop, a model's masks, noise that is drawn on the CPU.
    theirs = ("/pipeline_", "/before_denoise.py", "transformers/transformer_", "utils/torch_utils.py")
    reasons = [*counts.step_waits, *counts.replay_waits]
    ours = [reason for reason in reasons if not any(part in reason for part in theirs)]
    assert not counts.step_waits or name.startswith((
        "wan", "hunyuan_video15", "hunyuan_image", "chroma", "ernie_image", "qwen_image_21"))
    memo = "pipelines/conditioning.py"  # the digest of a reference image, which is compared on the host
    pictured = name.startswith(("flux_kontext", "qwen_image_edit", "skyreels_i2v"))
    masked = name.startswith(("hunyuan_video15", "hunyuan_image"))  # masks are read again when blocks are recomputed
    assert masked or all(memo in reason and pictured for reason in ours), ours


def size(part: published.Part) -> float:
    """Billions of weights."""
    return sum(p.numel() for p in from_configs.part(*part, torch.bfloat16).parameters()) / 1e9


def test_published_sizes_are_those_of_the_model_cards():
    denoisers = {"stable-diffusion-v1-5/stable-diffusion-v1-5": 0.86, "stabilityai/stable-diffusion-xl-base-1.0": 2.57,
                 "stabilityai/stable-diffusion-3.5-medium": 2.24, "black-forest-labs/FLUX.1-dev": 11.9,
                 "Qwen/Qwen-Image": 20.4, "Efficient-Large-Model/Sana_1600M_512px_diffusers": 1.6,
                 "Tongyi-MAI/Z-Image-Turbo": 6.15, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.42,
                 "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14.3, "hunyuanvideo-community/HunyuanVideo": 12.8}
    for released, billions in denoisers.items():
        parts = published.MODELS[released].parts
        assert size(parts.get("transformer") or parts["unet"]) == pytest.approx(billions, rel=0.01), released
    encoders = {"T5_XXL": 4.76, "UMT5_XXL": 5.68, "CLIP_L": 0.123, "CLIP_G": 0.695, "QWEN_VL_7B": 8.29,
                "QWEN3_4B": 4.02, "LLAMA3_8B": 7.5, "GEMMA2_2B": 2.61}
    for name, billions in encoders.items():
        assert size(getattr(published, name)) == pytest.approx(billions, rel=0.01), name
