"""Variance-preserving pipelines, driven by DDIM: grids by hand, the stock latents, replay, and the methods on them."""

import math
import re

import pytest
import torch
import yaml
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    TCDScheduler,
    UniPCMultistepScheduler,
)

from flowgrpo import gaussian
from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.methods.method import FOR_VP, Method
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.validate import describe_substitutes, resolve
from flowgrpo.objectives.reductions import InverseDelta
from flowgrpo.samplers.grids import alpha_bars, make_grid
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.kernels import (
    CPS,
    DDIM,
    VPCPS,
    DanceSDE,
    DPMSolver2M,
    Euler,
    FlowDDIM,
    FlowSDE,
    as_noise,
    prediction,
    process,
    x0_from_noise,
)
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import report
from flowgrpo.tools.check.tiny.unets import lcm
from tests.helpers import tiny
from tests.helpers.refusals import message
from tests.helpers.tables import rounding
from tests.samplers.test_scheduler import following

STEPS = 5
PNDM = tiny.pndm()
DDIM_V = DDIMScheduler(prediction_type="v_prediction", clip_sample=False, **tiny.SD15_NOISE)
DDIM_X0 = DDIMScheduler(prediction_type="sample", clip_sample=False, **tiny.SD15_NOISE)
LCM = lcm()
ZERO_SNR = DDIMScheduler(prediction_type="v_prediction", clip_sample=False, rescale_betas_zero_snr=True,
                         timestep_spacing="trailing")
SCHEDULERS = [
    PNDM, DDIM_V, DDIM_X0, DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **tiny.SD15_NOISE),
    EulerDiscreteScheduler(**tiny.SD15_NOISE),
    EulerDiscreteScheduler(prediction_type="v_prediction", **tiny.SD15_NOISE),
    DPMSolverMultistepScheduler(**tiny.SD15_NOISE | {"timestep_spacing": "trailing"})]


def vp_policy(scheduler=PNDM, **options):
    return tiny.policy(tiny.sd15(scheduler), **options)


def exploration(policy, schedule: Schedule, group: int = 2, roots: int = 2, **options) -> RolloutSpec:
    grid, timesteps = make_grid("shifted", STEPS, 3.0, policy.stock)
    return RolloutSpec(grid, schedule, DDIM(1.0), Euler(), group, roots, timesteps=timesteps, **options)


# --- the grid --------------------------------------------------------------------------------------------------------

# Of betas 0.1, 0.2, 0.3, 0.4 the alpha-bars are 0.9, 0.72, 0.504, 0.3024.
@pytest.mark.parametrize("options, timesteps, alphas", [
    ({"steps_offset": 1}, [3, 1], [0.3024, 0.72, 1]), ({}, [2, 0], [0.504, 0.9, 1]),
    ({"steps_offset": 1, "set_alpha_to_one": False}, [3, 1], [0.3024, 0.72, 0.9]),
    ({"timestep_spacing": "trailing"}, [3, 1], [0.3024, 0.72, 1]),
    ({"timestep_spacing": "linspace"}, [3, 0], [0.3024, 0.9, 1])])
def test_alpha_bars_by_hand(options, timesteps, alphas):
    scheduler = DDIMScheduler(num_train_timesteps=4, trained_betas=[0.1, 0.2, 0.3, 0.4], clip_sample=False, **options)
    grid, times = alpha_bars(scheduler, 2)
    assert times.tolist() == timesteps and times.dtype == torch.int64
    torch.testing.assert_close(grid, torch.tensor(alphas), rtol=0, atol=1e-6)
    assert scheduler.num_inference_steps is None  # left as it was


def test_alpha_bars_of_sd15_end_above_zero_noise():
    grid, times = alpha_bars(PNDM, 50)
    assert times.tolist() == list(range(981, 0, -20)) and len(grid) == 51 and (grid.diff() > 0).all()
    assert torch.equal(grid[:-1], PNDM.alphas_cumprod[times]) and grid[-1] == PNDM.alphas_cumprod[0] < 1


@pytest.mark.parametrize("options, steps, told", [
    ({"clip_sample": True}, 5, "has clip_sample, .*: set it to false"), ({"thresholding": True}, 5, "has thresholding"),
    ({}, 1001, "has 1000 timesteps, expected 1 to as many steps, got 1001"),
    ({"steps_offset": 1}, 1000, "at timestep 1000, expected one with an alpha-bar above 0"),
    ({"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}, 5, "timestep 999, .* above 0.*spacing leading"),
    ({"prediction_type": "v_prediction", "steps_offset": 1}, 1000, "at timestep 1000")])
def test_grids_that_cannot_be_driven_are_told(options, steps, told):
    scheduler = DDIMScheduler(**{"clip_sample": False} | options)
    assert re.search(f"^DDIMScheduler .*{told}", message(make_grid, "shifted", steps, 3.0, scheduler))


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("kind", [DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler,
                                  UniPCMultistepScheduler])
def test_alpha_bars_of_every_beta_schedule_are_the_stock_ones(kind, schedule):
    options = {"clip_sample": False} if kind is DDIMScheduler else {}
    stock = kind(beta_schedule=schedule, timestep_spacing="leading", steps_offset=1, **options)
    grid, times = alpha_bars(stock, 4)
    assert times.tolist() == [751, 501, 251, 1]
    t = torch.arange(1001, dtype=torch.float64) / 1000
    cosine = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
    betas = {"linear": torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64),
             "scaled_linear": torch.linspace(0.01, 0.02**0.5, 1000, dtype=torch.float64).square(),
             "squaredcos_cap_v2": (1 - cosine[1:] / cosine[:-1]).clamp(max=0.999)}[schedule]
    expected = torch.cat([(1 - betas).cumprod(0)[times], torch.ones(1, dtype=torch.float64)])
    torch.testing.assert_close(grid.double(), expected, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(grid[:-1], stock.alphas_cumprod[times], rtol=0, atol=0)


def test_a_terminal_signal_of_zero_is_all_but_zero():
    grid, times = alpha_bars(ZERO_SNR, 4)
    assert ZERO_SNR.alphas_cumprod[times[0]] == 0 and grid[0] == 2.0**-24
    assert torch.equal(grid[1:-1], ZERO_SNR.alphas_cumprod[times[1:]]) and grid[-1] == 1


@pytest.mark.parametrize("stock", [LCM, TCDScheduler(), LCMScheduler.from_config(PNDM.config, clip_sample=False)])
def test_a_distilled_model_has_the_timesteps_of_its_distillation(stock):
    grid, times = alpha_bars(stock, 4)
    assert times.tolist() == [999, 759, 499, 259]  # every 20th, of which the places 0, 12, 25, 37 from the end
    assert torch.equal(grid[:-1], stock.alphas_cumprod[times]) and grid[-1] == 1
    with pytest.raises(UserError, match="has 50 original_inference_steps, expected 1 to as many steps, got 51"):
        make_grid("shifted", 51, 3.0, stock)


def test_the_kind_of_grid_is_of_flows_alone():
    (first, times), (second, _) = (make_grid(kind, 5, 3.0, PNDM) for kind in ("shifted", "stock"))
    assert torch.equal(first, second) and times.tolist() == [801, 601, 401, 201, 1]
    assert make_grid("shifted", 5, 3.0, FlowMatchEulerDiscreteScheduler())[1] is None


@pytest.mark.parametrize("scheduler, found", [
    (PNDM, ("epsilon", "vp")), (DDIM_V, ("v_prediction", "vp")), (EulerDiscreteScheduler(), ("epsilon", "vp")),
    (DDIM_X0, ("sample", "vp")), (LCM, ("consistency", "vp")), (UniPCMultistepScheduler(), ("epsilon", "vp")),
    (UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"), ("velocity", "flow")),
    (FlowMatchEulerDiscreteScheduler(), ("velocity", "flow")),
    (DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"), ("velocity", "flow"))])
def test_the_process_is_found_from_the_scheduler(scheduler, found):
    assert (prediction(scheduler), process(scheduler)) == found


@pytest.mark.parametrize("scheduler", [DDIMScheduler(prediction_type="score"), EDMEulerScheduler()])
def test_other_processes_are_refused(scheduler):
    assert re.search(f"{type(scheduler).__name__} .* cannot be driven: expected", message(process, scheduler))


# --- the scheduler ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stock", SCHEDULERS)
def test_whatever_the_stock_class_the_state_is_not_scaled(stock):
    (grid, timesteps), x = alpha_bars(stock, STEPS), torch.ones(1, 2)
    policy, _ = following(Segment(grid, range(1, 3), timesteps=timesteps), stock, steps=99, device="cpu")
    assert policy.init_noise_sigma == 1 and policy.scale_model_input(x, 3) is x and isinstance(policy, type(stock))
    assert torch.equal(policy.timesteps, timesteps[1:3]) and policy.num_inference_steps == 2


@pytest.mark.parametrize("stock", [PNDM, DDIM_V])
def test_a_replay_hands_back_the_noise_with_its_graph(stock):
    task = Segment(torch.tensor([0.36, 0.64, 1.0]), range(1), replay=True, timesteps=torch.tensor([3, 1]))
    policy, record = following(task, stock)
    x, output = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.5, 1.0]], requires_grad=True)
    assert policy.step(output, policy.timesteps[0], x, return_dict=False)[0] is x
    record.output.sum().backward()
    expected, slope = ([[0.6 * 0.5 + 0.8 * 2, 0.6 - 0.8]], 0.6) if stock is DDIM_V else ([[0.5, 1.0]], 1)
    torch.testing.assert_close(record.output.detach(), torch.tensor(expected))
    torch.testing.assert_close(output.grad, torch.full((1, 2), float(slope)))


def test_deterministic_steps_are_ddims_and_remember_the_data():
    # x = 0.6 x0 + 0.8 noise, so that 0.8 x0 + 0.6 noise comes next
    x0, noise = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    task = Segment(torch.tensor([0.36, 0.64]), range(1), timesteps=torch.tensor([7]))
    policy, _ = following(task, PNDM)
    after = policy.step(noise, policy.timesteps[0], 0.6 * x0 + 0.8 * noise).prev_sample
    torch.testing.assert_close(after, 0.8 * x0 + 0.6 * noise)
    torch.testing.assert_close(task.predict_x0(0.6 * x0 + 0.8 * noise, noise, 0), x0)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_what_the_network_predicts_is_read_as_its_noise(kind):
    x0, noise = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).chunk(2, dim=0)
    grid = torch.tensor([0.36, 0.64, 1.0], dtype=torch.float64)
    x = 0.6 * x0 + 0.8 * noise
    output = {"epsilon": noise, "v_prediction": 0.6 * noise - 0.8 * x0, "sample": x0}[kind]
    found = as_noise(DDIMScheduler(prediction_type=kind), output, x, grid[0], torch.tensor(500))
    torch.testing.assert_close(found, noise, rtol=0, atol=1e-12)
    transition = DDIM(1.0)(x, found, grid, 0)
    # The posterior of x' given x and x0, of which the predicted data stands in for x0.
    step = 0.36 / 0.64
    variance = (1 - 0.64) / (1 - 0.36) * (1 - step)
    mean = (0.8 * (1 - step) * x0 + step**0.5 * (1 - 0.64) * x) / (1 - 0.36)
    torch.testing.assert_close(transition.mean, mean, rtol=0, atol=1e-12)
    assert transition.std.item() == pytest.approx(variance**0.5, abs=1e-12)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("timestep", [999, 499, 19])
def test_a_consistency_step_is_the_stock_one(kind, timestep):
    stock = LCMScheduler(clip_sample=False, prediction_type=kind, original_inference_steps=50)
    generator = torch.Generator().manual_seed(1)
    x, output, fresh = torch.randn(3, 2, 4, generator=generator).double()[:, None]
    stock.set_timesteps(timesteps=[timestep, 9])
    drawn, f = stock.step(output, torch.tensor(timestep), x, torch.Generator().manual_seed(2), return_dict=False)
    fresh = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grid = stock.alphas_cumprod.double()[[timestep, 9]]
    noise = as_noise(stock, output, x, grid[0], torch.tensor(timestep))
    torch.testing.assert_close(x0_from_noise(x, noise, grid[0]), f, rtol=0,
                               atol=1e-5)  # the stock one's alphas are fp32
    transition = VPCPS(1.0)(x, noise, grid, 0)
    torch.testing.assert_close(gaussian.sample(transition, fresh), drawn, rtol=0, atol=1e-5)
    density = torch.distributions.Normal(grid[1].sqrt() * x0_from_noise(x, noise, grid[0]), (1 - grid[1]).sqrt())
    torch.testing.assert_close(gaussian.log_prob(transition, drawn), density.log_prob(drawn).mean((1, 2)),
                               rtol=0, atol=1e-10)


def test_a_consistency_function_is_the_state_itself_at_timestep_zero():
    x, output = torch.tensor([[2.0, -1.0]], dtype=torch.float64), torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    alpha = torch.tensor(0.9, dtype=torch.float64)
    noise = as_noise(LCM, output, x, alpha, torch.tensor(0))
    torch.testing.assert_close(x0_from_noise(x, noise, alpha), x, rtol=0, atol=1e-12)
    # By hand at timestep 0.05, which is 0.5 in its unit: c_skip = 1/2 and c_out = sqrt(1/2).
    noise = as_noise(LCM, output, x, alpha, torch.tensor(0.05))
    z0 = (x - 0.1**0.5 * output) / 0.9**0.5
    torch.testing.assert_close(x0_from_noise(x, noise, alpha), x / 2 + z0 / 2**0.5, rtol=0, atol=1e-7)


def test_all_noise_is_fresh_at_level_1_and_none_at_level_0():
    x, noise = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grid = torch.tensor([0.36, 0.64, 1.0], dtype=torch.float64)
    x0 = (x - 0.8 * noise) / 0.6
    fresh, half, kept = (VPCPS(level)(x, noise, grid, 0) for level in (1.0, 0.5, 0.0))
    torch.testing.assert_close(fresh.mean, 0.8 * x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(half.mean, 0.8 * x0 + 0.6 * 0.5**0.5 * noise, rtol=0, atol=1e-12)
    assert [each.std.item() for each in (fresh, half, kept)] == pytest.approx([0.6, 0.6 * 0.5**0.5, 0], abs=1e-12)
    torch.testing.assert_close(kept.mean, DDIM(0.0)(x, noise, grid, 0).mean, rtol=0, atol=1e-12)
    assert VPCPS(1.0)(x, noise, grid, 1).std == 0
    torch.testing.assert_close(VPCPS(1.0)(x, noise, grid, 1).mean, (x - 0.6 * noise) / 0.8, rtol=0, atol=1e-12)


def test_a_terminal_signal_of_zero_steps_as_the_stock_scheduler():
    x, v = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(4))
    grid, timesteps = alpha_bars(ZERO_SNR, 4)
    policy, _ = following(Segment(grid, range(1), timesteps=timesteps), ZERO_SNR)
    ours = policy.step(v, policy.timesteps[0], x, return_dict=False)[0]
    ZERO_SNR.set_timesteps(4)
    stock = ZERO_SNR.step(v, timesteps[0], x, return_dict=False)[0]
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-3)  # the signal counts as 2^-12
    noise = as_noise(policy, v, x, grid[0], timesteps[0])
    torch.testing.assert_close(policy.task.predict_x0(x, noise, 0), -v, rtol=0, atol=2e-3)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("stock", SCHEDULERS)
def test_without_noise_it_gives_the_latents_of_ddim(stock, guidance):
    policy = vp_policy(stock, guidance=guidance)
    assert policy.process == "vp"
    conditioning, (grid, timesteps) = policy.encode(["red", "blue"], ["", "old"]), alpha_bars(stock, STEPS)
    ddim = tiny.sd15(DDIMScheduler.from_config(stock.config, clip_sample=False))
    expected = ddim(["red", "blue"], negative_prompt=["", "old"], num_inference_steps=STEPS, guidance_scale=guidance,
                    output_type="latent", generator=policy.generators([1, 2])).images
    every = frozenset(range(STEPS))
    for task in (Segment(grid, range(STEPS), timesteps=timesteps),
                 Segment(grid, range(STEPS), DDIM(0.0), stochastic=every, generators=policy.generators([3, 4]),
                         timesteps=timesteps)):
        final, _ = policy.run(task, conditioning, None, policy.generators([1, 2]))
        torch.testing.assert_close(final, expected, rtol=0, atol=1e-4)
    assert policy.evaluations >= 2 * 2 * STEPS * (2 if guidance > 1 else 1)


# --- rollout and replay ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stock", [PNDM, DDIM_V, DDIM_X0, LCM])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_the_first_ratio_is_one(stock, guidance):
    policy = tiny.stir(vp_policy(stock, guidance=guidance))
    conditioning = policy.encode(["red", "blue"])
    alone = exploration(policy, Schedule((0, 1, 3), (0, 1, 3)), keep_means=True)
    shared = exploration(policy, Schedule((1, 2), (1, 2)), roots=1, keep_means=True)
    parts = list(explore(policy, conditioning, [alone], 4, seeder(0, 0)))
    parts += explore(policy, conditioning, [shared], 4, seeder(0, 0))
    for part in parts:
        for micro_batch, depth in ((4, 0), (1, 4 * guidance)):  # guidance multiplies the rounding
            for k, rows, new in replay(policy, conditioning, part, micro_batch):
                old = part.transitions[k].old.rows(rows)
                most = rounding(old.mean, depth)
                assert (new.logp - old.logp).abs().max() <= most / old.std.min() and new.logp.requires_grad
                torch.testing.assert_close(new.mean.detach(), old.mean, rtol=0, atol=most)
    finals = torch.cat([part.finals[0] for part in parts])
    assert len(finals) == 8 and finals.isfinite().all() and len({float(final.sum()) for final in finals}) == 8


def test_in_half_precision_too():
    policy = tiny.policy(tiny.sd15(DDIM_V).to(torch.bfloat16), precision="bf16", guidance=5.0)
    conditioning = tiny.stir(policy).encode(["red"])
    [part] = explore(policy, conditioning, [exploration(policy, Schedule((1, 2), (1, 2)))], 2, seeder(0, 0))
    assert part.finals[0].dtype == torch.bfloat16
    for k, rows, new in replay(policy, conditioning, part, 2):
        assert torch.equal(new.logp, part.transitions[k].old.rows(rows).logp)


def test_the_recorded_density_is_ddims():
    policy = vp_policy()
    plan = exploration(policy, Schedule((2,), (2,)))
    [part] = explore(policy, policy.encode(["red"]), [plan], 2, seeder(0, 0))
    [taken] = part.transitions
    with torch.no_grad():
        noise = policy.replay(policy.encode(["red", "red"]), taken.x, plan.grid, 2, plan.timesteps)
    a, after = plan.grid[2:4].double()
    std = ((1 - after) / (1 - a) * (1 - a / after)).sqrt()
    x0 = (taken.x - (1 - a).sqrt() * noise) / a.sqrt()
    mean = after.sqrt() * x0 + (1 - after - std**2).sqrt() * noise
    density = torch.distributions.Normal(mean, std).log_prob(taken.x_next.double()).mean((1, 2, 3))
    torch.testing.assert_close(taken.old.logp[:, 0].double(), density, rtol=0, atol=1e-5)


# --- methods ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flow, vp", [(FlowDDIM(0.7), DDIM(0.7)), (CPS(0.7), VPCPS(0.7))])
def test_ddim_and_cps_have_a_form_in_either_process(flow, vp):
    flow, vp = Method().having(kernel=flow), Method().having(kernel=vp)
    assert flow.on("vp") == vp.on("vp") == vp and flow.on("flow") == vp.on("flow") == flow
    assert preset("mix_grpo_flash").on("flow") == preset("mix_grpo_flash")


@pytest.mark.parametrize("method, cure", [
    (Method().having(kernel=FlowSDE(0.7)), "kernel: {type: FlowDDIM, eta: 1.0}"),
    (Method().having(kernel=DanceSDE(0.3), solver=DPMSolver2M()),
     "kernel: {type: FlowDDIM, eta: 1.0}, solver: {type: Euler}"),
    (preset("ddpo").having(tail=0.4), "tail: 1.0"),
    (preset("ddpo").having(strides=(1, 2)), "strides: [1]"),
    (preset("ddpo").having(step_weight=InverseDelta()), "step_weight: {type: Uniform}")])
def test_what_a_user_sets_of_flows_alone_is_refused_with_its_cure(method, cure):
    told = message(method.on, "vp", given=FOR_VP)
    assert told.endswith(f"leave it out, or set parts: {{{cure}}}")
    assert all(f"{key} {method.parts()[key]}" in told for key in ("kernel", "tail") if f"{key}: " in cure)
    cures = yaml.safe_load(f"{{{cure}}}")
    assert with_parts(method, cures).on("vp", given=cures) == method.on("vp"), "what the method itself has is replaced"


@pytest.mark.parametrize("name", ["mix_grpo_flash+grpo_guard", "granular_grpo", "flow_grpo", "dance_grpo"])
def test_a_method_of_flows_takes_ddim_and_says_so(name):
    settings = tiny.config(method=name, train__steps=11, train__group=16)
    method = resolve(settings, "vp")
    assert method.rollout.kernel == DDIM(1.0)
    told = describe_substitutes(settings, method)
    assert "kernel FlowSDE" in told or "kernel DanceSDE" in told
    assert describe_substitutes(settings, resolve(settings, "flow")) is None
    assert describe_substitutes(tiny.config(method="ddpo"), resolve(tiny.config(method="ddpo"), "vp")) is None


# --- check -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stock", [PNDM, DDIM_V, DDIM_X0, LCM])
def test_check_drives_them(stock, tmp_path):
    told = report.report(str(tiny.save(tiny.sd15(stock), tmp_path / "sd15")))
    assert told["supported"], told["reason"]
    assert told == told | {"pipeline": "StableDiffusionPipeline", "scheduler": type(stock).__name__,
                           "prediction": prediction(stock), "denoisers": ["unet"], "latent_shape": [4, 8, 8],
                           "sample_shape": [3, 16, 16], "guidance": "one batch of twice the rows",
                           "replay_error": 0.0, "first_log_ratio": 0.0}
    assert told["lora_grad"] > 0 and told["parameters"] < 50_000


def test_check_tells_of_guidance_that_is_embedded():
    told = report.report("LatentConsistencyModelPipeline")
    assert told["supported"], told["reason"]
    assert told["guidance"] == "embedded: one evaluation per step" and told["prediction"] == "consistency"
