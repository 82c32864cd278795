"""What prompts bring beside their text reaches the pipeline's call, in rollout and replay alike."""

import json

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from safetensors.torch import save_file

import flowgrpo
from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Adapter, Load
from flowgrpo.data.inputs import Inputs
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines import conditioned, probes
from flowgrpo.policies.pipelines.conditioning import PromptCache
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.pipelines.prompt_inputs import IMAGES, names, require
from flowgrpo.run import run
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny
from flowgrpo.tools.check.tiny import make, parts
from flowgrpo.tools.check.tiny import unets as builders
from tests.helpers.refusals import message
from tests.helpers.tiny import config, save, sd3, sd15

CONTROL = ["StableDiffusionControlNetPipeline", "StableDiffusionXLControlNetPipeline",
           "StableDiffusion3ControlNetPipeline", "FluxControlNetPipeline"]


def policy(name, **more):
    pipe, call = tiny.make(name)
    call = {key: value for key, value in call.items() if key not in IMAGES}
    return PipelinePolicy(pipe, Adapter(rank=2), call=call | more, guidance=2.0)


@pytest.fixture
def files(tmp_path):
    """Four images of noise, 64 x 64, and two folders of nine frames of 16 x 16."""
    rng = np.random.default_rng(0)
    for name in "abcd":
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for i in range(9):
            frame = Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8))
            frame.save(tmp_path / name / f"{i}.png")
    return {path.stem: str(path) for path in tmp_path.iterdir()}


@pytest.fixture
def masks(tmp_path):
    """Masks of 32 x 32, white at one side."""
    for name, left in (("left", 0), ("right", 16)):
        mask = Image.new("L", (32, 32))
        mask.paste(255, (left, 0, left + 16, 32))
        mask.save(tmp_path / f"{name}.png")
    return {name: str(tmp_path / f"{name}.png") for name in ("left", "right")}


def encoded(live, brought):
    return PromptCache(live)(["a"] * len(brought), [""] * len(brought), brought)


def replayed(live, conditioning, one):
    """The model outputs of a replay, every row of the same state `one`."""
    grid, timesteps = probes.few_steps(live, 3)
    with torch.no_grad():
        x = one.expand(len(conditioning.prompts), *one.shape[1:]).contiguous()
        return live.replay(conditioning, x, grid, 1, timesteps)


def sees_its_own(live, brought):
    """Rows see what their own prompt brings, in a batch as alone; the loop resumes in its middle as the whole runs."""
    conditioning = encoded(live, brought)
    probes.require_middle(live, conditioning)
    row = conditioning.rows(torch.tensor([0]))
    grid, timesteps = probes.few_steps(live, 3)
    state = live.run(Segment(grid, range(1), timesteps=timesteps), row, None, live.generators([3]))[0]
    together = replayed(live, conditioning, state)
    for output, one in zip(together, brought, strict=True):
        torch.testing.assert_close(replayed(live, encoded(live, [one]), state)[0], output, rtol=0, atol=2e-4)
    return conditioning, (together[0] - together[1]).abs().max()


SMALL = {"height": 16, "width": 16}
SEEN = [  # class, arguments of its call, and what two prompts bring
    *((name, {}, lambda files: [Inputs((files["a"], files[key])) for key in "bc"])
      for name in ("QwenImageEditPlusPipeline", "Flux2KleinPipeline")),
    ("Flux2Pipeline", {}, lambda files: [files["a"], Inputs((files["a"], files["b"]))]),  # one image, and two
    ("WanImageToVideoPipeline (first and last frame)", {},
     lambda files: [Inputs((files["a"],), last_image=files[key]) for key in "bc"]),
    *((name, SMALL, lambda files: [Inputs(control_image=files[key]) for key in "ab"]) for name in CONTROL),
    *((name, SMALL, brought) for name in ("StableDiffusionInpaintPipeline", "FluxFillPipeline") for brought in (
        lambda files: [Inputs((files["a"],), mask_image=files[side]) for side in ("left", "right")],
        lambda files: [Inputs((files[key],), mask_image=files["left"]) for key in "ab"]))]


@pytest.mark.parametrize("name, call, brought", SEEN)
def test_every_prompt_sees_the_files_that_it_brings(name, call, brought, files, masks, monkeypatch):
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 128 * 128)  # pixels, 1024 x 1024 at first
    assert sees_its_own(policy(name, **call), brought(files | masks))[1] > 1e-3


@pytest.mark.parametrize("name", ["WanVideoToVideoPipeline", "CogVideoXVideoToVideoPipeline"])
def test_every_prompt_sees_its_video(name, files):
    live = policy(name, num_frames=5)
    conditioning, _ = sees_its_own(live, [Inputs(video=files["one"]), Inputs(video=files["two"])])
    assert [len(clip.frames) for clip in conditioning.inputs["video"]] == [5, 5]
    first, second = live.of_noise(conditioning, live.generators([0, 0]))  # a video is in the first state alone
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("name, inputs, told", [
    ("FluxFillPipeline", ["image"], "FluxFillPipeline paints into an image where a mask is white, but the prompt 'p' "
                                    "has no mask_image: give every prompt one"),
    ("FluxFillPipeline", ["mask_image"], "has no image: give every prompt one"),
    ("WanImageToVideoPipeline (first and last frame)", ["image"], "the model makes the frames between a first and a "
                                                                  "last one, but the prompt 'p' has no last_image"),
    ("SkyReelsV2ImageToVideoPipeline", ["image", "last_image"], "the model takes a first frame alone"),
    ("SkyReelsV2ImageToVideoPipeline", [], "starts from an image, but the prompt 'p' has no image"),
    ("FluxKontextPipeline", [], "starts from an image, but the prompt 'p' has no image: give every prompt one"),
    ("QwenImageEditPlusPipeline", [], "starts from an image, but the prompt 'p' has no image"),
    ("FluxKontextPipeline", ["image", "mask_image"], "takes no mask_image; of a prompt file's keys it takes image")])
def test_prompts_that_lack_a_file_or_bring_one_too_many_are_refused(name, inputs, told, files):
    pipe, given = tiny.make(name)[0], {key: files["a"] for key in inputs}
    if "image" in given:
        given["images"] = (given.pop("image"),)
    prompt = Prompt("p", inputs=Inputs(**given))
    assert told in message(conditioned.require_prompts, Config(model="x"), [prompt], pipe)


def test_a_mask_of_another_aspect_ratio_is_refused(files, masks, tmp_path):
    cls = type(tiny.make("FluxFillPipeline")[0])
    require(cls, [Prompt("p", inputs=Inputs((files["a"],), mask_image=masks["left"]))])
    Image.new("L", (64, 32)).save(tmp_path / "wide.png")
    prompts = [Prompt("p", inputs=Inputs((files["a"],), mask_image=str(tmp_path / "wide.png")))]
    assert "mask has 64 x 32 pixels and its image 64 x 64: expected the same aspect" in message(require, cls, prompts)


def test_rows_of_other_scales_are_calls_of_their_own(files):
    live, a = policy(CONTROL[0], height=16, width=16), files["a"]
    brought = [Inputs(control_image=a, controlnet_conditioning_scale=scale) for scale in (0.2, 0.9)]
    conditioning, apart = sees_its_own(live, [*brought, Inputs(control_image=a)])
    assert apart > 1e-3
    assert conditioning.inputs["controlnet_conditioning_scale"] == [0.2, 0.9, 1.0]
    assert conditioning.rows(torch.tensor([0, 0, 1, 1, 2])).runs == [range(2), range(2, 4), range(4, 5)]


def test_a_control_net_keeps_no_answers_and_no_gradients():
    """Its input is the state, so that its answers are never the same; they would only fill the memory."""
    live = PipelinePolicy(tiny.make("StableDiffusionControlNetPipeline")[0], Adapter(rank=2))
    assert set(live.driver._memo.modules) == {"vae", "text_encoder"} and set(live.denoisers) == {"unet"}
    assert not any(parameter.requires_grad for parameter in live.pipe.controlnet.parameters())


def test_every_prompt_sees_the_image_of_its_ip_adapter(files):
    live = policy("StableDiffusionPipeline (IP-Adapter)")
    brought = [Inputs(ip_adapter_image=files[name]) for name in "ab"]
    conditioning, apart = sees_its_own(live, brought)
    assert apart > 1e-3
    assert conditioning.rows(torch.tensor([0, 0, 1])).runs == [range(2), range(2, 3)]
    assert not any("_ip" in name for name in live.weights.named)


# --- loading ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An SD 1.5 pipeline, ControlNets of SD 1.5 and SDXL, and an IP-Adapter with its image encoder."""
    root = tmp_path_factory.mktemp("models")
    save(sd15(), root / "sd15")
    save(make("StableDiffusionXLPipeline")[0], root / "sdxl")
    save(sd3(), root / "sd3")
    torch.manual_seed(0)
    builders.unet_controlnet().save_pretrained(root / "control")
    make("StableDiffusionXLControlNetPipeline")[0].controlnet.save_pretrained(root / "control_xl")
    weights = builders.ip_adapter_weights(sd15().unet)
    (root / "ip" / "models").mkdir(parents=True)
    save_file({f"{part}.{key}": value for part, values in weights.items() for key, value in values.items()},
              root / "ip" / "models" / "ip.safetensors")
    parts.image_encoder().save_pretrained(root / "ip" / "models" / "image_encoder")
    return root


def adapter(root, **more):
    return {"path": str(root / "ip"), "subfolder": "models", "weights": "ip.safetensors"} | more


def test_a_control_net_and_an_ip_adapter_are_added_to_a_pipeline(folders):
    files = Load(controlnet=str(folders / "control"), ip_adapter=adapter(folders, scale=0.5))
    pipe = load_pipeline(str(folders / "sd15"), files=files)
    assert type(pipe).__name__ == "StableDiffusionControlNetPipeline" and conditioned.has_ip_adapter(pipe)
    processor = pipe.unet.attn_processors["down_blocks.0.attentions.0.transformer_blocks.0.attn2.processor"]
    assert processor.scale == [0.5]
    torch.manual_seed(0)
    torch.testing.assert_close(pipe.controlnet.state_dict(), builders.unet_controlnet().state_dict())
    stock = load_pipeline(str(folders / "sd15"))
    key = "down_blocks.0.attentions.0.proj_in.weight"
    torch.testing.assert_close(pipe.unet.state_dict()[key], stock.unet.state_dict()[key])
    assert not conditioned.has_ip_adapter(stock)
    xl = load_pipeline(str(folders / "sdxl"), files=Load(controlnet=str(folders / "control_xl")))
    assert type(xl).__name__ == "StableDiffusionXLControlNetPipeline"


@pytest.mark.parametrize("model, files, expected", [
    ("sdxl", {"controlnet": "control"}, "its cross_attention_dim is 16, and the model's is 32"),
    ("sd3", {"controlnet": "control"}, "it is a ControlNetModel, and a StableDiffusion3ControlNetPipeline takes"),
    ("sd15", {"controlnet": "sd15"}, "which has no config.json: expected a ControlNet's folder"),
    ("sd15", {"controlnet": "no/such/place"}, "which has no config.json: expected a ControlNet's folder"),
    ("sd15", {"ip_adapter": {"weights": "no.safetensors"}}, "load.ip_adapter: there is no file"),
    ("sdxl", {"ip_adapter": {}}, "does not load into StableDiffusionXLPipeline")])
def test_what_does_not_fit_is_one_line(folders, model, files, expected):
    if "controlnet" in files:
        files = {"controlnet": str(folders / files["controlnet"])}
    else:
        files = {"ip_adapter": adapter(folders, **files["ip_adapter"])}
    assert expected in message(load_pipeline, str(folders / model), files=Load(**files))


def test_a_run_trains_on_a_prompt_file_with_images(folders, files, tmp_path):
    """The reward sees the control image's path; before the update a replay gives the rollout's probabilities."""
    lines = [{"prompt": f"p {name}", "control_image": f"{name}.png", "ip_adapter_image": f"{name}.png",
              "controlnet_conditioning_scale": scale} for name, scale in zip("abcd", (0.5, 1, 1, 0.7))]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = config(tmp_path, model=str(folders / "sd15"), load__controlnet=str(folders / "control"),
                      load__ip_adapter=adapter(folders), prompts=str(tmp_path / "p.jsonl"), method="ddpo",
                      image__call={}, image__height=16, image__width=16, train__epochs=1)
    seen = []
    def red(images, prompts, metadata):
        seen.extend(entry["control_image"] for entry in metadata)
        return images[:, 0].mean((1, 2))
    summary = run(settings, functions={"red": red})
    assert summary["max_first_log_ratio"] <= 1e-6 and summary["updates"] > 0
    assert set(seen) == {files[name] for name in "abcd"}
    with pytest.raises(UserError, match="line 1, 'control_image': StableDiffusionPipeline takes no control_image"):
        run(settings.model_copy(update={"load": Load(), "name": "other"}), functions={"red": red})


def test_diffusers_without_a_control_net_form_is_one_line():
    told = message(conditioned.controlnet_class, "SanaVideoPipeline")
    assert "diffusers has no ControlNet pipeline of SanaVideoPipeline" in told


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, inputs, expected", [
    ("FluxKontextPipeline", {"images": "ab"}, "'images': FluxKontextPipeline takes one image per prompt, got 2"),
    ("StableDiffusionPipeline", {"control_image": "a"}, "takes no control_image: set load.controlnet"),
    ("StableDiffusionPipeline", {"images": "a"}, "'image': StableDiffusionPipeline takes no image"),
    ("StableDiffusionPipeline", {"ip_adapter_image": "a"}, "no IP-Adapter loaded: set load.ip_adapter"),
    ("FluxPipeline", {"video": "one"}, "'video': FluxPipeline takes no video; of a prompt file's keys it takes"),
    ("WanVideoToVideoPipeline", {"video": "one"}, "one has 9 frames, but image.frames is 12"),
    ("StableDiffusionControlNetPipeline", {"images": "a", "control_image": "b"}, "`control_image` and no other"),
    ("StableDiffusionControlNetPipeline", {"control_image": "broken"}, "'control_image': {broken} cannot be read as a"),
])
def test_files_that_a_pipeline_does_not_take_are_one_line(name, inputs, expected, files, tmp_path):
    (tmp_path / "broken.png").write_text("no image")
    files["broken"] = str(tmp_path / "broken.png")
    values = {key: tuple(files[one] for one in value) if key == "images" else files[value]
              for key, value in inputs.items()}
    prompts = [Prompt("a", inputs=Inputs(**values, place="prompts p.jsonl, line 3"))]
    told = message(require, getattr(diffusers, name), prompts, {"num_frames": 12}, False)
    assert told.startswith("prompts p.jsonl, line 3, '") and expected.format(**files) in told


def test_control_images_of_other_sizes_need_a_size(files, tmp_path):
    steered = diffusers.StableDiffusionControlNetPipeline
    Image.new("RGB", (32, 16)).save(tmp_path / "wide.png")
    prompts = [Prompt("a", inputs=Inputs(control_image=path)) for path in (files["a"], str(tmp_path / "wide.png"))]
    assert "set image.height and image.width" in message(require, steered, prompts)
    require(steered, prompts, {"height": 16, "width": 16})
    require(steered, prompts[:1])


def test_a_prompt_without_a_image_that_the_model_needs_is_one_line():
    plain, steered = diffusers.StableDiffusionPipeline, diffusers.StableDiffusionControlNetPipeline
    told = message(require, plain, [Prompt("a")], {}, True)
    assert "the model has an IP-Adapter, but the prompt 'a' has no ip_adapter_image" in told
    require(plain, [Prompt("a")], {}, None)
    assert "has a ControlNet, but the prompt 'a' has no control_image" in message(require, steered, [Prompt("a")])
    require(steered, [Prompt("a")], {"image": "a picture"})


def test_frames_that_the_autoencoder_does_not_take_are_one_line(files):
    live = policy("WanVideoToVideoPipeline", num_frames=6)
    assert "6 frames, but WanVideoToVideoPipeline takes 1 more than a multiple of 2: set image.frames: 5" in message(
        live.encode, ["a"], images=[Inputs(video=files["one"])])


def test_keys_by_class():
    assert names(diffusers.StableDiffusionControlNetPipeline)["control_image"] == "image"
    assert names(diffusers.StableDiffusionControlNetImg2ImgPipeline)["control_image"] == "control_image"
    assert names(diffusers.WanVACEPipeline)["images"] == "reference_images"
    assert "images" not in names(diffusers.QwenImageEditPipeline) and not names(diffusers.SanaPipeline)


def test_an_edit_of_no_image_is_refused_from_python_and_of_a_folder_before_it_is_loaded(tmp_path):
    pipe = tiny.make("FluxKontextPipeline")[0]
    lines = [{"prompt": f"make it {colour}", "image": None} for colour in ("red", "blue")]
    told = "FluxKontextPipeline starts from an image, but the prompt .make it (red|blue). has no image"
    for model in (pipe, tmp_path / "kontext"):
        pipe.save_pretrained(tmp_path / "kontext")
        (tmp_path / "kontext" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
        with pytest.raises(UserError, match=told):
            flowgrpo.align(model, "sharpness", lines, output=str(tmp_path / "runs"), device="cpu", tracker="none")
    assert not (tmp_path / "runs").exists()
