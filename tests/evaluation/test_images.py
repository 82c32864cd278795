"""Images from saved weights are those of the stock pipeline, and a run's page shows base beside tuned."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from safetensors.torch import load_file, save_file

from flowgrpo import starter
from flowgrpo.cli import main
from flowgrpo.config import validate
from flowgrpo.config.sections import Adapter
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import drawing
from flowgrpo.evaluation import columns, images, samplers
from flowgrpo.evaluation.pages import grid
from flowgrpo.evaluation.pages.clips import as_image
from flowgrpo.evaluation.plan import Arm
from flowgrpo.evaluation.samplers import Pipelines
from flowgrpo.policies import checkpoints, loading
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.rollout import seeder
from flowgrpo.tools.check import tiny as pipelines
from flowgrpo.tools.check.report import report
from tests.helpers import tiny
from tests.helpers.refusals import error_line, message, refused

BRIGHT = "def bright(images, prompts):\n    return images.flatten(1).mean(1).tolist()\n"


def make_run(folder, model, change: float, rank: int = 2, **options):
    """A run's folder as training leaves it, with weights that differ from the base by `change`."""
    pipe = load_pipeline(str(model))
    policy = PipelinePolicy(pipe, Adapter(rank=rank), call=tiny.CALL)
    with torch.no_grad():
        for key, parameter in policy.weights.named.items():
            if "lora_B" in key or not rank:
                parameter.add_(change * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    folder.mkdir()
    policy.weights.save(folder)
    (folder / "bright.py").write_text(BRIGHT)
    (folder / "prompts.txt").write_text("".join(f"picture {i}\n" for i in range(20)))
    config = {"model": str(model), "reward": f"{folder}/bright.py:bright", "prompts": f"{folder}/prompts.txt",
              "precision": "fp32", "image": {"call": tiny.CALL}, "eval": {"steps": 2, "guidance": 1.5},
              "adapter": {"rank": rank}}
    (folder / "config.yaml").write_text(validate(config | options).yaml())
    return folder


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def drawn(folder, model, lora=None, prompts=("a dog", "a cat"), count=1, seed=3, steps=2, guidance=1.5):
    paths = images.sample(str(model), lora, list(prompts), count, seed, steps, guidance, folder, precision="fp32")
    return [pixels(path) for path in paths]


def stock(model, lora, row, **options) -> np.ndarray:
    """What a user of diffusers gets for the second prompt's first image."""
    pipe = load_pipeline(str(model))
    if lora:
        pipe.load_lora_weights(lora)
    generator = torch.Generator().manual_seed(seeder(3, 0)(*row))
    with torch.no_grad():
        return np.asarray(pipe("a cat", generator=generator, **options).images[0]).astype(int)


def test_names_of_files(tmp_path, model):
    paths = images.sample(str(model), None, ["b, c!", "a", "a"], 2, 0, 1, 1.0, tmp_path / "deep" / "out")
    names = [path.name for path in paths]
    assert names == ["000-b-c-000.png", "000-b-c-001.png", "001-a-000.png", "001-a-001.png", "002-a-000.png",
                     "002-a-001.png"] == sorted(names)
    assert sorted((tmp_path / "deep" / "out").iterdir()) == paths
    assert all(Image.open(path).size == (16, 16) for path in paths)
    assert [name for name in images.names_of(["a"] * 1001, 1)] == sorted(images.names_of(["a"] * 1001, 1))
    for name in ("a.png", "B.PNG"):
        assert images.sample(str(model), None, ["a"], 1, 0, 1, 1.0, tmp_path / "in" / name) == [tmp_path / "in" / name]
    assert images.sample(str(model), None, ["a"], 1, 0, 1, 1.0, tmp_path / "in" / "a.png")[0].name == "a~2.png"
    assert Image.open(tmp_path / "in" / "B.PNG").format == "PNG"
    refused("a.png: is the file of one sample, got 2", images.sample, str(model), None, ["a", "b"], 1, 0, 1, 1.0,
            tmp_path / "a.png")


def test_a_image_is_the_stock_pipelines_with_its_own_steps_and_guidance_where_none_are_given(tmp_path, model):
    ours = drawn(tmp_path, model)[1]
    assert np.abs(ours - stock(model, None, (1, 0), num_inference_steps=2, guidance_scale=1.5)).max() <= 1
    ours = drawn(tmp_path, model, steps=None, guidance=None)[1]
    assert np.abs(ours - stock(model, None, (1, 0))).max() <= 1
    assert np.abs(ours - drawn(tmp_path, model)[1]).max() > 1


def test_a_image_depends_on_its_own_place_and_the_seed_alone(tmp_path, model):
    one, two = drawn(tmp_path, model), drawn(tmp_path, model, count=2)
    assert (two[0] == one[0]).all() and (two[2] == one[1]).all() and (two[0] != two[1]).any()
    assert (drawn(tmp_path, model, seed=4)[0] != one[0]).any()


@pytest.mark.parametrize("lora", ["folder", "file"])
def test_a_lora_is_drawn_as_stock_diffusers_loads_it(tmp_path, model, lora):
    run = make_run(tmp_path / "run", model, 0.3)
    ours = drawn(tmp_path / "out", model, run if lora == "folder" else run / LORA_FILE)[1]
    options = tiny.CALL if lora == "folder" else {}  # a run brings its `image` settings with it
    assert np.abs(ours - stock(model, run, (1, 0), num_inference_steps=2, guidance_scale=1.5, **options)).max() <= 1
    assert np.abs(ours - drawn(tmp_path / "out", model)[1]).max() > 1


def test_all_weights_are_loaded_too(tmp_path, model):
    run = make_run(tmp_path / "run", model, 0.1, rank=0)
    same = make_run(tmp_path / "same", model, 0.0, rank=0)
    assert not (run / LORA_FILE).exists()
    tuned, base = drawn(tmp_path / "out", model, run)[0], drawn(tmp_path / "out", model, same)[0]
    assert np.abs(tuned - base).max() > 1


def test_a_page_of_other_prompts_and_seeds(tmp_path, model):
    run = make_run(tmp_path / "run", model, 0.3)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a dog"}\n{"prompt": "a cat", "negative_prompt": "blue"}\n')
    pages = [Image.open(columns.grid(run, tmp_path / "p.jsonl", 5, seed, tmp_path / f"{seed}.png")) for seed in (0, 1)]
    assert pages[0].size == pages[1].size and pages[0].tobytes() != pages[1].tobytes()


@pytest.mark.parametrize("model, steps, guidance, expected", [
    ("starter", None, None, {"num_inference_steps": 20, "guidance": 1.0, "max_sequence_length": 1}),
    ("starter", 4, 0.0, {"num_inference_steps": 4, "guidance": 0.0, "max_sequence_length": 1}),
    ("other", None, None, {}),
    ("other", 4, None, {"num_inference_steps": 4})])
def test_defaults(model, steps, guidance, expected):
    assert samplers.call_arguments(model, None, steps, guidance) == expected


@pytest.mark.parametrize("raw, expected", [
    ({"model": "starter"}, {"max_sequence_length": 1}),
    ({"model": "starter", "image": {"call": {"max_sequence_length": 2}}}, {"max_sequence_length": 2}),
    ({"model": "x", "image": {"height": 64, "frames": 5, "call": {"a": 1}}}, {"height": 64, "num_frames": 5, "a": 1}),
    ({"model": "x"}, {})])
def test_what_a_runs_pipeline_is_called_with(raw, expected):
    assert validate(raw).call == expected


@pytest.mark.parametrize("name, more", [
    ("QwenImagePipeline", {}), ("QwenImagePipeline", {"guidance_scale": 2.0}),  # which only an embedded guidance reads
    ("HunyuanSkyreelsImageToVideoPipeline", {}),
    ("FluxPipeline", {"true_cfg_scale": 2.0}), ("StableDiffusion3Pipeline", {})])
def test_guidance_is_the_scale_that_a_run_evaluates_with(name, more):
    pipe, call = pipelines.make(name)
    policy = PipelinePolicy(pipe, None, call=call | more)
    conditioning = policy.encode(["red"], ["old"])
    pictures = []
    for guidance in (1.0, 4.0):
        asked = samplers.call_arguments("other", None, 2, guidance) | call | more
        pictures.append(samplers.draw_one(pipe, Prompt("red"), 0, asked, "old"))
        expected = policy.generate(conditioning, policy.generators([0]), 2, guidance)[0]
        torch.testing.assert_close(pictures[-1], expected, rtol=0, atol=1e-5)
    assert (pictures[0] - pictures[1]).abs().max() > 1e-4


def test_arguments_of_a_call_come_from_the_user_then_from_the_runs_evaluation_then_from_its_image(tmp_path):
    config = {"model": "x", "eval": {"steps": 9}, "image": {"height": 64, "call": {"max_sequence_length": 7}}}
    (tmp_path / "config.yaml").write_text(validate(config).yaml())
    of_run = {"height": 64, "max_sequence_length": 7, "num_inference_steps": 9, "guidance": 4.5}
    assert samplers.call_arguments("x", tmp_path) == of_run
    assert samplers.call_arguments("x", tmp_path, 3, 4.0) == of_run | {"num_inference_steps": 3, "guidance": 4.0}
    assert samplers.call_arguments("x", None) == {}


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_runs_page_shows_base_beside_tuned(tmp_path, model, change):
    path = columns.grid(make_run(tmp_path / "run", model, change), None, 2, 0, tmp_path / "deep" / "grid.png")
    assert path == tmp_path / "deep" / "grid.png"
    page = np.asarray(Image.open(path))
    coloured = (page[None] == np.array([ImageColor.getrgb(grid.ROSE), ImageColor.getrgb(grid.FELL)])[:, None, None])
    assert coloured.all(-1).any() == (change > 0)  # a score's colour says that it changed
    left, top, side = grid.MARGIN + 1, grid.MARGIN + grid.HEADING.height + 7, 158
    base, tuned = (page[top:top + side, at:at + side] for at in (left, left + 160 + grid.BETWEEN_IMAGES))
    assert base.std() > 0 and (base == tuned).all() == (change == 0)


def test_a_reward_that_cannot_judge_the_prompts_loses_no_image(tmp_path, model, capsys):
    whole = Image.open(columns.grid(make_run(tmp_path / "whole", model, 0.3), None, 2, 0, tmp_path / "whole.png"))
    run = make_run(tmp_path / "run", model, 0.3)
    (run / "bright.py").write_text("def bright(images, prompts):\n    raise KeyError(prompts[0])\n")
    assert Image.open(columns.grid(run, None, 2, 0, tmp_path / "page.png")).size[0] == whole.size[0]
    assert "left out: reward " in capsys.readouterr().err
    columns.columns(run, "seeds", ["0"], None, 2, 0, tmp_path / "columns.png")
    assert "left out: reward " in capsys.readouterr().err and (tmp_path / "columns.html").is_file()


def test_missing_runs_and_endless_prompts(tmp_path, model):
    assert "is not a run: it has no config.yaml" in message(columns.grid, tmp_path, None, 1, 0, tmp_path / "g.png")
    run = make_run(tmp_path / "run", model, 0.1)
    (run / LORA_FILE).unlink()
    refused("no weights at .* the run has not finished: --resume it", columns.grid, run, None, 1, 0, tmp_path / "g.png")
    refused("a prompt of 20,001 characters, expected 20,000 at most", images.sample, str(model), None, ["a" * 20_001],
            1, 0, 1, 1.0, tmp_path / "out")


@pytest.mark.parametrize("content, told", [
    (None, "no weights at .*: expected a finished run, a folder with a LoRA, or its file"),
    ({"lora.weight": (2, 2)}, "Invalid LoRA|holds no LoRA layer"),
    ({"unet.a.lora_A.weight": (2, 4), "unet.a.lora_B.weight": (4, 2)}, "holds no LoRA layer for StableDiffusion3"),
    ({"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": (2, 4),
      "transformer.transformer_blocks.0.attn.to_q.lora_B.weight": (4, 2)}, "does not load into .* size mismatch")])
def test_a_lora_that_does_not_fit_is_told(tmp_path, model, content, told):
    file = tmp_path / "some.safetensors"
    if content:
        save_file({key: torch.zeros(shape) for key, shape in content.items()}, file)
    refused(told, drawn, tmp_path, model, file)


def test_a_runs_lora_that_does_not_fit_is_told_before_the_model_is_loaded(tmp_path, model):
    """By the headers of the files: the other model's layers, and layers of another size."""
    run = make_run(tmp_path / "run", model, 0.1)
    origin = f"; its run was trained on {str(model)!r}"
    other = tmp_path / "sd15"
    pipelines.make("StableDiffusionPipeline")[0].save_pretrained(other)
    wide = tmp_path / "wide"
    shutil.copytree(model, wide)
    file = wide / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    layer = "transformer_blocks.0.attn.to_q"
    assert f"{layer}.weight" in tensors
    save_file({key: torch.zeros(48, *value.shape[1:]) if key == f"{layer}.weight" else value
               for key, value in tensors.items()}, file)
    loading.require_fit(str(model), run)
    wrong = {other: f"{run} holds a LoRA of the transformer, which {other} does not have{origin}",
             wide: f"{run} does not fit {wide}: the layer transformer.{layer} of its LoRA is 16 x 16, and 48 x 16 "
                   f"there{origin}"}
    for folder, line in wrong.items():
        assert message(lambda: drawn(tmp_path / "pictures", folder, run)) == line


def test_sizes_that_differ_are_told_with_the_model_that_a_lora_goes_with(tmp_path, model):
    """What torch says of them is longer than a line holds."""
    run = make_run(tmp_path / "run", model, 0.1)
    tensors = load_file(run / LORA_FILE)
    save_file({key: torch.zeros(2, 4) if key.endswith("to_q.lora_A.weight") else value
               for key, value in tensors.items()}, run / LORA_FILE)
    refused(r"does not load into StableDiffusion3Pipeline: size mismatch for .*to_q.lora_A.*, \[2, 4\] in the file and "
            r"\[2, 16\] in the model; its run was trained on", loading.load_tuned, load_pipeline(str(model)), run)


# --- images to start from ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    """A folder with an image-to-video model and two images, and what makes its clips small."""
    folder = tmp_path_factory.mktemp("moving")
    pipe, call = pipelines.make("WanImageToVideoPipeline")
    pipe.save_pretrained(folder / "model")
    for colour in ("red", "blue"):
        Image.new("RGB", (16, 16), colour).save(folder / f"{colour}.png")
    return folder, {key: value for key, value in call.items() if key != "image"}


def test_a_image_on_the_command_line_is_what_a_pipeline_starts_from(moving, tmp_path, monkeypatch, capsys):
    folder, small = moving
    model = str(folder / "model")
    monkeypatch.setitem(starter.CALLS, model, small)
    pipe, first = load_pipeline(model), []
    for colour in ("red", "blue"):
        picture, output = str(folder / f"{colour}.png"), tmp_path / colour
        assert main(["sample", model, "--prompt", "a cat", "--image", picture, "--steps", "2", "--guidance", "2",
                     "--precision", "fp32", "--output", str(output)]) == 0
        assert str(output) in capsys.readouterr().out
        asked = small | {"num_inference_steps": 2, "guidance": 2.0}
        expected = samplers.draw_one(pipe, Prompt("a cat", image=picture), seeder(0, 0)(0, 0), asked)
        [file] = output.glob("*.webp")  # beside an .mp4, where the extra for it is installed
        first.append(np.asarray(Image.open(file).convert("RGB")).astype(int))
        assert (first[-1] == np.asarray(as_image(expected[0]))).all()
    assert (first[0] != first[1]).any()


@pytest.mark.parametrize("options, told", [
    ([], ["WanImageToVideoPipeline takes an image, and fails without one (", "): give `sample` an --image FILE, or"]),
    (["--image", "nowhere.png"], ["nowhere.png cannot be read as an image (it does not exist)"]),
    (["--image", "config.json"], ["config.json cannot be read as an image (it is damaged, or no image)"])])
def test_a_image_that_is_missing_is_told(moving, tmp_path, monkeypatch, capsys, options, told):
    monkeypatch.chdir(moving[0] / "model" / "transformer")
    line = error_line(capsys, "sample", moving[0] / "model", "--prompt", "red", "--output", tmp_path, *options)
    assert all(part in line for part in told)


def test_what_a_pipeline_refuses_and_frames_are_one_line(tmp_path):
    pipe, call = pipelines.make("FluxKontextPipeline")
    Image.new("RGB", (1, 1)).save(tmp_path / "one.png")
    asked = {key: value for key, value in call.items() if key != "image"} | {"num_inference_steps": 1}
    refused(r"one.png \(1 x 1 pixels\): FluxKontextPipeline refuses its arguments: Zero", samplers.draw_one, pipe,
            Prompt("red", image=str(tmp_path / "one.png")), 0, asked)
    refused("^StableDiffusion3Pipeline refuses its arguments: `height` and `width`", samplers.draw_one, tiny.sd3(),
            Prompt("red"), 0, tiny.CALL | {"height": 17, "num_inference_steps": 1})
    pipe, size = load_pipeline(str(starter.FOLDERS["starter_video"])), {"height": 16, "width": 16}
    refused("^WanPipeline refuses its arguments: RuntimeError: shape .* with its own number of frames, and image.frames"
            " sets another", samplers.draw_one, pipe, Prompt("red"), 0, size | {"num_inference_steps": 1})
    told = report((pipe, size))
    assert told["supported"] is False and "and image.frames sets another" in told["reason"]


@pytest.mark.parametrize("name", ["QwenImageEditPipeline", "WanImageToVideoPipeline"])
def test_a_prompt_without_the_image_that_a_pipeline_needs_is_told(name):
    pipe, call = pipelines.make(name)
    asked = {key: value for key, value in call.items() if key != "image"}
    asked |= {"num_inference_steps": 1}
    assert f"{name} takes an image, and fails without one" in message(samplers.draw_one, pipe, Prompt("red"), 0, asked)


# --- memory ----------------------------------------------------------------------------------------------------------
LOW = {"weights": "int8", "encoders": "cpu", "vae": "tiled"}


def test_a_pipeline_takes_the_memory_that_its_run_takes(model):
    pipe = loading.make_pipeline(str(model), "bf16", memory=validate({"memory": LOW}).memory)
    assert any(hasattr(parameter, "qdata") for parameter in pipe.transformer.parameters())
    assert pipe.vae.use_slicing and pipe.vae.use_tiling
    plain = loading.make_pipeline(str(model), "bf16")
    assert not any(hasattr(parameter, "qdata") for parameter in plain.transformer.parameters())
    assert not plain.vae.use_slicing and not plain.vae.use_tiling
    low, full = (samplers.draw_one(each, Prompt("red"), 0, tiny.CALL | {"num_inference_steps": 2})
                 for each in (pipe, plain))
    assert 0 < (low - full).abs().mean() < 0.05


def test_every_command_draws_with_the_memory_of_the_run(tmp_path, model):
    low, full = make_run(tmp_path / "low", model, 0.3, memory=LOW), make_run(tmp_path / "full", model, 0.3)
    config = checkpoints.run_config(low)
    pipe = load_pipeline(str(model), weights="int8")
    loading.load_tuned(pipe, low)
    prompt, seed_of = sets.resolve(config)[1][0], seeder(0, 0)
    asked = {"num_inference_steps": 2, "guidance": 1.5, **tiny.CALL}
    expected = samplers.draw_one(pipe, prompt, seed_of(0, 0), asked)
    sampler = Pipelines(config.model, config, drawing(config.precision, "cpu"), "cpu")
    [page] = sampler.draw(Arm(low, asked, None), [prompt], [seed_of(0, 0)])
    assert torch.equal(page, expected)
    [other] = drawn(tmp_path / "f", model, full, [prompt.text], seed=0)
    [ours] = drawn(tmp_path / "l", model, low, [prompt.text], seed=0)
    assert np.abs(ours - np.asarray(grid._image(expected, 16))).max() <= 1 < np.abs(ours - other).max()
    (tmp_path / "suite.txt").write_text(prompt.text)
    assert main(["eval", str(low), "--suite", str(tmp_path / "suite.txt"), "--trust-run",
                 "--output", str(tmp_path / "e")]) == 0
    assert (pixels(tmp_path / "e" / "pictures" / "tuned" / "00000-00.png") == ours).all()
    pages = [columns.grid(run, None, 1, 0, tmp_path / f"{run.name}.png") for run in (low, full)]
    assert (pixels(pages[0]) != pixels(pages[1])).any()


COMMANDS = [["sample", "MODEL", "--prompt", "red", "--output", "out"], ["compare", "grid", "RUN"],
            ["sample", "MODEL", "--prompts", "RUN/prompts.txt", "--output", "out"],
            ["compare", "grid", "RUN", "--columns", "seeds"],
            ["eval", "RUN", "--suite", "RUN/prompts.txt", "--output", "out", "--trust-run"]]


def test_a_image_is_saved_before_the_next_is_drawn(tmp_path):
    """A count is never a list: of these images none is drawn in advance."""
    class Hand:
        drawn = 0

        def draw(self, prompts, places):
            assert len([*tmp_path.glob("*.png")]) == self.drawn
            self.drawn += 1
            return [torch.full((3, 2, 2), self.drawn / 100)]

        def facts(self, prompt, place, sample):
            return f"{place.sample}"

    saved = images.draw_files(Hand(), "base", [Prompt("a")], 10**18, tmp_path, images.names_of(["a"], 10**18), "image")
    paths = [next(saved) for _ in range(3)]
    assert paths[0].name == f"000000000000000000-a-{0:018}.png"
    assert [pixels(path).max() for path in paths] == [3, 5, 8]  # of 255


@pytest.mark.parametrize("arguments", [["MODEL", "--prompt", "a"], ["MODEL", "--prompts", "a.txt"]])
def test_more_images_than_the_disk_holds_are_refused(arguments, here, model, capsys):
    (here / "a.txt").write_text("a")
    words = [word.replace("MODEL", str(model)) for word in arguments]
    assert "but 1,000,000,000,000 samples take" in error_line(capsys, "sample", *words, "--count", f"{10**12}")
    assert [path.name for path in here.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("command", COMMANDS)
def test_too_little_memory_is_told_in_one_line(tmp_path, model, monkeypatch, capsys, command):
    run = make_run(tmp_path / "run", model, 0.3)
    def large(self, prompt=None, generator=None, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity")
    monkeypatch.setattr("diffusers.StableDiffusion3Pipeline.__call__", large)
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("MODEL", str(model)).replace("RUN", str(run)) for word in command]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flowgrpo: error")]
    assert told[0].startswith("flowgrpo: error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.): set")
