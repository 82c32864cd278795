"""Images, clips and grids as files: they say how they were drawn, as AUTOMATIC1111 and ComfyUI read it."""

import hashlib
import inspect
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.evaluation import image_files, images
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.rollout import seeder
from flowgrpo.version import __version__
from tests.evaluation.test_images import make_run, pixels
from tests.helpers import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model") / "tiny")


def comfy(text: str) -> tuple[str, str, dict[str, str]]:
    """(prompt, negative prompt, settings) as ComfyUI's import of AUTOMATIC1111's notation reads them."""
    steps = text.rindex("\nSteps:")
    negative = text.rindex("\nNegative prompt:", 0, steps)
    fields = re.findall(r'\s*([^:,]+): ("(?:[^"\\]|\\.)*"|[^,]*)', text[steps:].split("\n")[1])
    return text[:negative], text[negative + 18:steps].strip(), dict(fields)


def told(path) -> tuple[str, dict[str, str]]:
    """(prompt, settings) of a PNG's text chunk."""
    prompt, negative, settings = comfy(Image.open(path).text["parameters"])
    assert negative == ""
    return prompt, settings


def test_a_image_says_how_it_was_drawn_and_is_drawn_so_again(tmp_path, model):
    lora = make_run(tmp_path / "lora", model, 0.3)
    [path] = images.sample(str(model), lora, ["a cat"], 1, 3, 2, 1.5, tmp_path / "out", precision="fp32")
    prompt, settings = told(path)
    file = lora / LORA_FILE
    size = int.from_bytes(file.read_bytes()[:8], "little")
    assert prompt == "a cat" and settings == {
        "Steps": "2", "Sampler": "FlowMatchEulerDiscreteScheduler", "CFG scale": "1.5", "Model": model.name,
        "Lora hashes": f'"lora: {hashlib.sha256(file.read_bytes()[8 + size:]).hexdigest()[:12]}"',
        "Version": f"flowgrpo {__version__}", "Seed": str(seeder(3, 0)(0, 0)), "Size": "16x16"}
    pipe = load_pipeline(str(model))
    pipe.load_lora_weights(lora)
    again = pipe(prompt, num_inference_steps=2, guidance_scale=1.5, **tiny.CALL,
                 generator=torch.Generator().manual_seed(int(settings["Seed"]))).images[0]
    assert np.abs(pixels(path) - np.asarray(again).astype(int)).max() <= 1


def test_without_steps_and_guidance_a_image_names_the_pipelines_own(tmp_path, model):
    [path] = images.sample(str(model), None, ["a cat"], 1, 3, None, None, tmp_path, precision="fp32")
    defaults = inspect.signature(load_pipeline(str(model)).__call__).parameters
    _, settings = told(path)
    assert settings["Steps"] == str(defaults["num_inference_steps"].default)
    assert settings["CFG scale"] == str(defaults["guidance_scale"].default) and "Lora hashes" not in settings


def test_without_steps_and_guidance_a_runs_image_takes_those_of_its_evaluation(tmp_path, model):
    run = make_run(tmp_path / "run", model, 0.3)
    [path] = images.sample(str(model), run, ["a cat"], 1, 3, None, None, tmp_path / "out")
    [other] = images.sample(str(model), run, ["a cat"], 1, 3, 3, None, tmp_path / "out")
    found = [(settings["Steps"], settings["CFG scale"]) for _, settings in map(told, (path, other))]
    assert found == [("2", "1.5"), ("3", "1.5")]


def test_a_checkpoint_and_weights_of_parts_are_named_by_their_hash(tmp_path):
    from safetensors.torch import save_file
    def weights(name, value):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"a": torch.full((2,), value)}, path)
        return image_files.tensors_hash(path)[:12]
    state = weights("run/checkpoints/epoch-00004/state.safetensors", 1.0)
    parts = [weights(f"run/{name}", value) for name, value in (
        (LORA_FILE, 2.0), (f"transformer_2/{LORA_FILE}", 3.0), ("vae_x/adapter_model.safetensors", 4.0),
        ("unet/diffusion_pytorch_model.safetensors", 5.0))]
    assert image_files.lora_hashes(tmp_path / "run/checkpoints/epoch-00004") == f"run-epoch-00004: {state}"
    assert image_files.lora_hashes(tmp_path / "run") == ", ".join(
        f"{name}: {digest}" for name, digest in zip(("run", "run-transformer_2", "run-vae_x", "run-unet"), parts))
    assert image_files.lora_hashes(tmp_path / "run" / LORA_FILE) == f"run: {parts[0]}"
    assert image_files.lora_hashes(None) is None and image_files.lora_hashes(tmp_path / "none") is None


def test_values_with_commas_and_colons_are_quoted():
    settings = {"Steps": 3, "Model": 'a, "b": c', "RLG": None}
    text = image_files.parameters("one\ntwo", 7, torch.zeros(3, 8, 16), settings, "a blur")
    assert text == ('one\ntwo\nNegative prompt: a blur\nSteps: 3, Model: "a, \\"b\\": c", Seed: 7, Size: 16x8')
    assert comfy(text)[:2] == ("one\ntwo", "a blur") and json.loads(comfy(text)[2]["Model"]) == 'a, "b": c'


def test_a_clip_says_how_it_was_drawn(tmp_path):
    text = image_files.parameters("a cät", 7, torch.zeros(2, 3, 8, 16), {"Steps": 3})
    image_files.save(tmp_path / "a.webp", torch.rand(2, 3, 8, 16), text)
    exif = Image.open(tmp_path / "a.webp").getexif().get_ifd(0x8769)[0x9286]
    assert exif.startswith(b"UNICODE\0") and exif[8:].decode("utf-16-be") == text and "Size: 16x8" in text


def test_images_of_a_prompt_file_say_how_they_were_drawn(tmp_path, model):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    images.sample_file(str(model), tmp_path / "prompts.txt", tmp_path / "out", steps=2, guidance=1.5, seed=3)
    prompt, settings = told(tmp_path / "out" / "pictures" / "base" / "00001-00.png")
    assert prompt == "a dog" and settings["Seed"] == str(seeder(3, 0)(1, 0)) and settings["Steps"] == "2"


def test_a_grid_names_its_run_and_prompts(tmp_path, model):
    run = make_run(tmp_path / "run", model, 0.3)
    page = images.grid(run, None, 2, 5, tmp_path / "grid.png")
    found = json.loads(Image.open(page).text["flowgrpo"])
    assert found["run"] == "run" and found["seed"] == 5 and found["columns"] == ["before", "after"]
    assert found["weights"] == image_files.lora_hashes(run) and len(found["prompts"]) == 2
    assert found["model"] == str(model) and found["call"]["num_inference_steps"] > 0


def test_no_image_is_overwritten(tmp_path, model):
    every = [images.sample(str(model), None, ["a"], 2, seed, 1, 1.0, tmp_path) for seed in range(3)]
    assert [[path.name for path in paths] for paths in every] == [
        ["000-a-000.png", "000-a-001.png"], ["000-a-000~2.png", "000-a-001~2.png"],
        ["000-a-000~3.png", "000-a-001~3.png"]]
    assert len({path.read_bytes() for paths in every for path in paths}) == 6
