"""`flowgrpo sample`: prompt files, enhancers, best of N, batches, and what the files of images say."""

import hashlib
import inspect
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.config.schema import Config
from flowgrpo.data import prompts
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import best_of, columns, image_files, images, samplers
from flowgrpo.evaluation.images import sample_file as sample
from flowgrpo.evaluation.plan import Arm, Ledger, Place
from flowgrpo.evaluation.samplers import INSTRUCTION, Enhancer, Pipelines, Together, draw_one
from flowgrpo.policies import loading
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.rollout import seeder
from flowgrpo.text import evaluation as texts
from flowgrpo.text.policies import engines as text_samples
from flowgrpo.tools.check import tiny as pipelines
from flowgrpo.tools.check.tiny import make
from flowgrpo.version import __version__
from tests.evaluation.test_images import BRIGHT, drawn, make_run, pixels
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import error_line, message, refused


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


def test_images_without_steps_name_those_of_the_pipeline_or_run(tmp_path, model):
    [path] = images.sample(str(model), None, ["a cat"], 1, 3, None, None, tmp_path, precision="fp32")
    defaults = inspect.signature(load_pipeline(str(model)).__call__).parameters
    _, settings = told(path)
    assert settings["Steps"] == str(defaults["num_inference_steps"].default)
    assert settings["CFG scale"] == str(defaults["guidance_scale"].default) and "Lora hashes" not in settings
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
        return hashlib.sha256(np.full(2, value, np.float32).tobytes()).hexdigest()[:12]
    state = weights("run/checkpoints/epoch-00004/state.safetensors", 1.0)
    parts = [weights(f"run/{name}", value) for name, value in (
        (LORA_FILE, 2.0), (f"transformer_2/{LORA_FILE}", 3.0), ("vae_x/adapter_model.safetensors", 4.0),
        ("unet/diffusion_pytorch_model.safetensors", 5.0))]
    assert image_files.lora_hashes(tmp_path / "run/checkpoints/epoch-00004") == f"run-epoch-00004: {state}"
    assert image_files.lora_hashes(tmp_path / "run") == ", ".join(
        f"{name}: {digest}" for name, digest in zip(("run", "run-transformer_2", "run-vae_x", "run-unet"), parts))
    assert image_files.lora_hashes(tmp_path / "run" / LORA_FILE) == f"run: {parts[0]}"
    assert image_files.lora_hashes(None) is None and image_files.lora_hashes(tmp_path / "none") is None


def test_settings_are_quoted_and_clips_say_them(tmp_path):
    settings = {"Steps": 3, "Model": 'a, "b": c', "RLG": None}
    text = image_files.parameters("one\ntwo", 7, torch.zeros(3, 8, 16), settings, "a blur")
    assert text == ('one\ntwo\nNegative prompt: a blur\nSteps: 3, Model: "a, \\"b\\": c", Seed: 7, Size: 16x8')
    assert comfy(text)[:2] == ("one\ntwo", "a blur") and json.loads(comfy(text)[2]["Model"]) == 'a, "b": c'
    text = image_files.parameters("a cät", 7, torch.zeros(2, 3, 8, 16), {"Steps": 3})
    image_files.save(tmp_path / "a.webp", torch.rand(2, 3, 8, 16), text)
    exif = Image.open(tmp_path / "a.webp").getexif().get_ifd(0x8769)[0x9286]
    assert exif.startswith(b"UNICODE\0") and exif[8:].decode("utf-16-be") == text and "Size: 16x8" in text


@pytest.mark.fast
def test_files_of_prompts_and_grids_say_how_they_were_drawn(tmp_path, model):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    images.sample_file(str(model), tmp_path / "prompts.txt", tmp_path / "out", steps=2, guidance=1.5, seed=3)
    prompt, settings = told(tmp_path / "out" / "pictures" / "base" / "00001-00.png")
    assert prompt == "a dog" and settings["Seed"] == str(seeder(3, 0)(1, 0)) and settings["Steps"] == "2"
    run = make_run(tmp_path / "run", model, 0.3)
    found = json.loads(Image.open(columns.grid(run, None, 2, 5, tmp_path / "grid.png")).text["flowgrpo"])
    assert found["run"] == "run" and found["seed"] == 5 and found["columns"] == ["before", "after"]
    assert found["weights"] == image_files.lora_hashes(run) and len(found["prompts"]) == 2
    assert found["model"] == str(model) and found["call"]["num_inference_steps"] > 0


def test_no_image_is_overwritten(tmp_path, model):
    every = [images.sample(str(model), None, ["a"], 2, seed, 1, 1.0, tmp_path) for seed in range(3)]
    assert [[path.name for path in paths] for paths in every] == [
        ["000-a-000.png", "000-a-001.png"], ["000-a-000~2.png", "000-a-001~2.png"],
        ["000-a-000~3.png", "000-a-001~3.png"]]
    assert len({path.read_bytes() for paths in every for path in paths}) == 6


LINES = [{"prompt": "a dog", "metadata": {"task": "animals"}, "weight": 2, "negative_prompt": "a cat"},
         {"prompt": "a hat"}]


@pytest.fixture
def asked(tmp_path):
    """A prompt file."""
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_the_prompt_file_names_every_image(here, model, asked, monkeypatch, capsys):
    assert main(["sample", str(model), "--prompts", str(asked), "--output", "base", "--steps", "2", "--guidance", "1.5",
                 "--seed", "3", "--count", "2", "--batch", "3", "--precision", "fp32"]) == 0
    assert capsys.readouterr().out.strip() == "base/prompts.jsonl"
    monkeypatch.chdir("/")  # its paths are whole
    found = prompts.load_prompts(here / "base" / "prompts.jsonl")
    assert [(p.text, p.negative, p.weight, p.metadata.get("task")) for p in found] == \
        [("a dog", "a cat", 2, "animals")] * 2 + [("a hat", None, 1, None)] * 2
    files = [p.metadata["base_image"] for p in found]
    assert files == [str(here / "base" / "pictures" / "base" / f"0000{i}-0{k}.png") for i in (0, 1) for k in (0, 1)]
    # The images are those of --prompt: the second prompt's depend on the seed and its number alone.
    alone = drawn(here / "alone", model, prompts=("a dog", "a hat"), count=2)
    assert max(abs(pixels(file) - other).max() for file, other in zip(files[2:], alone[2:])) <= 1
    # And the reward that compares with them reads them.
    images = torch.stack([Ledger(here / "base").load(Place("base", i, k)) for i in (0, 1) for k in (0, 1)])
    likeness = {"base_similarity": rewards.find("base_similarity")}
    scores = rewards.score(likeness, images, [p.text for p in found], [p.metadata for p in found])
    assert scores[:, 0].tolist() == pytest.approx([1] * 4)
    assert rewards.score(likeness, images.flip(0), [""] * 4, [p.metadata for p in found]).max() < 0.999


def test_it_goes_on_without_drawing_again(tmp_path, model, asked):
    def draw(**options):
        return sample(str(model), asked, tmp_path / "out", steps=1, **options)
    first = draw().read_text()
    kept, lost = (tmp_path / "out" / "pictures" / "base" / f"0000{i}-00.png" for i in (0, 1))
    before, content = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.unlink()
    assert draw(key="mine").read_text() == first.replace("base_image", "mine")
    assert kept.stat().st_mtime_ns == before and lost.read_bytes() == content
    assert "holds an evaluation with another seed" in message(draw, seed=1)
    asked.write_text("another\n{}")
    assert "line 1: not valid JSON" in message(draw)
    asked.write_text('{"prompt": "another"}\n')
    assert "with another prompt file" in message(draw)


def test_texts_stand_in_the_file_itself(tmp_path):
    asked = tmp_path / "sums.txt"
    asked.write_text("1+2=\n7+8=\n")
    path = sample("starter_text", asked, tmp_path / "out", seed=5)
    found = prompts.load_prompts(path)
    assert [p.text for p in found] == ["1+2=", "7+8="]
    texts = [p.metadata["base_text"] for p in found]
    assert all(text and isinstance(text, str) for text in texts)
    lines = [json.loads(line) for line in (tmp_path / "out" / "texts-0.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == texts
    assert sample("starter_text", asked, tmp_path / "out", seed=5) == path
    # As prompts of their own, with the user's beside them; nothing is written again.
    assert sample("starter_text", asked, tmp_path / "out", seed=5, key="prompt") == path
    assert [(p.text, p.metadata) for p in prompts.load_prompts(path)] == [
        (texts[0], {"user_prompt": "1+2="}), (texts[1], {"user_prompt": "7+8="})]
    assert len((tmp_path / "out" / "texts-0.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("options, line", [
    ([], "got neither, expected --prompt TEXT or --prompts FILE"),
    (["--prompt", "x", "--prompts", "y.txt"], "got both, expected --prompt TEXT or --prompts FILE"),
    (["--prompts", "y.txt", "--image", "z.png"], "--image: goes with --prompt"),
    (["--prompt", "x", "--batch", "2"], "--batch: goes with --prompts FILE"),
    (["--prompt", "x", "--key", "k"], "--key: goes with --prompts FILE"),
    (["--prompts", "no.txt"], "prompts no.txt: no such file"),
    (["--prompts", "no.txt", "--temperature", "1"], "--temperature: is of a language model"),
    (["--prompts", "no.txt", "--key", "prompt"], "--key prompt: makes a text the prompt of its line"),
    (["--prompt", "x", "--enhancer", "starter"], "--enhancer starter: generates images, expected a language model"),
    *((["--prompt", "x", *options], line) for options, line in (
        (["--guidance", "inf"], "--guidance: got inf, expected a finite number"), (["--guidance", "nan"], "--guidance"),
        (["--best-of", "1000000000", "--by", "sharpness"],
         "1,000,000,000 candidates of one sample (--best-of) need 4,709 GiB"),
        (["--steps", "10001"], "--steps: got 10001, expected 10000 at most")))])
def test_mistakes_are_told(options, line, here, capsys):
    assert line in error_line(capsys, "sample", "starter", *options) and not list(here.iterdir())


ASKED = ["1+2=", "7+8="]
LENGTHS = """
def length(images, prompts):
    return [len(prompt) + float(image.mean()) for image, prompt in zip(images, prompts)]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, rewards, a suite of scenes and one of sums."""
    folder = tmp_path_factory.mktemp("world")
    tiny.save(tiny.sd3(), folder / "tiny")
    for name, content in (("bright", BRIGHT), ("length", LENGTHS)):
        (folder / f"{name}.py").write_text(content)
    for name, listed in (("suite", ("a dog", "a hat")), ("sums", ASKED)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in listed))
    return folder


def bright(file) -> float:
    return pixels(file).mean()


def flat(*values: float) -> list[torch.Tensor]:
    return [torch.full((3, 2, 2), value) for value in values]


def scored(images, prompts):
    """Brightness; none for black images."""
    return [None if image.max() == 0 else float(image.mean()) for image in images]


def test_the_best_of_images_and_texts(tmp_path):
    best, prompts = best_of.BestOf(3, "scored", scored), [Prompt("a"), Prompt("b")]
    assert best.pick(flat(0.25, 0.75, 0.5, 0.0, 0.0, 0.125), prompts) == [(1, 0.75), (2, 0.125)]
    assert best.pick(flat(0.5, 0.5, 0.25), prompts[:1]) == [(0, 0.5)]
    refused("--by scored: none of the 3 samples of 'a' has a score", best.pick, flat(0.0, 0.0, 0.0), prompts[:1])
    for each in tiny_text.model():
        each.save_pretrained(tmp_path / "lm")
    (tmp_path / "long.py").write_text("def long(texts, prompts):\n    return [float(len(set(t))) for t in texts]\n")
    every = texts.sample(str(tmp_path / "lm"), None, ["1+2=", "3+4="], 6, 0)
    kept = texts.sample(str(tmp_path / "lm"), None, ["1+2=", "3+4="], 2, 0, best_of=3, by=f"{tmp_path}/long.py:long")
    assert kept == [max(every[at:at + 3], key=lambda text: len(set(text))) for at in range(0, 12, 3)]


def test_sample_keeps_the_best_draw_and_says_so_in_the_image(world, capsys):
    by = f"{world}/bright.py:bright"
    for output, options in (("all", ["--count", "6"]), ("best", ["--count", "2", "--best-of", "3", "--by", by])):
        assert main(["sample", str(world / "tiny"), "--prompt", "a dog", "--prompt", "a hat", "--steps", "1",
                     "--output", str(world / output), "--precision", "fp32", *options]) == 0
    every = sorted((world / "all").iterdir())
    kept = sorted((world / "best").iterdir())
    assert len(kept) == 4
    for at, file in enumerate(kept):
        some = every[3 * at:3 * at + 3]
        number = int(np.argmax([bright(each) for each in some]))
        assert (pixels(file) == pixels(some[number])).all()
        line = Image.open(file).text["parameters"].splitlines()[-1]
        assert f"Seed: {seeder(0, 0)(at // 2, at % 2 * 3 + number)}" in line
        assert "Best of: 3, Best by: " in line and f"Best score: {bright(file) / 255:.3f}"[:-1] in line


def test_eval_and_prompt_files_keep_the_best_draw_too(world):
    by, options = f"{world}/bright.py:bright", ["--steps", "1", "--precision", "fp32"]
    for output, more in (("drawn", ["--samples", "4"]), ("chosen", ["--samples", "2", "--best-of", "2", "--by", by])):
        assert main(["eval", str(world / "tiny"), "--suite", str(world / "suite.jsonl"), "--output",
                     str(world / output), "--rewards", by, *options, *more]) == 0
    assert main(["sample", str(world / "tiny"), "--prompts", str(world / "suite.jsonl"), "--count", "2", "--best-of",
                 "2", "--by", by, "--output", str(world / "file"), *options]) == 0
    drawn, chosen, file = (Ledger(world / name) for name in ("drawn", "chosen", "file"))
    for prompt in range(2):
        for kept in range(2):
            some = [drawn.load(Place("base", prompt, 2 * kept + number)) for number in range(2)]
            best, place = max(some, key=lambda picture: picture.mean().item()), Place("base", prompt, kept)
            assert torch.equal(chosen.load(place), best) and torch.equal(file.load(place), best)
            assert "Best of: 2" in Image.open(chosen.image(place)).text["parameters"]
    results = json.loads((world / "chosen" / "results.json").read_text())
    assert (results["best_of"], results["by"]) == (2, by) and "best_of" not in json.loads(
        (world / "drawn" / "results.json").read_text())


@pytest.mark.parametrize("count, by, told", [
    (2, "", "got --best-of 2 without --by"), (1, "scene", "got --by without --best-of"),
    (2, {"scene": None, "sharp": None}, "--by: got scene, sharp, expected one reward")])
def test_one_option_without_the_other_is_refused(count, by, told):
    assert told in message(best_of.make, count, by, None)
    assert best_of.make(1, "", None) is None


def test_a_mistake_is_reported_before_a_model_is_loaded(tmp_path):
    refused("without --by", images.sample, f"{tmp_path}/none", None, ["a"], 1, 0, 1, 1.0, tmp_path / "out", best_of=2)


@pytest.fixture(scope="module")
def written():
    """The greedy answers of the text starter, which has no chat template: the instruction stands before a prompt."""
    policy = text_samples.load(text_samples.settings("starter_text", None, {"system": INSTRUCTION}), None)
    return [text.strip() for text in policy.generate(policy.encode(ASKED), policy.generators([0, 0]))]


def picture(text: str, seed: int):
    return draw_one(tiny.sd3(), Prompt(text), seed, {"num_inference_steps": 2, "guidance": 1.5})


def test_prompts_are_rewritten_once(written):
    enhancer = Enhancer("starter_text")
    made = enhancer([Prompt(ASKED[0], metadata={"n": 1}), Prompt(ASKED[1]), Prompt(ASKED[0])])
    assert [prompt.text for prompt in made] == [written[0], written[1], written[0]]
    assert made[0].metadata == {"n": 1} and enhancer.known == dict(zip(ASKED, written))
    enhancer.sampler.policy.generate = None  # known texts ask no model
    assert enhancer([Prompt(ASKED[1])])[0].text == written[1]


def test_sample_draws_from_the_rewritten_prompt(world, written, capsys):
    command = ["sample", str(world / "tiny"), "--prompt", ASKED[0], "--enhancer", "starter_text", "--steps", "2",
               "--guidance", "1.5", "--seed", "4", "--output", str(world / "rewritten"), "--precision", "fp32"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert f"{ASKED[0]} -> {written[0]}" in said.err
    [file] = [line for line in said.out.splitlines() if line.endswith(".png")]
    expected = picture(written[0], seeder(4, 0)(0, 0))
    assert abs(pixels(file) - expected.permute(1, 2, 0).numpy() * 255).max() <= 1.01
    with Image.open(file) as opened:
        assert opened.text["parameters"].startswith(f"{written[0]}\nNegative prompt")


def test_eval_judges_for_the_users_prompt(world, written, capsys):
    command = ["eval", str(world / "tiny"), "--suite", str(world / "sums.jsonl"), "--rewards",
               f"{world}/length.py:length", "--steps", "2", "--guidance", "1.5", "--output", str(world / "judged"),
               "--precision", "fp32"]
    assert main([*command, "--enhancer", "starter_text"]) == 0
    assert json.loads((world / "judged" / "results.json").read_text())["enhancer"] == "starter_text"
    scores = [json.loads(line) for line in (world / "judged" / "scores-0.jsonl").read_text().splitlines()]
    [found] = [value for value in scores[0]["scores"].values()]
    assert found == pytest.approx(len(ASKED[0]) + picture(written[0], seeder(0, 0)(0, 0)).mean().item(), abs=0.01)
    capsys.readouterr()
    assert "holds an evaluation with another enhancer (starter_text, now None)" in error_line(capsys, *command)


def test_a_language_model_takes_none(capsys):
    command = ["starter_text", "--enhancer", "starter_text"]
    assert "--enhancer: rewrites the prompts of a pipeline; leave it out" in error_line(
        capsys, "sample", *command, "--prompt", ASKED[0])
    assert "--enhancer: is of a denoiser" in error_line(capsys, "eval", *command, "--suite=starter_text", "--output=x")


PROMPTS, SEEDS = [Prompt("a red cube"), Prompt("two dogs")], [3, 4]
FEW_STEPS = {"num_inference_steps": 2, "guidance_scale": 1.5, **tiny.CALL}


@pytest.fixture(scope="module")
def made(world):
    """A model, a run that tuned it, and what the base and the tuned pipeline draw one by one."""
    model = str(world / "tiny")
    run = make_run(world / "run", model, 0.3)
    pipe = loading.make_pipeline(model, "fp32", device=torch.device("cpu"))
    def each() -> list[torch.Tensor]:
        return [samplers.draw_one(pipe, prompt, seed, FEW_STEPS) for prompt, seed in zip(PROMPTS, SEEDS)]
    base = each()
    loading.load_tuned(pipe, run)
    return model, run, base, each()


def sampler(model: str) -> Pipelines:
    return Pipelines(model, Config(), "fp32", torch.device("cpu"))


def same(found, expected) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))


def test_arms_and_blends_draw_in_any_order_and_a_sample_does_not_depend_on_the_others(made):
    model, run, base, tuned = made
    assert not same(base, tuned)
    drawing, loaded = sampler(model), []
    for arm, expected in [(Arm(None, FEW_STEPS), base), (Arm(run, FEW_STEPS), tuned), (Arm(None, FEW_STEPS), base)]:
        assert same(drawing.draw(arm, PROMPTS, SEEDS), expected)
        loaded.append(drawing.pipe)
    assert loaded[0] is loaded[1] is not loaded[2]  # weights do not leave a pipeline
    assert same(sampler(model).draw(Arm(None, FEW_STEPS), PROMPTS[1:], SEEDS[1:]), base[1:])
    drawing, loaded = sampler(model), []
    for weight, expected in ((0.0, base), (1.0, tuned), (0.0, base)):
        assert same(drawing.draw(Arm(run, FEW_STEPS, weight), PROMPTS, SEEDS), expected)
        loaded.append(drawing.pipe)
    assert loaded[0] is loaded[1] is loaded[2]
    assert same(drawing.draw(Arm(run, FEW_STEPS), PROMPTS, SEEDS), tuned) and drawing.pipe is not loaded[0]


BATCH = [Prompt("a cat"), Prompt("a cat"), Prompt("two dogs", negative="blue"), Prompt("red")]
BATCH_SEEDS = [3, 4, 5, 6]
TWO_STEPS = {"num_inference_steps": 2, "guidance_scale": 3.0}
SD15 = {"height": 16, "width": 16}


def counted(pipe):
    """The pipeline as one of a class that counts its calls in `calls`, by their rows."""
    class Counted(type(pipe)):
        calls: list[int] = []

        def __call__(self, prompt=None, **options):
            self.calls.append(len(prompt) if isinstance(prompt, list) else 1)
            return super().__call__(prompt=prompt, **options)

    Counted.__call__.__signature__ = inspect.signature(type(pipe).__call__)
    pipe.__class__ = Counted
    return pipe


def alone(pipe, asked) -> list[torch.Tensor]:
    return [draw_one(pipe, prompt, seed, asked, "green") for prompt, seed in zip(BATCH, BATCH_SEEDS)]


def consistency():
    """A pipeline whose scheduler draws noise at every step, of which the pipeline passes it no generator."""
    from diffusers import FlowMatchLCMScheduler
    pipe = tiny.sd3()
    pipe.scheduler = FlowMatchLCMScheduler()
    return pipe


@pytest.mark.parametrize("make, call", [(tiny.sd3, tiny.CALL), (tiny.sd15, SD15), (tiny.flux, tiny.FLUX_CALL),
                                        (consistency, tiny.CALL)])
def test_images_of_one_call_are_those_of_single_calls(make, call):
    pipe, asked = counted(make()), TWO_STEPS | call
    expected, together = alone(pipe, asked), Together()
    pipe.calls.clear()
    found = together.draw(pipe, BATCH, BATCH_SEEDS, asked, "green")
    assert pipe.calls == [4, 1] and together.works  # the second one tells whether the pipeline does it
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-5)
    pipe.calls.clear()
    again = together.draw(pipe, BATCH[:3], BATCH_SEEDS[:3], asked, "green")
    assert pipe.calls == [3]
    torch.testing.assert_close(torch.stack(again), torch.stack(expected[:3]), rtol=0, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-3


def test_true_guidance_counts_in_one_call_too():
    pipe, call = pipelines.make("QwenImagePipeline")
    found = []
    for guidance in (1.0, 4.0):
        asked = {"num_inference_steps": 2, "guidance": guidance} | call
        together = Together()
        found.append(torch.stack(together.draw(pipe, BATCH[1:3], BATCH_SEEDS[1:3], asked, "green")))
        expected = [draw_one(pipe, *each, asked, "green") for each in zip(BATCH[1:3], BATCH_SEEDS[1:3])]
        assert together.works
        torch.testing.assert_close(found[-1], torch.stack(expected), rtol=0, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 1e-3


def refuses(prompts, generators):
    raise ValueError("`prompt` has to be of type `str`")


# What a class makes of several prompts and generators.
SPOILERS = {"refuses them": refuses,
            "the first noise in all rows": lambda prompts, generators: (prompts, generators[0]),
            "the first prompt in all rows": lambda prompts, generators: ([prompts[0]] * len(prompts), generators),
            "the first image alone": lambda prompts, generators: (prompts[0], generators[0])}


@pytest.mark.parametrize("kind", SPOILERS)
def test_a_pipeline_that_does_not_do_it_is_found_out(kind, capsys):
    pipe = tiny.sd3()
    stock = type(pipe)

    class Spoilt(stock):
        def __call__(self, prompt=None, generator=None, negative_prompt=None, **options):
            given = SPOILERS[kind](prompt, generator) if isinstance(prompt, list) else (prompt, generator)
            negative = negative_prompt if isinstance(given[0], list) or isinstance(negative_prompt, str) else "green"
            return stock.__call__(self, prompt=given[0], generator=given[1], negative_prompt=negative, **options)

    Spoilt.__call__.__signature__ = inspect.signature(stock.__call__)
    prompts, seeds = BATCH[1:3], BATCH_SEEDS[1:3]
    expected = [draw_one(pipe, *each, TWO_STEPS | tiny.CALL, "green") for each in zip(prompts, seeds)]
    pipe.__class__ = Spoilt
    together = Together()
    for _ in range(2):
        found = together.draw(pipe, prompts, seeds, TWO_STEPS | tiny.CALL, "green")
        assert together.works is False and torch.equal(torch.stack(found), torch.stack(expected))
    told = capsys.readouterr()
    assert (told.out + told.err).count("does not draw several prompts in one call as it draws each") == 1


def test_prompts_with_a_image_are_drawn_alone(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    pipe, together = counted(make("StableDiffusionImg2ImgPipeline")[0]), Together()
    prompts = [Prompt(text, image=str(tmp_path / "a.png")) for text in ("a cat", "red")]
    found = together.draw(pipe, prompts, BATCH_SEEDS[:2], TWO_STEPS, "")
    assert pipe.calls == [1, 1] and together.works is None and len(found) == 2


def test_too_little_memory_is_told():
    class Large:
        scheduler = None

        def __call__(self, prompt, generator, return_dict):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    refused("2 images in one call do not fit .*: give a --batch below 2$", Together().draw, Large(), BATCH[:2],
            BATCH_SEEDS[:2], {}, "")


def test_an_evaluation_in_batches_gives_the_same_images_and_goes_on(tmp_path, capsys):
    model = tiny.save(tiny.sd3(), tmp_path / "tiny")
    run = make_run(tmp_path / "run", model, 0.3)
    (tmp_path / "suite.txt").write_text("".join(f"picture {i}\n" for i in range(5)))
    def evaluated(name: str, *options: str) -> tuple[np.ndarray, dict]:
        assert main(["eval", str(run), "--suite", str(tmp_path / "suite.txt"), "--base", "--trust-run",
                     "--rlg", "1.5", "--samples", "2", "--output", str(tmp_path / name), *options]) == 0
        files = sorted((tmp_path / name / "pictures").rglob("*.png"))
        assert len(files) == 20
        return (np.stack([np.asarray(Image.open(file)) for file in files]).astype(int),
                json.loads((tmp_path / name / "results.json").read_text()))
    single, told = evaluated("single")
    batched, same = evaluated("batched", "--batch", "4")
    assert np.abs(batched - single).max() <= 1  # a rounding of 1/255
    [reward] = told["arms"]["tuned"]
    for arm in told["arms"]:
        means = [each["arms"][arm][reward]["all prompts"]["mean"] for each in (told, same)]
        assert means[0] == pytest.approx(means[1], abs=1e-3)
    lost = tmp_path / "batched" / "pictures" / "tuned" / "00002-01.png"
    before = np.asarray(Image.open(lost)).astype(int)
    lost.unlink()
    for file in (tmp_path / "batched").glob("scores-*.jsonl"):
        file.write_text("".join(line for line in file.read_text().splitlines(True) if '["tuned", 2, 1]' not in line))
    again, _ = evaluated("batched", "--batch", "3")  # how they are drawn is none of the settings
    assert np.abs(np.asarray(Image.open(lost)).astype(int) - before).max() <= 1
    assert np.abs(again - batched).max() <= 1
    capsys.readouterr()
    assert "--batch" in error_line(capsys, "eval", str(run), "--suite", "starter", "--output", "x", "--batch", "0")
