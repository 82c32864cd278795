"""Reward backpropagation: what is in the graph, its gradient, and the runs of refl, draft and alignprop."""

import re
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import preset
from flowgrpo.objectives.surrogates import RewardAscent
from flowgrpo.policies.weights.checkpointing import recompute_forwards
from flowgrpo.run import run
from flowgrpo.samplers import reward_gradient
from flowgrpo.samplers.kernels import Euler, FlowDDIM
from flowgrpo.samplers.plans import LastSteps, LateStep, RandomLast
from flowgrpo.samplers.reward_gradient import OneStep, Unroll
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import PolicyScheduler
from tests.helpers import tiny
from tests.helpers.refusals import message
from tests.helpers.tables import close, draw, f64, near
from tests.test_train import align

PRESETS = ("refl", "draft", "alignprop")
GRID = f64([1.0, 0.8, 0.55, 0.3, 0.0])
STEPS, SIZE, GROUP = 4, 3, 4


class Matrices:
    """A policy in float64 whose velocity at step i is `weight[i] @ x`: every step has weights of its own."""

    device = states = torch.device("cpu")

    def __init__(self):
        self.weight = (draw(STEPS, SIZE, SIZE) / 2).requires_grad_()
        self.scheduler = PolicyScheduler.over(FlowMatchEulerDiscreteScheduler())

    def run(self, task, conditioning, x=None, generators=None, x0=None):
        if x is None:
            x = torch.stack([torch.randn(SIZE, dtype=torch.float64, generator=each) for each in generators])
        record = self.scheduler.follow(task)
        self.scheduler.set_timesteps()
        for i in task.steps:
            x = self.scheduler.step(x @ self.weight[i].T, None, x).prev_sample
        return x, record

    def unroll(self, task, conditioning, latents, checkpointing=False):
        return self.run(replace(task, unrolled=True), conditioning, latents)[0]

    def replay(self, conditioning, x, grid, step, timesteps=None):
        return x @ self.weight[step].T

    def image(self, latents, conditioning):
        return latents

    def sampling(self):
        return torch.no_grad()

    @staticmethod
    def generators(seeds):
        return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


class Two:
    """The conditioning of two prompts."""

    prompts = ["one", "two"]

    def rows(self, rows):
        return self


AIM = draw(2, SIZE, seed=3)


def value(rows, pictures):
    """A reward that is not linear, of a goal of its own for each prompt."""
    return -(pictures - AIM[rows]).square().sum(1)


def exploration(plan, eta: float = 0.0) -> RolloutSpec:
    return RolloutSpec(GRID, plan(STEPS, 0, 0), FlowDDIM(eta), Euler(), GROUP, GROUP)


def sampled(plan, ending, eta: float = 0.0, policy=None, micro_batch: int = 2):
    """(policy, its one part with rewards) of the toy."""
    policy = policy or Matrices()
    [*parts] = reward_gradient.explore(policy, Two(), exploration(plan, eta), ending, micro_batch, seeder(0, 0))
    return policy, [reward_gradient.score_images(part, part.finals[0], value, policy.device,
                                                 micro_batch) for part in parts]


def rewards(policy, parts, ending, micro_batch: int = 2) -> torch.Tensor:
    """The rewards of a replay, [B]."""
    found = [new for part in parts for _, _, new in reward_gradient.replay(policy, Two(), part, ending, micro_batch)]
    assert all(new.mask.all() for new in found)
    return torch.cat([new.logp[:, 0] for new in found])


def gradient(policy, parts, ending) -> torch.Tensor:
    policy.weight.grad = None
    rewards(policy, parts, ending).sum().backward()
    return policy.weight.grad


@pytest.mark.parametrize("ending", [OneStep(), Unroll(), Unroll(checkpointing=True)])
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_replay_sees_the_rollouts_rewards(ending, eta, count):
    policy, parts = sampled(LastSteps(count), ending, eta)
    assert [part.groups for part in parts] == [range(1), range(1, 2)]
    old = torch.cat([part.transitions[0].old.logp[:, 0] for part in parts])
    assert old.isfinite().all() and torch.equal(rewards(policy, parts, ending).detach(), old)


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_before_the_truncation_has_a_gradient(count, eta):
    policy, parts = sampled(LastSteps(count), Unroll(), eta)
    found = gradient(policy, parts, Unroll())
    assert (found[:-count] == 0).all() and (found[-count:].abs().amax((1, 2)) > 1e-3).all()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_gradient_of_the_last_steps_is_that_of_their_product(count):
    """Deterministic steps x - D W x, written out; with count = T it is the gradient of the whole rollout."""
    policy, parts = sampled(LastSteps(count), Unroll())
    weight, total = policy.weight.detach().clone().requires_grad_(), 0.0
    for p, part in enumerate(parts):
        x = part.transitions[0].x
        for i in range(STEPS - count, STEPS):
            x = x - (GRID[i] - GRID[i + 1]) * x @ weight[i].T
        total = total - (x - AIM[p]).square().sum()
    total.backward()
    torch.testing.assert_close(gradient(policy, parts, Unroll()), weight.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_whole_gradient_is_that_of_finite_differences(eta):
    """Of rollouts from their initial noise, in which every step draws the same noise as before."""
    policy, parts = sampled(LastSteps(STEPS), Unroll(), eta)
    found, shift = gradient(policy, parts, Unroll()), 1e-5
    def rollout(weight) -> float:
        other = Matrices()
        other.weight = weight
        _, again = sampled(LastSteps(1), Unroll(), eta, other)  # its graph is short, its rollout the same
        return sum(part.transitions[0].old.logp.sum().item() for part in again)
    for at in [(0, 0, 1), (1, 2, 0), (2, 1, 1), (3, 0, 2)]:
        both = []
        for sign in (1, -1):
            weight = policy.weight.detach().clone()
            weight[at] += sign * shift
            both.append(rollout(weight))
        assert found[at].item() == pytest.approx((both[0] - both[1]) / (2 * shift), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("step", range(STEPS))
def test_one_step_ends_with_the_data_that_it_predicts_and_trains_that_step_alone(step):
    policy, parts = sampled(LastSteps(STEPS - step), OneStep())
    found = gradient(policy, parts, OneStep())
    assert found[step].abs().max() > 1e-3 and (found[torch.arange(STEPS) != step] == 0).all()
    for p, part in enumerate(parts):
        x = part.transitions[0].x
        x0 = x - GRID[step] * x @ policy.weight[step].detach().T
        torch.testing.assert_close(part.finals[0], x0, rtol=0, atol=1e-10)
        torch.testing.assert_close(part.transitions[0].old.logp[:, 0], -(x0 - AIM[p]).square().sum(1), rtol=0,
                                   atol=1e-10)


def test_every_sample_has_its_noise_whatever_the_batch_and_the_rows_kept():
    policy, parts = sampled(LastSteps(3), Unroll(), 1.0)
    _, whole = sampled(LastSteps(3), Unroll(), 1.0, micro_batch=8)
    assert len(whole) == 1
    near(whole[0].finals[0], torch.cat([part.finals[0] for part in parts]), depth=STEPS)
    keep = torch.tensor([False, True, True, False, True, False, False, False])
    kept = whole[0].with_advantages([torch.arange(8.0)], [keep])
    assert torch.equal(kept.advantages[0], torch.tensor([1.0, 2, 4]))
    torch.testing.assert_close(rewards(policy, [kept], Unroll()), whole[0].transitions[0].old.logp[keep, 0],
                               rtol=0, atol=1e-12)
    assert whole[0].with_advantages([torch.zeros(8)], [torch.zeros(8, dtype=torch.bool)]) is None


def test_ascent_by_hand():
    log_ratio, old = f64([[0.5], [0.0], [-0.25]]), f64([[1.0], [3.0], [2.0]])
    close(RewardAscent()(log_ratio, None, old), [[-1.5], [-3.0], [-1.75]])
    close(RewardAscent(2.0)(log_ratio, None, old), [[0.5], [0.0], [0.25]])
    assert RewardAscent(2.0).clip_mask(log_ratio, None, old).flatten().tolist() == [False, True, False]
    assert not RewardAscent().clip_mask(log_ratio, None, old).any()
    log_ratio.requires_grad_()
    RewardAscent(2.0)(log_ratio, None, old).sum().backward()
    assert log_ratio.grad.flatten().tolist() == [-1.0, 0.0, -1.0]


def test_where_the_graph_begins():
    assert LastSteps(3)(10, 0, 0).trained == (7,) and LastSteps(10)(10, 5, 1).trained == (0,)
    assert {LateStep(0.75)(40, epoch, 0).trained[0] for epoch in range(400)} == set(range(30, 40))
    assert {LateStep(0.75)(3, epoch, 0).trained[0] for epoch in range(20)} == {2}
    begins = torch.tensor([RandomLast(0.16, 0.1)(50, epoch, 0).trained[0] for epoch in range(2000)]).double()
    assert begins.mean().item() == pytest.approx(42, abs=0.5) and begins.std().item() == pytest.approx(4.7, abs=0.4)
    assert 49 >= begins.max() and begins.min() >= 0
    assert RandomLast(1.0, 0.0)(10, 0, 0).trained == (0,) and RandomLast(0.3, 0.0)(10, 0, 0).trained == (7,)


def test_modifiers_beside_a_rewards_gradient():
    for name in PRESETS:
        assert preset("grpo_guard", name) == preset(name)
    assert preset("draft", "sol_rl").parts()["preview"] == preset("sol_rl", "draft").parts()["preview"] is not None


@pytest.mark.parametrize("name", PRESETS)
def test_a_reward_without_a_gradient_is_refused_before_anything_is_loaded(name, tmp_path):
    told = message(run, tiny.config(tmp_path, method=name), functions={"red": lambda images, prompts: [0.0]},
                   prompts=[Prompt(text) for text in tiny.PROMPTS])
    assert re.search("reward 'red' is not differentiable.*such as scene_soft", told) and not any(tmp_path.iterdir())


def adapter_gradient(policy, ending) -> dict[str, torch.Tensor]:
    """The gradient of the summed red of two images, from a state two steps before the end."""
    conditioning, generator = policy.encode(["red", "blue"]), torch.Generator().manual_seed(1)
    explored = RolloutSpec(GRID.float(), LastSteps(2)(4, 0, 0), FlowDDIM(1.0), Euler(), 2, 2)
    final = ending(policy, conditioning, torch.randn(2, *tiny.LATENTS, generator=generator), explored, 2,
                   policy.generators([3, 4]))
    for parameter in policy.weights.parameters():
        parameter.grad = None
    tiny.red(policy.image(final, conditioning), None).sum().backward()
    return {key: p.grad.clone() for key, p in policy.weights.named.items() if p.grad is not None}


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_checkpointing_gives_the_same_gradient(guidance):
    policy = tiny.stir(tiny.policy(guidance=guidance))
    [denoiser] = policy.denoisers.values()
    calls = []
    policy.encode(["red"])  # the first time it tries a step
    denoiser.transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
    plain, spent = adapter_gradient(policy, Unroll()), policy.evaluations
    assert len(calls) == 2
    again = adapter_gradient(policy, Unroll(checkpointing=True))
    assert len(calls) == 6 and policy.evaluations == 2 * spent  # two forwards, each of them twice; counted once
    assert "forward" not in vars(denoiser)
    assert plain.keys() == again.keys() and len(plain) > 10 and max(each.abs().max() for each in plain.values()) > 1e-6
    for key, expected in plain.items():
        torch.testing.assert_close(again[key], expected, rtol=1e-5, atol=1e-8)


def test_blocks_that_are_checkpointed_and_a_decoder_give_the_same_gradient():
    plain, blocks = (adapter_gradient(tiny.stir(tiny.policy(checkpointing=each)), Unroll()) for each in (False, True))
    for key, expected in plain.items():
        torch.testing.assert_close(blocks[key], expected, rtol=1e-4, atol=1e-6)  # another attention kernel


def test_a_forward_of_its_own_comes_back():
    module = torch.nn.Identity()
    own = module.forward = lambda x: 2 * x
    with recompute_forwards([module], torch.no_grad):
        assert module.forward is not own
    assert module.forward is own


def test_a_image_with_a_gradient_is_the_one_that_is_scored():
    policy = tiny.policy()
    conditioning, latents = policy.encode(["red"]), torch.randn(1, *tiny.LATENTS).requires_grad_()
    picture = policy.image(latents, conditioning)
    picture.sum().backward()
    assert torch.equal(picture.detach(), policy.decode(latents, conditioning)) and latents.grad.abs().max() > 0
    assert not policy.decode(latents, conditioning).requires_grad and 0 <= picture.min() and picture.max() <= 1
    assert (picture * 255 - (picture * 255).round()).abs().max() > 0.1


def test_the_reward_rises(tmp_path):
    summary = align(tiny.config(tmp_path, method="draft", train__epochs=10, train__lr=0.02, parts__plan__count=2))
    assert summary["after"]["red"] > summary["before"]["red"] + 0.02
