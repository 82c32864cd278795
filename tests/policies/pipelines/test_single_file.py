"""Pipelines and denoisers from single files, by diffusers' own readers, on tiny models without a network."""

import importlib.util
import re

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from flowgrpo.cli import main
from flowgrpo.config import validate
from flowgrpo.config.sections import Load
from flowgrpo.policies import build, loading, options
from flowgrpo.policies.pipelines import conditioned, load
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline
from flowgrpo.tools.check.tiny import make
from tests.helpers import loop, tiny
from tests.helpers.refusals import message, refused

OTHER = 7  # seed of weights that differ from a tiny model's usual ones
# Names of a U-Net in checkpoints of Stable Diffusion.
RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
          "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
LAYERS = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
          "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
          "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
BLOCKS = [(r"down_blocks\.0\.(resnets|attentions)\.0", lambda kind: f"input_blocks.1.{kind}"),
          (r"mid_block\.(resnets)\.0", lambda kind: "middle_block.0"),
          (r"mid_block\.(attentions)\.0", lambda kind: "middle_block.1"),
          (r"mid_block\.(resnets)\.1", lambda kind: "middle_block.2"),
          (r"up_blocks\.0\.(resnets|attentions)\.0", lambda kind: f"output_blocks.0.{kind}"),
          (r"up_blocks\.0\.(resnets|attentions)\.1", lambda kind: f"output_blocks.1.{kind}")]


def ldm(key: str) -> str:
    """Return the name of a tiny U-Net's weight in a checkpoint of Stable Diffusion."""
    for ours, theirs in LAYERS.items():
        if key.startswith(f"{ours}."):
            return f"model.diffusion_model.{theirs}{key.removeprefix(ours)}"
    for pattern, block in BLOCKS:
        if match := re.match(rf"{pattern}\.(.*)", key):
            rest = match[2]
            if match[1] == "resnets":
                layer, _, end = rest.rpartition(".")
                rest = f"{RESNET[layer]}.{end}"
            return f"model.diffusion_model.{block(int(match[1] == 'attentions'))}.{rest}"
    raise KeyError(key)


def checkpoint(pipe, file) -> str:
    """A file of the denoiser: a U-Net's in the names of Stable Diffusion, a transformer's in those of diffusers."""
    [(name, module)] = denoisers(pipe).items()
    rename = ldm if name == "unet" else str
    save_file({rename(key): value.contiguous() for key, value in module.state_dict().items()}, file)
    return str(file)


def same(module, other) -> bool:
    mine, others = module.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[key], others[key]) for key in mine)


def sdxl(seed=0):
    return make("StableDiffusionXLPipeline", seed)[0]


@pytest.mark.parametrize("make", [tiny.sd15, sdxl, tiny.sd3, tiny.flux])
def test_a_pipeline_is_loaded_from_a_file(make, tmp_path):
    """Parts that the file lacks come from the folder of the configuration."""
    folder, pipe = tiny.save(make(), tmp_path / "folder"), make(seed=OTHER)
    model = checkpoint(pipe, tmp_path / "model.safetensors")
    config = validate({"model": model, "precision": "fp32", "load": {"config": str(folder)}})
    options.require_load(loop.setup(config, "pipeline"))
    assert build.kind(config) == build.PIPELINE and not build.writes(model, config)
    loaded = build.load(config)
    assert type(loaded) is type(pipe)
    [(name, module)] = denoisers(pipe).items()
    assert same(getattr(loaded, name), module) and same(loaded.vae, make().vae)
    assert loaded.scheduler.config == load_pipeline(str(folder)).scheduler.config


def test_a_denoiser_is_replaced_by_a_files_and_a_run_with_it_is_drawn_with_that_file(tmp_path):
    folder, pipe = tiny.save(tiny.sd3(), tmp_path / "folder"), tiny.sd3(OTHER)
    file = checkpoint(pipe, tmp_path / "denoiser.safetensors")
    config = validate({"model": str(folder), "load": {"denoiser": file}})
    drawn = loading.make_pipeline(str(folder), "fp32", files=loading.files_of(config, str(folder)))
    assert same(drawn.transformer, pipe.transformer)
    loaded = load_pipeline(str(folder), "bf16", files=Load(denoiser=file))
    assert same(loaded.transformer, pipe.transformer.to(torch.bfloat16)) and loaded.transformer.dtype == torch.bfloat16
    assert same(loaded.text_encoder, tiny.sd3().text_encoder.to(torch.bfloat16))
    assert loading.files_of(config, "another/model") == loading.files_of(None, "x") == Load()


def test_files_that_do_not_fit_are_told(tmp_path, monkeypatch):
    folder = tiny.save(tiny.sd3(), tmp_path / "folder")
    other = checkpoint(tiny.flux(), tmp_path / "flux.safetensors")
    part = str(tmp_path / "part.safetensors")
    save_file({"proj_out.weight": torch.zeros(16, 16)}, part)
    (tmp_path / "broken.safetensors").write_text("nothing")
    assert "broken.safetensors" in message(load.config_source, str(tmp_path / "broken.safetensors"), Load())
    for file in (other, part):
        assert f"{file} " in message(load_pipeline, str(folder), files=Load(denoiser=file))
    assert "load.denoiser" in message(load_pipeline, part, files=Load(config=str(folder)))
    assert "memory.weights is 'int8', but model is" in message(load_pipeline, part, weights="int8")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "without a model_index.json" in message(load_pipeline, part, files=Load(config=str(empty)))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot load the model" in message(load_pipeline, part)


def test_a_language_model_has_no_single_file(tmp_path):
    file = tmp_path / "text.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    told = message(build.kind, validate({"model": str(file), "method": "grpo"}))
    assert "the method trains a language model, which is loaded from a folder" in told


@pytest.mark.parametrize("key, shape, repository", [
    ("double_blocks.0.img_attn.norm.key_norm.scale", (2,), "black-forest-labs/FLUX.1-schnell"), ("a", (1,), "v1-5")])
def test_the_pipeline_of_a_file_is_inferred_from_its_names(key, shape, repository, tmp_path):
    save_file({key: torch.zeros(shape)}, tmp_path / "x.safetensors")
    assert repository in load.config_source(str(tmp_path / "x.safetensors"), Load())


def test_two_denoisers_take_no_file(tmp_path):
    file = checkpoint(tiny.sd3(), tmp_path / "x.safetensors")
    told = message(load.denoiser, Load(denoiser=file), "folder", {}, ["transformer", "transformer_2"], torch.float32)
    assert "the pipeline has 2: transformer, transformer_2" in told


@pytest.mark.parametrize("settings, package, told", [
    ({"memory": {"weights": "int8"}}, True, "a file, which diffusers does not quantise as it reads it: set 'full'"),
    ({"adapter": {"rank": 0}}, True, "but adapter.rank is 0"),
    ({"adapter": {"dora": True}}, True, "but adapter.dora reads"),
    ({"memory": {"shard": True}}, True, "whose packed weights are not sharded"),
    ({}, None, "x.gguf', which needs gguf: pip install gguf$")])
def test_what_does_not_go_with_gguf_and_that_it_needs_its_package(settings, package, told, tmp_path, monkeypatch):
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: package)
    config = validate({"load": {"denoiser": str(tmp_path / "x.gguf")}} | settings)
    refused(told, options.check, loop.setup(config))


def test_an_autoencoder_is_replaced_by_a_files_or_a_folders(tmp_path):
    folder, other = tiny.save(tiny.sd15(), tmp_path / "folder"), tiny.sd15(seed=OTHER).vae
    save_file(other.state_dict(), tmp_path / "vae.safetensors")
    other.save_pretrained(tmp_path / "vae")
    for given in ("vae.safetensors", "vae"):
        config = validate({"model": str(folder), "precision": "fp32", "load": {"vae": str(tmp_path / given)}})
        options.require_load(loop.setup(config, "pipeline"))
        pipe = build.load(config)
        assert same(pipe.vae, other) and not same(pipe.vae, tiny.sd15().vae) and same(pipe.unet, tiny.sd15().unet)


@pytest.mark.parametrize("keys, expected", [
    (["encoder.conv_in.weight", "decoder.conv_in.weight"], "holds a VAE and no pipeline: give it as load.vae"),
    (["lora_unet_a.lora_down.weight", "lora_unet_a.alpha"], "holds a LoRA and no pipeline: give it as load.lora or --"),
    (["emb_params"], "holds a textual inversion and no pipeline: give it as load.textual_inversion")])
def test_a_file_of_a_part_is_no_model(keys, expected, tmp_path):
    save_file({key: torch.ones(2) for key in keys}, tmp_path / "a.safetensors")
    told = message(build.kind, validate({"model": str(tmp_path / "a.safetensors")}))
    assert f"a.safetensors', which {expected}" in told


@pytest.mark.parametrize("there, told", [(True, "which holds a VAE"), (False, "but there is no such file")])
def test_a_file_in_a_folder_is_no_missing_run(there, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "sd").mkdir(parents=True)
    if there:
        save_file({"encoder.a": torch.ones(2)}, "models/sd/a.safetensors")
    assert main(["train", "--model=models/sd/a.safetensors", "--reward=scene", "--prompts=starter"]) == 2
    assert f"model is 'models/sd/a.safetensors', {told}" in capsys.readouterr().err


def test_a_checkpoint_without_a_network_names_itself_and_load_config(tmp_path, monkeypatch):
    model = checkpoint(tiny.sd15(), tmp_path / "model.safetensors")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert re.search(rf"the model '{re.escape(model)}': diffusers infers .*load\.config", message(load_pipeline, model))


def inverted(name, tmp_path, tensors, **options):
    save_file(tensors, tmp_path / "my-style.safetensors")
    pipe = make(name)[0]
    for inversion in Load(textual_inversion=[{"path": str(tmp_path / "my-style.safetensors")} | options]).inversions:
        conditioned.add_inversion(pipe, inversion)
    return pipe


@pytest.mark.parametrize("key, options, token", [
    ("<style>", {}, "<style>"), ("emb_params", {}, "my-style"), ("<style>", {"token": "other"}, "other")])
def test_a_textual_inversion_gives_a_token_its_embeddings(key, options, token, tmp_path, capsys):
    values = torch.randn(2, make("StableDiffusionPipeline")[0].text_encoder.config.hidden_size)
    pipe = inverted("StableDiffusionPipeline", tmp_path, {key: values}, **options)
    ids = [pipe.tokenizer.convert_tokens_to_ids(each) for each in (token, f"{token}_1")]
    assert torch.equal(pipe.text_encoder.get_input_embeddings().weight[ids], values)
    assert pipe.maybe_convert_prompt(f"a {token}", pipe.tokenizer) == f"a {token} {token}_1"
    assert f"the token {token!r} is 2 embeddings of the text_encoder" in capsys.readouterr().err


def test_a_textual_inversion_of_sdxl_has_one_for_each_encoder(tmp_path):
    plain = make("StableDiffusionXLPipeline")[0]
    wide = [part.config.hidden_size for part in (plain.text_encoder, plain.text_encoder_2)]
    left, right = (torch.randn(1, width) for width in wide)
    pipe = inverted("StableDiffusionXLPipeline", tmp_path, {"clip_g": right, "clip_l": left})
    for part, tokenizer, value in ((pipe.text_encoder, pipe.tokenizer, left),
                                   (pipe.text_encoder_2, pipe.tokenizer_2, right)):
        assert torch.equal(part.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("my-style")], value[0])
    told = message(inverted, "StableDiffusionXLPipeline", tmp_path, {"clip_l": left})
    assert re.search("holds clip_l of width .*: expected embeddings of width .* for the text_encoder", told)


def test_what_no_textual_inversion_is_for_is_one_line(tmp_path):
    told = message(inverted, "WanPipeline", tmp_path, {"<a>": torch.ones(1, 8)})
    assert "but WanPipeline takes none: leave it out" in told
    told = message(inverted, "StableDiffusionPipeline", tmp_path, {"<a>": torch.ones(1, 3)})
    assert re.search(r"holds <a> of width 3: expected embeddings of width \d+ for the text_encoder", told)
