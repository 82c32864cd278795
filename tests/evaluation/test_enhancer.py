"""`--enhancer`: images are drawn from what a language model makes of the prompts, and judged for the prompts."""

import json

import pytest
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.samplers import INSTRUCTION, Enhancer, draw_one
from flowgrpo.samplers.rollout import seeder
from flowgrpo.text.policies import engines as texts
from tests.evaluation.test_images import pixels
from tests.helpers import tiny

ASKED = ["1+2=", "7+8="]
LENGTHS = """
def length(images, prompts):
    return [len(prompt) + float(image.mean()) for image, prompt in zip(images, prompts)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("enhancer")
    tiny.save(tiny.sd3(), made / "tiny")
    (made / "suite.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ASKED))
    (made / "length.py").write_text(LENGTHS)
    return made


@pytest.fixture(scope="module")
def written():
    """The greedy answers of the text starter, which has no chat template: the instruction stands before a prompt."""
    policy = texts.load(texts.settings("starter_text", None, {"system": INSTRUCTION}), None)
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


def test_sample_draws_from_the_rewritten_prompt(folder, written, capsys):
    command = ["sample", str(folder / "tiny"), "--prompt", ASKED[0], "--enhancer", "starter_text", "--steps", "2",
               "--guidance", "1.5", "--seed", "4", "--output", str(folder / "drawn"), "--precision", "fp32"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert f"{ASKED[0]} -> {written[0]}" in said.err
    [file] = [line for line in said.out.splitlines() if line.endswith(".png")]
    expected = picture(written[0], seeder(4, 0)(0, 0))
    assert abs(pixels(file) - expected.permute(1, 2, 0).numpy() * 255).max() <= 1.01
    with Image.open(file) as opened:
        assert opened.text["parameters"].startswith(f"{written[0]}\nNegative prompt")


def test_eval_judges_for_the_users_prompt(folder, written, capsys):
    command = ["eval", str(folder / "tiny"), "--suite", str(folder / "suite.jsonl"), "--rewards",
               f"{folder}/length.py:length", "--steps", "2", "--guidance", "1.5", "--output", str(folder / "out"),
               "--precision", "fp32"]
    assert main([*command, "--enhancer", "starter_text"]) == 0
    results = json.loads((folder / "out" / "results.json").read_text())
    assert results["enhancer"] == "starter_text"
    scores = [json.loads(line) for line in (folder / "out" / "scores-0.jsonl").read_text().splitlines()]
    [found] = [value for value in scores[0]["scores"].values()]
    assert found == pytest.approx(len(ASKED[0]) + picture(written[0], seeder(0, 0)(0, 0)).mean().item(), abs=0.01)
    capsys.readouterr()
    assert main(command) == 2  # the folder holds images of rewritten prompts
    assert "holds an evaluation with another enhancer (starter_text, now None)" in capsys.readouterr().err


def test_a_language_model_takes_none(capsys):
    assert main(["sample", "starter_text", "--prompt", ASKED[0], "--enhancer", "starter_text"]) == 2
    assert "--enhancer: rewrites the prompts of a pipeline; leave it out" in capsys.readouterr().err
    assert main(["eval", "starter_text", "--suite", "starter_text", "--output", "x", "--enhancer", "starter_text"]) == 2
    assert "--enhancer: is of a denoiser" in capsys.readouterr().err
