"""Steps with too little noise: left out of training on every grid, and a run says so."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.kernels import CPS, DDIM, ODE, DanceSDE, FlowDDIM, FlowSDE
from flowgrpo.samplers.noise import deviation
from flowgrpo.samplers.plans import AllSteps, EachStep, Single
from tests.helpers import tiny
from tests.helpers.tables import stock

SD35 = stock(FlowMatchEulerDiscreteScheduler(shift=3.0), 10)  # its scheduler's sigmas, which end 0.278, 0.0089, 0
LEARNED = preset("reinflow").rollout.kernel


def explored(method, grid=SD35, **parts):
    return method.having(**parts).explorations(grid, 12, None, 0, 0)


def posterior(grid, step):
    """Deviation of the state at grid[step+1] given the one at grid[step] and the data, for flows."""
    now, after = grid[step].item(), grid[step + 1].item()
    return after * math.sqrt(1 - (after * (1 - now) / (now * (1 - after))) ** 2)


def test_the_last_step_of_sd35s_grid_would_have_all_of_the_gradient():
    [spec] = preset("ddpo").on("flow").planned(SD35, 12, None, 0, 0)
    assert spec.schedule.trained == tuple(range(9)) and isinstance(spec.kernel, FlowDDIM)
    found = [deviation(spec, step) for step in range(9)]
    assert found == pytest.approx([posterior(SD35, step) for step in range(9)], rel=1e-4)
    assert found[8] == pytest.approx(0.0089, abs=5e-5) and found[8] ** -2 / sum(s ** -2 for s in found) > 0.99


@pytest.mark.parametrize("name, parts", [
    ("ddpo", {}), ("flow_grpo", {"kernel": CPS(0.8)}), ("flow_grpo", {"kernel": FlowDDIM(0.5)})])
def test_it_is_drawn_and_not_trained(name, parts):
    [spec] = explored(preset(name).on("flow"), **parts)
    assert spec.schedule.stochastic == tuple(range(9)) and spec.schedule.trained == tuple(range(8))
    [spec] = explored(preset(name).on("flow"), shifted(10, 3.0), **parts)
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
    with pytest.raises(UserError, match="have a std of at most 0.0047 under DanceSDE"):
        resolve(tiny.config(method="dance_grpo", parts={"kernel": {"level": 0.01}}))


def test_a_rewards_gradient_needs_no_noise():
    method = preset("draft")
    [spec] = explored(method)
    assert spec.schedule.trained == (9,) and explored(method) == method.planned(SD35, 12, None, 0, 0)


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
