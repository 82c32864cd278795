"""Every pipeline class that a tiny instance can be built of is driven, replayed, trained, saved and loaded.

No line here is about one class; the tables at the top say what is known of some. The fast tier makes two checks of each
class: replay and gradient.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.device import DTYPES
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.pipelines.probes import other
from flowgrpo.policies.weights.forwards import fuse_norms
from flowgrpo.policies.weights.lora_files import load_lora
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.kernels import Euler, FlowDDIM
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import report, tiny
from flowgrpo.tools.check.tiny import derived
from scripts.docs.build_pipelines import live
from tests.helpers.refusals import message
from tests.helpers.tiny import UNFIT, stir

# Of those with the parts of others (test_derived.py) only some: ways of guidance, sound, a timestep ahead.
DERIVED = {f"{name}ModularPipeline" for name in ("Flux3Distilled", "LTX2", "QwenImage")}
FACTORIES = {name: make for name, make in tiny.factories().items() if name not in derived.FACTORIES or name in DERIVED}
# Classes whose denoisers normalise by diffusers' RMSNorm, which is fused on a GPU.
NORMS = {*(f"{name}Pipeline" for name in (
    "ErnieImage", "HunyuanSkyreelsImageToVideo", "HunyuanVideo", "HunyuanVideo15", "HunyuanVideoImageToVideo",
    "LTX", "LTX2", "LTX2ImageToVideo", "LTXCondition", "LTXImageToVideo", "Lumina2", "Mochi", "QwenImage",
    "QwenImageEdit", "QwenImageEditPlus", "Sana", "SanaVideo", "StableDiffusion3", "StableDiffusion3ControlNet",
    "ZImage")), "HunyuanVideoImageToVideoPipeline (token_replace)"}
# Classes without a guidance scale, or whose scale does nothing at 1.
UNGUIDED = {"Flux3DistilledModularPipeline"}
# Heights and widths around 18 x 30 (of multiples of 128 around 250 x 270), by what sides are multiples of; "up" is
# rounded up, "area" is the same form with the model's own number of pixels.
AROUND = {4: ([16, 20], [28, 32]), 8: ([16, 24], [24, 32]), 16: ([16, 32], [16, 32]), 32: ([32], [32]),
          128: ([128, 256], [256, 384]), "wide": ([224, 256], [256, 288]), "up": ([20], [32]), "area": ([12], [20])}
SIZED = {4: "AuraFlow Bria Chroma ErnieImage Flux2Klein Flux2 FluxControlNet FluxFill FluxInpaint Flux HunyuanVideo15 "
            "Ideogram4 LongCatImage NucleusMoEImage OvisImage PRX QwenImageInpaint QwenImage StableDiffusion3 WanVACE "
            "ZImage",
         8: "Allegro AnimateDiff CogVideoXImageToVideo CogVideoX CogVideoXVideoToVideo CogView3Plus Kolors "
            "LatentConsistencyModel Latte Mochi PixArtAlpha PixArtSigma StableDiffusion3ControlNet "
            "StableDiffusionPAG StableDiffusion StableDiffusionXLPAG StableDiffusionXL",
         16: "CogView4 HunyuanDiT HunyuanSkyreelsImageToVideo HunyuanVideoImageToVideo HunyuanVideo Lumina2 "
             "SkyReelsV2ImageToVideo SkyReelsV2 WanImageToVideo Wan WanVideoToVideo",
         32: "LTX2ImageToVideo LTX2 LTXCondition LTXImageToVideo LTX Sana SanaVideo",
         128: "QwenImageEdit QwenImageEditPlus", "wide": "QwenImage21", "up": "Krea2",
         "area": "FluxKontext HiDreamImage",
         # The size of their image, whatever it is, or any even one.
         "any": "HunyuanImage StableDiffusionControlNet StableDiffusionInpaint StableDiffusionXLControlNet"}
# Tiny models whose positions, or whose patches beside what their class checks, allow no size around.
ONE_SIZE = {"AllegroPipeline", "AuraFlowPipeline", "StableDiffusion3Pipeline", "StableDiffusion3ControlNetPipeline"}
# Calls without a height, with one of few sizes, and classes that have no `encode_prompt`.
UNSIZED = {"Kandinsky5T2IPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInstructPix2PixPipeline",
           "OmniGenPipeline"}
STEPS, GUIDANCE = 3, 3.0
PROMPTS, NEGATIVES = ["red", "sky"], ["old", "old"]  # of three tokens each
BATCH = 5e-5  # of the output's largest number: what another batch size may change in fp32


@dataclass(frozen=True)
class Case:
    """A tiny pipeline as a policy whose LoRA is not at its start."""

    name: str
    precision: str = "fp32"

    @cached_property
    def policy(self) -> PipelinePolicy:
        pipe, call = FACTORIES[self.name](0)
        if self.precision != "fp32":
            pipe.to(DTYPES[self.precision])
        torch.manual_seed(0)
        return stir(PipelinePolicy(pipe, Adapter(rank=2, alpha=7.0), guidance=GUIDANCE, call=call,
                                   precision=self.precision), 0.2)

    @cached_property
    def conditioning(self):
        return self.policy.encode(PROMPTS, NEGATIVES)

    @cached_property
    def grid(self):
        return make_grid("shifted", STEPS, 3.0, self.policy.stock)

    @cached_property
    def kernel(self):
        return Method().having(kernel=FlowDDIM()).on(self.policy.process).rollout.kernel

    @cached_property
    def state(self) -> torch.Tensor:
        """The state of both prompts after one deterministic step."""
        return self.run(range(1))[0]

    def explored(self, kernel):
        """A part of four independent samples that records both steps but the last."""
        grid, timesteps = self.grid
        plan = RolloutSpec(grid, Schedule((0, 1), (0, 1)), kernel, Euler(), 2, roots=2, timesteps=timesteps)
        [part] = explore(self.policy, self.conditioning, [plan], 4, seeder(0, 0))
        return part

    def run(self, steps: range, x=None, x0=None):
        grid, timesteps = self.grid
        generators = self.policy.generators([1, 2]) if x is None else None
        return self.policy.run(Segment(grid, steps, timesteps=timesteps), self.conditioning, x, generators, x0)

    def output(self, x=None, rows=(0, 1), conditioning=None) -> torch.Tensor:
        """The model output at the second step."""
        grid, timesteps = self.grid
        index = torch.tensor(rows)
        return self.policy.replay((conditioning or self.conditioning).rows(index),
                                  self.state[index] if x is None else x, grid, 1, timesteps)


@pytest.fixture(scope="module", params=sorted(set(FACTORIES) - set(UNFIT)))
def case(request):
    return Case(request.param)


@pytest.mark.parametrize("guidance", [pytest.param(GUIDANCE, marks=pytest.mark.fast), 1.0])
def test_a_replay_sees_what_the_rollout_saw(case, guidance):
    outputs = []
    def kernel(x, v, grid, i):
        outputs.append(v)
        return case.kernel(x, v, grid, i)
    with at_guidance(case.policy, guidance):
        part = case.explored(kernel)
        sampled = outputs.copy()
        outputs.clear()
        scores = list(replay(case.policy, case.conditioning, part, 4))
    assert len(part.finals[0]) == 4 and torch.isfinite(part.finals[0]).all()
    for then, now in zip(by_step(sampled), by_step(outputs), strict=True):
        assert now.requires_grad and then.std() > 1e-3
        torch.testing.assert_close(now.detach(), then, rtol=0, atol=1e-5)
    for k, rows, new in scores:
        assert (new.logp - part.transitions[k].old.logp[rows]).abs().max() <= 1e-6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(NORMS))
def test_fused_norms_change_rounding_alone_and_replay_exactly(name, precision):
    stock, fused = Case(name, precision), Case(name, precision)
    assert any([fuse_norms(module, torch.device("cuda")) for module in fused.policy.denoisers.values()])
    if precision == "fp32":
        expected = stock.output()
        limit = 1e-5 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(fused.output(stock.state), expected, rtol=0, atol=limit)
    part = fused.explored(fused.kernel)
    for k, rows, new in replay(fused.policy, fused.conditioning, part, 4):
        assert new.logp.requires_grad
        assert (new.logp - part.transitions[k].old.logp[rows]).abs().max() <= 1e-6


def by_step(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of all rows at the two recorded steps; one row runs through both steps before the next one, where a
    pipeline takes one alone. A second state (LTX-2's sound) follows the first."""
    flat = [output.flatten(1) for output in outputs]
    if len({output.shape[1] for output in flat}) > 1:
        flat = [torch.cat(both, 1) for both in zip(flat[::2], flat[1::2], strict=True)]
    return [torch.cat(flat[step::2]) for step in range(2)]


@pytest.mark.fast
def test_the_gradient_reaches_the_lora_and_nothing_else(case):
    policy = case.policy
    trained = {id(parameter) for parameter in policy.weights.parameters()}
    case.output().float().square().mean().backward()
    reached = {key for key, p in policy.weights.named.items() if p.grad is not None and p.grad.abs().max() > 0}
    assert {"lora_A", "lora_B"} == {key.split(".")[-3] for key in reached}
    for module in policy.pipe.components.values():
        if isinstance(module, torch.nn.Module):
            assert not module.training
            for parameter in module.parameters():
                assert parameter.requires_grad == (id(parameter) in trained)
                assert parameter.grad is None or id(parameter) in trained
    for parameter in policy.weights.parameters():
        parameter.grad = None


def test_a_segment_from_the_middle_is_the_whole_run(case):
    whole, _ = case.run(range(STEPS))
    first, record = case.run(range(1))
    rest, _ = case.run(range(1, STEPS), first, record.x0)
    torch.testing.assert_close(rest, whole, rtol=0, atol=1e-6)
    assert whole.shape == first.shape and (whole - first).abs().max() > 1e-3


def test_guidance_changes_the_output(case):
    with torch.no_grad():
        guided = case.output()
        with at_guidance(case.policy, 1.0):
            plain = case.output()
    assert ((guided - plain).abs().max() > 1e-4) == (case.name not in UNGUIDED)


def test_the_prompt_changes_the_output(case):
    with torch.no_grad():
        swapped = case.conditioning.rows(torch.tensor([1, 0]))
        assert (case.output(conditioning=swapped) - case.output()).abs().max() > 1e-4


def test_a_prompt_sees_its_own_image(case):
    policy = case.policy
    if "image" not in policy.given:
        assert not case.conditioning.inputs.get("image")
        return
    own, (grid, timesteps) = policy.given["image"], case.grid
    states = []
    for image in (other(own), own):
        conditioning = policy.encode(["red", "red"], NEGATIVES, [own, image])
        states.append(policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None,
                                 policy.generators([1, 1]))[0])
    ours, theirs = states
    scale = BATCH * theirs.abs().max()
    assert (ours[0] - theirs[0]).abs().max() <= scale and (theirs[0] - theirs[1]).abs().max() <= scale
    assert (ours[1] - theirs[1]).abs().max() > 1e-4


def test_decoding_gives_images_or_frames(case):
    seen = case.policy.decode(case.run(range(STEPS))[0], case.conditioning)
    assert seen.ndim in (4, 5) and seen.shape[0] == 2 and seen.shape[-3] == 3
    assert torch.isfinite(seen).all() and seen.min() >= 0 and seen.max() <= 1 and seen.std() > 1e-3


def test_one_row_is_what_it_is_among_others(case):
    with torch.no_grad():
        together = case.output()
        alone = torch.cat([case.output(rows=(row,)) for row in (0, 1)])
    assert (together - alone).abs().max() <= BATCH * together.abs().max()


def test_the_stock_pipeline_loads_the_lora(case, tmp_path):
    """With an alpha that is not the rank, and a B that is not zero."""
    assert "same scale" in case.policy.weights.save(tmp_path)
    stock, call = FACTORIES[case.name](0)
    untuned = stock_latents(stock, call)
    used = load_lora(stock, denoisers(stock), tmp_path)
    loaded, ours = stock_latents(stock, call), stock_latents(case.policy.pipe, call)
    assert used and (loaded - ours).abs().max() <= BATCH * ours.abs().max()  # B times the scale is rounded in the file
    assert (untuned - stock_latents(stock, call)).abs().max() > 1e-3


def stock_latents(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    """The latents of one prompt, as a user calls the pipeline."""
    options = dict(prompt="red", negative_prompt="old", num_inference_steps=2, output_type="latent", return_dict=False,
                   generator=torch.Generator().manual_seed(1), **call)
    takes = inspect.signature(type(pipe).__call__).parameters
    with torch.no_grad():
        return inspect.unwrap(type(pipe).__call__)(pipe, **{k: value for k, value in options.items() if k in takes})[0]


@pytest.mark.parametrize("name", sorted(UNFIT))
def test_check_says_what_stops_a_pipeline(name):
    told = report.report(name)
    assert not told["supported"] and UNFIT[name] in told["reason"]


def test_the_page_tells_of_every_class():
    """The page is written by scripts/docs/build_pipelines.py; verdicts are those of the tests above."""
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
    works, _, fails = page.partition("Not supported:")
    fails, _, others = fails.partition("The other classes")
    rows = re.findall(r"^\| \w+ \| \w+ \| [^|]+ \| (\w[^|]+) \|$", works, re.M)[1:]
    told = {name.rstrip("\u2020\u2021") for row in rows for name in re.split(r", (?=[A-Z])", row)}
    assert told == {*tiny.factories()} - {*UNFIT}
    reasons = {name: reason for names, reason in re.findall(r"^\| (\w+Pipeline[^|]*) \| ([^|]+) \|$", fails, re.M)
               for name in names.split(", ")}
    assert reasons.keys() == UNFIT.keys()
    assert all(reason in reasons[name] for name, reason in UNFIT.items())
    named = {name.partition(" ")[0] for name in {*told, *UNFIT, *re.findall(r"\w+Pipeline\b", others)}}
    assert {*live()} <= named  # every class of the installed diffusers


# --- sizes -----------------------------------------------------------------------------------------------------------
def made(name: str, height: int, width: int) -> list[int]:
    pipe, call = FACTORIES[name](0)
    policy = PipelinePolicy(pipe, None, call=call | {"height": height, "width": width})
    return [*policy.of_noise(policy.encode(["red"]), policy.generators([0])).shape[-2:]]


@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - UNSIZED - DERIVED))
def test_a_size_is_made_as_asked_or_is_a_line_with_those_around_it(name):
    [how] = [how for how, names in SIZED.items() if name.split()[0].removesuffix("Pipeline") in names.split()]
    asked = (250, 270) if how in (128, "wide") else (18, 30)
    if how == "any":
        assert made(name, *asked) == [*asked]
        return
    heights, widths = AROUND[how]
    line = message(made, name, *asked)
    assert line.endswith(f"expected height {' or '.join(map(str, heights))} and width {' or '.join(map(str, widths))}")
    for height, width in zip(heights, widths) if name not in ONE_SIZE else ():
        assert made(name, height, width) == [height, width]
