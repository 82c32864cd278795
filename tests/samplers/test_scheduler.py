"""PolicyScheduler on a stock pipeline: the stock latents without noise, exact records with it."""

import inspect

import pytest
import torch
from diffusers import CogVideoXDPMScheduler, FlowMatchEulerDiscreteScheduler, LCMScheduler, UniPCMultistepScheduler

from flowgrpo.samplers import grids
from flowgrpo.samplers.kernels import CPS, DanceSDE, DPMSolver2M, Euler, FlowSDE, predict_x0
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment, noise_like
from tests.helpers import tiny
from tests.helpers.tables import stock

STEPS = 5
PROMPTS = ["red", "blue"]


@pytest.fixture(scope="module")
def pipe():
    return tiny.sd3()


def drawn_by() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (11, 12)]


def latents(pipe, scheduler=None, steps: int = STEPS, guidance: float = 1.0, seed: int = 3, **options) -> torch.Tensor:
    stock, pipe.scheduler = pipe.scheduler, scheduler or pipe.scheduler
    try:
        return pipe(PROMPTS, num_inference_steps=steps, guidance_scale=guidance, output_type="latent", **tiny.CALL,
                    generator=torch.Generator().manual_seed(seed), return_dict=False, **options)[0]
    finally:
        pipe.scheduler = stock


def following(task: Segment, stock=None, x0: torch.Tensor | None = None, steps: int = 1, **asked):
    """A policy scheduler that follows a task, by default of a flow, and its record."""
    policy = PolicyScheduler.over(stock or FlowMatchEulerDiscreteScheduler())
    record = policy.follow(task, x0)
    policy.set_timesteps(steps, **asked)
    return policy, record


class Toy:
    """Drives a scheduler by hand with a velocity that depends on the state, without a pipeline."""

    def __init__(self, task: Segment, dtype: torch.dtype = torch.float32):
        self.scheduler, self.record = following(task, steps=99)
        self.x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.states, self.velocities = [self.x], []
        for t in self.scheduler.timesteps:
            self.velocities.append(torch.sin(3 * self.states[-1]) - 0.2)
            self.states.append(self.scheduler.step(self.velocities[-1], t, self.states[-1], return_dict=False)[0])


@pytest.mark.parametrize("guidance, steps", [(1.0, STEPS), (4.0, STEPS), (1.0, 2)])
def test_without_noise_it_gives_the_stock_pipelines_latents_whatever_steps_its_call_has(pipe, guidance, steps):
    scheduler = PolicyScheduler.over(pipe.scheduler)
    scheduler.follow(Segment(stock(pipe.scheduler, STEPS), range(STEPS)))
    torch.testing.assert_close(latents(pipe, scheduler, steps, guidance), latents(pipe, guidance=guidance),
                               rtol=0, atol=1e-5)


def test_it_is_of_the_stock_class_and_keeps_its_configuration():
    stock = FlowMatchEulerDiscreteScheduler(shift=2.5, num_train_timesteps=500, base_shift=0.7)
    policy = PolicyScheduler.over(stock)
    assert isinstance(policy, FlowMatchEulerDiscreteScheduler) and isinstance(policy, PolicyScheduler)
    public = [{key: value for key, value in scheduler.config.items() if not key.startswith("_")}
              for scheduler in (stock, policy)]
    assert public[0] == public[1] and public[1]["shift"] == 2.5
    assert {"timesteps", "sigmas", "mu"} <= set(inspect.signature(policy.set_timesteps).parameters)
    assert type(stock) is FlowMatchEulerDiscreteScheduler  # the original is left as it was


def test_timesteps_are_the_sigmas_of_the_segment_in_the_schedulers_unit():
    task = Segment(torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0]), range(1, 3))
    stock = FlowMatchEulerDiscreteScheduler(num_train_timesteps=500)
    policy, _ = following(task, stock, steps=99, device="cpu", sigmas=[1.0], mu=0.3)
    assert policy.timesteps.tolist() == [400.0, 250.0] and policy.num_inference_steps == 2
    assert policy.timesteps.dtype == torch.float32


def test_an_object_is_returned_where_it_is_asked_for():
    policy, _ = following(Segment(torch.tensor([1.0, 0.5, 0.0]), range(2)), steps=2)
    x, v = torch.ones(1, 2), torch.full((1, 2), 0.5)
    assert policy.step(v, policy.timesteps[0], x).prev_sample.tolist() == [[0.75, 0.75]]
    assert policy.step(v, policy.timesteps[1], x, return_dict=False)[0].tolist() == [[0.75, 0.75]]


@pytest.mark.parametrize("stock, behind", [(LCMScheduler(clip_sample=False), ()),
                                           (CogVideoXDPMScheduler(clip_sample=False), (None, None))])
def test_steps_of_two_values_give_the_next_state_twice(stock, behind):
    """behind: what the class's `step` takes before and after the timestep, beside the state."""
    task = Segment(torch.tensor([0.36, 0.64, 1.0]), range(1), timesteps=torch.tensor([999, 499]))
    policy, _ = following(task, stock)
    x, noise = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    arguments = (*behind[:1], policy.timesteps[0], *behind[1:], x)
    after, again = policy.step(noise, *arguments, return_dict=False)
    # What is left of c_skip at timestep 999 is below 1e-8.
    torch.testing.assert_close(after, 0.8 * (x - 0.8 * noise) / 0.6 + 0.6 * noise, rtol=0, atol=1e-5)
    assert again is after


def test_a_pipeline_that_needs_a_step_gets_an_idle_one():
    policy, record = following(Segment(torch.zeros(1), range(0)), LCMScheduler(clip_sample=False), steps=3)
    assert policy.timesteps.tolist() == [0] and policy.num_inference_steps == 1
    x = torch.ones(1, 2)
    assert all(value is x for value in policy.step(torch.zeros(1, 2), policy.timesteps[0], x, return_dict=False))
    assert not record.x and record.x0 is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.8)])
def test_stochastic_steps_are_recorded_as_the_network_sees_them(kernel, dtype):
    grid = grids.shift_grid(STEPS, 3.0)
    both = frozenset({1, 2})
    toy = Toy(Segment(grid, range(STEPS), kernel, stochastic=both, recorded=both, generators=drawn_by()), dtype)
    generators = drawn_by()
    assert set(toy.record.x) == set(toy.record.x_next) == set(toy.record.logp) == {1, 2}
    for i in (1, 2):
        x, v = toy.states[i], toy.velocities[i]
        transition = kernel(x, v, grid, i)
        drawn = (transition.mean + transition.std.float() * noise_like(x, generators)).to(dtype)
        assert toy.record.x[i] is x and toy.record.x_next[i] is toy.states[i + 1]
        assert toy.states[i + 1].dtype == dtype and torch.equal(toy.states[i + 1], drawn)
        density = torch.distributions.Normal(transition.mean.double(), transition.std.double()).log_prob(drawn.double())
        torch.testing.assert_close(toy.record.logp[i].double(), density.mean((1, 2)), rtol=0, atol=2e-6)
        assert toy.record.logp[i].dtype == torch.float32
    assert toy.record.x[2] is toy.record.x_next[1]


def test_steps_that_draw_noise_need_not_be_recorded():
    toy = Toy(Segment(grids.shift_grid(STEPS, 3.0), range(STEPS), DanceSDE(), stochastic=frozenset({0, 1, 2}),
                      recorded=frozenset({1}), generators=drawn_by()))
    assert set(toy.record.x) == set(toy.record.transition) == {1}
    assert not torch.equal(toy.states[1], Euler()(toy.states[0], toy.velocities[0], toy.scheduler.task.grid, 0, None))


def test_the_other_solver_works_after_the_window_only():
    grid, window = grids.shift_grid(7, 3.0), frozenset({2, 3})
    toy = Toy(Segment(grid, range(7), FlowSDE(), DPMSolver2M(), window, window, drawn_by()))
    for i in (0, 1):
        assert torch.equal(toy.states[i + 1], Euler()(toy.states[i], toy.velocities[i], grid, i, None).float())
    for i in (4, 5, 6):  # the first of them remembers what the window's last step predicted
        previous = predict_x0(toy.states[i - 1], toy.velocities[i - 1], grid[i - 1])
        expected = DPMSolver2M()(toy.states[i], toy.velocities[i], grid, i, previous)
        torch.testing.assert_close(toy.states[i + 1], expected.float(), rtol=0, atol=1e-6)
        euler = Euler()(toy.states[i], toy.velocities[i], grid, i, None)
        assert i == 6 or not torch.allclose(toy.states[i + 1], euler.float(), atol=1e-4)
    torch.testing.assert_close(toy.states[7], predict_x0(toy.states[6], toy.velocities[6], grid[6]).float())


def test_a_segment_may_bring_the_solvers_memory():
    grid, window = grids.shift_grid(6, 3.0), frozenset({0})
    whole = Toy(Segment(grid, range(6), FlowSDE(), DPMSolver2M(), window, window, drawn_by()))
    memory = predict_x0(whole.states[2], whole.velocities[2], grid[2])
    policy, _ = following(Segment(grid, range(3, 4), FlowSDE(), DPMSolver2M(), window, window, drawn_by()), x0=memory)
    assert torch.equal(policy.step(whole.velocities[3], None, whole.states[3], return_dict=False)[0], whole.states[4])


def test_a_replay_hands_back_the_output_with_its_graph_and_leaves_the_state():
    policy, record = following(Segment(torch.tensor([1.0, 0.5, 0.0]), range(1), replay=True))
    x, v = torch.ones(1, 2), torch.ones(1, 2, requires_grad=True)
    out = policy.step(v * 2, policy.timesteps[0], x, return_dict=False)[0]
    assert out is x and record.output.requires_grad and not record.logp


@pytest.mark.parametrize("stock, place", [(FlowMatchEulerDiscreteScheduler(), "meta"),
                                          (UniPCMultistepScheduler(prediction_type="flow_prediction",
                                                                   use_flow_sigmas=True), "cpu")])
def test_sigmas_are_where_the_stock_class_has_them(stock, place):
    scheduler, _ = following(Segment(torch.tensor([0.9, 0.5, 0.0]), range(2)), stock, steps=2, device="meta")
    stock.set_timesteps(2, device="meta")
    assert scheduler.sigmas.device.type == stock.sigmas.device.type == place
    assert scheduler.timesteps.device.type == "meta"
