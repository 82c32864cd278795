"""Which steps are trained: plans by hand, and steps with too little noise, which are left out."""

import math
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.kernels import CPS, DDIM, ODE, DanceSDE, FlowDDIM, FlowSDE
from flowgrpo.samplers.plans import ORDERS, AllSteps, EachStep, NoSteps, RandomSubset, Schedule, Single, Sliding
from flowgrpo.samplers.rollout import deviation
from tests.helpers import tiny
from tests.helpers.refusals import message
from tests.helpers.tables import stock


def firsts(plan: Sliding, steps: int, epochs: int) -> list[int]:
    schedules = [plan(steps, epoch, seed=0) for epoch in range(epochs)]
    assert all(s.trained == s.stochastic for s in schedules)
    assert all(s.trained == tuple(range(s.trained[0], s.trained[0] + plan.size)) for s in schedules)
    return [s.trained[0] for s in schedules]


def test_all_steps_leave_out_the_last_and_no_steps_all():
    assert AllSteps()(5, epoch=3, seed=0) == Schedule((0, 1, 2, 3), (0, 1, 2, 3))
    assert AllSteps()(2, epoch=0, seed=0) == Schedule((0,), (0,))
    assert NoSteps()(5, epoch=3, seed=0) == Schedule((), ())


def test_single():
    assert Single(3)(5, epoch=9, seed=0) == Schedule((3,), (3,))
    for step in (4, -1):
        told = message(Single(step), 5, epoch=0, seed=0, error=ValueError)
        assert f"Single: step is {step}, expected 0 to 3 of 5 steps" in told


@pytest.mark.parametrize(("steps", "fraction", "count"), [(16, 0.6, 9), (10, 0.6, 5), (10, 1.0, 9), (3, 0.1, 1)])
def test_random_subset_trains_its_fraction(steps, fraction, count):
    for epoch in range(20):
        schedule = RandomSubset(fraction)(steps, epoch, seed=0)
        assert schedule.stochastic == tuple(range(steps - 1)) and len(schedule.trained) == count


def test_random_subset_is_redrawn_each_epoch_and_reaches_every_step():
    drawn = [RandomSubset()(16, epoch, seed=7).trained for epoch in range(40)]
    assert len(set(drawn)) > 30
    assert {step for trained in drawn for step in trained} == set(range(15))


# T = 6 and windows of 2: the first step l runs from 0 to 3.
WINDOWS = [
    (Sliding(2, every=2), [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1]),
    (Sliding(2, every=2, roll_back=False), [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]),
    (Sliding(2, stride=2, every=2), [0, 0, 2, 2, 0, 0, 2, 2]),
    (Sliding(2, stride=2, every=2, roll_back=False), [0, 0, 2, 2, 3, 3, 3, 3]),
    (Sliding(2, every=1, start=1), [1, 2, 3, 1, 2, 3, 1]),
    (Sliding(2, every=1, stop=4), [0, 1, 2, 0, 1, 2, 0]),
    (Sliding(2, every=3, order="frozen"), [0] * 8),
    (Sliding(2, order="frozen", start=3), [3] * 8),
    # p = l/4: int(4 (1-p) + p) = 4, int(3.25), int(2.5), int(1.75) epochs
    (Sliding(2, every=4, order="decay"), [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 0, 0, 0, 0, 1]),
    # from 4 down to 3: 4, int(3.75), int(3.5), int(3.25)
    (Sliding(2, every=4, every_min=3, order="decay"), [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0]),
    # 3, 3, ceil(3/e = 1.10), ceil(3/e^2 = 0.41) epochs
    (Sliding(2, every=3, order="exp_decay", rate=1, threshold=1), [0, 0, 0, 1, 1, 1, 2, 2, 3, 0, 0])]


@pytest.mark.parametrize(("plan", "expected"), WINDOWS)
def test_windows_by_hand(plan, expected):
    assert firsts(plan, 6, len(expected)) == expected


def test_mix_grpo_as_published():
    # T = 25, windows of 4 for 25 epochs each: l = 0 to 20, and back to 0 after 21 * 25 epochs.
    assert firsts(Sliding(), 25, 551) == [first for first in range(21) for _ in range(25)] + [0] * 25 + [1]
    # Decay from 10 to 1, p = l/23: int(10 - 9 p).
    stays = [10, 9, 9, 8, 8, 8, 7, 7, 6, 6, 6, 5, 5, 4, 4, 4, 3, 3, 2, 2, 2]
    decay = firsts(Sliding(every=10, order="decay"), 25, sum(stays) + 1)
    assert decay == [first for first, stay in enumerate(stays) for _ in range(stay)] + [0]
    # Exponential decay from 25 with k = 0.1 beyond l = 13: ceil(25 exp(-0.1 (l-13))).
    stays = [25] * 14 + [23, 21, 19, 17, 16, 14, 13]
    exp_decay = firsts(Sliding(order="exp_decay"), 25, sum(stays) + 1)
    assert exp_decay == [first for first, stay in enumerate(stays) for _ in range(stay)] + [0]


def test_random_windows_reach_every_place_and_no_other_about_as_often():
    assert set(firsts(Sliding(4, order="random"), 25, 500)) == set(range(21))
    assert set(firsts(Sliding(2, order="random", start=2), 6, 60)) == {2, 3}
    # Flow-GRPO-Fast: windows of 3 in the first half of 10 steps.
    assert set(firsts(Sliding(3, order="random", stop=10 // 2), 10, 60)) == {0, 1, 2}
    drawn = firsts(Sliding(2, order="random"), 6, 2000)
    assert all(abs(drawn.count(first) - 500) < 100 for first in range(4))  # 5 deviations


@pytest.mark.parametrize("order", ORDERS)
def test_windows_are_never_empty_and_never_reach_the_last_step(order):
    for steps in range(2, 31):
        for size in range(1, steps):
            plan = Sliding(size, every=3, order=order, threshold=5)
            for epoch in (0, 1, 2, 3, 7, 29, 100):
                window = plan(steps, epoch, seed=1).trained
                assert len(window) == size and window[0] >= 0 and window[-1] <= steps - 2


@pytest.mark.parametrize("plan", [RandomSubset(), *(Sliding(order=order) for order in ORDERS)])
def test_plans_are_functions_of_their_arguments(plan):
    calls = [(epoch, seed) for epoch in range(60) for seed in (0, 1)]
    forwards = [plan(12, *call) for call in calls]
    assert forwards[::-1] == [plan(12, *call) for call in calls[::-1]]
    drawn = isinstance(plan, RandomSubset) or plan.order == "random"
    assert (forwards[::2] != forwards[1::2]) == drawn  # by the seed


@pytest.mark.parametrize("plan, steps", [
    (Sliding(size=5), 5), (Sliding(size=3, start=2), 5), (Sliding(size=3, stop=2), 10),
    (Sliding(size=3, start=4, stop=6), 10), (Sliding(size=1), 1), (AllSteps(), 1), (RandomSubset(), 1), (Single(0), 1)])
def test_plans_that_leave_nothing_to_train_are_refused(plan, steps):
    assert f"{steps}" in message(plan, steps, 0, 0, error=ValueError)


@pytest.mark.parametrize("stochastic, trained", [
    ((0, 1), ()), ((), (0,)), ((0,), (1,)), ((1, 0), (0,)), ((0, 0), (0,)), ((-1,), (-1,))])
def test_a_schedule_checks_itself(stochastic, trained):
    assert "steps" in message(Schedule, stochastic, trained, error=ValueError)


@pytest.mark.parametrize("name", ["children", "noise"])
@pytest.mark.parametrize("given", [(2,), (2, 1, 1), (0, 2), (2, -1)])
def test_children_and_noise_are_one_per_stochastic_step(name, given):
    told = f"{name} is {given}, expected 2 numbers above 0, one per stochastic step"
    assert told in message(Schedule, (1, 3), (3,), **{name: given}, error=ValueError)


def test_children_and_noise_may_be_left_out_and_tell_schedules_apart():
    bare, whole = Schedule((1, 3), (3,)), Schedule((1, 3), (3,), children=(2, 1), noise=(0.5, 1.5))
    assert (bare.children, bare.noise, whole.children, whole.noise) == ((), (), (2, 1), (0.5, 1.5))
    assert bare != whole and hash(whole) == hash(Schedule((1, 3), (3,), (2, 1), (0.5, 1.5)))


def test_a_stop_below_one_is_a_share_of_the_steps():
    for steps, last in ((8, 2), (10, 3), (7, 1)):  # windows of 2 within the first 4, 5 and 3 steps
        plan = Sliding(size=2, order="random", stop=0.5)
        assert {plan(steps, epoch, 0).trained[0] for epoch in range(200)} == set(range(last + 1))


SD35 = stock(FlowMatchEulerDiscreteScheduler(shift=3.0), 10)  # its scheduler's sigmas, which end 0.278, 0.0089, 0
LEARNED = preset("reinflow").rollout.kernel


def explored(method, grid=SD35, **parts):
    return method.having(**parts).explorations(grid, 12, None, 0, 0)


def posterior(grid, step):
    """Deviation of the state at grid[step+1] given the one at grid[step] and the data, for flows."""
    now, after = grid[step].item(), grid[step + 1].item()
    return after * math.sqrt(1 - (after * (1 - now) / (now * (1 - after))) ** 2)


def test_the_last_step_of_sd35s_grid_would_have_all_of_the_gradient():
    [spec] = preset("ddpo").on("flow").plan_explorations(SD35, 12, None, 0, 0)
    assert spec.schedule.trained == tuple(range(9)) and isinstance(spec.kernel, FlowDDIM)
    found = [deviation(spec, step) for step in range(9)]
    assert found == pytest.approx([posterior(SD35, step) for step in range(9)], rel=1e-4)
    assert found[8] == pytest.approx(0.0089, abs=5e-5) and found[8] ** -2 / sum(s ** -2 for s in found) > 0.99


@pytest.mark.parametrize("name, parts", [
    ("ddpo", {}), ("flow_grpo", {"kernel": CPS(0.8)}), ("flow_grpo", {"kernel": FlowDDIM(0.5)})])
def test_it_is_drawn_and_not_trained(name, parts):
    [spec] = explored(preset(name).on("flow"), **parts)
    assert spec.schedule.stochastic == tuple(range(9)) and spec.schedule.trained == tuple(range(8))
    [spec] = explored(preset(name).on("flow"), shift_grid(10, 3.0), **parts)
    assert spec.schedule.trained == tuple(range(9))


def test_b2s_growing_tail_ends_before_it():
    [spec] = explored(preset("b2_diffurl").on("flow"))
    assert spec.schedule.trained == tuple(range(3, 8)) and spec.splits == {3: 4}


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), DanceSDE(0.3), LEARNED])
def test_noise_of_the_steps_width_is_trained_everywhere(kernel):
    [spec] = explored(preset("flow_grpo"), kernel=kernel)
    assert spec.schedule.trained == tuple(range(9))
    # g sqrt(D): between 0.6 and 0.59 a level of 0.3 has 0.03, one of 0.15 has 0.015.
    near = torch.tensor([1, 0.6, 0.59, 0.3, 0])
    for level, trained in ((0.3, (0, 1, 2)), (0.15, (0, 2))):
        [spec] = explored(preset("flow_grpo"), near, kernel=DanceSDE(level))
        assert spec.schedule.trained == trained
        [spec] = explored(preset("flow_grpo"), near, kernel=replace(LEARNED, low=level, high=0.9))
        assert spec.schedule.trained == trained


def test_a_variance_preserving_grid_is_read_alike():
    alphas = torch.tensor([0.05, 0.5, 0.99, 0.9999, 1.0])
    [spec] = preset("ddpo").on("vp").explorations(alphas, 12, None, 0, 0, torch.tensor([900, 500, 20, 1]))
    last = math.sqrt((1 - 0.9999) / (1 - 0.99) * (1 - 0.99 / 0.9999))
    assert isinstance(spec.kernel, DDIM) and deviation(spec, 2) == pytest.approx(last, rel=1e-3) and last < 0.02
    assert spec.schedule.trained == (0, 1)


def test_a_schedule_of_that_step_alone_is_left_out_and_one_without_others_is_refused():
    every = explored(preset("flow_grpo"), kernel=FlowDDIM(), plan=EachStep())
    assert [spec.schedule.trained for spec in every] == [(step,) for step in range(8)]
    with pytest.raises(ValueError, match=r"trained steps \[8\] of 10 have a std of at most 0.0089 under FlowDDIM"):
        explored(preset("flow_grpo"), kernel=FlowDDIM(), plan=Single(8))
    with pytest.raises(ValueError, match=r"at most 0 under ODE\(\), expected 0.02 or more: use more noise"):
        explored(preset("flow_grpo"), kernel=ODE(), plan=AllSteps())


def test_a_rewards_gradient_needs_no_noise():
    method = preset("draft")
    [spec] = explored(method)
    [planned] = method.plan_explorations(SD35, 12, None, 0, 0)
    assert spec.schedule.trained == (9,) and vars(spec).keys() == vars(planned).keys()
    assert all(value is vars(planned)[name] or value == vars(planned)[name] for name, value in vars(spec).items())


def of_a_run(**options):
    pipe = tiny.sd3()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return tiny.trainer(tiny.policy(pipe), train__grid="stock", **options)


def test_a_run_says_which_steps_it_leaves_out(capsys):
    own = of_a_run(method="ddpo", train__steps=10)
    told = "of the steps 0 to 9 these are not trained, their deviation is below 0.02: 8 (0.0089)"
    assert told in capsys.readouterr().out
    assert own.rollouts.explorations(0)[0].schedule.trained == tuple(range(8))
    assert math.isfinite(own.run_epoch()["grad_norm"])
    of_a_run(method="flow_grpo", train__steps=10)
    assert "not trained" not in capsys.readouterr().out


def test_a_run_is_refused_before_it_begins_where_a_later_epoch_trains_nothing():
    plan = {"type": "Sliding", "size": 1, "every": 1}
    with pytest.raises(UserError, match=r"^epoch 9: the trained steps \[8\] of 10 have a std of at most 0.0089"):
        of_a_run(method="ddpo", train__steps=10, train__epochs=9, parts={"plan": plan})
    of_a_run(method="ddpo", train__steps=10, train__epochs=8, parts={"plan": plan})
