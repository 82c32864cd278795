"""What is special to video pipelines: experts, frames, images to start from, signs and order of time, sound."""

from functools import cache

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor

from flowgrpo import gaussian, types
from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment
from flowgrpo.tools.check.tiny import videos
from tests.helpers import tiny

GRID = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0], dtype=torch.float64)


@cache
def policy_of(name: str) -> PipelinePolicy:
    """A tiny pipeline whose LoRA is not at its start."""
    pipe, call = videos.FACTORIES[name](0)
    policy, generator = PipelinePolicy(pipe, Adapter(rank=2), call=call), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


@cache
def encoded(name: str):
    return policy_of(name).encode(["red", "blue"])


def rollout(name: str, steps: tuple[int, ...], grid=GRID):
    """Two samples each of two prompts, with noise in the trained `steps`."""
    plan = RolloutSpec(grid, Schedule(steps, steps), FlowSDE(0.7), Euler(), 2, roots=2, keep_means=True)
    [part] = explore(policy_of(name), encoded(name), [plan], 4, seeder(0, 0))
    return part


# --- experts ---------------------------------------------------------------------------------------------------------
def test_both_experts_have_a_lora_and_a_replayed_step_goes_through_that_of_the_rollout():
    policy = policy_of("WanPipeline (2.2)")
    encoded("WanPipeline (2.2)")
    called: list[str] = []
    hooks = [module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
             for name, module in policy.denoisers.items()]
    part = rollout("WanPipeline (2.2)", (0, 1, 2, 3))
    experts = ["transformer", "transformer", "transformer_2", "transformer_2"]  # from 0.875 down
    assert called == experts
    called.clear()
    for k, rows, new in replay(policy, encoded("WanPipeline (2.2)"), part, 4):
        expert = experts[k]
        assert called == [expert]
        called.clear()
        assert (new.logp - part.transitions[k].old.logp[rows]).abs().max() <= 1e-6
        new.logp.sum().backward()
        assert {key.split(".")[0] for key, p in policy.weights.named.items() if p.grad is not None} == {expert}
        for parameter in policy.weights.parameters():
            parameter.grad = None
    for hook in hooks:
        hook.remove()
    named = policy_of("WanPipeline (2.2)").weights.named
    sizes = [sum(p.numel() for key, p in named.items() if key.startswith(f"{name}."))
             for name in ("transformer", "transformer_2")]
    assert sizes[0] == sizes[1] == 2 * 8 * 2 * 2 * 24  # blocks, layers, A and B, rank, width


# --- frames ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, frames, size", [
    ("WanPipeline", 5, 16), ("CogVideoXPipeline", 9, 16), ("MochiPipeline", 7, 32), ("LattePipeline", 5, 16),
    ("HunyuanVideoImageToVideoPipeline", 5, 16),  # 9, of which the pipeline cuts off 4
    ("LTX2Pipeline", 5, 32)])
def test_decoding_gives_all_frames(name, frames, size):
    policy = policy_of(name)
    noise, _ = policy.run(Segment(torch.ones(1), range(0)), encoded(name), None, policy.generators([1, 2]))
    seen = policy.decode(noise, encoded(name))
    assert seen.shape == (2, frames, 3, size, size) and seen.dtype == torch.float32
    assert seen.min() >= 0 and seen.max() <= 1 and seen.std() > 0.01
    assert (seen[:, 0] - seen[:, -1]).abs().max() > 0.01 and (seen[0] - seen[1]).abs().max() > 0.01


# --- signs and the order of time -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, guidance", [
    ("MochiPipeline", 4.0),  # time runs from 0 to 1, and the velocity points to the data
    ("LTXConditionPipeline", 4.0),  # hands its scheduler the negative velocity
    ("LTX2Pipeline", 4.0),  # two states; guidance on the predicted data
    ("WanPipeline (2.2)", 4.0),
    ("HunyuanVideoImageToVideoPipeline", 1.0),  # mixes its image into the state at every call
    ("HunyuanVideoImageToVideoPipeline (token_replace)", 1.0)])  # shows its scheduler all frames but the first
def test_without_noise_the_frames_are_those_of_the_stock_pipeline(name, guidance):
    pipe, call = videos.FACTORIES[name](0)
    if name.startswith("Wan"):
        pipe.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    if name == "LTXConditionPipeline":
        call.pop("image")
    scale = {"true_cfg_scale" if "Hunyuan" in name else "guidance_scale": guidance}
    frames = pipe(prompt="red", num_inference_steps=4, output_type="pt", return_dict=False,
                  generator=torch.Generator().manual_seed(1), **call, **scale)[0]
    grid = pipe.scheduler.sigmas.double()
    grid = 1 - grid if pipe.scheduler.config.invert_sigmas else grid
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=call, guidance=guidance)
    conditioning = policy.encode(["red"])
    middle, _ = policy.run(Segment(grid, range(2)), conditioning, None, policy.generators([1]))
    final, _ = policy.run(Segment(grid, range(2, 4)), conditioning, middle)
    torch.testing.assert_close(policy.decode(final, conditioning), frames, rtol=0, atol=1e-4)


def test_inverted_sigmas_by_hand():
    scheduler = PolicyScheduler.over(FlowMatchEulerDiscreteScheduler(invert_sigmas=True))
    scheduler.follow(Segment(torch.tensor([1.0, 0.75, 0.25, 0.0]), range(1, 3)))
    scheduler.set_timesteps(2)
    assert scheduler.timesteps.tolist() == [250.0, 750.0] and scheduler.sigmas.tolist() == [0.25, 0.75, 1.0]
    # At 0.75 the velocity noise - data is -2, so 0.5 down: x + 1. At 0.25 it is -4, and 0.25 down: x + 1.
    x = torch.ones(1, 1)
    for output, expected in ((2.0, 2.0), (4.0, 3.0)):
        x, *_ = scheduler.step(torch.full((1, 1), output), None, x, return_dict=False)
        assert x.item() == expected
    # At time 250, three quarters of the state are noise.
    assert scheduler.add_noise(torch.tensor([8.0]), torch.tensor([4.0]), torch.tensor(250.0)).item() == 5.0


# --- images and videos to start from -------------------------------------------------------------------------------
def test_a_video_is_where_the_trajectory_starts():
    name = "WanVideoToVideoPipeline"
    policy, call = policy_of(name), videos.FACTORIES[name](0)[1]
    vae = policy.pipe.vae
    grid, _ = make_grid("shifted", 5, 3.0, policy.stock, policy.strength)
    assert policy.strength == 0.8 and len(grid) == 5  # one of five steps is left out
    noised, _ = policy.run(Segment(grid, range(0)), encoded(name), None, policy.generators([1, 2]))
    frames = policy.pipe.video_processor.preprocess_video(call["video"], height=16, width=16)
    with torch.no_grad():
        data = (vae.encode(frames).latent_dist.mode() - 0.1) / 1.5  # the mean and deviation that its config names
    noise = randn_tensor(noised.shape, generator=policy.generators([1, 2]))
    sigma = grid[0].float()
    torch.testing.assert_close(noised, (1 - sigma) * data + sigma * noise, rtol=0, atol=1e-5)


def test_strengths_that_leave_too_little():
    with pytest.raises(UserError, match="a strength of 0.1 leaves none of 5 steps"):
        make_grid("shifted", 5, 3.0, FlowMatchEulerDiscreteScheduler(), 0.1)
    with pytest.raises(UserError, match="^a strength of 0.8 leaves 4 of 6 steps: Sliding: a window of 4 from step 0"):
        tiny.trainer(policy_of("WanVideoToVideoPipeline"), method="mix_grpo", train__steps=6)


@pytest.mark.parametrize("name", ["HunyuanVideoImageToVideoPipeline (token_replace)", "LTXImageToVideoPipeline"])
def test_an_idle_step_costs_no_evaluation(name):
    policy, conditioning = policy_of(name), encoded(name)
    policy.guidance = 1.0
    assert policy.driver.loads
    before = policy.evaluations
    state, _ = policy.run(Segment(GRID, range(2)), conditioning, None, policy.generators([1, 2]))
    assert policy.evaluations - before == 2 * 2
    policy.decode(state, conditioning)
    policy.replay(conditioning, state, GRID, 2)
    assert policy.evaluations - before == 2 * 3


def test_the_first_frame_is_no_part_of_the_state():
    policy = policy_of("LTXImageToVideoPipeline")
    state, _ = policy.run(Segment(GRID, range(1)), encoded("LTXImageToVideoPipeline"), None, policy.generators([1, 2]))
    assert state.shape == (2, 8, 2, 16, 16)  # of three latent frames the last two
    frames = [policy.decode(x, encoded("LTXImageToVideoPipeline")) for x in (state, torch.zeros_like(state))]
    assert (frames[0] - frames[1]).abs().max() > 0.01


# --- sound -----------------------------------------------------------------------------------------------------------
def test_sound_is_a_part_of_the_state():
    name, policy = "LTX2Pipeline", policy_of("LTX2Pipeline")
    pictures, sound = 4 * 3 * 16 * 16, 2 * 5 * 2  # channels x frames x height x width, channels x length x pitch
    part = rollout(name, (1, 2))
    assert part.finals[0].shape == (4, pictures + sound)
    for k, rows, new in replay(policy, encoded(name), part, 4):
        taken = part.transitions[k]
        torch.testing.assert_close(new.mean.detach(), taken.old.mean, rtol=0, atol=1e-6)
        assert (new.logp - taken.old.logp).abs().max() <= 1e-6
        deviation = (taken.x_next - taken.old.mean[:, 0]) / taken.old.std
        assert deviation[:, :pictures].std() > 0.9 and deviation[:, pictures:].std() > 0.5
        both = torch.distributions.Normal(taken.old.mean[:, 0].double(), taken.old.std.double()).log_prob(taken.x_next)
        torch.testing.assert_close(taken.old.logp[:, 0], both.mean(1).float(), rtol=0, atol=1e-5)
        torch.testing.assert_close(gaussian.log_prob(types.Gaussian(new.mean[:, 0], new.std), taken.x_next),
                                   new.logp[:, 0], rtol=0, atol=1e-6)
        new.logp.sum().backward()
    reached = {key for key, p in policy.weights.named.items() if p.grad is not None and p.grad.abs().max() > 0}
    assert any(".audio_attn1." in key for key in reached) and any(".attn1." in key for key in reached)
    for parameter in policy.weights.parameters():
        parameter.grad = None
