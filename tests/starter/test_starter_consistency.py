"""The consistency starter: how it is built, how it loads, and that its images depend on their seeds alone."""

from pathlib import Path

import build_starter_consistency as build
import pytest
import torch
from diffusers import FlowMatchLCMScheduler, StableDiffusion3Pipeline
from safetensors.torch import load_file

from flowgrpo.config import load
from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.evaluation import images
from flowgrpo.policies.pipelines.call import seed_steps
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.grids import require_steps
from flowgrpo.starter import CALL, EVAL, FOLDERS, MERGED
from tests.helpers import tiny
from tests.helpers.refusals import error_line

NAME = "starter_consistency"
RECIPE = Path(__file__).parents[2] / "configs" / f"{NAME}.yaml"
F64 = torch.float64


# --- the script ------------------------------------------------------------------------------------------------------
def test_the_factors_gradients_are_those_of_the_sum():
    """Against autograd through W + B A."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).to(F64)
    lora, x = build.LowRank(module, 2), torch.randn(7, 5, dtype=F64)
    with torch.no_grad():
        for up in lora.up.values():
            up.normal_()
    lora.write()
    module(x).square().sum().backward()
    lora.chain()
    weights = {f"{name}.weight": lora.base[name] + lora.up[name] @ lora.down[name] for name in lora.weights}
    loss = torch.func.functional_call(module, weights, (x,)).square().sum()
    expected = torch.autograd.grad(loss, lora.parameters())
    for parameter, gradient in zip(lora.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)


class Told(torch.nn.Module):
    """A denoiser whose velocity is a function of state, sigma and the first token."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, encoder_hidden_states, pooled_projections, timestep, return_dict):
        return (self.function(x, timestep.view(-1, 1, 1, 1) / 1000, encoder_hidden_states[:, :1, :1, None]),)


def test_targets_and_steps_of_schedulers():
    x, s = torch.full((2, 1, 1, 1), 3.0), torch.tensor([0.5, 0.1]).view(2, 1, 1, 1)
    teacher, average = Told(lambda x, s, token: x * 0 + token), Told(lambda x, s, token: x + s)
    found = build.mean_velocity(teacher, average, x, s, torch.full((2, 1, 1), 3.5), torch.zeros(2, 1), jumps=4)
    v = 3.5
    # From 0.5 to 0.25, where x is 3 - 0.25 v; from 0.1 straight to the data.
    expected = [(0.25 * v + 0.25 * (3 - 0.25 * v + 0.25)) / 0.5, v]
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-5)
    from diffusers import FlowMatchEulerDiscreteScheduler
    require_steps(FlowMatchEulerDiscreteScheduler(), 1)
    require_steps(FlowMatchEulerDiscreteScheduler(shift_terminal=0.1), 2)
    with pytest.raises(UserError):
        require_steps(FlowMatchEulerDiscreteScheduler(shift_terminal=0.1), 1)


# --- what ships ------------------------------------------------------------------------------------------------------
def test_its_files_are_small_and_name_a_scheduler_that_renoises():
    folder = MERGED[NAME]
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 5e6
    scheduler = FlowMatchLCMScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(4)
    assert scheduler.sigmas.tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_it_is_the_starter_with_the_lora_in_its_weights():
    base, merged = (dict(load_pipeline(name).transformer.named_parameters()) for name in ("starter", NAME))
    assert merged.keys() == base.keys()
    factors = load_file(MERGED[NAME] / LORA_FILE)
    changed = {key.removeprefix("transformer.").rsplit(".", 2)[0] for key in factors}
    for name in changed:
        down, up = (factors[f"transformer.{name}.lora_{side}.weight"].float() for side in "AB")
        torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + up @ down, rtol=0, atol=1e-5)
    assert all(torch.equal(merged[key], base[key]) for key in base if key.removesuffix(".weight") not in changed)


def test_stock_diffusers_draws_the_same():
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDERS["starter"], text_encoder_3=None, tokenizer_3=None)
    pipe.load_lora_weights(MERGED[NAME])
    pipe.scheduler = FlowMatchLCMScheduler.from_pretrained(MERGED[NAME], subfolder="scheduler")
    pipe.set_progress_bar_config(disable=True)
    drawn = []
    for each in (pipe, load_pipeline(NAME)):
        torch.manual_seed(0)
        drawn.append(each("three red stars", generator=torch.Generator().manual_seed(1), output_type="latent",
                          num_inference_steps=EVAL[NAME]["num_inference_steps"], guidance_scale=EVAL[NAME]["guidance"],
                          **CALL).images)
    torch.testing.assert_close(*drawn, rtol=0, atol=1e-4)


def test_a_image_depends_on_its_seed_alone(tmp_path):
    policy = PipelinePolicy(load_pipeline(NAME), Adapter(rank=0), call=CALL)
    both = policy.generate(policy.encode(["a star", "two rings"]), policy.generators([1, 2]), 4, 1.0)
    torch.manual_seed(7)
    alone = policy.generate(policy.encode(["two rings"]), policy.generators([2]), 4, 1.0)
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=1e-4)
    paths = [images.sample(NAME, None, ["a star"], 1, seed, None, None, tmp_path / str(i))[0]
             for i, seed in enumerate((0, 0, 1))]
    files = [path.read_bytes() for path in paths]
    assert files[0] == files[1] != files[2]


def test_a_generator_that_a_pipeline_passes_comes_first_and_the_scheduler_is_left_as_it_was():
    x = torch.ones(1, 2)
    def drawn(inside: int, **given):
        scheduler = FlowMatchLCMScheduler()
        scheduler.set_timesteps(2)
        with seed_steps(scheduler, torch.Generator().manual_seed(inside)):
            found = scheduler.step(x, scheduler.timesteps[0], x, return_dict=False, **given)[0]
        assert "step" not in vars(scheduler)
        return found
    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert torch.equal(drawn(1, generator=torch.Generator().manual_seed(2)), drawn(2))


def test_its_recipe_trains_every_step_but_the_last_on_the_model_s_own_grid():
    config = load(RECIPE, {"device": "cpu", "tracker": "none", "train.epochs": 1, "train.prompts": 1,
                           "train.group": 4, "adapter.rank": 2})
    policy = PipelinePolicy(load_pipeline(NAME, "bf16"), config.adapter, precision="bf16", call=config.call)
    trainer = tiny.Trainer(config, tiny.Accelerator(cpu=True), policy, {"red": tiny.red}, ([tiny.Prompt("a star")], []))
    assert trainer.rollouts.grid.tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("command", [
    ["sample", "starter_consistency", "--prompt", "a star", "--steps", "1"],
    ["train", str(RECIPE), "--eval.steps=1", "--output=runs", "--device=cpu", "--precision=fp32"],
], ids=["sample", "eval.steps"])
def test_one_step_is_refused_in_a_line(command, tmp_path, monkeypatch, capsys):
    """Its scheduler divides by zero at one step, in stock diffusers too."""
    monkeypatch.chdir(tmp_path)
    assert error_line(capsys, *command) == ("flowgrpo: error: got 1 step, which FlowMatchLCMScheduler does not take "
                                            "with its shift_terminal of 0.25: expected 2 or more")
