"""Sampler of (arm, prompts, seeds): the arms in any order, with one loading where their weights allow it."""

import pytest
import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import samplers
from flowgrpo.evaluation.plan import Arm
from flowgrpo.evaluation.samplers import Pipelines
from flowgrpo.policies import loading
from tests.evaluation.test_images import make_run
from tests.helpers import tiny

PROMPTS, SEEDS = [Prompt("a red cube"), Prompt("two dogs")], [3, 4]
ASKED = {"num_inference_steps": 2, "guidance_scale": 1.5, **tiny.CALL}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, a run that tuned it, and what the base and the tuned pipeline draw one by one."""
    folder = tmp_path_factory.mktemp("sampler")
    model = str(tiny.save(tiny.sd3(), folder / "tiny"))
    run = make_run(folder / "run", model, 0.3)
    pipe = loading.make_pipeline(model, "fp32", device=torch.device("cpu"))
    def each() -> list[torch.Tensor]:
        return [samplers.draw_one(pipe, prompt, seed, ASKED) for prompt, seed in zip(PROMPTS, SEEDS)]
    base = each()
    loading.load_tuned(pipe, run)
    return model, run, base, each()


def sampler(model: str) -> Pipelines:
    return Pipelines(model, Config(), "fp32", torch.device("cpu"))


def same(found, expected) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))


def test_the_arms_draw_in_any_order(made):
    model, run, base, tuned = made
    assert not same(base, tuned)
    drawing, loaded = sampler(model), []
    for arm, expected in [(Arm(None, ASKED), base), (Arm(run, ASKED), tuned), (Arm(None, ASKED), base)]:
        assert same(drawing.draw(arm, PROMPTS, SEEDS), expected)
        loaded.append(drawing.pipe)
    assert loaded[0] is loaded[1] is not loaded[2]  # weights do not leave a pipeline


def test_blends_of_one_pair_are_loaded_once(made):
    model, run, base, tuned = made
    drawing, loaded = sampler(model), []
    for weight, expected in ((0.0, base), (1.0, tuned), (0.0, base)):
        assert same(drawing.draw(Arm(run, ASKED, weight), PROMPTS, SEEDS), expected)
        loaded.append(drawing.pipe)
    assert loaded[0] is loaded[1] is loaded[2]
    assert same(drawing.draw(Arm(run, ASKED), PROMPTS, SEEDS), tuned) and drawing.pipe is not loaded[0]


def test_a_sample_does_not_depend_on_the_others(made):
    model, run, base, _ = made
    assert same(sampler(model).draw(Arm(None, ASKED), PROMPTS[1:], SEEDS[1:]), base[1:])
