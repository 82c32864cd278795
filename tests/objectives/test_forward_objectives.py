"""Losses of forward-process methods, in closed form: values, weights and gradients in float64."""

import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.gaussian import log_prob
from flowgrpo.objectives.forward_process import (
    CentredReward,
    GroupPreference,
    NegativeAware,
    Preference,
    StepPreference,
    goodness,
)
from flowgrpo.objectives.ratios import Matching, PlainRatio, error
from flowgrpo.objectives.reductions import Sigma
from flowgrpo.objectives.surrogates import Clip
from flowgrpo.samplers.noised_finals import matching
from flowgrpo.types import Gaussian, GroupStatistics, NoisedBatch, Scored
from tests.helpers.tables import close, draw, f64

GRID, ROWS, DIMS = f64([0.75, 0.25, 0.0]), 4, (3, 2)


def scored(v: torch.Tensor, u: torch.Tensor) -> Scored:
    """Velocities [b,*D] scored at their targets."""
    logp = log_prob(Gaussian(v, torch.ones((), dtype=v.dtype)), u)[:, None]
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), v[:, None], torch.ones(1))


def with_error(values: list[float], grad: bool = False) -> Scored:
    """Scores of samples with the given errors, without means."""
    logp = (-(f64(values)[:, None] + math.log(2 * math.pi)) / 2).requires_grad_(grad)
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool))


def noised(surrogate, advantage: list[float], new: Scored, old: Scored, group=None, reference=None, target=None,
           time: float = 0.75) -> NoisedBatch:
    """What the surrogate reads of whole groups, by default of one."""
    rows = torch.arange(len(advantage))
    found = NoisedBatch(time, new, old, target, rows, reference, measure=PlainRatio())
    if not surrogate.reads_groups:
        return found
    group = torch.zeros(len(rows), dtype=torch.int64) if group is None else torch.tensor(group)
    peers = GroupStatistics(surrogate.statistic(found).detach().flatten(), f64(advantage), group)
    return replace(found, peers=peers)


def velocities(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(v with a gradient, v_old, u)."""
    return tuple(draw(ROWS, *DIMS, seed=3 * seed + i).requires_grad_(i == 0) for i in range(3))


def column(values: list[float]) -> torch.Tensor:
    return f64(values)[:, None]


def test_the_error_is_what_the_density_says():
    v, _, u = velocities()
    close(error(scored(v, u)).detach(), (v - u).square().flatten(1).mean(1, keepdim=True).tolist())
    gaussian = matching(v, v, GRID, 0)
    torch.testing.assert_close(log_prob(gaussian, u), torch.distributions.Normal(v, f64(1.0)).log_prob(u).mean((1, 2)))


def test_goodness_by_hand():
    close(goodness(f64([-9.0, -5.0, 0.0, 1.0, 5.0, 9.0]), 5.0), [0.0, 0.0, 0.5, 0.6, 1.0, 1.0])


def value(surrogate, advantage: list[float], new: Scored, old: Scored, group=None, reference=None, target=None,
          time: float = 0.75) -> torch.Tensor:
    """The surrogate's value of every sample, where no ratio has moved."""
    read = noised(surrogate, advantage, new, old, group, reference, target, time)
    return surrogate(torch.zeros(len(advantage), 1), column(advantage), read)


# --- diffusion_nft ---------------------------------------------------------------------------------------------------
def nft(surrogate, v, v_old, u, advantage: list[float], time: float = 0.75) -> torch.Tensor:
    return value(surrogate, advantage, scored(v, u), scored(v_old, u), target=u, time=time)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nfts_gradient_at_the_old_policy(beta):
    """most (2 r - 1) 2 t^2 (v - u) / (D w), w = t mean|v - u|: whatever beta is."""
    advantage, t = [5.0, 1.0, -2.0, -7.0], 0.75
    v, _, u = velocities()
    loss = nft(NegativeAware(beta), v, v.detach(), u, advantage)
    [found] = torch.autograd.grad(loss.sum(), v)
    apart = (v - u).detach()
    sign = f64([1.0, 0.2, -0.4, -1.0]).view(-1, 1, 1)  # 2 r - 1
    weight = t * apart.abs().mean((1, 2), keepdim=True)
    close(found, (5 * sign * 2 * t**2 * apart / (6 * weight)).tolist())
    # There v+ and v- are one: the value is most / beta * e / w, whatever the advantage.
    expected = 5 / beta * t**2 * apart.square().mean((1, 2)) / weight.flatten()
    close(loss.detach(), expected[:, None].tolist())


def test_nft_without_advantages_stays_at_the_old_policy():
    v, _, u = velocities()
    [found] = torch.autograd.grad(nft(NegativeAware(), v, v.detach(), u, [0.0] * ROWS).sum(), v)
    assert found.abs().max() == 0
    # And with r = 1/2 a step and its opposite cost the same.
    step = 0.3 * draw(ROWS, *DIMS, seed=9)
    sides = [nft(NegativeAware(0.7), v.detach() + side * step, v.detach(), u, [0.0] * ROWS) for side in (1, -1)]
    close(sides[0], sides[1].tolist())


def test_nft_by_hand():
    """One value: t 1/2, u 0, v_old 1, v 3, beta 1/2: v+ = 2, v- = 0; A 1: r 0.6. l(v+) = 1 / 1; the weight of v- = 0 is
    at least 1e-5."""
    v, v_old, u = (f64([[value]]) for value in (3.0, 1.0, 0.0))
    surrogate = NegativeAware(0.5)
    read = noised(surrogate, [1.0], scored(v, u), scored(v_old, u), target=u, time=0.5)
    close(surrogate(torch.zeros(1, 1), column([1.0]), read), [[5 / 0.5 * 0.6 * 1.0]])
    assert not surrogate.clip_mask(torch.ones(1, 1), column([1.0]), read).any()


# --- awm -------------------------------------------------------------------------------------------------------------
def test_awm_by_hand():
    """At the old policy the ratio is 1 and the loss -A; its gradient is A t f'(e) grad e, f'(e) = (e + 1e-10)^-0.75."""
    v, _, u = velocities()
    new, old = scored(v, u), scored(v.detach(), u)
    advantage = column([5.0, 1.0, -2.0, 0.0])
    ratio = Matching(0.25)(new, old)
    assert ratio.abs().max() == 0
    loss = Clip(1.0, 1.0)(ratio, advantage, old.logp) * Sigma()(None, GRID, [0])
    close(loss.detach(), (-0.75 * advantage).tolist())
    [found] = torch.autograd.grad(loss.sum(), v)
    apart = (v - u).detach()
    slope = (apart.square().mean((1, 2), keepdim=True) + 1e-10).pow(-0.75)
    close(found, (0.75 * advantage[..., None] * slope * 2 * apart / 6).tolist())


def test_the_log_ratio_by_hand():
    new, old = with_error([1.0, 4.0]), with_error([2.0, 1.0])
    close(Matching()(new, old), [[1.0], [-3.0]])
    close(Matching(0.5)(new, old), [[2 * (2**0.5 - 1)], [-2.0]], atol=1e-9)
    close(Sigma()(None, GRID, [1, 0]), [0.25, 0.75])


# --- dgpo ------------------------------------------------------------------------------------------------------------
def test_dgpos_weights_by_hand():
    """Two groups of two: sums of A (e - e_ref) are 1 * (-0.1) - 1 * 0.2 and 2 * 0.3 - 2 * 0.1; beta 10, halved."""
    surrogate, advantage, group = GroupPreference(10.0), [1.0, -1.0, 2.0, -2.0], [7, 7, 3, 3]
    new, reference = with_error([0.4, 0.7, 0.8, 0.3], grad=True), with_error([0.5, 0.5, 0.5, 0.2])
    read = noised(surrogate, advantage, new, new, group, reference)
    weight = [1 / (1 + math.exp(1.5))] * 2 + [1 / (1 + math.exp(-2.0))] * 2
    close(surrogate.weight(read), column(weight).tolist())
    loss = surrogate(torch.zeros(4, 1), column(advantage), read)
    expected = [w * a * e for w, a, e in zip(weight, advantage, [0.4, 0.7, 0.8, 0.3])]
    close(loss.detach(), column(expected).tolist())
    [found] = torch.autograd.grad(loss.sum(), new.logp)  # e = -2 logp less a constant, W is detached
    close(found, column([-2 * w * a for w, a in zip(weight, advantage)]).tolist())


def test_dgpo_cuts_the_gradient_of_what_has_moved_far_enough():
    surrogate, advantage = GroupPreference(10.0, 0.1, 0.2), [1.0, 1.0, -1.0, -1.0]
    new = with_error([1.0] * 4, grad=True)
    log_ratio = column([math.log(1.21), math.log(0.5), math.log(0.89), math.log(2.0)])
    read = noised(surrogate, advantage, new, new, reference=with_error([1.0] * 4))
    cut = [[True], [False], [True], [False]]
    assert surrogate.clip_mask(log_ratio, column(advantage), read).tolist() == cut
    [found] = torch.autograd.grad(surrogate(log_ratio, column(advantage), read).sum(), new.logp)
    close(found, column([0.0, -1.0, 0.0, 1.0]).tolist())  # W = 1/2


# --- crd -------------------------------------------------------------------------------------------------------------
def test_crd_by_hand():
    """Values v of one number with target 0: l(v) = v^2 / |v| = |v|. R = |v_old| - |v|; r = A/10 + 1/2."""
    surrogate, advantage = CentredReward(2.0), [1.0, 2.0, -3.0, 5.0]
    v, v_old, u = (f64(values)[:, None] for values in ([1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 5.0], [0.0] * 4))
    read = noised(surrogate, advantage, scored(v, u), scored(v_old, u), [0, 0, 0, 1], target=u)
    close(read.peers.statistic, [1.0, 0.0, -1.0, 1.0])
    loss = surrogate(torch.zeros(4, 1), column(advantage), read)
    # Centred R: 1, 0, -1 and 0; centred r: 0.1, 0.2, -0.3 and 0.
    close(loss, [[2.5 * 1.9**2], [2.5 * 0.2**2], [2.5 * 1.7**2], [0.0]])


def test_crds_gradient_is_that_of_the_whole_group():
    surrogate, advantage = CentredReward(1.5), [1.0, 2.0, -4.0, 1.0]
    v, v_old, u = velocities()
    read = noised(surrogate, advantage, scored(v, u), scored(v_old, u), target=u)
    [found] = torch.autograd.grad(surrogate(torch.zeros(ROWS, 1), column(advantage), read).sum(), v)
    reward = surrogate.statistic(read).flatten()
    wanted = f64([0.6, 0.7, 0.1, 0.6])
    whole = 5 / 1.5 * (1.5 * (reward - reward.mean()) - (wanted - wanted.mean())).square().sum()
    close(found, torch.autograd.grad(whole, v)[0].tolist())


# --- diffusion_dpo ---------------------------------------------------------------------------------------------------
def dpo(new: Scored, reference: Scored, advantage: list[float], beta: float = 20.0, group=None) -> torch.Tensor:
    return value(Preference(beta), advantage, new, new, group, reference)


def test_dpo_by_hand():
    """The better sample's error fell by 0.1 against the reference, the worse one's rose by 0.05: -beta/2 * -0.15."""
    new, reference = with_error([0.4, 0.65], grad=True), with_error([0.5, 0.6])
    loss = dpo(new, reference, [1.0, -1.0])
    expected, slope = math.log(1 + math.exp(-1.5)), 1 / (1 + math.exp(1.5))
    close(loss.detach(), [[expected], [expected]])
    [found] = torch.autograd.grad(loss.mean(), new.logp)
    # d value / d e_w = beta/2 * slope, and the opposite for e_l; e = -2 logp.
    close(found, [[-2 * 10 * slope], [2 * 10 * slope]])


def test_dpo_at_ties():
    new = with_error([0.4, 0.7], grad=True)
    ties = dpo(new, with_error([0.4, 0.7]), [1.0, -1.0])  # the policy is the reference
    close(ties.detach(), [[math.log(2)]] * 2)
    equal = dpo(new, with_error([0.5, 0.5]), [0.3, 0.3])  # no sample is the better one
    close(equal.detach(), [[math.log(2)]] * 2)
    assert torch.autograd.grad(equal.sum(), new.logp)[0].abs().max() == 0
    new = with_error([0.3], grad=True)  # one without a partner
    loss = dpo(new, with_error([0.5]), [1.0])
    assert loss.item() == 0 and torch.autograd.grad(loss.sum(), new.logp)[0].item() == 0
    v, _, u = (each[:1] for each in velocities())
    twice = scored(v.expand(2, *DIMS), u.expand(2, *DIMS))  # one sample, preferred to itself
    [found] = torch.autograd.grad(dpo(twice, with_error([1.0, 1.0]), [1.0, -1.0]).sum(), v, retain_graph=True)
    assert found.abs().max() < 1e-15


def test_dpos_gradient_is_that_of_all_pairs():
    advantage, group, beta = [2.0, -1.0, 0.5, 1.0, -1.0], [0, 0, 0, 1, 1], 3.0
    new, reference = with_error([0.3, 0.9, 0.4, 0.8, 0.2], grad=True), with_error([0.5, 0.2, 0.7, 0.1, 0.6])
    loss = dpo(new, reference, advantage, beta, group)
    d = (error(new) - error(reference)).flatten()
    def pair(w: int, loser: int) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(-beta / 2 * (d[w] - d[loser]))
    first, second = (pair(0, 1) + pair(0, 2) + pair(2, 1)) / 3, pair(3, 4)
    whole = (3 * first + 2 * second) / 5
    close(loss.mean().detach(), whole.item())
    expected = torch.autograd.grad(whole, new.logp, retain_graph=True)[0]
    close(torch.autograd.grad(loss.mean(), new.logp)[0], expected.tolist())


# --- pso -------------------------------------------------------------------------------------------------------------
def test_pso_by_hand():
    """Log-ratios to the reference are 0.1, -0.2 and 0.4; 0 is better than 1 and 2, which tie; beta 5."""
    new, reference = (Scored(column(values), torch.ones(len(values), 1, dtype=torch.bool))
                      for values in ([-1.0, -1.2, -0.7], [-1.1, -1.0, -1.1]))
    new.logp.requires_grad_()
    loss = value(StepPreference(5.0), [1.0, -1.0, -1.0], new, new, None, reference)
    first, second, tie = (math.log(1 + math.exp(-5 * apart)) for apart in (0.3, -0.3, 0.0))
    close(loss.detach(), [[(first + second) / 2], [(first + tie) / 2], [(second + tie) / 2]])
    slopes = [5 / (1 + math.exp(5 * apart)) for apart in (0.3, -0.3)]  # of a pair's loss, by the better one's log-ratio
    [found] = torch.autograd.grad(loss.sum(), new.logp)
    close(found, [[-sum(slopes)], [slopes[0]], [slopes[1]]])


# --- peers -----------------------------------------------------------------------------------------------------------
def test_who_is_in_whose_group():
    peers = GroupStatistics(f64([0.0] * 4), f64([0.0] * 4), torch.tensor([5, 5, 2, 5]))
    assert peers.members(torch.tensor([2, 3])).tolist() == [[False, False, True, False], [True, True, False, True]]
