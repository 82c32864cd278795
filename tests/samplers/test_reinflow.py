"""Noise learned beside the flow: its bounds, the joint density of a chain, what is trained, and what is kept of it."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal

from flowgrpo.gaussian import log_prob
from flowgrpo.methods import preset
from flowgrpo.methods.targets import JointDensity
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers import joint_density
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.joint_density import JointTransitions
from flowgrpo.samplers.kernels import LearnedNoise, NoiseNet, Noisy
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.tables import close, draw, f64

GRID = f64([1.0, 0.8, 0.5, 0.3, 0.0])


def network(seed: int = 0, scale: float = 0.5) -> NoiseNet:
    """One that has left its start."""
    torch.manual_seed(seed)
    made = NoiseNet(8).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, dtype=torch.float64))
    return made


def trainer(method: str = "reinflow", **options):
    made = tiny.trainer(method=method, **{"train__lr": 1e-3} | options)
    tiny.stir(made.policy)
    return made


@pytest.mark.parametrize("scale", [0.5, 100.0])
def test_the_step_is_eulers_with_a_level_of_noise_between_the_bounds(scale):
    x, v = 4 * draw(3, 2, 5), draw(3, 2, 5, seed=1)
    kernel = Noisy(network(scale=scale), 0.2, 0.48)
    for i, (now, after) in enumerate(zip(GRID.tolist(), GRID.tolist()[1:])):
        found = kernel(x, v, GRID, i)
        close(found.mean, (x - (now - after) * v).tolist())
        level = found.std / (now - after) ** 0.5
        assert level.shape == x.shape and level.min() >= 0.2 - 1e-12 and level.max() <= 0.48 + 1e-12
        assert scale > 1 or level.max() - level.min() > 0.02  # it differs from value to value
        raw = kernel.network(x, torch.tensor(now, dtype=torch.float64))
        close(level, (0.2 ** (1 - raw) * 0.48 ** raw).tolist())


def test_it_starts_between_its_bounds_everywhere():
    kernel, x, v = LearnedNoise(0.2, 0.48), draw(2, 3), draw(2, 3, seed=1)
    expected = math.sqrt(0.2 * 0.48) * math.sqrt(0.3)
    close(kernel(x, v, GRID, 1).std, [[expected] * 3] * 2)
    close(Noisy(kernel.network().double(), kernel.low, kernel.high)(x, v, GRID, 1).std, [[expected] * 3] * 2)


def test_the_upper_bound_holds_and_then_falls_along_a_cosine():
    kernel = LearnedNoise(0.1, 0.2, hold=0.4, decay=0.5)
    assert [kernel.upper(epoch, 10) for epoch in range(5)] == [0.2] * 5
    assert kernel.upper(7, 10) == pytest.approx(0.175)  # half-way between 0.2 and 0.15
    assert kernel.upper(10, 10) == pytest.approx(0.15) and kernel.upper(6, 10) > kernel.upper(8, 10)
    assert LearnedNoise(0.1, 0.2, decay=1.0).upper(9, 10) == 0.2


def test_the_joint_density_is_that_of_torch_distributions():
    """Of three steps with learned noise: the sum over all values, over their number and that of the terms."""
    kernel, states = Noisy(network(), 0.2, 0.48), [draw(2, 3, 4, seed=seed) for seed in range(4)]
    outputs = [draw(2, 3, 4, seed=10 + seed) for seed in range(3)]
    steps = [log_prob(kernel(x, v, GRID, i), x_next)
             for i, (x, v, x_next) in enumerate(zip(states, outputs, states[1:]))]
    total = Normal(0.0, 1.0).log_prob(states[0]).sum((1, 2))
    for i, (x, v, x_next) in enumerate(zip(states, outputs, states[1:])):
        delta = (GRID[i] - GRID[i + 1]).item()
        raw = kernel.network(x, GRID[i])
        deviation = 0.2 * (0.48 / 0.2) ** raw * math.sqrt(delta)
        total = total + Normal(x - delta * v, deviation).log_prob(x_next).sum((1, 2))
    close(joint_density.log_prob(states[0], steps).detach(), (total / (4 * 12)).tolist())
    close(joint_density.log_prob(None, [f64([1.0, 2.0]), f64([3.0, 5.0])]), [2.0, 3.5])


def test_the_gradient_of_the_density_reaches_network_and_flow():
    """d log N / d log sigma = z^2 - 1, and d log N / d v = -D z / sigma, by hand for one value."""
    net = network()
    kernel, v = Noisy(net, 0.2, 0.48), f64([[0.7]]).requires_grad_()
    x, x_next = f64([[0.3]]), f64([[0.1]])
    found = kernel(x, v, GRID, 0)
    log_prob(found, x_next).sum().backward()
    z = ((x_next - found.mean) / found.std).detach()
    close(v.grad, (-0.2 * z / found.std.detach()).tolist())
    raw = net(x, GRID[0]).detach()
    # log sigma is log(high/low) raw + ..., and raw = (tanh(b) + 1) / 2 has the derivative 2 raw (1 - raw).
    close(net.level.bias.grad, ((z.square() - 1) * math.log(0.48 / 0.2) * 2 * raw * (1 - raw)).flatten().tolist())


def test_a_sample_is_one_decision_and_its_first_ratio_is_one():
    made = trainer()
    parts, conditioning, _ = sampling.sample(made, made.prompts[:2])
    for part in parts:
        [chain] = part.transitions
        assert isinstance(chain, JointTransitions) and [link.step for link in chain.links] == [0, 1, 2, 3, 4]
        assert chain.old.logp.shape == (len(part.prompts), 1)
        terms = [Normal(0.0, 1.0).log_prob(chain.x).mean((1, 2, 3)), *(link.old.logp[:, 0] for link in chain.links)]
        torch.testing.assert_close(chain.old.logp[:, 0], torch.stack(terms).mean(0), rtol=0, atol=1e-6)
        for _, rows, new in made.rollouts.replay(part, conditioning):
            assert (new.logp - chain.old.logp[rows]).abs().max() <= 1e-6


def test_the_network_is_left_out_at_inference_and_of_the_lora(tmp_path):
    made = trainer()
    conditioning = made.policy.encode(["red"])
    def picture() -> torch.Tensor:
        return made.policy.generate(conditioning, made.policy.generators([1]), 3, 1.0)
    before = picture()
    with torch.no_grad():
        for parameter in made.rollouts.network.parameters():
            parameter += 1.0
    assert torch.equal(picture(), before)
    made.policy.weights.save(tmp_path)
    assert [key for key in load_file(tmp_path / LORA_FILE) if not key.startswith("transformer.")] == []
    stock = tiny.sd3()
    stock.load_lora_weights(tmp_path)
    found = stock("red", num_inference_steps=3, guidance_scale=1.0, output_type="pt",
                  generator=made.policy.generators([1]), **tiny.CALL).images
    torch.testing.assert_close(found, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 0])
def test_the_base_has_the_noise_that_the_run_began_with(rank):
    made = tiny.trainer(method="reinflow", adapter__rank=rank)
    kept = made.policy.weights.snapshot()
    with torch.no_grad():
        for parameter in made.policy.weights.parameters():
            parameter += 1.0
    moved = made.policy.weights.snapshot()
    with made.policy.reference():
        inside = made.policy.weights.snapshot()
    assert all(torch.equal(inside[key], kept[key]) for key in kept if rank == 0 or key.startswith("noise."))
    assert all(torch.equal(value, moved[key]) for key, value in made.policy.weights.snapshot().items())


def test_the_bounds_of_an_epoch_are_those_of_its_rollout():
    made = trainer(train__epochs=4, parts__kernel__hold=0.0)
    uppers = [made.rollouts.explorations(epoch)[0].kernel.high for epoch in range(4)]
    assert uppers == [LearnedNoise(hold=0.0).upper(epoch, 4) for epoch in range(4)] and uppers[0] > uppers[3]


def test_rows_that_are_left_out_leave_their_chains():
    made = trainer()
    parts, _, _ = sampling.sample(made, made.prompts[:1])
    [chain] = parts[0].transitions
    kept = chain.select(torch.tensor([True, False, True, False]))
    assert all(torch.equal(one.x, two.x[[0, 2]]) for one, two in zip(kept.links, chain.links))
    assert torch.equal(kept.old.logp, chain.old.logp[[0, 2]]) and kept.parent.tolist() == [0, 1]
    assert chain.select(torch.zeros(4, dtype=torch.bool)) is None


def test_steps_may_stay_decisions_of_their_own():
    made = trainer("mix_grpo", parts__kernel__type="LearnedNoise", parts__plan__size=2)
    found = made.run_epoch()
    assert found["log_ratio_max"] <= 1e-6 and made.optimization.skipped == 0
    assert all(p.grad is not None for p in made.rollouts.network.parameters())


def test_what_the_paper_has():
    method = preset("reinflow")
    assert method.target == JointDensity() and not method.reads_means
    grid = shift_grid(4, 1.0)
    x = torch.zeros(1, 1)
    found = [LearnedNoise(level, level)(x, x, grid, 0).std.item() for level in (0.2, 0.48)]
    assert found == pytest.approx([0.10, 0.24])
