"""Pipelines whose loop has no middle are refused where a method would start there."""

import re

import pytest
import torch

from flowgrpo.config import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies.pipelines import probes
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.tools.check import report
from flowgrpo.tools.check.tiny import make
from tests.helpers import tiny
from tests.helpers.refusals import message

PROMPTS = [Prompt("red"), Prompt("sky")]
FOUR = "StableDiffusionInpaintPipeline (4 channels)"
TOLD = "Pipeline does not go on from the middle of its loop as the whole loop does, but .*% off: it may put an image"


def policy(name: str, dtype: torch.dtype = torch.float32) -> PipelinePolicy:
    pipe, call = make(name)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    return PipelinePolicy(pipe.to(dtype), Adapter(rank=2), call=call, precision=precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["FluxInpaintPipeline", "QwenImageInpaintPipeline"])
def test_training_is_refused_where_replays_would_see_another_background(name, dtype):
    assert re.search(f"{name[:-8]}{TOLD}", message(tiny.trainer, policy(name, dtype), method="flow_grpo"))


def test_where_replays_are_right_only_methods_that_share_steps_are_refused():
    alone = tiny.trainer(policy(FOUR), method="ddpo").rollouts
    [part, *_] = [part for part, _ in alone.sample(alone.conditioning(PROMPTS), 0, None)]
    assert max((new.logp - part.transitions[k].old.logp[rows]).abs().max()
               for k, rows, new in alone.replay(part, alone.conditioning(PROMPTS))) <= 1e-6
    told = message(tiny.trainer, policy(FOUR), method="ddpo", parts__roots=1)
    assert re.search(f"StableDiffusionInpaint{TOLD}", told)
    told = [report.report(FOUR, Config(method="ddpo", precision="fp32", parts=parts))["supported"]
            for parts in ({}, {"roots": 1})]
    assert told == [True, False] and not report.report(FOUR)["supported"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["StableDiffusionInpaintPipeline", "LTXConditionPipeline"])
def test_a_image_that_the_denoiser_reads_stops_nothing(name, dtype):
    trained = policy(name, dtype)
    conditioning, before = trained.encode(["red"]), trained.evaluations
    probes.require_middle(trained, conditioning)
    assert trained.evaluations == before


def test_a_random_module_is_told_as_such():
    trained = policy("StableDiffusion3Pipeline")
    trained.pipe.transformer.register_forward_hook(lambda _, args, out: (out[0] + 0.01 * torch.randn(out[0].shape),))
    told = message(probes.require_middle, trained, trained.encode(["red"]))
    assert re.search("two equal runs of StableDiffusion3Pipeline differ, by .*: look for dropout", told)
