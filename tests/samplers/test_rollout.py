"""Exploration: trees, what branches share, their noise, what they cost, their replay; samples that are not finished."""

import contextlib
import math
import re
from dataclasses import replace

import pytest
import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import compress_tail, shift_grid, thin_grid
from flowgrpo.samplers.growth import explore, replay, rescore
from flowgrpo.samplers.kernels import DPMSolver2M, Euler, FlowSDE
from flowgrpo.samplers.plans import AllSteps, RandomSubset, Schedule, Sliding
from flowgrpo.samplers.preview import Pruning
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.training import sampling
from flowgrpo.training.memory import _per_group
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import message

PROMPTS = ["red", "blue", "green"]
GROUP, STEPS = 4, 6
GRID = shift_grid(STEPS, 3.0)
WINDOW, EVERY = Schedule((2, 3), (2, 3)), (0, 1, 2, 3, 4)
BINARY = Schedule(EVERY, EVERY, children=(2, 1, 2, 1, 1))
EARLY, LATE = (Schedule(steps, steps, children=(1, 4)) for steps in ((0, 2), (1, 3)))


def exploration(schedule=WINDOW, roots=1, group=GROUP, **options) -> RolloutSpec:
    return RolloutSpec(GRID, schedule, FlowSDE(0.7), Euler(), group, roots, **options)


def only(step: int, **options) -> RolloutSpec:
    """One stochastic step, at which the group parts."""
    return exploration(Schedule((step,), (step,)), **options)


# Explorations, and their evaluations for one prompt: of the rollout, of the same images without sharing, of a replay.
TREES = {
    # 3 steps with 1 row, the third of which parts; 3 with 4. Recorded: 1 state at step 2, 4 at step 3.
    "shared": ([exploration()], 3 + 12, 24, 1 + 4),
    "two roots": ([exploration(roots=2)], 2 * 3 + 12, 24, 2 + 4),
    "independent": ([exploration(roots=4)], 24, 24, 4 + 4),
    "binary": ([exploration(BINARY)], 1 + 2 + 2 + 4 * 3, 24, 1 + 2 + 2 + 4 + 4),
    "binary from two roots": ([exploration(BINARY, roots=2, group=8)], 2 + 4 + 4 + 8 * 3, 48, 2 + 4 + 4 + 8 + 8),
    "noise before the first split": (
        [exploration(Schedule((0, 1, 2, 3), (0, 1, 3), children=(1, 2, 1, 2)))], 1 + 1 + 2 + 2 + 4 * 2, 24, 1 + 1 + 2),
    # One trunk of 3 steps; behind it 1 row at the step that parts and 4 at the 4 and 2 steps that are left.
    "two on one trunk": ([only(1), only(3)], 3 + 1 + 16 + 1 + 8, 48, 1 + 1),
    "two in falling order": ([only(3), only(1)], 3 + 1 + 16 + 1 + 8, 48, 1 + 1),
    # Trunks of 0 and 1 steps; steps 0 to 2 and 1 to 3 have 1 row, the others 4.
    "two with noise on the trunk": ([exploration(EARLY), exploration(LATE)], 1 + 3 + 12 + 3 + 8, 48, 1 + 1 + 1 + 1),
    "two with noise in falling order": ([exploration(LATE), exploration(EARLY)], 1 + 3 + 12 + 3 + 8, 48, 1 + 1 + 1 + 1),
    "two of independent samples": ([exploration(roots=4), only(1, roots=4)], 48, 48, 4 + 4 + 4),
    # Behind step 2 the grid has 3 steps, or 2 of every second sigma.
    "two granularities": ([only(2, strides=(1, 2))], 3 + 12 + 8, 4 * (6 + 5), 1),
    "two granularities behind a window": (
        [exploration(Schedule((0, 1, 2), (0, 1, 2)), strides=(1, 2))], 1 + 8 + 12 + 8, 4 * (6 + 5), 1 + 4 + 4),
    "two granularities of independent samples": (
        [exploration(Schedule((0, 1, 2), (0, 1, 2)), roots=4, strides=(1, 2))], 12 + 12 + 8, 4 * (6 + 5), 4 + 4 + 4)}
each_tree = pytest.mark.parametrize("tree", TREES)


@pytest.fixture(scope="module")
def policy():
    return tiny.stir(PipelinePolicy(tiny.sd3(), Adapter(rank=2), call=tiny.CALL))


@pytest.fixture(scope="module")
def conditioning(policy):
    return policy.encode(PROMPTS)


def sample(policy, conditioning, *plans: RolloutSpec, micro_batch=24, epoch=0, run_seed=0):
    """The parts of one rollout in the explorations, with their means."""
    plans = [replace(plan, keep_means=True) for plan in plans or (exploration(),)]
    return list(explore(policy, conditioning, plans, micro_batch, seeder(run_seed, epoch)))


@pytest.fixture(scope="module")
def sampled(policy, conditioning):
    """The parts of a rollout of one of the TREES and its evaluations, sampled once for all tests."""
    found = {}
    def of(tree: str, micro_batch: int = 24):
        if (tree, micro_batch) not in found:
            before = policy.evaluations
            parts = sample(policy, conditioning, *TREES[tree][0], micro_batch=micro_batch)
            found[tree, micro_batch] = parts, policy.evaluations - before
        return found[tree, micro_batch]
    return of


@pytest.fixture
def guided(policy):
    """A context in which the policy has another guidance."""
    @contextlib.contextmanager
    def to(guidance: float):
        policy.guidance, before = guidance, policy.guidance
        try:
            yield
        finally:
            policy.guidance = before
    return to


def transitions(parts):
    return [taken for part in parts for taken in part.transitions]


def drawn_noise(parts) -> torch.Tensor:
    """The standard normal noise of all recorded transitions, [transitions, values], from what was recorded."""
    return torch.cat([((taken.x_next - taken.old.mean[:, 0]) / taken.old.std).flatten(1)
                      for taken in transitions(parts)])


def by_group(parts) -> dict:
    """Noise and finals of every group, by prompt and stochastic steps: parts hold one or more of them."""
    found = {}
    for part in parts:
        noise = [drawn_noise([replace(part, transitions=(taken,))]).view(len(part.groups), -1)
                 for taken in part.transitions]
        finals = [final.view(len(part.groups), part.exploration.group, *tiny.LATENTS) for final in part.finals]
        for n, p in enumerate(part.prompts[::part.exploration.group].tolist()):
            found[p, part.exploration.schedule.stochastic] = [each[n] for each in (*noise, *finals)]
    return found


def apart(values: torch.Tensor) -> bool:
    """No two rows are the same draw: of 256 standard normal values they are about 22 apart."""
    return bool((torch.pdist(values.flatten(1)) > 10).all())


def largest_log_ratio(policy, conditioning, parts, micro_batch, pack=False) -> float:
    with torch.no_grad():
        return max((new.logp - part.transitions[k].old.logp[rows]).abs().max().item()
                   for part in parts for k, rows, new in replay(policy, conditioning, part, micro_batch, pack))


# --- what runs once ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("solver", [Euler(), DPMSolver2M()])
def test_a_run_cut_in_two_equals_the_whole(policy, conditioning, stop, solver):
    plan = replace(exploration(), solver=solver)
    def run(start, stop, draws, latents=None, x0=None):
        return policy.run(plan.task(start, stop, draws), conditioning, latents, policy.generators(range(3)), x0)
    whole, record = run(0, STEPS, policy.generators(range(3, 6)))
    draws = policy.generators(range(3, 6))
    middle, first = run(0, stop, draws)
    end, second = run(stop, STEPS, draws, middle, first.x0)
    assert torch.equal(end, whole) and {**first.logp, **second.logp}.keys() == record.logp.keys()
    assert all(torch.equal((first.logp | second.logp)[i], record.logp[i]) for i in (2, 3))


@pytest.mark.parametrize("micro_batch", [1, 5, 24])
@each_tree
def test_evaluations_by_hand(policy, conditioning, sampled, tree, micro_batch):
    plans, rollout, alone, update = TREES[tree]
    parts, spent = sampled(tree, micro_batch)
    before = policy.evaluations
    largest_log_ratio(policy, conditioning, parts, micro_batch)
    assert (spent, policy.evaluations - before) == (3 * rollout, 3 * update)
    assert (cost.rollout(plans, 3), cost.alone(plans, 3)) == (3 * rollout, 3 * alone)
    assert cost.update(plans, 3, 1) == 3 * update and cost.update(plans, 3, 2) == 6 * update


@pytest.mark.parametrize("guidance, factor", [(1.0, 1), (3.0, 2)])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_shared_prefix_is_denoised_once_per_prompt(policy, conditioning, guided, guidance, factor, first):
    window, spent = Schedule((first, first + 1), (first, first + 1)), {}
    for roots in (1, GROUP):
        before = policy.evaluations
        with guided(guidance):
            sample(policy, conditioning, exploration(window, roots), micro_batch=8)
        spent[roots] = policy.evaluations - before
    # 3 prompts through the prefix and the step at which their samples part, 12 rows through the rest; without sharing
    # 12 rows through all 6 steps.
    assert spent == {1: factor * (3 * (first + 1) + 12 * (5 - first)), GROUP: factor * 12 * 6}


def test_states_of_every_step_by_hand():
    assert cost.states(exploration()) == [1, 1, 1, 4, 4, 4]
    assert cost.states(exploration(BINARY)) == [1, 2, 2, 4, 4, 4]
    assert cost.states(exploration(BINARY, roots=3, group=12)) == [3, 6, 6, 12, 12, 12]
    assert cost.states(exploration(roots=4)) == [4] * 6


def test_neither_encoding_nor_decoding_nor_an_empty_trunk_runs_the_denoiser(policy, conditioning):
    before = policy.evaluations
    policy.encode(PROMPTS)
    policy.decode(torch.zeros(3, *tiny.LATENTS), conditioning)
    policy.run(Segment(shift_grid(2, 1.0), range(0)), conditioning, None, policy.generators(range(3)))
    assert policy.evaluations == before


# --- the tree ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("micro_batch", [1, 5, 24])
@each_tree
def test_a_part_holds_whole_groups(sampled, tree, micro_batch):
    plans = TREES[tree][0]
    group, together = plans[0].group, 3 if micro_batch == 24 else 1  # a group is never cut
    parts, _ = sampled(tree, micro_batch)
    assert [place for part in parts for place in part.groups] == list(range(3 * len(plans)))
    seen = [tuple(part.prompts[::group].tolist()) for part in parts]
    chunks = [tuple(range(3))[at:at + together] for at in range(0, 3, together)]
    assert seen == [chunk for chunk in chunks for _ in plans]  # prompts come again for every exploration
    for part in parts:
        assert torch.equal(part.prompts, part.prompts[::group].repeat_interleave(group))
        assert len(part.groups) * group == len(part.prompts)
        assert {final.shape for final in part.finals} == {(len(part.prompts), *tiny.LATENTS)}
        for taken, later in zip(part.transitions, part.transitions[1:]):  # what a step leaves is where the next starts
            assert later.step > taken.step + 1 or torch.equal(taken.x_next, later.x)


@each_tree
def test_children_of_a_state_share_it_and_differ(sampled, tree):
    for part in sampled(tree)[0]:
        states = cost.states(part.exploration)
        for taken in part.transitions:
            children = part.exploration.splits.get(taken.step, 1)
            assert len(taken.x) == states[taken.step] * 3 and len(taken.x_next) == children * len(taken.x)
            assert torch.equal(taken.parent, torch.arange(len(taken.x)).repeat_interleave(children))
            assert torch.equal(taken.prompts, torch.arange(3).repeat_interleave(states[taken.step]))
            for siblings in taken.x_next.split(children):
                assert (torch.pdist(siblings.flatten(1)) > 0.1).all()
        for group in (rows for final in part.finals for rows in final.split(part.exploration.group)):
            assert (torch.pdist(group.flatten(1)) > 0.1).all()


@pytest.mark.parametrize("roots", [1, 2, 4])
def test_as_many_initial_noises_as_roots_even_where_the_first_step_is_stochastic(policy, conditioning, roots):
    [part] = sample(policy, conditioning, only(0, roots=roots))
    [taken] = part.transitions
    assert len(taken.x) == 3 * roots and len(taken.x_next) == 3 * GROUP
    assert apart(taken.x) and 0.8 < taken.x.std() < 1.2


@pytest.mark.parametrize("tree", ["shared", "two on one trunk", "two in falling order"])
def test_the_prefix_is_the_deterministic_run_of_one_image(policy, conditioning, sampled, tree):
    for part in sampled(tree)[0]:
        first = part.transitions[0]
        for p in range(3):
            generators = policy.generators([seeder(0, 0)(p, -1)])
            segment, own = Segment(GRID, range(first.step)), conditioning.rows(torch.tensor([p]))
            alone, _ = policy.run(segment, own, None, generators)
            torch.testing.assert_close(first.x[p], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", [Euler(), DPMSolver2M()])
@pytest.mark.parametrize("roots", [1, 4])
def test_the_leaves_end_with_the_deterministic_run_of_the_last_states(policy, conditioning, solver, roots):
    plan = replace(only(2, roots=roots, strides=(1, 2)), solver=solver)
    [part] = sample(policy, conditioning, plan)
    [taken] = part.transitions
    rows = conditioning.rows(part.prompts)
    with torch.no_grad():
        v = policy.replay(rows, taken.x[taken.parent], GRID, 2)
    for grid, final in zip((GRID, thin_grid(GRID, 3, 2)), part.finals, strict=True):
        task = replace(plan.task(3, len(grid) - 1), grid=grid)
        expected, _ = policy.run(task, rows, taken.x_next, None, taken.x[taken.parent] - GRID[2] * v)
        torch.testing.assert_close(final, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kwargs, told", [
    ({"roots": 3}, "3 initial noises and splits into .* make 3 samples per prompt, expected the group of 4"),
    ({"roots": 8}, "8 initial noises and splits into 1 make 8 samples per prompt, expected the group of 4"),
    ({"roots": 0}, "roots is 0, expected 1 to the group of 4"),
    ({"roots": -1}, "roots is -1, expected 1 to the group of 4"),
    ({"schedule": BINARY, "group": 8}, r"1 initial noises and splits into \[2, 2\] make 4 .* the group of 8"),
    ({"schedule": BINARY, "roots": 4}, r"4 initial noises and splits into \[2, 2\] make 16 .* the group of 4"),
    ({"schedule": Schedule((2, 3), (2, 3), children=(1, 1))}, "1 initial noises and splits into 1 make 1 samples"),
    ({"strides": ()}, r"strides are \[\], expected at least one, each 1 or more"),
    ({"strides": (1, 0)}, r"strides are \[1, 0\], expected at least one, each 1 or more")])
def test_roots_splits_and_strides_that_make_no_group_are_refused(kwargs, told):
    assert re.search(told, message(exploration, **kwargs, error=ValueError))


# --- noise ------------------------------------------------------------------------------------------------------------
@each_tree
def test_no_two_transitions_use_the_same_noise(policy, conditioning, sampled, tree):
    noise = drawn_noise(sampled(tree)[0])
    # The initial noise that samples, and explorations, of a prompt share: what is drawn later is another.
    initial = policy.run(Segment(GRID, range(0)), conditioning, None,
                         policy.generators(seeder(0, 0)(p, -1) for p in range(3)))[0].flatten(1)
    assert apart(torch.cat([noise, initial]))
    assert abs(noise.mean()) < 0.1 and 0.9 < noise.std() < 1.1


@each_tree
def test_neither_noise_nor_images_depend_on_the_micro_batch(sampled, tree):
    reference = by_group(sampled(tree)[0])
    assert len(reference) == 3 * len(TREES[tree][0])
    for micro_batch in (1, 5):
        torch.testing.assert_close(by_group(sampled(tree, micro_batch)[0]), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("roots", [1, 2, 4])
def test_initial_noise_is_the_same_to_the_last_bit_in_every_micro_batch(policy, conditioning, roots):
    first, *others = [torch.cat([taken.x for taken in transitions(sample(policy, conditioning, only(0, roots=roots),
                                                                         micro_batch=micro_batch))])
                      for micro_batch in (1, 5, 12)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("plan", [exploration(Schedule((0, 1), (0, 1)), roots=4), exploration(BINARY)])
def test_every_epoch_and_run_has_its_own_noise(policy, conditioning, plan):
    found = [drawn_noise(sample(policy, conditioning, plan, epoch=epoch, run_seed=run_seed))
             for epoch, run_seed in ((0, 0), (1, 0), (0, 1))]
    assert apart(torch.cat(found))
    assert torch.equal(drawn_noise(sample(policy, conditioning, plan)), found[0])


def test_seeds_differ_in_everything_they_are_made_of():
    seeds = {seeder(run, epoch)(prompt, sample) for run in range(3) for epoch in range(3) for prompt in range(4)
             for sample in range(-4, 4)}
    assert len(seeds) == 3 * 3 * 4 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeder(1, 2)(3, 4) == seeder(1, 2)(3, 4)


@pytest.mark.parametrize("schedule, factors", [
    (Schedule((1, 2, 3), (1, 2, 3)), (1, 0.5, 1.2)), (BINARY, (1, 0.5, 0.25, 1, 1))])
def test_a_schedules_noise_multiplies_the_deviation_of_its_step(policy, conditioning, schedule, factors):
    plain, tuned = (sample(policy, conditioning, exploration(replace(schedule, noise=n))) for n in ((), factors))
    for before, after, factor in zip(transitions(plain), transitions(tuned), factors, strict=True):
        assert after.old.std.item() == pytest.approx(factor * before.old.std.item(), rel=1e-6)
    assert torch.equal(transitions(plain)[0].x_next, transitions(tuned)[0].x_next)
    torch.testing.assert_close(drawn_noise(tuned), drawn_noise(plain), rtol=0, atol=1e-4)
    assert largest_log_ratio(policy, conditioning, tuned, 24) == 0


# --- replay -----------------------------------------------------------------------------------------------------------
@each_tree
def test_the_density_of_a_tree_in_bf16_is_that_of_the_state_that_the_network_sees(tree):
    policy = tiny.stir(PipelinePolicy(tiny.sd3().to(torch.bfloat16), Adapter(rank=2), call=tiny.CALL, precision="bf16"))
    conditioning = policy.encode(PROMPTS)
    parts = sample(policy, conditioning, *TREES[tree][0])
    assert {step.x_next.dtype for part in parts for step in part.transitions} == {torch.bfloat16}
    assert largest_log_ratio(policy, conditioning, parts, 24) == 0


@pytest.mark.parametrize("before, now, most", [(24, 24, 0), (1, 1, 1e-6), (5, 1, 1e-6), (24, 5, 1e-6), (24, 1, 1e-6)])
@each_tree
def test_a_replay_gives_the_old_log_probabilities(policy, conditioning, sampled, tree, before, now, most):
    assert largest_log_ratio(policy, conditioning, sampled(tree, before)[0], now) <= most


@pytest.mark.parametrize("tree", ["binary", "two on one trunk"])
def test_the_replay_is_exact_under_guidance(policy, conditioning, sampled, guided, tree):
    unguided = sampled(tree)[0]
    with guided(3.0):
        parts = sample(policy, conditioning, *TREES[tree][0])
        assert largest_log_ratio(policy, conditioning, parts, 24) == 0
        assert largest_log_ratio(policy, conditioning, unguided, 24) > 1e-3


def test_a_replay_yields_every_transition_once_and_in_order(policy, conditioning, sampled):
    [part], _ = sampled("binary")
    found = [(k, rows.start, rows.stop, new.logp.shape) for k, rows, new in replay(policy, conditioning, part, 4)]
    # Of 3 prompts: 3 states with 2 children, 6 with 1, 6 with 2, 12 with 1 and 12 with 1.
    assert [(k, start, stop) for k, start, stop, _ in found] == [
        (0, 0, 6), (1, 0, 4), (1, 4, 6), (2, 0, 8), (2, 8, 12), (3, 0, 4), (3, 4, 8), (3, 8, 12), (4, 0, 4), (4, 4, 8),
        (4, 8, 12)]
    assert all(shape == (stop - start, 1) for _, start, stop, shape in found)


def test_a_replay_has_gradients_and_rescored_parts_have_none(conditioning, sampled):
    [part], _ = sampled("binary")
    moved = tiny.stir(tiny.policy(), 0.2)
    again = rescore(part, replay(moved, conditioning, part, 5))
    for k, rows, new in replay(moved, conditioning, part, 5):
        old = again.transitions[k].old
        assert new.logp.requires_grad and not old.logp.requires_grad
        assert torch.equal(new.logp, old.logp[rows]) and torch.equal(new.mean, old.mean[rows])
        assert torch.equal(new.std, old.std) and (new.logp != part.transitions[k].old.logp[rows]).all()


# --- what is recorded -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan, steps", [
    (AllSteps(), EVERY), (Sliding(size=2, start=1), (1, 2)),
    (RandomSubset(0.6), RandomSubset(0.6)(STEPS, 0, 0).trained),
    (lambda *_: Schedule(EVERY, (0, 2, 3)), (0, 2, 3)), (lambda *_: Schedule(EVERY, (1, 4)), (1, 4)),
    (lambda *_: replace(BINARY, trained=(1, 3)), (1, 3))])
def test_trained_steps_are_recorded_in_grid_order(policy, conditioning, plan, steps):
    [part] = sample(policy, conditioning, exploration(plan(STEPS, 0, 0)))
    assert tuple(taken.step for taken in part.transitions) == steps
    assert all(taken.old.mask.all() and taken.old.logp.shape == (len(taken.x_next), 1) for taken in part.transitions)


def test_means_are_kept_only_where_they_are_read(policy, conditioning):
    for keep, score in ((True, False), (False, True), (False, False)):
        [part] = explore(policy, conditioning, [exploration(BINARY, score_means=score, keep_means=keep)], 24,
                         seeder(0, 0))
        new = [new for _, _, new in replay(policy, conditioning, part, 24)]
        assert all((each.mean is not None) is (keep or score) is (each.slope is not None) for each in new)
        for taken in (*part.transitions, *rescore(part, replay(policy, conditioning, part, 24)).transitions):
            assert (taken.old.mean is not None) is keep is (taken.old.std is not None)
            if keep:
                assert taken.old.mean.shape == (len(taken.x_next), 1, *tiny.LATENTS) and taken.old.std.shape == (1,)


@pytest.mark.parametrize("plan, keep_means, states, means", [
    (exploration(roots=4), False, 4 + 4 + 4 + 4, 0),  # before steps 2 and 3, after step 3, and at the end
    (exploration(roots=4), True, 4 + 4 + 4 + 4, 4 + 4),
    (exploration(), False, 1 + 4 + 4 + 4, 0),  # one state before the split
    (exploration(Schedule((4, 5), (4, 5)), roots=4), False, 4 + 4 + 4, 0),  # the last draw is the end
])
def test_a_state_of_several_micro_batches_is_stored_once(policy, conditioning, plan, keep_means, states, means):
    plan = replace(plan, keep_means=keep_means)
    [part, *_] = explore(policy, conditioning, [plan], 2, seeder(0, 0))
    kept = [*part.finals, *(tensor for taken in part.transitions for tensor in (taken.x, taken.x_next, taken.old.mean))]
    size = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
            if tensor is not None}
    one = 4 * math.prod(tiny.LATENTS)  # in fp32
    assert len(part.prompts) == GROUP > 2 and sum(size.values()) == one * (states + means)
    assert _per_group(plan) == (states, means)


def test_a_credited_part_keeps_transitions_with_their_states_and_advantages(policy, conditioning):
    [part] = sample(policy, conditioning, replace(exploration(BINARY), schedule=replace(BINARY, trained=(0, 1, 2))))
    advantages = [torch.arange(6.0), torch.arange(6.0) + 10, torch.arange(12.0) + 20]
    keep = [torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)]
    keep[2][[1, 4, 5, 10]] = True  # of the states 0, 2 and 5
    found = part.with_advantages(advantages, keep)
    whole, some = found.transitions
    assert whole is part.transitions[0] and torch.equal(found.advantages[0], advantages[0])
    assert some.step == 2 and some.parent.tolist() == [0, 1, 1, 2] and some.prompts.tolist() == [0, 1, 2]
    assert found.advantages[1].tolist() == [21, 24, 25, 30]
    before = part.transitions[2]
    assert torch.equal(some.x, before.x[[0, 2, 5]]) and torch.equal(some.x_next, before.x_next[[1, 4, 5, 10]])
    assert torch.equal(some.old.logp, before.old.logp[[1, 4, 5, 10]])
    assert torch.equal(some.old.mean, before.old.mean[[1, 4, 5, 10]])
    assert largest_log_ratio(policy, conditioning, [found], 24) <= 1e-6
    assert torch.equal(found.prompts, part.prompts) and found.groups == part.groups


def test_a_part_of_which_nothing_is_kept_is_none(sampled):
    [part], _ = sampled("shared")
    nothing = [torch.zeros(12, dtype=torch.bool)] * 2
    assert part.with_advantages([torch.zeros(12)] * 2, nothing) is None
    with pytest.raises(ValueError):  # not one per trained step
        part.with_advantages([torch.zeros(12)], nothing[:1])


# --- grids behind the noise -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio, steps", [(0.4, 5), (0.01, 5), (0.8, 7)])
def test_a_compressed_tail_is_shorter_and_ends_at_the_data(policy, conditioning, ratio, steps):
    grid = compress_tail(shift_grid(8, 3.0), 4, ratio, 3.0)  # 4 steps lie behind the window: 1, 1 and 3 are left
    plan = RolloutSpec(grid, WINDOW, FlowSDE(0.7), DPMSolver2M(), GROUP)
    before = policy.evaluations
    [part] = sample(policy, conditioning, plan)
    assert len(grid) == steps + 1 and grid[-1] == 0 and (grid.diff() < 0).all()
    assert policy.evaluations - before == 3 * 3 + 12 * (steps - 3)
    assert part.finals[0].isfinite().all() and part.finals[0].std() < 5


@pytest.mark.parametrize("schedule, strides, kept", [
    (Schedule((2,), (2,)), (1, 2), [range(7), (0, 1, 2, 3, 4, 6)]),
    (Schedule((1,), (1,)), (1, 2, 3), [range(7), (0, 1, 2, 3, 5, 6), (0, 1, 2, 3, 6)]),
    (WINDOW, (2,), [range(7)]),  # of the two steps behind the noise none can be left out
    (BINARY, (1, 2), [range(7), range(7)]),
    (Schedule((0, 1), (0, 1), children=(4, 1)), (1, 9), [range(7), (0, 1, 2, 3, 6)])])
def test_granularities_differ_behind_all_noise_and_end_at_the_data(policy, conditioning, schedule, strides, kept):
    plan = exploration(schedule, strides=strides)
    assert [tail.grid.tolist() for tail in plan.tails()] == [GRID[list(indices)].tolist() for indices in kept]
    [part] = sample(policy, conditioning, plan)
    assert len(part.finals) == len(strides)
    [whole] = sample(policy, conditioning, exploration(schedule))
    for taken, same in zip(part.transitions, whole.transitions, strict=True):
        assert torch.equal(taken.x_next, same.x_next) and torch.equal(taken.old.logp, same.old.logp)
    for indices, final in zip(kept, part.finals, strict=True):
        change = (final - whole.finals[0]).abs().max().item()
        assert change == 0 if len(indices) == 7 else 1e-3 < change < math.inf


PRUNED = {"pruning": {"type": "Pruning", "pool": 7, "step": 2}, "roots": None}


def made(host: str = "flow_grpo", kind: str = "flow", **parts):
    return tiny_runs.trainer(kind, tiny_runs.config(kind, host, PRUNED | parts, train__steps=4, train__micro_batch=4))


def test_the_best_and_the_worst_go_on():
    scores = torch.tensor([[0.3, 0.9, 0.1, 0.5, 0.7], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert Pruning(5).choose(scores, 2).tolist() == [[1, 2], [0, 4]]
    assert Pruning(5).choose(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 3, 4]]


@pytest.mark.parametrize("right, places", [
    ([1, 1, 1, 1, 0, 1, 0, 1], [0, 1, 4, 6]), ([1, 1, 1, 1, 0, 1, 1, 1], [0, 1, 2, 4]),
    ([0, 0, 0, 0, 0, 1, 0, 0], [0, 1, 2, 5]), ([1] * 8, [0, 1, 2, 3]), ([0] * 8, [0, 1, 2, 3])])
def test_successes_and_failures_are_balanced(right, places):
    scores = torch.tensor([right], dtype=torch.float32)
    assert Pruning(8, right=0.5).choose(scores, 4).tolist() == [places]


@pytest.mark.parametrize("kind, host, parts", [
    ("flow", "flow_grpo", {}), ("flow", "mix_grpo", {"plan": {"size": 2}}), ("vp", "ddpo", {"advantage": {"least": 4}}),
    ("flow", "mix_grpo", {"plan": {"size": 1}, "solver": {"type": "DPMSolver2M"}})])
def test_what_goes_on_is_what_was_begun(kind, host, parts):
    """The samples are those of a whole rollout of the pool, and the first ratio is 1."""
    trainer = made(host, kind, **parts)
    [part, _], conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    whole = tiny_runs.trainer(kind, tiny_runs.config(kind, host, {"roots": None} | parts, train__steps=4,
                                                     train__group=7, train__micro_batch=7))
    pool = sampling.sample(whole, whole.prompts[:2])[0][0]
    of = [pool.seeds.tolist().index(seed) for seed in part.seeds.tolist()]
    assert len(set(of)) == 4
    torch.testing.assert_close(part.finals[0], pool.finals[0][of], rtol=1e-4, atol=1e-4)
    for taken, among in zip(part.transitions, pool.transitions):
        torch.testing.assert_close(taken.x_next, among.x_next[of], rtol=1e-4, atol=1e-4)
    for k, rows, new in trainer.rollouts.replay(part, conditioning):
        torch.testing.assert_close(new.logp, part.transitions[k].old.logp[rows], rtol=0, atol=1e-5)


def test_those_that_stop_cost_the_steps_before_and_a_look():
    trainer = made()
    sampling.sample(trainer, trainer.prompts[:2])
    assert trainer.rollouts.rollout_evaluations == 2 * (7 * (2 + 1) + 4 * 2)


def test_the_predictions_decide_by_the_runs_reward():
    trainer = made()
    trainer.scoring.functions["score"] = lambda images, prompts: torch.arange(len(images)) % 7  # of a pool, its last
    [part, _], _, _ = sampling.sample(trainer, trainer.prompts[:2])
    seed = trainer.rollouts.seeds(0, 0, 2)
    assert part.seeds.tolist() == [seed(0, sample) for sample in (0, 1, 5, 6)]


def test_a_run_with_pruning_and_progress_trains():
    trainer = made("diffusion_nft")
    assert tiny_runs.epochs(trainer, 1)[0]["clip_fraction"] == 0
    trainer = made(progress={"type": "Progress"})
    [metrics] = tiny_runs.epochs(trainer, 1)
    assert trainer.first_ratio.max_log_ratio < 1e-6 and metrics["grad_norm"] > 0
