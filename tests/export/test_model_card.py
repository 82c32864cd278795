"""The model card: metadata that a hub reads, a snippet that runs as it is, results with intervals, few settings."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, save_file

from flowgrpo.cli import main
from flowgrpo.config import load, validate
from flowgrpo.data import sets
from flowgrpo.data.inputs import Inputs
from flowgrpo.data.prompts import Prompt
from flowgrpo.escaped import plain
from flowgrpo.evaluation.held_out import compare_rewards
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.pages import sources
from flowgrpo.evaluation.report import snapshots
from flowgrpo.evaluation.report.snapshots import commit, data_url, write
from flowgrpo.evaluation.samplers import call_arguments, draw_one
from flowgrpo.export import comfy_names, export, model_card, run_lora, usage
from flowgrpo.policies.loading import load_tuned
from flowgrpo.policies.pipelines.frames import is_video
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline
from flowgrpo.policies.pipelines.prompt_inputs import IMAGES
from flowgrpo.policies.weights.adapters import merge
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.tools.check.tiny import make
from tests.export.test_export import SUMMARY, finished, make_run, record
from tests.helpers import tiny
from tests.helpers.tiny_runs import assert_same_weights
from tests.policies.pipelines.test_single_file import checkpoint


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sd3"), tiny.sd3(), tiny.CALL)


def snippet(folder, prompt="a star", sources=(), **settings) -> str:
    """What the card of a run with these settings shows, which is Python."""
    told = usage.snippet(validate({"reward": "scene"} | settings), folder, "me/repository", prompt, sources)
    compile(told, "snippet", "exec")
    return told


def code(card: str) -> str:
    [(_, found)] = re.findall(FENCED, card, re.S | re.M)
    return found


FENCED = r"^(`{3,})python\n(.*?)^\1$"


def test_the_card_says_what_the_run_says_with_intervals(sd3):
    text = export.card(sd3).read_text()
    assert "with `mix_grpo+grpo_guard` on 2 `bright`" in text and "| bright | 0.250 | 0.500 | +0.250 | yes |" in text
    assert "Means over 4 held-out pictures (2 steps, guidance 1), with the pipeline's own scheduler.\n" in text
    assert "1,234 denoiser evaluations" in text and "| LoRA | rank 2, alpha 2 |" in text
    assert len(text.splitlines()) < 110 and "text:" not in text
    assert (sd3 / "curves.png").read_bytes().startswith(b"\x89PNG")
    prompts, scores = [Prompt(str(i)) for i in range(4)], ([0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    before, after = (Measured(prompts, {"bright": values}, torch.empty(0)) for values in scores)
    told = model_card.results(validate({"reward": "bright"}), SUMMARY | {"compared": compare_rewards(before, after, 1)})
    assert "| bright | 0.250 [0.046, 0.699] | 0.750 [0.301, 0.954] | +0.500 [" in told
    assert told.endswith("95 % intervals: Wilson.")


@pytest.mark.parametrize("front, expected, said", [
    ("---\nlicense: apache-2.0\n---\n# A model", {"license": "apache-2.0"}, "`apache-2.0`"),
    ("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE.md\n---\n",
     {"license": "other", "license_name": "own", "license_link": "LICENSE.md"}, "`other`"),
    ("# A model without metadata", {}, "unknown"), ("---\n: {\n---\n", {}, "unknown"), (None, {}, "unknown")])
def test_the_licence_is_the_base_models(sd3, front, expected, said):
    file = sd3 / "model" / "README.md"
    try:
        if front is not None:
            file.write_text(front)
        assert model_card.licence_of(str(sd3 / "model")) == expected
        card = ModelCard(export.card(sd3).read_text())
        assert card.data.license == expected.get("license", "other")
        assert f"Of the base model `{sd3 / 'model'}`: {said}" in card.text
    finally:
        file.unlink(missing_ok=True)


def test_metadata_and_clips_of_the_card(sd3):
    card = ModelCard(export.card(sd3).read_text())
    assert card.data.base_model is None and card.data.library_name == "diffusers"  # a folder here is no hub id
    assert card.data.tags == ["flowgrpo", "reinforcement-learning", "lora"]
    assert card.data.pipeline_tag == "text-to-image"
    on_hub = validate({"model": "owner/a-model", "reward": "bright"})
    told = model_card.metadata(on_hub, {}, "clip", True)
    assert told["base_model"] == "owner/a-model" and told["base_model_relation"] == "adapter"
    assert told["pipeline_tag"] == "text-to-video" and told["license"] == "other"
    assert "Of the base model `owner/a-model`: unknown" in model_card._licence(on_hub, {})
    assert model_card.licence_of("starter") == {"license": "apache-2.0"} and model_card.licence_of("no/model") == {}
    clip = sd3 / "before_after.webp"
    try:
        assert "(before_after.png)" in export.card(sd3).read_text()
        clip.touch()
        assert "(before_after.webp)" in export.card(sd3).read_text()
    finally:
        clip.unlink()


@pytest.mark.parametrize("which", ["sd3", "whole", "pixart"])
def test_the_snippet_of_a_pipeline_runs_as_it_is(sd3, which, tmp_path, monkeypatch):
    run = {"sd3": lambda: sd3, "whole": lambda: make_run(tmp_path / "run", tiny.sd3(), tiny.CALL, rank=0),
           "pixart": lambda: make_run(tmp_path / "run", *make("PixArtSigmaPipeline"))}[which]()
    monkeypatch.chdir(tmp_path)
    written = code(export.card(run).read_text())
    here: dict = {}
    exec(written, here)
    tuned = np.asarray(Image.open("image.png")).astype(int)
    exec(re.sub(r"(?m)^(pipe\.load_lora_weights|load_lora|pipe\.\w+ = type).*\n", "", written)
         .replace("image.png", "base.png"), {})
    assert which != "sd3" or here["pipe"].transformer.peft_config
    assert tuned.std() > 0 and ("load" in written or "from_pretrained" in written)
    states = here["pipe"].transformer.state_dict()
    assert all(torch.isfinite(value).all() for value in states.values() if value.is_floating_point())
    assert (tuned != np.asarray(Image.open("base.png")).astype(int)).any()


@pytest.mark.parametrize("name", ["FluxModularPipeline", "AnimaModularPipeline", "LTXModularPipeline",
                                  "Flux3ModularPipeline", "StableDiffusionXLPipeline", "QwenImagePipeline"])
def test_the_snippet_draws_what_sample_does_under_guidance(name, tmp_path, monkeypatch):
    """The first has no guider, the second no loader of LoRAs, the third makes clips, and the fourth rewrites prompts.
    Without a negative prompt SDXL takes zeros in its place, and Qwen-Image has no guidance."""
    run = make_run(tmp_path / "run", *make(name), eval={"steps": 2, "guidance": 3.0})
    monkeypatch.chdir(tmp_path)
    config, here = load(run / "config.yaml"), {}
    lines = code(export.card(run).read_text())
    assert ("ModularPipeline.from_pretrained" in lines) == ("Modular" in name) and "load_pipeline" not in lines
    lines = re.sub("= pipe\\(", "= pipe(generator=torch.Generator().manual_seed(3), ", lines)
    exec(re.sub("(?m)^(export_to_video|image.save).*", "", lines), here)
    prompt, pipe = re.search("prompt='([^']*)'", lines)[1], load_pipeline(config.model, "fp32")
    load_tuned(pipe, run)
    ours = draw_one(pipe, Prompt(prompt), 3, call_arguments(config.model, run))
    made = here.get("frames", [here.get("image")])  # frames are numbers from 0 to 1
    theirs = torch.stack([torch.from_numpy(np.array(each)) for each in made]).movedim(-1, 1)
    theirs = (theirs * 255).round().to(torch.uint8) if theirs.is_floating_point() else theirs
    assert ours.std() > 0 and torch.equal((ours * 255).round().to(torch.uint8).reshape(theirs.shape), theirs)


SINGLE = {"StableDiffusionPipeline": ("comfyui", "kohya"), "StableDiffusionXLPipeline": ("comfyui", "kohya"),
          "StableDiffusion3Pipeline": ("comfyui", "kohya"), "FluxPipeline": ("comfyui", "kohya"),
          "WanPipeline": ("comfyui",)}  # forms of the denoiser, by pipeline


@pytest.mark.parametrize("rank", [2, 0])
@pytest.mark.parametrize("name", SINGLE)
def test_a_run_on_a_single_file_is_exported_and_its_snippet_is_of_diffusers_alone(name, rank, tmp_path, monkeypatch):
    """Of Wan diffusers reads the denoiser alone, `load.denoiser`. Text encoders are in the configuration's folder."""
    pipe, call = make(name)
    run = make_run(tmp_path / "run", pipe, call, rank, eval={"steps": 2})
    for parameter in denoisers(pipe)["unet" if hasattr(pipe, "unet") else "transformer"].parameters():
        parameter.data += 0.01  # not the folder's own
    file, folder = checkpoint(pipe, tmp_path / "model.safetensors"), str(run / "model")
    plain = load(run / "config.yaml")
    given = {"load": {"denoiser": file}} if name == "WanPipeline" else {"model": file, "load": {"config": folder}}
    (run / "config.yaml").write_text(validate(plain.model_dump() | given).yaml())
    monkeypatch.chdir(tmp_path)
    for form in SINGLE[name] if rank else ():
        assert main(["export", str(run), "--form", form, "--output", f"{form}.safetensors"]) == 0
        known = comfy_names.classes(folder)
        expected = export._write_lora(run, tmp_path / "whole.safetensors", run_lora.read(run), known, form)
        assert load_file(f"{form}.safetensors").keys() == load_file(*expected).keys()
    assert main(["export", str(run), "--form=card"]) == 0
    lines = code((run / "README.md").read_text())
    assert "flowgrpo" not in lines and ".from_single_file(" in lines
    here: dict = {}
    exec(re.sub(r"(?m)^(image|frames|export_to_video|image.save).*\n?", "", lines), here)
    config = load(run / "config.yaml")
    ours = load_pipeline(config.model, "fp32", files=config.load)
    load_tuned(ours, run)
    for part, module in ours.components.items():
        if isinstance(module, torch.nn.Module):
            merge(module)
            merge(here["pipe"].components[part])
            assert_same_weights(here["pipe"].components[part].state_dict(), module.state_dict())


def test_the_licence_of_a_file_is_that_of_its_metadata_or_of_the_card_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, said in (("plain", {}), ("said", {"modelspec.license": "CreativeML Open RAIL++-M"})):
        save_file({"a": torch.ones(1)}, f"{name}.safetensors", said)
    told = {"license": "other", "license_name": "CreativeML Open RAIL++-M"}
    assert model_card.licence_of("said.safetensors") == told and model_card.licence_of("plain.safetensors") == {}
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert model_card.licence_of("plain.safetensors") == {"license": "mit"}
    config = validate({"model": "models/said.safetensors", "reward": "bright"})
    assert "base_model" not in model_card.metadata(config, told, "image", True)  # a path is no hub id
    assert "`other` `CreativeML Open RAIL++-M`. These" in model_card._licence(config, told)


SMALL = {"height": 16, "width": 16}
BROUGHT = {  # by pipeline: what a prompt brings, further arguments of the call, and the hub's task
    "FluxKontextPipeline": (["image"], {"max_area": 256, "_auto_resize": False}, "image-to-image"),
    "FluxFillPipeline": (["image", "mask_image"], {}, "image-to-image"),
    "StableDiffusionInpaintPipeline": (["image", "mask_image"], {}, "image-to-image"),
    "StableDiffusionXLControlNetPipeline": (["control_image"], {}, "image-to-image"),
    "WanImageToVideoPipeline": (["image"], {"num_frames": 5}, "image-to-video"),
    "WanImageToVideoPipeline (first and last frame)": (["image", "last_image"], {"num_frames": 5}, "image-to-video"),
    "WanVideoToVideoPipeline": (["video"], {"num_frames": 5}, "video-to-video"),
    "LatentConsistencyModelPipeline": ([], {}, "text-to-image"),
    "WanPipeline": ([], {"num_frames": 5}, "text-to-video"),
    "LTX2Pipeline": ([], {"height": 32, "width": 32}, "text-to-video"),
    "LTX2ImageToVideoPipeline": (["image"], {"height": 32, "width": 32}, "image-to-video"),
    "Flux2KleinPipeline": ([], {"height": 64, "width": 64}, "text-to-image"),
    "Flux2Pipeline": (["image", "image"], {"height": 64, "width": 64}, "image-to-image"),
    "QwenImageEditPlusPipeline": (["image", "image"], {"height": 256, "width": 256}, "image-to-image")}


@pytest.mark.parametrize("name", BROUGHT)
def test_the_card_of_a_run_with_sources_runs_and_draws_what_sample_does(name, tmp_path, monkeypatch):
    keys, further, task = BROUGHT[name]
    pipe, given = make(name)
    call = {key: value for key, value in given.items() if key not in IMAGES} | SMALL | further
    if name == "StableDiffusionXLControlNetPipeline":
        call["controlnet_conditioning_scale"] = 1.0
    run = make_run(tmp_path / "run", pipe, call, eval={"steps": 2, "guidance": 2.0})
    prompt = Prompt("make it red", inputs=brings(tmp_path, keys))
    clip = is_video(type(pipe))
    shown = Measured([prompt], {"bright": [0.5]}, torch.rand(1, *[5] * clip, 3, 8, 8))
    for stage in ("before", "after"):
        snapshots.stage(run, stage, 0, shown)
    sources.save(run / "source", [prompt], 5)
    monkeypatch.chdir(tmp_path)
    card = ModelCard(export.card(run, None).read_text())
    assert card.data.pipeline_tag == task
    widget = card.data.to_dict()["widget"][0]
    assert ("src" in widget) == bool(keys) and all((run / file).is_file() for file in [widget.get("src", "README.md")])
    assert "| prompt | source | before | after |" in card.text or not keys
    here: dict = {}
    lines = code(card.text).replace("= pipe(", "= pipe(generator=torch.Generator().manual_seed(3), output_type='pt', ")
    exec(re.sub(r"(?m)^(image\.save|export_to_video).*$", "", lines), here)
    config = load(run / "config.yaml")
    ours = draw_one(here["pipe"], prompt, 3, call_arguments(config.model, run))
    theirs = here["frames" if clip else "image"]
    torch.testing.assert_close(theirs.float().cpu(), ours, rtol=0, atol=1e-5)
    if clip:
        exec(code(card.text), {})  # as printed
        assert f"fps={'25' if name.startswith('LTX') else '16'})" in card.text and (tmp_path / "clip.mp4").is_file()


def test_snippets_of_uploads_and_sources(tmp_path):
    make("Flux2Pipeline")[0].save_config(tmp_path)
    told = snippet(tmp_path, "p", [("image", "images/a.png"), ("image", "images/b.png")], model=str(tmp_path))
    assert "image = load_image(hf_hub_download('me/repository', 'images/a.png'))" in told
    assert "pipe(prompt='p', image=[image, image_2], " in told
    assert usage.task(validate({"model": str(tmp_path), "reward": "scene"}), "image", ()) == "text-to-image"
    assert "load_image" not in snippet(tmp_path, model=str(tmp_path))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "adapter_config.json").touch()
    told = snippet(tmp_path, model="owner/model")
    assert "load_lora(pipe, {'transformer': pipe.transformer}, Path(snapshot_download('me/repository')))" in told


def brings(folder, keys) -> Inputs:
    """Images of noise of 64 x 64, the frames of a video among them."""
    rng, files = np.random.default_rng(0), []
    for number in range(8):
        files.append(str(folder / f"{number}.png"))
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(files[-1])
    if "video" in keys:
        frames = [Image.open(file) for file in files]
        frames[0].save(folder / "clip.webp", save_all=True, append_images=frames[1:], lossless=True)
        return Inputs(video=str(folder / "clip.webp"))
    images = tuple(files[:keys.count("image")])
    return Inputs(images, **{key: files[-1] for key in keys if key != "image"})


@pytest.mark.parametrize("rank", [2, 0])
def test_the_snippet_of_a_language_model_runs_as_it_is(tmp_path, rank, capsys):
    run, own = finished(tmp_path, rank)
    card = export.card(run).read_text()
    here: dict = {}
    exec(code(card), here)
    expected = own.model.generate(**here["inputs"], max_new_tokens=own.text.max_tokens, do_sample=False)
    assert torch.equal(here["output"], expected) and capsys.readouterr().out
    assert "| completions | up to" in card and "pipeline_tag: text-generation" in card


@pytest.mark.parametrize("model, lines", [
    ("starter", ["from flowgrpo.starter import FOLDERS", "str(FOLDERS['starter'])", "text_encoder_3=None",
                 "guidance_scale=2.0", "max_sequence_length=1"]),
    ("starter_video", ["export_to_video(frames", "num_frames=5"]), ("starter_consistency", ["load_pipeline("])])
def test_snippets_of_packaged_models(model, lines, tmp_path):
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    told = snippet(tmp_path, model=model, eval={"guidance": 2.0})
    assert all(line in told for line in lines) and "pipe.load_lora_weights('me/repository')" in told


def test_a_reward_that_applied_to_no_held_out_prompt_has_no_mean_in_the_card(tmp_path):
    told = SUMMARY | {"before": {"bright": None, "dark": 0.5}, "after": {"bright": 0.25, "dark": None}}
    lines = [{"evaluations": 5, "reward/bright/mean": None, "reward/dark/mean": 0.5, "reward/dark/std": 1.0},
             {"evaluations": 9, "reward/bright/mean": None, "reward/dark/mean": None, "held_out/dark": 0.75},
             {"evaluations": 14, "held_out/dark": 1.0, "loss": 2.0}]
    record(tmp_path, validate({"model": "starter", "reward": {"bright": 1, "dark": 1}}), told, lines)
    text = export.card(tmp_path).read_text()
    assert "| bright | - | 0.250 | - | yes |" in text and "| dark | 0.500 | - | - | yes |" in text
    assert model_card.points(lines) == {"reward/dark": [(5, 0.5)], "held_out/dark": [(9, 0.75), (14, 1.0)]}


@pytest.mark.parametrize("model, method", [("owner/model", "mix_grpo"), ("owner/text", "grpo")])
def test_the_snippet_loads_the_revision_and_the_variant_of_the_run(model, method, tmp_path):
    told = snippet(tmp_path, model=model, method=method, load={"variant": "fp16", "revision": "v2"})
    assert "variant='fp16', revision='v2'" in told


@pytest.mark.parametrize("model, argument", [
    ("black-forest-labs/FLUX.1-dev", "guidance_scale"), ("Qwen/Qwen-Image", "true_cfg_scale"),
    ("hunyuanvideo-community/HunyuanVideo", "guidance_scale"), ("skyreels_i2v", "true_cfg_scale"),
    ("stabilityai/stable-diffusion-3.5-medium", "guidance_scale"), ("FluxPipeline", "guidance_scale"),
    ("QwenImagePipeline", "true_cfg_scale")])
def test_the_snippet_sets_the_guidance_that_the_run_had(model, argument, tmp_path):
    """A published model by its name, or a folder: FLUX.1-dev and HunyuanVideo take the scale as an input, and their
    `true_cfg_scale` is another thing."""
    if model.endswith("Pipeline"):
        pipe, _ = make(model)
        if model == "FluxPipeline":
            pipe.transformer = type(pipe.transformer).from_config(pipe.transformer.config, guidance_embeds=True)
        pipe.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    told = snippet(tmp_path, model=model, eval={"guidance": 2.5})
    assert f" {argument}=2.5" in told and told.count("=2.5") == 1


def test_snippets_of_guiders_and_denoisers(tmp_path):
    model = tmp_path / "model"
    make("HunyuanVideo15Pipeline")[0].save_pretrained(model)
    told = snippet(tmp_path, model=str(model), eval={"guidance": 3.5})
    [last] = [line for line in told.splitlines() if ".frames[0]" in line]
    assert "pipe.guider = pipe.guider.new(guidance_scale=3.5)" in told and "guidance_scale" not in last
    told = snippet(tmp_path, model="owner/model", precision="bf16", load={"denoiser": "d.gguf"})
    assert "pipe = load_pipeline('owner/model', 'bf16', files=Load(denoiser='d.gguf'))" in told
    assert "from flowgrpo.config.sections import Load" in told


HOSTILE = ["---\nlicense: mit\n---", "a ``` fence ~~~", "| cell | <script>alert(1)</script>",
           "\x1b[31mred\x07 \u202etfel",
           "![x](javascript:1) [y](z) `code` *b* __c__", "key: [value, \"quoted\" 'too'] # no comment\\"]


@pytest.mark.parametrize("prompt", HOSTILE)
def test_texts_of_others_are_neither_yaml_nor_markdown_nor_commands(tmp_path, prompt):
    run = with_cards(tmp_path, prompt)
    text = export.card(run).read_text()
    card = ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.to_dict()["widget"][0] == {
        "text": plain(" ".join(prompt.split())), "output": {"url": "images/after-0.webp"}}
    assert not set(text) & set("\x1b\x07\u202e")
    body = re.sub(FENCED, "", card.text, flags=re.S | re.M)
    markup = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"\\.", "", body))  # without spans of code
    assert "![x](" not in markup and "](y)" not in markup and "<script" not in markup
    [row] = [each for each in body.splitlines() if "images/before-0.webp" in each]
    assert len(re.findall(r"(?<!\\)\|", row)) == 4
    compile(code(text), "snippet", "exec")


def with_cards(folder, prompt: str):
    """A run's folder with one held-out prompt, whose name and reward are that text too, a name without its controls."""
    picture = {"prompt": prompt, "scores": {}, "picture": data_url(torch.rand(3, 8, 8))}
    for name in ("before", "after"):
        write(folder / "report" / f"{name}.json", {"name": name, "epoch": 0, "scores": {}, "cards": [picture]})
    label, name = " ".join(prompt.split()), "".join(filter(str.isprintable, prompt)).replace("/", "")
    config = validate({"model": "starter", "reward": {label: {"use": "scene"}}, "name": name})
    record(folder, config, SUMMARY | {"before": {label: 0.25}, "after": {label: 0.5}}, [])
    said = {"transformer.r": 16, "transformer.lora_alpha": 32}  # as earlier versions wrote it
    save_file({"transformer.to_q.lora_A.weight": torch.ones(16, 1)}, folder / LORA_FILE,
              {"lora_adapter_metadata": json.dumps(said)})
    return folder


def test_the_card_says_where_everything_came_from(tmp_path):
    text = export.card(with_cards(tmp_path, "a red star")).read_text()
    assert f"`{LORA_FILE}`: `{hashlib.sha256((tmp_path / LORA_FILE).read_bytes()).hexdigest()}`" in text
    assert "| LoRA | rank 16, alpha 32 |" in text
    train = sets.SETS["starter"].train
    assert f"| training | `starter` | {len(train.read_text().splitlines()):,} | " \
           f"`{hashlib.sha256(train.read_bytes()).hexdigest()}` |" in text
    assert "- `a red star`: flowgrpo " in text and "reward hacking would not show" in text
    assert (tmp_path / "images" / "before-0.webp").read_bytes()[8:12] == b"WEBP"
    front = ModelCard(text).data.to_dict()
    assert front["license"] == "apache-2.0" and front["library_name"] == "diffusers"


def test_the_card_says_that_a_test_set_was_trained_on(tmp_path):
    run = with_cards(tmp_path, "a red star")
    assert "Trained on" not in export.card(run).read_text()
    config = validate({"prompts": "partiprompts", "train_on_test_set": True, "reward": "scene"})
    (run / "config.yaml").write_text(config.yaml())
    write(run / "summary.json", SUMMARY | {"before": {"scene": 0.25}, "after": {"scene": 0.5}})
    assert ("**Trained on partiprompts, a test set (train\\_on\\_test\\_set): no score on it, held-out prompts "
            "included, can be compared with that of a model that was not.**") in export.card(run).read_text()


def test_the_card_has_commit_versions_and_cost(tmp_path):
    run = with_cards(tmp_path, "a red star")
    machine = {"device": "cpu", "processes": "2", "torch": "2.9", "commit": "0" * 40}
    write(run / "report" / "machine.json", machine)
    text = export.card(run).read_text()
    assert f"Made with: device cpu, processes 2, torch 2.9, commit {'0' * 40}." in text
    assert "1,234 denoiser evaluations, 3 s of training (0.00167 hours of 2 x cpu)" in text
    assert all(re.fullmatch("[0-9a-f]{40}( with changes)?", value) for value in commit().values())
