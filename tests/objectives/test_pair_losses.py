"""Losses of preference pairs by hand: DPO, IPO, SLiC, SimPO, cDPO, ODPO, of texts and of images."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo.objectives.forward_process import Preference
from flowgrpo.objectives.reductions import SequenceMean, reduced
from flowgrpo.objectives.sequence_losses import PairLoss
from flowgrpo.types import CompletionBatch, GroupStatistics, NoisedBatch, Scored
from tests.helpers.tables import draw, f64

# Two completions of one prompt, of 3 and 2 tokens. Sums of log p: -3 and -1; of log p_reference: -4 and -1.5.
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
NEW, BASE = f64([[-1, -1.5, -0.5], [-0.25, -0.75, 0]]), f64([[-2, -1, -1], [-0.5, -1, 0]])


def loss_of(part: PairLoss, advantage=(1.0, 0.0), new=NEW, base=BASE, mask=MASK, group=None, rows=None):
    """The reduced loss of completions, and its gradient by log p. rows: batches, in place of all at once."""
    new, every = new.clone().requires_grad_(), torch.arange(len(new))
    advantage = f64(advantage)
    group = torch.zeros(len(new)).long() if group is None else group
    def batch(at, peers=None):
        now = Scored(new[at], mask[at])
        return CompletionBatch(now, now, torch.zeros_like(now.logp), at, mask.long(), mask, Scored(base[at], mask[at]),
                               peers)
    peers = GroupStatistics(part.statistic(batch(every)).detach(), advantage, group)
    reduction, total = SequenceMean(), torch.zeros((), dtype=torch.float64)
    for at in rows or [every]:
        piece = batch(at, peers)
        loss = reduced(part(torch.zeros_like(piece.new.logp), advantage[at, None], piece), reduction(mask[at]),
                       reduction.count(mask))
        loss.backward()
        total += loss.detach()
    return total.item(), new.grad


def near(found: torch.Tensor, values: list) -> None:
    torch.testing.assert_close(found, f64(values), rtol=0, atol=1e-7)  # a reduction's weights are float32


def logistic(h: float) -> float:
    return math.log(1 + math.exp(-h))


# s is 1 for the chosen and 0.5 for the rejected: they differ by 0.5. Means over tokens: 1/3 and 0.25; of log p: -1 and
# -0.5.
@pytest.mark.parametrize("part, value", [
    (PairLoss(2.0), logistic(2 * 0.5)),
    (PairLoss(2.0, smoothing=0.1), 0.9 * logistic(1) + 0.1 * logistic(-1)),
    (PairLoss(2.0, "squared"), (0.5 - 1 / (2 * 2.0)) ** 2),
    (PairLoss(0.5, "squared"), (0.5 - 1) ** 2),
    (PairLoss(1.0, "hinge"), 0.5),
    (PairLoss(3.0, "hinge"), 0.0),
    (PairLoss(6.0, mean=True), logistic(6 * (1 / 3 - 0.25))),
    (PairLoss(2.0, mean=True, reference=False, margin=0.7), logistic(2 * -0.5 - 0.7)),
    (PairLoss(2.0, offset=0.3), logistic(2 * 0.5 - 0.3)),
    (PairLoss(2.0, likelihood=0.4), logistic(1) + 0.4 * 1.0)])
def test_the_family_by_hand(part, value):
    assert loss_of(part)[0] == pytest.approx(value, abs=1e-7)


def test_the_gradient_of_dpo_by_hand():
    # d/dh -log sigmoid(h) = -sigmoid(-h); h = 2 (s_w - s_l), and s is a sum over tokens.
    _, found = loss_of(PairLoss(2.0))
    slope = 2 / (1 + math.exp(1))
    near(found, [[-slope, -slope, -slope], [slope, slope, 0]])
    near(loss_of(PairLoss(2.0), (0.0, 1.0))[1], [[2 / (1 + math.exp(-1))] * 3, [-2 / (1 + math.exp(-1))] * 2 + [0]])


def test_a_pair_of_equal_advantages_has_no_loss():
    value, found = loss_of(PairLoss(2.0, likelihood=1.0), (0.5, 0.5))
    assert value == 0 and found.abs().max() == 0


def test_a_group_of_several_has_the_mean_of_its_pairs_in_any_micro_batch():
    new, base = draw(5, 3, seed=1), draw(5, 3, seed=2)
    group, advantage = torch.tensor([0, 0, 0, 1, 1]), (2.0, 1.0, 1.0, 0.0, 3.0)
    s = (new - base).sum(1)
    pairs = [[(0, 1), (0, 2)], [(4, 3)]]
    expected = sum(size * sum(logistic(float(s[i] - s[j])) for i, j in of) / len(of) for size, of in zip((3, 2), pairs))
    mask = torch.ones(5, 3).bool()
    value, whole = loss_of(PairLoss(1.0), advantage, new, base, mask, group)
    assert value == pytest.approx(expected / 5, abs=1e-7)
    rows = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4])]
    _, pieces = loss_of(PairLoss(1.0), advantage, new, base, mask, group, rows)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-7)
    leaf = new.clone().requires_grad_()
    s = (leaf - base).sum(1)
    total = sum(size * torch.stack([-torch.nn.functional.logsigmoid(s[i] - s[j]) for i, j in of]).mean()
                for size, of in zip((3, 2), pairs)) / 5
    torch.testing.assert_close(whole, torch.autograd.grad(total, leaf)[0], rtol=0, atol=1e-7)


def test_of_images_it_is_the_loss_of_diffusion_dpo():
    new, base = draw(2, 1, seed=3).requires_grad_(), draw(2, 1, seed=4)
    advantage, there = f64([0.2, 0.9]), torch.ones(2, 1).bool()
    found = []
    for part in (PairLoss(20.0), Preference(20.0)):
        read = NoisedBatch(0.5, Scored(new, there), Scored(new, there), torch.zeros(2, 1), torch.arange(2),
                           Scored(base, there))
        peers = GroupStatistics(part.statistic(read).detach().flatten(), advantage, torch.zeros(2).long())
        read = NoisedBatch(0.5, read.new, read.old, read.target, read.rows, read.reference, peers)
        loss = part(torch.zeros(2, 1), advantage[:, None], read)
        found.append((loss.detach(), torch.autograd.grad(loss.mean(), new)[0]))
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options, problem", [
    ({"form": "kto"}, "form is 'kto', expected one of logistic, squared, hinge"),
    ({"beta": 0}, "beta is 0 and smoothing 0.0, expected above 0"),
    ({"smoothing": 0.5}, "smoothing 0.5, expected above 0, and 0 to 1/2"),
    ({"offset": -1.0}, "offset is -1.0, expected 0 or more")])
def test_settings_out_of_range_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        PairLoss(**options)
