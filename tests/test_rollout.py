"""Exploration: segments, shared prefixes, noise, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import tiny
import torch

from flowgrpo.config import Adapter
from flowgrpo.policies.pipeline import PipelinePolicy
from flowgrpo.samplers.cost import rollout as cost
from flowgrpo.samplers.grids import compress_tail, shifted
from flowgrpo.samplers.kernels import FlowSDE
from flowgrpo.samplers.plans import AllSteps, RandomSubset, Schedule, Sliding
from flowgrpo.samplers.rollout import Exploration, explore, seeder
from flowgrpo.samplers.scheduler import Task
from flowgrpo.samplers.solvers import DPMSolver2M, Euler

PROMPTS = ["red", "blue", "green"]
GROUP, STEPS = 4, 6
WINDOW = Schedule((2, 3), (2, 3))


@pytest.fixture(scope="module")
def policy():
    return PipelinePolicy(tiny.sd3(), Adapter(rank=2), call=tiny.CALL)


@pytest.fixture(scope="module")
def conditioning(policy):
    return policy.encode(PROMPTS)


def exploration(schedule=WINDOW, shared=True, steps=STEPS, **options) -> Exploration:
    return Exploration(shifted(steps, 3.0), schedule, FlowSDE(0.7), Euler(), shared, **options)


def sample(policy, conditioning, plan=None, micro_batch=5, epoch=0, run_seed=0):
    """The parts of one rollout, joined: recorded states [B,K+1,*D] per segment, finals [B,*D], old scores."""
    parts = list(explore(policy, conditioning, plan or exploration(), GROUP, micro_batch, seeder(run_seed, epoch)))
    assert torch.equal(torch.cat([part.rows for part in parts]), torch.arange(len(conditioning.prompts) * GROUP))
    segments = [torch.cat(states) for states in zip(*([s.states for s in part.taken.segments] for part in parts))]
    return segments, torch.cat([part.taken.final for part in parts]), parts


def drawn_noise(parts) -> torch.Tensor:
    """The standard normal noise [B,K,*D] of the recorded steps, from what was recorded."""
    found = []
    for part in parts:
        pairs = list(part.taken.pairs())
        found.append(torch.stack([(x_next - part.old.mean[:, k]) / part.old.std[k]
                                  for k, (_, _, x_next) in enumerate(pairs)], 1))
    return torch.cat(found)


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("solver", [Euler(), DPMSolver2M()])
def test_a_run_cut_in_two_equals_the_whole(policy, conditioning, stop, solver):
    plan = replace(exploration(), solver=solver)

    def run(start, stop, draws, latents=None, x0=None):
        def noise(x):
            return torch.randn(x.shape, generator=torch.Generator().manual_seed(next(draws)))

        return policy.run(plan.task(start, stop, noise), conditioning, latents, policy.generators(range(3)), x0)

    whole, record = run(0, STEPS, count())
    draws = count()
    middle, first = run(0, stop, draws)
    end, second = run(stop, STEPS, draws, middle, first.x0)
    assert torch.equal(end, whole) and {**first.logp, **second.logp}.keys() == record.logp.keys()
    assert all(torch.equal((first.logp | second.logp)[i], record.logp[i]) for i in (2, 3))


@pytest.mark.parametrize("guidance, factor", [(1.0, 1), (3.0, 2)])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_shared_prefix_is_denoised_once_per_prompt(policy, conditioning, guidance, factor, first):
    window = Schedule((first, first + 1), (first, first + 1))
    spent = {}
    for shared in (True, False):
        policy.evaluations, policy.guidance = 0, guidance
        try:
            sample(policy, conditioning, exploration(window, shared), micro_batch=8)
        finally:
            policy.guidance = 1.0
        spent[shared] = policy.evaluations
    # 3 prompts through the prefix and the step at which their rows part, 12 rows through the rest; without sharing 12
    # rows through all 6 steps.
    assert spent == {True: factor * (3 * (first + 1) + 12 * (5 - first)), False: factor * 12 * 6}
    assert spent == {shared: factor * cost(window, STEPS, 3, GROUP, shared) for shared in (True, False)}


def test_neither_encoding_nor_decoding_nor_an_empty_trunk_runs_the_denoiser(policy, conditioning):
    policy.evaluations = 0
    policy.encode(PROMPTS)
    policy.decode(torch.zeros(3, *tiny.LATENTS), conditioning)
    policy.run(Task(shifted(2, 1.0), range(0)), conditioning, None, policy.generators(range(3)))
    assert policy.evaluations == 0


def test_rows_of_a_group_part_at_the_window(policy, conditioning):
    (states,), final, parts = sample(policy, conditioning, micro_batch=12)
    states, final = states.view(3, GROUP, 3, *tiny.LATENTS), final.view(3, GROUP, *tiny.LATENTS)
    assert (states[:, :, 0] == states[:, :1, 0]).all()
    for after in (states[:, :, 1], states[:, :, 2], final):
        for a in range(GROUP):
            for b in range(a):
                assert ((after[:, a] - after[:, b]).flatten(1).abs().amax(1) > 1e-3).all()
    assert (states[0, 0, 0] != states[1, 0, 0]).any()


def test_a_group_shares_its_noise_even_where_the_first_step_is_stochastic(policy, conditioning):
    shared, _, _ = sample(policy, conditioning, exploration(Schedule((0,), (0,))))
    alone, _, _ = sample(policy, conditioning, exploration(Schedule((0,), (0,)), shared=False))
    assert (shared[0][:GROUP, 0] == shared[0][0, 0]).all() and (shared[0][GROUP, 0] != shared[0][0, 0]).any()
    assert (alone[0][0, 0] != alone[0][1, 0]).any()


def test_the_prefix_is_the_deterministic_run_of_one_picture(policy, conditioning):
    (states,), _, _ = sample(policy, conditioning)
    for p in range(3):
        one = conditioning.rows(torch.tensor([p]))
        alone, _ = policy.run(Task(shifted(STEPS, 3.0), range(2)), one, None, policy.generators([seeder(0, 0)(p, -1)]))
        torch.testing.assert_close(states[p * GROUP, 0], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_noise_does_not_depend_on_the_micro_batch(policy, conditioning, shared):
    plan = exploration(shared=shared, keep_means=True)
    reference = sample(policy, conditioning, plan, micro_batch=12)
    for micro_batch in (1, 5):
        found = sample(policy, conditioning, plan, micro_batch)
        torch.testing.assert_close(drawn_noise(found[2]), drawn_noise(reference[2]), rtol=0, atol=1e-4)
        torch.testing.assert_close(found[1], reference[1], rtol=0, atol=1e-4)


def test_initial_noise_is_the_same_to_the_last_bit_in_every_micro_batch(policy, conditioning):
    plan = exploration(Schedule((0,), (0,)), shared=False)
    first = [sample(policy, conditioning, plan, micro_batch)[0][0][:, 0] for micro_batch in (1, 5, 12)]
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])
    assert 0.8 < first[0].std() < 1.2


def test_every_row_epoch_and_run_has_its_own_noise(policy, conditioning):
    plan = exploration(Schedule((0, 1), (0, 1)), shared=False, keep_means=True)
    found = [drawn_noise(sample(policy, conditioning, plan, 12, epoch, run_seed)[2])
             for epoch, run_seed in ((0, 0), (1, 0), (0, 1))]
    rows = torch.cat(found).flatten(0, 1).flatten(1)  # [3 rollouts * 12 rows * 2 steps, values]
    assert len(rows) == 72 and (torch.pdist(rows) > 1).all()  # 256 values: about 22 apart
    assert abs(rows.mean()) < 0.05 and 0.95 < rows.std() < 1.05
    again = drawn_noise(sample(policy, conditioning, plan, 12)[2])
    assert torch.equal(again, found[0])


def test_seeds_differ_in_everything_they_are_made_of():
    seeds = {seeder(run, epoch)(prompt, sample) for run in range(3) for epoch in range(3) for prompt in range(4)
             for sample in range(-1, 4)}
    assert len(seeds) == 3 * 3 * 4 * 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeder(1, 2)(3, 4) == seeder(1, 2)(3, 4)


@pytest.mark.parametrize("plan, runs", [
    (AllSteps(), [(0, 1, 2, 3, 4)]),
    (Sliding(size=2, start=1), [(1, 2)]),
    (lambda *_: Schedule((0, 1, 2, 3, 4), (0, 2, 3)), [(0,), (2, 3)]),
])
def test_trained_steps_are_recorded_in_contiguous_segments(policy, conditioning, plan, runs):
    _, final, parts = sample(policy, conditioning, exploration(plan(STEPS, 0, 0)))
    assert [segment.steps for segment in parts[0].taken.segments] == runs
    assert parts[0].old.logp.shape == (5, sum(map(len, runs))) and parts[0].old.mask.all()
    assert final.shape == (12, *tiny.LATENTS)


def test_a_random_subset_trains_part_of_the_stochastic_steps(policy, conditioning):
    schedule = RandomSubset(0.6)(STEPS, 0, 0)
    _, _, parts = sample(policy, conditioning, exploration(schedule))
    assert parts[0].taken.steps == schedule.trained and len(schedule.trained) == 3


def test_means_are_kept_only_where_they_are_read(policy, conditioning):
    _, _, kept = sample(policy, conditioning, exploration(keep_means=True))
    assert kept[0].old.mean.shape == (5, 2, *tiny.LATENTS) and kept[0].old.std.shape == (2,)
    _, _, dropped = sample(policy, conditioning)
    assert dropped[0].old.mean is None and dropped[0].old.std is None


@pytest.mark.parametrize("ratio, steps", [(0.4, 5), (0.01, 5), (0.8, 7)])
def test_a_compressed_tail_is_shorter_and_ends_at_the_data(policy, conditioning, ratio, steps):
    grid = compress_tail(shifted(8, 3.0), 4, ratio, 3.0)  # 4 steps lie behind the window: 1, 1 and 3 are left
    plan = Exploration(grid, WINDOW, FlowSDE(0.7), DPMSolver2M(), True)
    policy.evaluations = 0
    _, final, _ = sample(policy, conditioning, plan, micro_batch=8)
    assert len(grid) == steps + 1 and grid[-1] == 0 and (grid.diff() < 0).all()
    assert policy.evaluations == 3 * 3 + 12 * (steps - 3)
    assert final.isfinite().all() and final.std() < 5
