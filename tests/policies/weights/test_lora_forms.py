"""LoRA files of others, in every form and at every door: applied exactly, or refused in a line with counts."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.cli import main
from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.policies import loading
from flowgrpo.policies.pipelines.load import denoisers, text_encoders
from flowgrpo.policies.weights import adapters, lora_files
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.tools.check.tiny import make
from tests.helpers import tiny
from tests.helpers.refusals import error_line, message

RANK = 2
WAN = {f"blocks.0.attn{number}.{ours}": f"blocks_0_{kind}_attn_{theirs}"
       for number, kind in ((1, "self"), (2, "cross"))
       for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))}
CLASSES = {"sd15": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline", "sd3": "StableDiffusion3Pipeline",
           "flux": "FluxPipeline", "wan": "WanPipeline"}
NAMED = {  # by family: kohya's names of some layers; of the others they are diffusers' own
    "flux": {"transformer_blocks.0.attn.to_out.0": "double_blocks_0_img_attn_proj",
             "single_transformer_blocks.0.proj_out": "single_blocks_0_linear2"},
    "wan": WAN | {"blocks.0.ffn.net.0.proj": "blocks_0_ffn_0", "blocks.0.ffn.net.2": "blocks_0_ffn_2"}}
TOWERS = {"text_encoder": "lora_te1_text_model_", "text_encoder_2": "lora_te2_text_model_"}


def pipeline(family):
    return make(CLASSES[family])[0]


def layers_of(family, pipe):
    """A, B of layers of the denoiser and of CLIP's text encoders, by part and layer."""
    generator, made = torch.Generator().manual_seed(0), {}
    [(part, denoiser)] = denoisers(pipe).items()
    ends = {part: lambda name: name in NAMED[family] if family in NAMED else name.endswith((".to_q", ".to_v"))}
    ends |= {name: lambda name: name.endswith(("q_proj", "out_proj")) for name, module in text_encoders(pipe).items()
             if type(module).__name__.startswith("CLIP")}
    for part, chosen in ends.items():
        for name, module in getattr(pipe, part).named_modules():
            if chosen(name):
                out, into = module.weight.shape
                made[part, name] = (torch.randn(RANK, into, generator=generator),
                                    torch.randn(out, RANK, generator=generator))
    return made


def written(family, pipe, form, towers=False, alpha=None):
    """The tensors of a file. form: kohya, or diffusers. towers: with text encoders."""
    tensors, sides = {}, ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
    for (part, name), matrices in layers_of(family, pipe).items():
        if part in TOWERS and not towers:
            continue
        key = f"{part}.{name}"
        if form == "kohya":
            plain = name.removeprefix("text_model.").replace(".", "_")
            tower = TOWERS.get(part, "").replace("te1", "te" if family == "sd15" else "te1")
            key = tower + plain if tower else f"lora_unet_{NAMED.get(family, {}).get(name, plain)}"
        tensors |= {f"{key}.{side}.weight": matrix.clone() for side, matrix in zip(sides, matrices)}
        tensors |= {} if alpha is None else {f"{key}.alpha": torch.tensor(alpha)}
    return tensors


def kohya(pipe, towers=False):
    return written("sd15", pipe, "kohya", towers, 1.0)


def plain(pipe):
    return written("sd15", pipe, "diffusers")


def of_family(family, path, door):
    """A pipeline with a LoRA in its weights, by `load.lora`, `sample --lora` or `adapter.init`."""
    pipe = pipeline(family)
    if door == "fuse":
        lora_files.fuse(pipe, denoisers(pipe) | text_encoders(pipe), path, 1.0)
    elif door == "sample":
        loading.load_tuned(pipe, path)
    else:
        targets = [name for part, name in layers_of(family, pipe) if part not in TOWERS]
        TrainableWeights(pipe, denoisers(pipe), Adapter(rank=RANK, alpha=1.0, targets=targets, init=str(path)))
    if door != "fuse":
        for module in (denoisers(pipe) | text_encoders(pipe)).values():
            adapters.merge(module)
    return pipe


def change(pipe, base, part, name):
    """How a layer's weight differs from the base's."""
    return getattr(pipe, part).get_submodule(name).weight - getattr(base, part).get_submodule(name).weight


every_door = pytest.mark.parametrize("door", ["fuse", "sample", "init"])
READ = [(family, form, towers, alpha) for family in CLASSES for form in ("diffusers", "kohya")
        for towers in (False, True) for alpha in (None, 1.0)
        if not (form == "kohya" and family == "sd3" or towers and family == "wan")]


@every_door
@pytest.mark.parametrize("family, form, towers, alpha", READ)
def test_a_family_reads_a_form_exactly_or_refuses_it(family, form, towers, alpha, door, tmp_path, capsys):
    base, file = pipeline(family), tmp_path / "a.safetensors"
    save_file(written(family, base, form, towers, alpha), file)
    if door == "init" and towers:
        assert re.search(r"its LoRA is also of the text_encoder( and \w+)?, but the run trains",
                         message(of_family, family, file, door))
        return
    found, layers = of_family(family, file, door), layers_of(family, base)
    for (part, name), (a, b) in layers.items():
        scale = (1.0 if alpha is None else alpha / RANK) * (towers or part not in TOWERS)
        torch.testing.assert_close(change(found, base, part, name), scale * b @ a, atol=1e-4, rtol=1e-3)
    [part] = denoisers(base)
    count = sum(each == part for each, _ in layers)
    assert door == "init" or f"{count} layers of the {part}, rank 2, scale" in capsys.readouterr().err


def test_a_layer_without_alpha_has_scale_1_beside_others(tmp_path):
    base = pipeline("sd15")
    first, second = [key for key in layers_of("sd15", base) if key[0] == "unet"][:2]
    tensors = kohya(base)
    del tensors["lora_unet_" + first[1].replace(".", "_") + ".alpha"]
    save_file(tensors, tmp_path / "a.safetensors")
    found = of_family("sd15", tmp_path / "a.safetensors", "fuse")
    for key, scale in ((first, 1.0), (second, 0.5)):
        a, b = layers_of("sd15", base)[key]
        torch.testing.assert_close(change(found, base, *key), scale * b @ a, atol=1e-5, rtol=1e-4)


def test_a_dora_sets_the_lengths_of_rows(tmp_path):
    base = pipeline("sd15")
    names = [name for part, name in layers_of("sd15", base) if part == "unet"]
    lengths = {name: 1.5 * base.unet.get_submodule(name).weight.norm(dim=1) for name in names}
    save_file(plain(base) | {f"unet.{name}.lora_magnitude_vector": value for name, value in lengths.items()},
              tmp_path / "a.safetensors")
    tuned = of_family("sd15", tmp_path / "a.safetensors", "fuse")
    for name, length in lengths.items():
        torch.testing.assert_close(tuned.unet.get_submodule(name).weight.norm(dim=1), length, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", ["", adapters.WEIGHTS])
def test_a_folder_of_peft_has_its_alpha_beside_it(given, tmp_path):
    base = pipeline("sd15")
    save_file({f"base_model.model.{key.removeprefix('unet.')}": value for key, value in plain(base).items()},
              tmp_path / adapters.WEIGHTS)
    layers = {name: sides for (part, name), sides in layers_of("sd15", base).items() if part == "unet"}
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": [*layers]}
    (tmp_path / adapters.CONFIG).write_text(json.dumps(said))
    name, (a, b) = next(iter(layers.items()))
    for door in ("fuse", "sample"):
        found = of_family("sd15", tmp_path / given, door)
        torch.testing.assert_close(change(found, base, "unet", name), 3 * b @ a, atol=1e-4, rtol=1e-4)


def other(*names):
    def made(pipe):
        tensors = kohya(pipe)
        layer = next(iter(tensors)).partition(".")[0]
        return {key: value for key, value in tensors.items() if not key.startswith(f"{layer}.")} | {
            f"{layer}.{name}": torch.ones(4, 4) for name in names}
    return made


def beginning(family, pipe, prefix):
    """Diffusers' names with another beginning."""
    return {prefix + key.partition(".")[2]: value for key, value in written(family, pipe, "diffusers").items()}


REFUSED = {  # by form: the family, the file's tensors, and what is said of it
    "kohya's DoRA": ("sd15", lambda pipe: kohya(pipe) | {f"{key.partition('.')[0]}.dora_scale": torch.ones(32, 1)
                                                         for key in kohya(pipe)}, "holds a DoRA in kohya's form"),
    "LoHa": ("sd15", other("hada_w1_a", "hada_w1_b"), r"holds a LoHa in 1 of its \d+ layers, which is not read"),
    "LoKr": ("sd15", other("lokr_w1", "lokr_w2"), "holds a LoKr in 1 of"),
    "whole": ("sd15", other("diff"), "holds a difference of whole weights in 1 of"),
    "oft": ("sd15", other("oft_blocks"), "holds a OFT in 1 of"),
    "biases": ("sd15", lambda pipe: plain(pipe) | {key.replace(".weight", ".bias"): torch.ones(4)
                                                   for key in plain(pipe) if "lora_B" in key}, "holds a LoRA with bia"),
    "unknown": ("sd15", lambda pipe: plain(pipe) | {"unet.nowhere.to_q.lora_A.weight": torch.ones(2, 8),
                                                    "unet.nowhere.to_q.lora_B.weight": torch.ones(8, 2)},
                r"(\d+) of its \d+ layers are applied to StableDiffusionPipeline, and 1 are not, or at another scale, "
                "such as unet.nowhere.to_q"),
    "kohya, SD 3": ("sd3", lambda pipe: written("sd3", pipe, "kohya", alpha=1.0), "its names are kohya's, which"),
    "kohya, some layers": ("wan", lambda pipe: dict([*written("wan", pipe, "kohya", alpha=1.0).items()][:9]),
                           "as diffusers reads its form, the file lacks 'blocks_0_"),
    "peft's file alone": ("wan", lambda pipe: beginning("wan", pipe, "base_model.model."),
                          "its names are peft's: expected its adapter_config.json beside it"),
    "without a part": ("sdxl", lambda pipe: beginning("sdxl", pipe, ""), "holds no LoRA layer for StableDiffusionXL"),
    "another model": ("flux", lambda pipe: {f"unet.down.0.to_q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"},
                      "holds no LoRA layer for FluxPipeline: was it trained on another model"),
    "LoHa, Wan": ("wan", lambda pipe: {"lora_unet_blocks_0_self_attn_q.hada_w1_a": torch.ones(2, 2)},
                  "holds a LoHa, which"),
    "kohya's DoRA, FLUX": ("flux", lambda pipe: written("flux", pipe, "kohya", alpha=1.0) | {
        "lora_unet_single_blocks_0_linear2.dora_scale": torch.ones(16, 1)}, "holds a DoRA in kohya's form")}


@every_door
@pytest.mark.parametrize("form", REFUSED)
def test_what_would_be_lost_is_refused_at_every_door(form, door, tmp_path):
    family, tensors, told = REFUSED[form]
    save_file(tensors(pipeline(family)), tmp_path / "a.safetensors")
    assert re.search(rf"a\.safetensors.* {told}", message(of_family, family, tmp_path / "a.safetensors", door))


# --- a LoRA that is damaged, or that a run cannot start from: said before the model is loaded -----------------------
LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
A, B = torch.ones(2, 8), torch.ones(8, 2)
KOHYA = "lora_unet_" + LAYER.replace(".", "_")
SAID = {"r": 2, "lora_alpha": 2, "target_modules": [LAYER], "peft_type": "LORA"}
OTHER_NUMBERS = [*(({"r": value}, "does not say its rank: {prefix}r is .*, expected a whole number of 1 or more")
                   for value in (0, -2, "two", None, True, 2.5, [2])),
                 *(({"lora_alpha": value}, "{prefix}lora_alpha is .*, expected a number") for value in ("x", None)),
                 ({"rank_pattern": {LAYER: 0}}, "{prefix}r is 0"), ({"alpha_pattern": 3}, "alpha_pattern is 3"),
                 ({"lora_alpha": math.nan}, "NaN|unet.lora_alpha is nan"), ({"peft_type": "LOHA"}, "is of a LOHA")]


def without_weights(folder):
    """A model's folder whose weights are damaged, so that loading it fails."""
    tiny.save(tiny.sd15(), folder)
    for file in folder.rglob("*.safetensors"):
        file.write_bytes(b"damaged")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return without_weights(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("form", ["diffusers", "peft"])
@pytest.mark.parametrize("number, told", OTHER_NUMBERS)
def test_a_rank_or_alpha_that_is_no_number_is_told_before_loading(number, told, form, model, tmp_path, capsys):
    said = SAID | number
    if form == "peft":
        (tmp_path / adapters.CONFIG).write_text(json.dumps(said))
        file = tmp_path / adapters.WEIGHTS
    else:
        file = tmp_path / "a.safetensors"
    prefix = "" if form == "peft" else "unet."
    save_file({f"{'base_model.model.' if form == 'peft' else 'unet.'}{LAYER}.lora_{side}.weight": value
               for side, value in (("A", A), ("B", B))}, file,
              {adapters.METADATA: json.dumps({f"unet.{key}": value for key, value in said.items()})})
    for given in (file, tmp_path) if form == "peft" else (file,):
        line = error_line(capsys, "sample", model, "--prompt=x", "--lora", given)
        assert re.search(told.format(prefix=prefix), line), line


@pytest.mark.parametrize("tensors, told", [
    ({f"{KOHYA}.lora_down.weight": A[:0], f"{KOHYA}.lora_up.weight": B[:, :0], f"{KOHYA}.alpha": torch.tensor(1.0)},
     "has rank 0 and no values, expected a rank of 1 or more"),
    ({f"unet.{LAYER}.lora_A.weight": A[:0], f"unet.{LAYER}.lora_B.weight": B[:, :0]}, "has rank 0 and no values"),
    ({f"{KOHYA}.lora_down.weight": A, f"{KOHYA}.lora_up.weight": B, f"{KOHYA}.alpha": torch.ones(3)},
     "alpha holds 3 values, expected one number"),
    ({f"{KOHYA}.lora_down.weight": A, f"{KOHYA}.lora_up.weight": B, f"{KOHYA}.alpha": torch.tensor(math.nan)},
     "alpha holds NaN")])
def test_a_damaged_lora_is_one_line_at_every_door_before_the_model_is_loaded(tensors, told, model, tmp_path, capsys):
    save_file(tensors, tmp_path / "a.safetensors")
    assert told in error_line(capsys, "sample", model, "--prompt=x", "--lora", tmp_path / "a.safetensors")
    run = ["train", f"--model={model}", "--prompts=general", "--reward=sharpness"]
    for option in (f"--adapter.init={tmp_path}/a.safetensors", f"--load.lora=[{tmp_path}/a.safetensors]"):
        assert told in error_line(capsys, *run, option)


def test_the_settings_of_kohyas_usual_file_are_told_at_once_and_begin_a_run(tmp_path, capsys):
    """Of the U-Net's projections and feed-forwards and of the text encoder."""
    base = tiny.sd15()
    tensors = kohya(base, towers=True)
    for name, module in base.unet.named_modules():
        if name.endswith(("ff.net.0.proj", "ff.net.2", "to_out.0", "to_k")):
            key, (out, into) = "lora_unet_" + name.replace(".", "_"), module.weight.shape
            tensors |= {f"{key}.lora_down.weight": torch.ones(RANK, into), f"{key}.alpha": torch.tensor(1.0),
                        f"{key}.lora_up.weight": torch.ones(out, RANK)}
    save_file(tensors, tmp_path / "a.safetensors", {"modelspec.license": "CC-BY-4.0"})
    common = ["--prompts=starter", "--reward=sharpness", f"--adapter.init={tmp_path / 'a.safetensors'}", "--device=cpu",
              f"--output={tmp_path}", "--name=run", "--precision=fp32", "--tracker=none", "--train.epochs=1",
              "--train.prompts=1", "--train.group=2", "--train.micro_batch=2", "--train.steps=6", "--eval.prompts=2",
              "--eval.steps=2", "--adapter.targets=[to_q]"]
    line = error_line(capsys, "train", f"--model={without_weights(tmp_path / 'damaged')}", *common)
    assert "its LoRA has rank 2, expected adapter.rank 32; it is also of the text_encoder, but the run trains unet; " \
        "it has a layer unet.down_blocks" in line
    settings = line.partition(": set ")[2].split()
    assert settings == ["--adapter.rank=2", "--adapter.alpha=1", "--adapter.targets=[net.2,proj,to_k,to_out.0,to_q,"
                        "to_v]", "--adapter.encoder_targets=[out_proj,q_proj]", "--parts.adapted.encoders=true"]
    model = tiny.save(base, tmp_path / "model")
    assert main(["train", f"--model={model}", *common[:-1], *settings]) == 0
    assert "LoRA applied to 4 layers of the text_encoder, 40 layers of the unet, rank 2" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--form=card"]) == 0
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"It began from the LoRA `{tmp_path / 'a.safetensors'}` (adapter.init)" in card
    assert f"Of the LoRA `{tmp_path / 'a.safetensors'}`, from which the training began: `other` `CC-BY-4.0`." in card


@pytest.mark.parametrize("layers, others, expected", [
    (["a.0.to_q", "a.1.to_q"], ["a.0.to_k"], ["to_q"]), (["a.0.x.to_q"], ["a.0.y.to_q"], ["x.to_q"]),
    (["a.0.to_q"], ["a.1.to_q"], ["a.0.to_q"]), (["a.ff.net.2", "b.ff.net.2"], ["a.norm.2"], ["net.2"]),
    (["to_q"], ["a.to_q"], ["to_q"]), (["a.to_out.0"], [], ["to_out.0"])])
def test_the_shortest_targets_of_layers(layers, others, expected):
    assert lora_files.targets_for(layers, others) == expected


@pytest.mark.parametrize("family, edit, told", [
    ("flux", lambda tensors: tensors, "a run trains all text encoders or none, but it has no text_encoder_2: no run "
     "starts from it; fuse it into the model by load.lora"),
    ("sdxl", lambda tensors: tensors | {key: torch.cat([value, value], int("up" in key)) for key, value in
                                        [*tensors.items()][:2]}, "one rank, but these have 2 and 4: no run starts")])
def test_what_no_run_starts_from_is_said_with_another_way(family, edit, told, tmp_path):
    pipe = pipeline(family)
    save_file(edit(written(family, pipe, "kohya", True, None)), tmp_path / "a.safetensors")
    modules = denoisers(pipe) | text_encoders(pipe)
    start = lora_files.start_of(tmp_path / "a.safetensors", type(pipe), modules)
    with pytest.raises(UserError, match=told):
        lora_files.require_start("adapter.init", tmp_path / "a.safetensors", start, Adapter(), denoisers(pipe), modules)
