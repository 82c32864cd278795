"""Other forms of a run say what the run's own file says: image models and language models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo.cli import main
from flowgrpo.config import validate
from flowgrpo.config.sections import Adapter
from flowgrpo.evaluation.plan import digest, weights_digest
from flowgrpo.export import comfy_names, export, run_lora
from flowgrpo.export.comfy_names import Place
from flowgrpo.files import tensors_of
from flowgrpo.policies.loading import load_tuned
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline, text_encoders
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.adapters import merge
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.storage.manifest import order_metadata
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.text_weights import load_causal_lm
from flowgrpo.tools.check.tiny import make
from tests.helpers import tiny, tiny_masked, tiny_text, tiny_vision
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import assert_same_weights

SUMMARY = {"before": {"bright": 0.25}, "after": {"bright": 0.5},
           "evaluation": {"prompts": 4, "steps": 2, "guidance": 1.0, "of": "pictures (2 steps, guidance 1)"},
           "epochs": 2, "updates": 2, "denoiser_evaluations": 1234, "unit": "denoiser evaluations", "seconds": 3.0,
           "seed": 7}


def make_run(folder, pipe, call, rank: int = 2, alpha: float | None = 3.0, **options):
    """A finished run's folder; the trained weights are far from the base's."""
    model = tiny.save(pipe, folder / "model")
    policy = tiny.stir(tiny.policy(load_pipeline(str(model)), rank, alpha, call=call))
    policy.weights.save(folder)
    adapter = Adapter(rank=rank, alpha=alpha).model_dump()
    config = validate({"name": "mine", "model": str(model), "method": "mix_grpo+grpo_guard", "reward": {"bright": 2.0},
                       "seed": 7, "precision": "fp32", "image": {"call": call}, "adapter": adapter, **options})
    lines = [{"evaluations": 10 * i, "reward/bright/mean": 0.1 * i, "reward/bright/std": 1.0} for i in (1, 2, 3)]
    lines[1]["held_out/bright"] = 0.3
    return record(folder, config, SUMMARY, lines)


def record(folder, config, summary, lines):
    """Put a run's configuration, summary and metrics into its folder."""
    (folder / "config.yaml").write_text(config.yaml())
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def latents(pipe, **call) -> torch.Tensor:
    with torch.no_grad():
        return pipe("a cat", num_inference_steps=2, guidance_scale=1.0, output_type="latent",
                    generator=torch.Generator().manual_seed(0), **call).images


def test_the_kohya_file_of_a_unet_does_what_the_runs_own_does(tmp_path):
    unet = make_run(tmp_path / "run", tiny.sd15(), {})
    [file] = export.lora(unet, tmp_path / "kohya.safetensors")
    made = []
    for lora in (None, unet / LORA_FILE, file):
        pipe = load_pipeline(str(unet / "model"))
        if lora:
            pipe.load_lora_weights(lora.parent, weight_name=lora.name)
        made.append(latents(pipe))
    torch.testing.assert_close(made[1], made[2], rtol=1e-5, atol=1e-6)
    assert (made[0] - made[1]).abs().max() > 1e-3


def test_kohya_and_merged_models_make_the_loras_change(tmp_path):
    sd3 = make_run(tmp_path / "run", tiny.sd3(), tiny.CALL)
    layers, own = load_file(*export.lora(sd3, tmp_path / "kohya.safetensors")), load_file(sd3 / LORA_FILE)
    for name in {key.rpartition(".lora_A")[0] for key in own if ".lora_A" in key}:
        layer = "lora_transformer_" + name.removeprefix("transformer.").replace(".", "_")
        down, up, alpha = (layers[f"{layer}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        change = own[f"{name}.lora_B.weight"] @ own[f"{name}.lora_A.weight"]
        torch.testing.assert_close(up @ down * alpha / len(down), change)
    assert len(layers) == 3 * len(own) / 2
    tuned, base = (load_pipeline(str(sd3 / "model")) for _ in range(2))
    tuned.load_lora_weights(sd3)
    merged = load_pipeline(str(export.write_merged(sd3, tmp_path / "merged")))
    assert not any("lora" in key for key in merged.transformer.state_dict())
    expected = latents(tuned, **tiny.CALL)
    torch.testing.assert_close(latents(merged, **tiny.CALL), expected, rtol=1e-4, atol=1e-5)
    assert (latents(base, **tiny.CALL) - expected).abs().max() > 1e-3


def test_a_lora_in_pefts_own_format_is_merged_and_has_the_kohya_layout(tmp_path):
    """Of a pipeline without a LoRA loader."""
    pixart = make_run(tmp_path / "run", *make("PixArtSigmaPipeline"))
    assert not (pixart / LORA_FILE).exists()
    folders = pixart / "model", export.write_merged(pixart, tmp_path / "m")
    base, merged = (load_pipeline(str(folder)) for folder in folders)
    layers = load_file(*export.lora(pixart, tmp_path / "kohya.safetensors"))
    before, after = base.transformer.state_dict(), merged.transformer.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    for key in changed:
        layer = "transformer." + key.removesuffix(".weight")
        down, up, alpha = (layers.pop(f"{layer}.{end}") for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        torch.testing.assert_close(after[key] - before[key], up @ down * alpha / len(down), rtol=1e-4, atol=1e-6)
    assert changed and not layers and set(before) == set(after)


# By tiny pipeline and form: [layer, rows, columns, rank] as the programs loaded them, by `lora_loaders.py`.
NAMES = json.loads((Path(__file__).parent / "names.json").read_text())


def lora_run(folder, name: str, **adapter):
    """The folder of a run that trained a LoRA of the tiny pipeline `name`, which was loaded from Python."""
    pipe, call = make(name)
    tiny.stir(PipelinePolicy(pipe, Adapter(**{"rank": 2, "alpha": 3.0} | adapter), call=call)).weights.save(folder)
    (folder / "config.yaml").write_text(validate({"model": type(pipe).__name__, "reward": "bright"}).yaml())
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_exports_have_the_layers_that_the_programs_load_and_the_whole_change(name, tmp_path):
    [(tensors, adapter), *_] = run_lora.read(lora_run(tmp_path, name)).values()
    assert adapter["lora_alpha"] == adapter["r"] == 2
    change = sum((tensors[key].flatten(1) @ tensors[key.replace("_B", "_A")].flatten(1)).square().sum()
                 for key in tensors if key.endswith(".lora_B.weight"))
    for form, expected in NAMES[name].items():
        layers = load_file(export.lora(tmp_path, tmp_path / f"{form}.safetensors", form)[0])
        names = sorted({key.rpartition(".lora_")[0] for key in layers if ".lora_" in key})
        sides = {layer: (layers[f"{layer}.lora_up.weight"], layers[f"{layer}.lora_down.weight"]) for layer in names}
        assert [[layer, len(up), down.shape[1], len(down)] for layer, (up, down) in sides.items()] == expected
        assert all(layers[f"{layer}.alpha"] == len(down) for layer, (_, down) in sides.items())
        written = sum((up.flatten(1) @ down.flatten(1)).square().sum() for up, down in sides.values())
        torch.testing.assert_close(written, change, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name, layer, place", [
    ("AnimaModularPipeline", "transformer_blocks.0.attn1.to_out.0", "diffusion_model.blocks.0.self_attn.output_proj"),
    ("AnimaModularPipeline", "transformer_blocks.0.attn2.to_k", "diffusion_model.blocks.0.cross_attn.k_proj"),
    ("FluxModularPipeline", "transformer_blocks.0.attn.to_q", "lora_transformer_transformer_blocks_0_attn_to_q")])
def test_a_run_on_a_modular_pipeline_has_a_file_for_comfyui(name, layer, place, tmp_path):
    """Names of Anima: those of its layers in ComfyUI (comfy/ldm/cosmos/predict2.py), whose loader maps all weights."""
    run = make_run(tmp_path / "run", *make(name))
    assert main(["export", str(run), "--form=comfyui", f"--output={tmp_path / 'c.safetensors'}"]) == 0
    [(own, adapter), *_] = run_lora.read(run).values()
    found, key = load_file(tmp_path / "c.safetensors"), layer
    product = own[f"{key}.lora_B.weight"] @ own[f"{key}.lora_A.weight"] * adapter["lora_alpha"] / adapter["r"]
    up, down = found[f"{place}.lora_up.weight"], found[f"{place}.lora_down.weight"]
    torch.testing.assert_close(up @ down * found[f"{place}.alpha"] / len(down), product, rtol=1e-5, atol=1e-7)


def test_parts_of_a_fused_layer_become_one_lora_block_by_block():
    place = {"to_q": Place("a.linear1", "q", "qkvm"), "to_k": Place("a.linear1", "k", "qkvm"),
             "to_v": Place("a.linear1", "v", "qkvm"), "o": Place("a.o")}
    tensors = {f"{layer}.lora_{side}.weight": torch.randn(*shape) for layer in place
               for side, shape in (("A", (2, 5)), ("B", (3, 2)))}
    found = export._rename_tensors(place.get, tensors, {"lora_alpha": 4})
    change = {layer: 2 * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"] for layer in place}
    product = found["a.linear1.lora_up.weight"] @ found["a.linear1.lora_down.weight"]
    expected = torch.cat([change["to_q"], change["to_k"], change["to_v"], torch.zeros(12, 5)])
    torch.testing.assert_close(product, expected)
    assert found["a.linear1.alpha"] == 6 and found["a.o.alpha"] == 2 and len(found) == 6
    some = {key: value for key, value in tensors.items() if "to_v" not in key}
    told = message(export._rename_tensors, place.get, some, {"lora_alpha": 4})
    assert "has none of v: expected adapter.targets with to_q, to_k and to_v" in told


def merged_weights(name: str, *files, **options) -> dict[str, torch.Tensor]:
    """The denoisers' weights of a tiny pipeline after diffusers has read the files."""
    pipe, _ = make(name)
    for file, option in zip(files, options.get("into", ({}, {}))):
        pipe.load_lora_weights(file.parent, weight_name=file.name, **option)
    for module in denoisers(pipe).values():
        merge(module)
    return {f"{part}.{key}": value for part, module in denoisers(pipe).items()
            for key, value in module.state_dict().items()}


@pytest.mark.parametrize("name", ["QwenImagePipeline", "ZImagePipeline", "WanPipeline", "WanPipeline (2.2)",
                                  "WanImageToVideoPipeline"])
def test_what_is_written_for_comfyui_is_read_by_diffusers_too(name, tmp_path):
    """Every layer, as diffusers' own tables of other people's names have it."""
    run = lora_run(tmp_path, name)
    found = export.lora(run, tmp_path / "kohya.safetensors")
    assert len(found) == (2 if name in ("WanPipeline (2.2)", "WanImageToVideoPipeline") else 1)
    own, into = [run / LORA_FILE], [{}, {"load_into_transformer_2": True}]
    if len(found) == 2:  # of two experts
        assert [file.name for file in found] == ["kohya_high_noise.safetensors", "kohya_low_noise.safetensors"]
        own.append(run / "transformer_2" / LORA_FILE)
    base, expected = merged_weights(name), merged_weights(name, *own, into=into)
    read = merged_weights(name, *found, into=into)
    assert any(not torch.equal(base[key], expected[key]) for key in base)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-6)


CLIPS = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}
SD3 = CLIPS | {"transformer": "SD3Transformer2DModel", "text_encoder_3": "T5EncoderModel"}
SD15 = {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel"}
FLUX = {"transformer": "FluxTransformer2DModel", "text_encoder_2": "T5EncoderModel"}


@pytest.mark.parametrize("program, part, known, layer, name", [
    ("comfyui", "text_encoder", SD3, "encoder.layers.0.mlp.fc1", "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
    ("comfyui", "text_encoder_2", SD3, "text_model.encoder.layers.3.self_attn.q_proj",
     "lora_te2_text_model_encoder_layers_3_self_attn_q_proj"),
    ("comfyui", "text_encoder_3", SD3, "encoder.block.0.layer.0.SelfAttention.q",
     "lora_te3_encoder_block_0_layer_0_SelfAttention_q"),
    ("kohya", "text_encoder", SD15, "x", "lora_te_text_model_x"), ("kohya", "text_encoder_2", FLUX, "x", "lora_te3_x"),
    ("kohya", "text_encoder", SD15 | CLIPS, "x", "lora_te1_text_model_x")])
def test_names_of_text_encoders(program, part, known, layer, name):
    assert comfy_names.namer(part, known, program)(layer) == Place(name)


@pytest.mark.parametrize("part, known, told", [
    ("transformer", {"transformer": "SanaTransformer2DModel"}, "no name for the transformer (SanaTransformer2DModel)"),
    ("transformer", {"transformer": "CogVideoXTransformer3DModel"}, "load the run's own file with diffusers"),
    ("text_encoder", {"transformer": "PixArtTransformer2DModel", "text_encoder": "T5EncoderModel"}, "--form merged"),
    ("text_encoder", {"unet": "UNet2DConditionModel", "text_encoder": "ChatGLMModel"}, "no name for the text_encoder"),
    ("prior", {}, "of an unknown class")])
def test_what_comfyui_has_no_name_for_is_refused(part, known, told):
    assert told in message(comfy_names.namer, part, known)


def test_layers_and_models_that_cannot_be_named_are_refused(tmp_path):
    named = comfy_names.namer("transformer", {"transformer": "WanTransformer3DModel"})
    told = message(named, "condition_embedder.time_proj")
    assert "the layer condition_embedder.time_proj of WanTransformer3DModel is not known" in told
    assert re.search("the parts of the model .* cannot be read", message(comfy_names.classes, str(tmp_path)))
    run = lora_run(tmp_path, "FluxPipeline", dora=True)
    assert "adapter.dora" in message(export.lora, run, tmp_path / "out.safetensors")


def test_a_foreign_lora_without_its_alpha_is_refused(tmp_path):
    save_file({"transformer.x.lora_A.weight": torch.ones(1, 1)}, tmp_path / LORA_FILE)
    assert "does not say its alpha" in message(lambda: export.lora(tmp_path, tmp_path / "out.safetensors"))
    assert "no LoRA in" in message(lambda: export.lora(tmp_path / "elsewhere", tmp_path / "out.safetensors"))


def test_a_lora_that_does_not_fit_and_comfyuis_language_models_are_told_in_one_line(tmp_path):
    run, _ = finished(tmp_path)
    for each in tiny_text.model(layers=1, hidden_size=16):
        each.save_pretrained(run / "base")
    assert re.search("does not load into Qwen3ForCausalLM: .*size mismatch",
                     message(export.write_merged, run, tmp_path / "out"))
    told = message(export.lora, run, tmp_path / "out.safetensors", "comfyui")
    assert "is of a language model, which ComfyUI does not load: use --form merged" in told


@pytest.mark.parametrize("adapter, rank, expected", [
    ({"lora_alpha": 8}, 4, 2.0), ({"lora_alpha": 8, "use_rslora": False}, 16, 0.5),
    ({"lora_alpha": 8, "use_rslora": True}, 16, 2.0), ({"lora_alpha": 8, "alpha_pattern": {"to_q": 2}}, 4, 0.5),
    ({"lora_alpha": 8, "alpha_pattern": {"o_q": 2}}, 4, 2.0)])
def test_scales_by_hand(adapter, rank, expected):
    assert run_lora.scale(adapter, "blocks.0.to_q", rank) == expected


def test_exports_beside_the_weights_leave_an_evaluation_valid(tmp_path):
    run = make_run(tmp_path / "run", tiny.sd3(), tiny.CALL)
    before = weights_digest(run)
    export.lora(run, run / "kohya.safetensors")
    export.write_merged(run, run / "merged")
    export.card(run)
    assert weights_digest(run) == before == weights_digest(run / LORA_FILE)
    (run / LORA_FILE).write_bytes((run / LORA_FILE).read_bytes() + b" ")
    assert weights_digest(run) != before


@pytest.mark.parametrize("rank", [2, 0])
def test_a_merged_wan_in_bf16_keeps_in_fp32_what_the_stock_model_keeps(rank, tmp_path):
    run = make_run(tmp_path, *make("WanPipeline"), rank=rank, precision="bf16")
    stock = load_pipeline(str(run / "model"), "bf16").transformer.state_dict()
    exact = load_pipeline(str(run / "model")).transformer.state_dict()
    folder = export.write_merged(run, tmp_path / "merged") / "transformer"
    written = load_file(folder / "diffusion_pytorch_model.safetensors")
    kept = {key for key, value in stock.items() if value.dtype == torch.float32}
    assert any("scale_shift_table" in key for key in kept) and any("time_embedder" in key for key in kept)
    assert {key: value.dtype for key, value in written.items()} == {key: value.dtype for key, value in stock.items()}
    if rank:
        assert all(torch.equal(written[key], exact[key]) for key in kept)
    else:  # all weights were trained: none is rounded before it is written
        own = load_file(run / "transformer" / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(written[key], own[key].to(stock[key].dtype)) for key in own)
        tuned = load_pipeline(str(run / "model"), "bf16")
        load_tuned(tuned, run)
        assert_same_weights(tuned.transformer.state_dict(), written)


@pytest.mark.parametrize("files, told", [
    ((), "is not a run: it has no config.yaml"),
    (("config.yaml",), "has no summary.json: the run has not finished: --resume it")])
def test_what_is_no_finished_run_is_refused(tmp_path, files, told):
    for name in files:
        (tmp_path / name).write_text("")
    assert told in message(export.load_finished, tmp_path)


TWICE = """
import sys
from pathlib import Path
import torch
from flowgrpo.export import export
from tests.export.test_export import make_run
from tests.helpers import tiny
torch.manual_seed(0)
run = make_run(Path(sys.argv[1]), tiny.sd3(), tiny.CALL)
export.lora(run, run / "kohya.safetensors")
"""


def test_exports_of_the_same_tensors_have_the_same_bytes_in_every_process(tmp_path):
    """Sets and maps have another order in every process."""
    started = [subprocess.Popen([sys.executable, "-c", TWICE, str(tmp_path / seed)], stderr=subprocess.DEVNULL,
                                env=os.environ | {"PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert [process.wait() for process in started] == [0, 0]
    one, two = (tmp_path / seed for seed in ("1", "2"))
    for name in (LORA_FILE, "kohya.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_the_metadata_of_a_file_is_ordered(tmp_path):
    tensors, facts = {"a": torch.arange(4.0)}, {letter: "\n\"é" for letter in "hgfedcba"}
    written = set()
    for i in range(3):
        save_file(tensors, tmp_path / str(i), facts)
        order_metadata(tmp_path / str(i))
        written.add((tmp_path / str(i)).read_bytes())
    found, said = tensors_of(tmp_path / "0")
    assert said == facts and torch.equal(found["a"], tensors["a"])
    [once] = written
    assert once.index(b'"a":') < once.index(b'"h":')


@pytest.mark.parametrize("name, adapter, said, written", [
    ("FluxPipeline", {}, None, []), ("WanPipeline", {}, "for ComfyUI: RUN/comfyui/mine.safetensors", ["mine"]),
    ("WanPipeline (2.2)", {}, "for ComfyUI: RUN/comfyui/mine_high_noise.safetensors and "
     "RUN/comfyui/mine_low_noise.safetensors", ["mine_high_noise", "mine_low_noise"]),
    ("PixArtSigmaPipeline", {}, "for ComfyUI: RUN/comfyui/mine.safetensors", ["mine"]),
    ("SanaPipeline", {}, "no file for ComfyUI: ComfyUI has no name for the transformer (SanaTransformer2DModel): use "
     "--form merged, or load the run's own file with diffusers", []),
    ("FluxPipeline", {"dora": True}, "no file for ComfyUI: the LoRA of RUN has lengths of its own (adapter.dora), "
     "which ComfyUI and kohya's scripts scale otherwise: use --form merged", [])])
def test_a_run_ends_with_a_file_for_comfyui_where_its_own_is_not_read(name, adapter, said, written, tmp_path):
    pipe, call = make(name)
    policy = PipelinePolicy(pipe, Adapter(rank=2, **adapter), call=call)
    policy.weights.save(tmp_path)
    config = validate({"name": "mine", "adapter": {"rank": 2} | adapter})
    told = export.for_comfyui(config, tmp_path, policy)
    assert (told and told.replace(str(tmp_path), "RUN")) == said
    assert sorted(file.stem for file in tmp_path.glob("comfyui/*")) == written


TEXT_SUMMARY = SUMMARY | {
    "before": {"short": None}, "after": {"short": 0.5}, "unit": "tokens",
    "evaluation": {"prompts": 4, "steps": 20, "guidance": 4.5, "of": "completions (greedy)"}}
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def finished(folder, rank: int = 2, precision: str = "fp32"):
    """(a finished run's folder, its policy, whose trained weights are far from the base's)."""
    loaded = tiny_text.model()
    for each in loaded:
        each.save_pretrained(folder / "base")
    own = tiny_text.stir(tiny_text.policy(loaded, rank))
    own.weights.save(folder)
    settings = tiny_text.config(model=str(folder / "base"), adapter__rank=rank, precision=precision)
    lines = [{"evaluations": 10 * i, "reward/short/mean": 0.1 * i} for i in (1, 2, 3)]
    return record(folder, settings, TEXT_SUMMARY, lines), own


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("rank", [2, 0])
def test_a_merged_model_says_what_the_policy_says(tmp_path, rank, capsys):
    run, own = finished(tmp_path, rank)
    weights = weights_digest(run)
    assert main(["export", str(run)]) == 0  # the form of a language model
    assert weights_digest(run) == weights != digest([])
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "merged")
    base, merged = (AutoModelForCausalLM.from_pretrained(run / name) for name in ("base", "merged"))
    assert base.state_dict().keys() == merged.state_dict().keys()
    torch.testing.assert_close(logits(merged), logits(own.model), rtol=1e-5, atol=1e-5)
    assert (logits(base) - logits(merged)).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(run / "merged")("1+2=").input_ids == own.tokenizer("1+2=").input_ids


@pytest.mark.parametrize("targets", [["lm_head"], ["lm_head", "q_proj", "down_proj"]])
@pytest.mark.parametrize("tied", [True, False])
def test_a_lora_of_an_output_layer_leaves_embeddings_that_are_tied_to_it(targets, tied, tmp_path):
    """peft#2018, #2777: merged in place, it would change what the model reads, too."""
    for each in tiny_text.model(tie_word_embeddings=tied):
        each.save_pretrained(tmp_path / "base")
    base, reader = load_causal_lm(str(tmp_path / "base"))
    settings = tiny_text.config(model=str(tmp_path / "base"), adapter__targets=str(targets))
    assert (base.lm_head.weight is base.get_input_embeddings().weight) == tied
    before, embedded = logits(base), base.get_input_embeddings().weight.clone()
    tiny_text.stir(CausalLM(base, reader, settings.adapter, settings.text)).weights.save(tmp_path)
    record(tmp_path, settings, TEXT_SUMMARY, [])
    assert main(["export", str(tmp_path), "--form=merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path))
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged.get_input_embeddings().weight, embedded) and not merged.config.tie_word_embeddings
    assert (before - adapted).abs().max() > 0.1


def tied_model(name: str):
    """A vision model, or a masked one whose output layer has the biases of another part too."""
    if name == "BERT":
        model = tiny_masked.model()[0].eval()
        model.cls.predictions.bias.data.normal_()
        return model, "cls.predictions.decoder"
    made, _ = getattr(tiny_vision, name)()
    made.config.tie_word_embeddings = made.config.text_config.tie_word_embeddings = True
    return type(made)(made.config), "lm_head"


@pytest.mark.parametrize("name", ["llava", "qwen", "BERT"])
@torch.no_grad()
def test_other_kinds_of_models_are_untied_too(name, tmp_path):
    (model, head), ids = tied_model(name), torch.tensor([[13, 14, 2]])
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    adapters.add(model, LoraConfig(r=2, target_modules=[head], init_lora_weights=False), "default")
    expected = model(input_ids=ids).logits
    merge(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path).eval()(input_ids=ids).logits, expected, rtol=1e-5,
                               atol=1e-5)


def test_tied_weights_that_no_configuration_unties_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    adapters.add(model, LoraConfig(r=2, target_modules=["1"]), "default")
    assert "the LoRA of 1 does not merge: its weight is another layer's too" in message(merge, model)


@pytest.mark.parametrize("rank", [2, 0])
def test_tied_text_encoders_are_loaded_as_they_were_trained(rank, tmp_path):
    """The T5 of FLUX has its embeddings under two names."""
    pipe, _ = make("FluxPipeline")
    encoders = text_encoders(pipe)
    assert encoders["text_encoder_2"].shared.weight is encoders["text_encoder_2"].encoder.embed_tokens.weight
    adapter = Adapter(rank=rank, encoder_targets=["q_proj", "q"])
    weights = TrainableWeights(pipe, denoisers(pipe) | encoders, adapter)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter += 0.1
    weights.save(tmp_path)
    again, _ = make("FluxPipeline")
    load_tuned(again, tmp_path)
    for name, module in (denoisers(pipe) | encoders).items():
        merge(module)
        merge(getattr(again, name))
        torch.testing.assert_close(getattr(again, name).state_dict(), module.state_dict(), rtol=1e-5, atol=1e-5)


def test_a_merged_model_is_added_up_in_fp32_and_rounded_to_the_runs_precision(tmp_path):
    run, own = finished(tmp_path, precision="bf16")
    merged = AutoModelForCausalLM.from_pretrained(export.write_merged(run, tmp_path / "out"), dtype="auto").state_dict()
    [(name, layer)] = [(key, module) for key, module in own.model.named_modules() if key.endswith("0.mlp.up_proj")]
    layer.merge()
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged[f"{name}.weight"], layer.base_layer.weight.to(torch.bfloat16))


@pytest.mark.parametrize("rank, library, tags", [(2, "peft", "- lora"), (0, "transformers", "-learning")])
def test_the_card_is_of_texts(tmp_path, rank, library, tags):
    run, _ = finished(tmp_path, rank)
    text = export.card(run).read_text()
    assert f"\nlibrary_name: {library}\n" in text and f"{tags}\n---" in text
    assert "| short | - | 0.500 | - | yes |" in text and "Means over 4 held-out completions (greedy).\n" in text
    assert "1,234 tokens, 3 s of training" in text and "(before_after.png)" in text
    assert ("\n`before_after.png` shows a completion of held-out prompts before and after training, with its scores, "
            "and the means of all held-out prompts:\n") in text
    assert "All of these rewards were trained on, and `eval.rewards` named no other to measure" in text
    assert not any(word in text for word in ("pictures", "scheduler", "denoiser", "guidance"))
