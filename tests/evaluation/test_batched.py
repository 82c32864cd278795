"""Several images per call of a pipeline: those of single calls, or single calls where a pipeline cannot."""

import inspect
import json

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.samplers import Together, draw_one
from flowgrpo.tools.check import tiny as pipelines
from flowgrpo.tools.check.tiny import make
from tests.evaluation.test_images import make_run
from tests.helpers import tiny

PROMPTS = [Prompt("a cat"), Prompt("a cat"), Prompt("two dogs", negative="blue"), Prompt("red")]
SEEDS = [3, 4, 5, 6]
ASKED = {"num_inference_steps": 2, "guidance_scale": 3.0}
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
    return [draw_one(pipe, prompt, seed, asked, "green") for prompt, seed in zip(PROMPTS, SEEDS)]


def consistency():
    """A pipeline whose scheduler draws noise at every step, of which the pipeline passes it no generator."""
    from diffusers import FlowMatchLCMScheduler
    pipe = tiny.sd3()
    pipe.scheduler = FlowMatchLCMScheduler()
    return pipe


@pytest.mark.parametrize("make, call", [(tiny.sd3, tiny.CALL), (tiny.sd15, SD15), (tiny.flux, tiny.FLUX_CALL),
                                        (consistency, tiny.CALL)])
def test_images_of_one_call_are_those_of_single_calls(make, call):
    pipe, asked = counted(make()), ASKED | call
    expected, together = alone(pipe, asked), Together()
    pipe.calls.clear()
    found = together.draw(pipe, PROMPTS, SEEDS, asked, "green")
    assert pipe.calls == [4, 1] and together.works  # the second one tells whether the pipeline does it
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-5)
    pipe.calls.clear()
    again = together.draw(pipe, PROMPTS[:3], SEEDS[:3], asked, "green")
    assert pipe.calls == [3]
    torch.testing.assert_close(torch.stack(again), torch.stack(expected[:3]), rtol=0, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-3


def test_true_guidance_counts_in_one_call_too():
    pipe, call = pipelines.make("QwenImagePipeline")
    found = []
    for guidance in (1.0, 4.0):
        asked = {"num_inference_steps": 2, "guidance": guidance} | call
        together = Together()
        found.append(torch.stack(together.draw(pipe, PROMPTS[1:3], SEEDS[1:3], asked, "green")))
        expected = [draw_one(pipe, *each, asked, "green") for each in zip(PROMPTS[1:3], SEEDS[1:3])]
        assert together.works
        torch.testing.assert_close(found[-1], torch.stack(expected), rtol=0, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 1e-3


class OnePrompt:
    """Of a class that refuses lists of prompts."""

    def spoil(self, prompt, generator):
        if isinstance(prompt, list):
            raise ValueError("`prompt` has to be of type `str`")
        return prompt, generator


class SharedNoise:
    """Of a class that draws the noise of every row from the first generator."""

    def spoil(self, prompt, generator):
        return prompt, generator[0] if isinstance(generator, list) else generator


class FirstPrompt:
    """Of a class that draws the first prompt in all rows."""

    def spoil(self, prompt, generator):
        return [prompt[0]] * len(prompt) if isinstance(prompt, list) else prompt, generator


class OneImage:
    """Of a class that gives the first prompt's image alone."""

    def spoil(self, prompt, generator):
        return (prompt[0], generator[0]) if isinstance(prompt, list) else (prompt, generator)


@pytest.mark.parametrize("kind", [OnePrompt, SharedNoise, FirstPrompt, OneImage])
def test_a_pipeline_that_does_not_do_it_is_found_out(kind, capsys):
    pipe = tiny.sd3()
    stock = type(pipe)

    class Spoilt(kind, stock):
        def __call__(self, prompt=None, generator=None, negative_prompt=None, **options):
            given = self.spoil(prompt, generator)
            negative = negative_prompt if isinstance(given[0], list) or isinstance(negative_prompt, str) else "green"
            return stock.__call__(self, prompt=given[0], generator=given[1], negative_prompt=negative, **options)

    Spoilt.__call__.__signature__ = inspect.signature(stock.__call__)
    prompts, seeds = PROMPTS[1:3], SEEDS[1:3]
    expected = [draw_one(pipe, *each, ASKED | tiny.CALL, "green") for each in zip(prompts, seeds)]
    pipe.__class__ = Spoilt
    together = Together()
    for _ in range(2):
        found = together.draw(pipe, prompts, seeds, ASKED | tiny.CALL, "green")
        assert together.works is False and torch.equal(torch.stack(found), torch.stack(expected))
    told = capsys.readouterr()
    assert (told.out + told.err).count("does not draw several prompts in one call as it draws each") == 1


def test_prompts_with_a_image_are_drawn_alone(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    pipe, together = counted(make("StableDiffusionImg2ImgPipeline")[0]), Together()
    prompts = [Prompt(text, image=str(tmp_path / "a.png")) for text in ("a cat", "red")]
    found = together.draw(pipe, prompts, SEEDS[:2], ASKED, "")
    assert pipe.calls == [1, 1] and together.works is None and len(found) == 2


def test_too_little_memory_is_told():
    class Large:
        scheduler = None

        def __call__(self, prompt, generator, return_dict):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    with pytest.raises(UserError, match="2 images in one call do not fit .*: give a --batch below 2$"):
        Together().draw(Large(), PROMPTS[:2], SEEDS[:2], {}, "")


def test_an_evaluation_in_batches_gives_the_same_images_and_goes_on(tmp_path, capsys):
    model = tiny.save(tiny.sd3(), tmp_path / "tiny")
    run = make_run(tmp_path / "run", model, 0.3)
    (tmp_path / "suite.txt").write_text("".join(f"picture {i}\n" for i in range(5)))
    def evaluated(name: str, *options: str) -> tuple[np.ndarray, dict]:
        assert main(["eval", str(run), "--suite", str(tmp_path / "suite.txt"), "--base", "--trust-run",
                     "--rlg", "1.5", "--samples",
                     "2", "--output", str(tmp_path / name), *options]) == 0
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
    assert main(["eval", str(run), "--suite", "starter", "--output", "x", "--batch", "0"]) == 2
    assert "--batch" in capsys.readouterr().err
