"""Noised finals: when, how and under whose weights they are scored, and runs of the methods that train on them."""

import math
from itertools import combinations

import pytest
import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.methods import preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.objectives.forward_process import NegativeAware
from flowgrpo.policies.weights import trainable
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.noised_finals import GridTimes, RandomGridTimes, Stratified, matching
from flowgrpo.samplers.old_policy import Lag, OldPolicy
from flowgrpo.training import memory, sampling
from tests.helpers import loop, tiny
from tests.test_train import gradient

NAMES = ("diffusion_nft", "awm", "dgpo", "crd", "diffusion_dpo")


def epoch(trainer):
    """One epoch's parts, each transition with its advantage, and the conditioning, before any update."""
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:2])
    return list(loop.credit(trainer, parts, grouped, conditioning.prompts)), conditioning


def test_sol_rl_goes_with_diffusion_nft_in_either_order():
    both = preset("sol_rl+diffusion_nft")
    previewed = preset("diffusion_nft").having(preview=preset("sol_rl").rollout.preview)
    assert both == preset("diffusion_nft+sol_rl") == previewed


@pytest.mark.parametrize("name", [*NAMES, "rpo"])
def test_what_is_trained_does_not_depend_on_the_presets_before(name):
    redraw = preset("dynamic_sampling").redraw
    assert preset("grpo_guard+dynamic_sampling", name) == preset(name).having(redraw=redraw)
    guarded = preset(name, "flow_dppo+dynamic_sampling")  # what comes after still changes it
    assert guarded == preset(name).having(surrogate=preset("flow_dppo").parts()["surrogate"], redraw=redraw)


# --- times -----------------------------------------------------------------------------------------------------------
def places(times, steps: int, epochs: int) -> list[tuple[int, ...]]:
    """Which steps of the grid an epoch's times are."""
    grid = shift_grid(steps, 3.0)
    found = [times(grid, epoch, 0) for epoch in range(epochs)]
    return [tuple((grid == t).nonzero().item() for t in each) for each in found]


def test_grid_times_are_the_steps_that_are_asked_for():
    assert set(places(GridTimes(), 4, 5)) == {(0, 1, 2, 3)}
    assert set(places(GridTimes(share=0.99), 10, 5)) == {tuple(range(9))}
    assert set(places(GridTimes(start=1, share=0.5), 10, 5)) == {(1, 2, 3, 4)}
    # Stretches of two steps, the last one short: every combination comes.
    assert set(places(GridTimes(every=2, share=0.5), 10, 80)) == {(a, b, 4) for a in (0, 1) for b in (2, 3)}
    assert set(places(GridTimes(every=3, start=2, share=0.6), 10, 80)) == {(2, b) for b in (3, 4, 5)}


def test_awm_draws_from_the_stretches_of_its_release():
    """train_sd3_awm.py, `discrete_wo_init`, with its 14 steps, 6 times and fraction 0.9."""
    bounds = torch.linspace(1, int(14 * 0.9), 7).long().tolist()
    stretches = [set(range(*pair)) for pair in zip(bounds, bounds[1:])]
    assert stretches == [{1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]
    assert [set(drawn) for drawn in zip(*places(preset("awm").target.times, 14, 40))] == stretches


def test_stratified_times_fall_one_in_each_slice():
    grid = shift_grid(6, 3.0)
    for each in range(50):
        times = Stratified(4, 0.2, 1.0)(grid, each, 0)
        assert times.dtype == grid.dtype and ((1.0 - times) // 0.2).tolist() == [0, 1, 2, 3]
    drawn = torch.cat([Stratified(1)(grid, each, 0) for each in range(2000)])
    assert abs(drawn.mean() - 0.5) < 0.03 and abs(drawn.var() - 1 / 12) < 0.01


def test_random_grid_times_are_any_of_the_grid_with_one_probability():
    found = places(RandomGridTimes(0.5), 4, 3000)
    counts = {each: found.count(each) for each in set(found)}
    assert set(counts) == set(combinations(range(4), 2))  # falling, none twice
    assert all(count == pytest.approx(500, abs=4 * (3000 * 5 / 36) ** 0.5) for count in counts.values())
    for share, size in ((0.6, 6), (0.99, 9)):  # the last time too, as often as all others
        found = places(RandomGridTimes(share), 10, 2000)
        assert {len(each) for each in found} == {size}
        for step in range(10):
            told = sum(step in each for each in found) / 2000
            assert told == pytest.approx(size / 10, abs=4 * (size / 10 * (1 - size / 10) / 2000) ** 0.5)
    assert set(places(RandomGridTimes(), 4, 5)) == {(0, 1, 2, 3)}


@pytest.mark.parametrize("times", [GridTimes(every=3), RandomGridTimes(0.5), Stratified(3)])
def test_times_are_functions_of_seed_and_epoch(times):
    drawn = [[times(shift_grid(12, 3.0), each, seed).tolist() for each in range(20)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len({tuple(each) for each in drawn[0]}) > 10


# --- the old policy --------------------------------------------------------------------------------------------------
def test_an_old_lora_and_its_average_stay_on_the_device(monkeypatch):
    pipe = tiny.sd3()
    pipe.transformer.to("meta")
    weights = TrainableWeights(pipe, {"transformer": pipe.transformer}, Adapter(rank=2))
    old = OldPolicy(Lag(0.5, most=0.5), weights)
    for epoch in range(2):
        old.start_epoch(epoch)
    assert {tensor.device.type for tensor in old.held.values()} == {"meta"}
    loaded = {key: torch.zeros(tensor.shape) for key, tensor in old.held.items()}
    old.load_state(loaded, {"epoch": 1})
    assert {tensor.device.type for tensor in old.held.values()} == {"meta"}
    monkeypatch.setattr(trainable, "KEPT", 1000)
    assert weights.large
    old.load_state(loaded, {"epoch": 1})
    assert {tensor.device.type for tensor in old.held.values()} == {"cpu"}


@pytest.mark.parametrize("lag, expected", [
    (Lag(), {0: 0, 500: 0}),
    (Lag(slope=0.001, most=0.5), {0: 0, 1: 0.001, 400: 0.4, 500: 0.5, 900: 0.5}),
    (Lag(after=75, slope=0.0075, most=0.999), {75: 0, 77: 0.015, 208: 0.9975, 209: 0.999}),
    (Lag(start=0.25, slope=0.005, most=0.999), {0: 0.25, 10: 0.3, 200: 0.999})])
def test_decays_by_hand(lag, expected):
    assert {updates: lag(updates) for updates in expected} == pytest.approx(expected)


class One:
    """One trained weight."""

    def __init__(self, value: float):
        self.value = torch.tensor([value], dtype=torch.float64)

    def copy_for_average(self) -> dict[str, torch.Tensor]:
        return {"w": self.value.clone()}


def test_the_old_policy_follows_once_per_epoch():
    one = One(8.0)
    old_policy, found = OldPolicy(Lag(start=0.25, slope=0.25, most=0.75), one), []
    for epoch, (value, updates) in enumerate([(8.0, 0), (4.0, 1), (0.0, 2), (8.0, 4)]):
        one.value.fill_(value)
        old_policy.updates = updates
        old_policy.start_epoch(epoch)
        old_policy.start_epoch(epoch)  # an interrupted epoch is begun again
        found.append(old_policy.held["w"].item())
    # 8, then 1/2 * 8 + 1/2 * 4, 3/4 * 6 + 1/4 * 0 and 3/4 * 4.5 + 1/4 * 8
    assert found == [8.0, 6.0, 4.5, 5.375]
    without = OldPolicy(Lag(), None)
    without.start_epoch(3)
    assert without.held is None


def test_the_decay_counts_updates_of_which_an_epoch_may_make_several():
    trainer = tiny.trainer(method="crd", train__updates=2, train__lr=0.02)
    first = trainer.policy.weights.snapshot()
    for trainer.epoch in range(2):
        trainer.run_epoch()
        present = trainer.policy.weights.snapshot()
    trainer.epoch = 2
    held = trainer.rollouts.old_policy.held
    sampling.sample(trainer, trainer.prompts[:2])
    assert trainer.optimization.update == 4 and any(not torch.equal(held[key], first[key]) for key in first)
    for key, old in trainer.rollouts.old_policy.held.items():
        torch.testing.assert_close(old, (0.25 + 4 * 0.005) * held[key] + 0.73 * present[key])


@pytest.mark.fast
def test_rollouts_and_old_scores_are_the_old_policys():
    found = {}
    for draws in (True, False):
        lag = {"start": 0.5, "most": 0.5, "draws": draws}
        trainer = tiny.trainer(method="diffusion_nft", parts__lag=lag)
        tiny.stir(trainer.policy)
        trainer.rollouts.old_policy.start_epoch(0)
        tiny.stir(trainer.policy)
        parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
        found[draws] = torch.cat([part.finals[0] for part in parts])
        with trainer.rollouts.old_policy.old(), torch.no_grad():
            again = [(new, part.transitions[k].old.rows(rows)) for part in parts
                     for k, rows, new in trainer.rollouts.replay(part, conditioning)]
        assert all(torch.equal(new.logp, old.logp) and torch.equal(new.mean, old.mean) for new, old in again)
    other = tiny.trainer(method="awm")
    tiny.stir(tiny.stir(other.policy))
    present = torch.cat([part.finals[0] for part in sampling.sample(other, other.prompts[:2])[0]])
    assert torch.equal(found[False], present) and not torch.allclose(found[True], present, atol=1e-3)


# --- noised finals ---------------------------------------------------------------------------------------------------
def test_the_kernel_is_a_unit_gaussian_around_the_velocity():
    v, u = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).chunk(2, 1)
    found = matching(torch.zeros_like(v), v, shift_grid(4, 3.0), 2)
    expected = torch.distributions.Normal(v, 1.0).log_prob(u)
    torch.testing.assert_close(torch.distributions.Normal(found.mean, found.std).log_prob(u), expected)


def noised_parts(**options):
    trainer = tiny.trainer(method="diffusion_nft", **options)
    tiny.stir(trainer.policy)
    return trainer, sampling.sample(trainer, trainer.prompts[:2])[0]


def noises(parts) -> torch.Tensor:
    """The noise of every time and leaf, [K,b,*D]: target + x0."""
    steps = range(len(parts[0].transitions))
    return torch.stack([torch.cat([part.transitions[k].x_next + part.finals[0] for part in parts]) for k in steps])


def test_finals_are_noised_at_the_epochs_times():
    trainer, parts = noised_parts()
    times = RandomGridTimes(0.99)(trainer.rollouts.grid, 0, 0)
    assert len(times) == 5
    for part in parts:
        assert [taken.step for taken in part.transitions] == list(range(5))
        for t, taken in zip(times.tolist(), part.transitions):
            torch.testing.assert_close(taken.x, part.finals[0] + t * taken.x_next, rtol=1e-5, atol=1e-5)
            assert torch.equal(taken.parent, torch.arange(len(taken.x))) and torch.equal(taken.prompts, part.prompts)


def test_the_noise_is_standard_normal_and_every_samples_own():
    trainer, parts = noised_parts(train__group=16, train__micro_batch=16)
    noise = noises(parts)
    assert noise.shape == (5, 32, *tiny.LATENTS)
    assert abs(noise.mean()) < 0.015 and abs(noise.var() - 1) < 0.02  # 40,960 values: 3 deviations
    rows = torch.nn.functional.normalize(noise.flatten(0, 1).flatten(1), dim=1)
    assert (rows @ rows.T - torch.eye(len(rows))).abs().max() < 0.35  # 5.6 deviations of 256 values
    first = torch.randn(256, generator=torch.Generator().manual_seed(trainer.rollouts.seeds(0, 0, 2)(0, 0)))
    assert abs(torch.nn.functional.normalize(first, dim=0) @ rows[0]) < 0.35  # not that of the rollout


def test_the_noise_does_not_depend_on_the_micro_batch():
    found = [noises(noised_parts(train__micro_batch=size)[1]) for size in (8, 3)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_group_may_share_its_noise():
    _, parts = noised_parts(parts__times={"shared": True}, train__micro_batch=8)
    noise = noises(parts).unflatten(1, (2, 4))
    torch.testing.assert_close(noise, noise[:, :, :1].expand_as(noise), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(noise[:, 0], noise[:, 1], atol=0.5) and not torch.allclose(noise[0], noise[1], atol=0.5)


def test_any_rollout_will_do():
    trainer = tiny.trainer(method="diffusion_nft", parts__plan={"type": "AllSteps"}, train__lr=1e-3)
    usual = tiny.trainer(method="diffusion_nft")
    plain = torch.cat([part.finals[0] for part in sampling.sample(usual, trainer.prompts[:2])[0]])
    parts = sampling.sample(trainer, trainer.prompts[:2])[0]
    assert not torch.allclose(torch.cat([part.finals[0] for part in parts]), plain, atol=1e-2)
    assert all(len(part.transitions) == 5 for part in parts) and math.isfinite(trainer.run_epoch()["loss"])


def test_what_noised_finals_hold_is_foretold():
    trainer, parts = noised_parts()
    held = [tensor for part in parts for taken in part.transitions
            for tensor in (taken.x, taken.x_next, taken.old.mean)] + [part.finals[0] for part in parts]
    given = trainer.policy, trainer.config, trainer.rollouts.conditioning(trainer.prompts[:2]), held[0][:1]
    assert memory.tensor_bytes(held) == memory._rollout_bytes(*given)
    assert memory.tensor_bytes(held) == memory.tensor_bytes(held[0][:1]) * 8 * (5 * 3 + 1)


# --- runs ------------------------------------------------------------------------------------------------------------
def test_in_half_precision_old_scores_stand_as_they_are():
    policy = tiny.stir(tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16"))
    trainer = tiny.trainer(policy, precision="bf16", method="diffusion_nft")
    trainer.first_ratio(*epoch(trainer), print)
    assert trainer.first_ratio.max_log_ratio == 0 and not trainer.first_ratio.rescore


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_does_not_depend_on_the_micro_batch(name):
    found = []
    for micro_batch, pack in ((12, False), (6, False), (4, False), (12, True)):  # of groups of 6, some cut into two
        trainer = tiny.trainer(method=name, train__group=6, train__micro_batch=micro_batch)
        tiny.stir(trainer.policy)
        parts, conditioning = epoch(trainer)
        tiny.stir(trainer.policy, 0.02)
        trainer.rollouts.config = tiny.config(method=name, train__group=6, train__pack=pack)
        assert trainer.policy.vector(conditioning)
        found.append(gradient(trainer, parts, conditioning))
    scale = found[0].abs().max()
    assert scale > 1e-4
    for other in found[1:]:
        torch.testing.assert_close(other / scale, found[0] / scale, rtol=0, atol=1e-4)


def test_a_first_pass_is_made_only_where_a_comparing_method_cuts_its_groups():
    spent = {}
    for name, micro_batch in (("crd", 4), ("crd", 2), ("diffusion_nft", 2)):
        trainer = tiny.trainer(method=name, train__micro_batch=micro_batch)
        parts, conditioning = epoch(trainer)
        before = trainer.policy.evaluations
        gradient(trainer, parts, conditioning)
        spent[name, micro_batch] = trainer.policy.evaluations - before
    replays = 5 * 8  # times and samples; the KL has the reference's
    assert spent == {("crd", 4): 2 * replays, ("crd", 2): 3 * replays, ("diffusion_nft", 2): 2 * replays}


def test_a_better_matched_good_sample_is_what_every_method_reaches_for():
    """After some updates on one batch of samples the errors of the good ones have fallen against those of the bad."""
    for name in NAMES:
        trainer = tiny.trainer(method=name, train__micro_batch=8, train__lr=1e-3, parts__kl__weight=0.0)
        tiny.stir(trainer.policy)
        parts, conditioning = epoch(trainer)
        def fit() -> float:
            with torch.no_grad():
                return sum((part.advantages[k][rows] * new.logp[:, 0]).sum().item() for part in parts
                           for k, rows, new in trainer.rollouts.replay(part, conditioning))
        before = fit()
        for _ in range(3):
            gradient(trainer, parts, conditioning)
            trainer.optimization.optimizer.step()
        assert fit() > before, name


# --- parts -----------------------------------------------------------------------------------------------------------
def test_a_comparison_with_the_reference_keeps_it_without_a_kl():
    trainer = tiny.trainer(method="diffusion_dpo", parts__reference={"type": "PreviousPolicy"})
    assert trainer.method.loss.kl.weight == 0 and len(trainer.kl_reference.snapshots) == 1
    assert "kl_weight" not in trainer.run_epoch()


def test_parts_can_be_changed_like_any_other():
    method = with_parts(preset("diffusion_nft"), {"times": {"type": "Stratified", "count": 2}, "lag": {"most": 0.9},
                                                  "surrogate": {"beta": 0.1}})
    assert (method.target.times, method.rollout.lag.most) == (Stratified(2), 0.9)
    assert method.loss.surrogate == NegativeAware(0.1)
    assert "times" not in preset("mix_grpo").parts()
