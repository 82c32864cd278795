"""Losses that compare samples: rewards as labels, and the family of preference pairs, of texts and of images."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from flowgrpo.methods import preset
from flowgrpo.methods.groups import Loss
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.forward_process import Preference
from flowgrpo.objectives.ratios import CompletionRatio, Matching, PlainRatio
from flowgrpo.objectives.reductions import SequenceMean, SequenceSum, reduce_loss
from flowgrpo.objectives.sequence_losses import PairLoss, PairwisePreference, Regressed
from flowgrpo.rollouts.loss_inputs import NoisedInputs
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import Part, RolloutSpec
from flowgrpo.text.losses import RewardLabels
from flowgrpo.types import CompletionBatch, GroupStatistics, NoisedBatch, Scored, Transitions
from tests.helpers import tiny, tiny_text
from tests.helpers.tables import close, draw, f64
from tests.objectives.test_text_objectives import GROUP, MASK, reduced, scored

REWARD = f64([1, 0, 0.25, 0, 1])
CENTRED = REWARD - f64([1.25 / 3] * 3 + [0.5] * 2)


def written_out(loss, whole: bool, reference: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """loss(logits, labels) of each group, weighted by its size, over all completions; and its gradient."""
    new, old, base = (scored(seed).logp for seed in (1, 2, 3))
    new.requires_grad_()
    apart = ((new - (base if reference else old)) * MASK).sum(1) / (1 if whole else MASK.sum(1))
    total = sum(len(own) * loss(apart[own], REWARD[own]) for own in ([0, 1, 2], [3, 4])) / 5
    total.backward()
    return total.detach(), new.grad


def anchor(z, y):
    """log(1 + sum e^-z of right ones) + log(1 + sum e^z of wrong ones); soft labels count in part in both."""
    return (1 + (y * (-2 * z).exp()).sum()).log() + (1 + ((1 - y) * (2 * z).exp()).sum()).log()


def each(z, y):
    return binary_cross_entropy_with_logits(2 * z, y)


def leave_one_out(z, y):
    others = (z.sum() - z) / (len(z) - 1)
    return binary_cross_entropy_with_logits(2 * (z - others), y)


@pytest.mark.parametrize("loss", [anchor, each, leave_one_out])
@pytest.mark.parametrize("whole, reference", [(False, False), (True, True)])
def test_rewards_as_labels_have_the_groups_cross_entropy_and_its_gradient(loss, whole, reference):
    part = RewardLabels(loss.__name__, 2.0, reference)
    ratio, reduction = (CompletionRatio(), SequenceSum()) if whole else (PlainRatio(), SequenceMean())
    assert part.reads_reference == reference
    value, gradient = written_out(loss, whole, reference)
    found, pushed = reduced(part, ratio, reduction, REWARD)
    torch.testing.assert_close(pushed, gradient, rtol=0, atol=1e-12)
    if not whole:  # a sum over tokens counts a row's value once per token
        torch.testing.assert_close(found, value, rtol=0, atol=1e-12)
    _, pieces = reduced(part, ratio, reduction, REWARD, (slice(0, 2), slice(2, 4), slice(4, 5)))
    torch.testing.assert_close(pieces, gradient, rtol=0, atol=1e-12)


def test_the_anchored_loss_is_that_of_the_released_code():
    # REAL's compute_policy_loss_real at tau 0.5: its loss of two groups of three completions, and its gradient.
    old = f64([[-1, -2], [-0.5, -0.5], [-3, -1], [-1, -1], [-2, -2], [-1, -3]])
    moved = f64([[0.5, -0.1], [0.2, 0.4], [-0.3, 0], [0.1, 0.1], [0.2, 0.2], [-0.4, 0.1]])
    mask = torch.tensor([[True, True], [True, False], *[[True, True]] * 4])
    logp, labels, group = (old + moved).requires_grad_(), f64([1, 0, 1, 1, 1, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    new, past, ratio = Scored(logp * mask, mask), Scored(old * mask, mask), PlainRatio()
    part = RewardLabels("anchor", 1 / 0.5)
    batch = CompletionBatch(new, past, ratio(new, past), torch.arange(6), mask.long(), mask, measure=ratio)
    peers = GroupStatistics(part.statistic(batch).detach(), labels, group)
    reduction = SequenceMean()
    loss = reduce_loss(part(batch.log_ratio, labels[:, None], replace(batch, peers=peers)), reduction(mask), 6)
    assert loss.item() == pytest.approx(1.7422939910880277, abs=1e-12)
    slopes = [-0.11097356787894297, 0.598687660112452, -0.22347332277388005, -0.16446646114445332, -0.13465374958886894,
              0.2127787415941705]
    close(torch.autograd.grad(loss, logp)[0], [[slope, slope * (row != 1)] for row, slope in enumerate(slopes)], 1e-12)


def test_with_an_anchor_slopes_are_bounded_and_fall_with_the_logit():
    # One right sample: its slope is -sigmoid(-z), from 0.98 at -4 to 0.02 at 4, where GRPO's e^z grows.
    part, same = RewardLabels(), torch.ones(1, 1, dtype=torch.float64)
    slopes = torch.stack([part.losses(f64([z]), f64([1.0]), same)[1] for z in (-4.0, 0.0, 4.0)])[:, 0]
    close(slopes, (-torch.sigmoid(f64([4.0, 0.0, -4.0]))).tolist())
    # Two right ones share one softmax with the anchor: e^-z over 1 + both.
    _, found = part.losses(f64([1.0, -1.0]), f64([1.0, 1.0]), torch.ones(2, 2, dtype=torch.float64))
    weights = torch.softmax(f64([-1.0, 1.0, 0.0]), 0)[:2]
    close(found, (-2 * weights).tolist())
    close(part.losses(f64([700.0]), f64([0.0]), same)[0], softplus(f64([700.0])).tolist())


def test_pacs_scores_add_up_to_zero_and_an_agreeing_group_learns_too():
    same = torch.ones(3, 3, dtype=torch.float64)
    _, slope = RewardLabels("leave_one_out").losses(f64([0, 0, 0]), f64([1, 1, 1]), same)
    close(slope, [0, 0, 0])  # a shift of all changes no psi
    _, slope = RewardLabels("leave_one_out").losses(f64([0, 0, 0]), f64([1, 0, 0]), same)
    close(slope, [-0.5 - 0.5, 0.5, 0.5])
    _, slope = RewardLabels("each").losses(f64([0, 0, 0]), f64([1, 1, 1]), same)
    close(slope, [-0.5, -0.5, -0.5])


def test_the_logged_loss_is_a_mean_and_no_sum_over_tokens():
    # Where nothing has moved all logits are 0, and the loss of any labels is log 2, whatever the lengths.
    metrics = tiny_text.trainer(method="pacs", train__lr=1e-9).run_epoch()
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)


# Images
def part_of(old, advantage) -> Part:
    """One recorded step of two groups, of three and two transitions, each from a state of its own."""
    x = torch.zeros(5, 1)
    taken = Transitions(0, x, GROUP, torch.arange(5), x, Scored(old[:, None], torch.ones(5, 1).bool()))
    spec = RolloutSpec(torch.tensor([0.9, 0.5]), Schedule((0,), (0,)), None, None, 5, 5)
    return Part(range(2), GROUP, spec, (taken,), (), (advantage,))


def grouped(new, old, advantage, loss) -> torch.Tensor:
    """sum of loss(log-ratios, advantages) over two groups, weighted by size, over all samples."""
    return sum(len(own) * loss(new[own] - old[own], advantage[own]) for own in ([0, 1, 2], [3, 4])) / 5


@pytest.mark.parametrize("surrogate, loss", [
    (RewardLabels("anchor", 2.0), anchor), (RewardLabels("leave_one_out", 2.0), leave_one_out),
    (Regressed(1e-3), lambda z, a: ((z - z.mean()) / z.std(correction=0).detach() - a).square().mean()),
    (PairwisePreference(2.0, 1.0, 0.0), lambda z, a: torch.stack(
        [softplus(-2 * (z[i] - z[j])) for i in range(len(z)) for j in range(len(z)) if a[i] > a[j]]).mean())])
def test_transitions_of_a_step_are_compared_as_completions_are(surrogate, loss):
    new, old = draw(5, seed=4).requires_grad_(), draw(5, seed=5)
    advantage = REWARD if isinstance(surrogate, RewardLabels) else CENTRED
    part = part_of(old, advantage)
    expected = torch.autograd.grad(grouped(new, old, advantage, loss), new)[0]
    [taken] = part.transitions
    inputs = NoisedInputs(Loss(surrogate=surrogate), part, [taken.old], torch.device("cpu"))
    score = Scored(new[:, None], taken.old.mask)
    seen = inputs(0, 0, slice(0, 5), score, taken.old)
    value = surrogate(seen.log_ratio, advantage[:, None], seen).mean()
    torch.testing.assert_close(torch.autograd.grad(value, new)[0], expected, rtol=0, atol=1e-9)


def test_noised_finals_measure_by_the_methods_log_ratio():
    new, old = draw(5, seed=4).requires_grad_(), draw(5, seed=5)
    part = part_of(old, REWARD)
    [taken] = part.transitions
    inputs = NoisedInputs(Loss(surrogate=RewardLabels("each"), log_ratio=Matching(1.0)), part, [], torch.device("cpu"))
    seen = inputs(0, 0, slice(0, 5), Scored(new[:, None], taken.old.mask), taken.old)
    close(seen.peers.statistic, (2 * (new - old)).tolist())  # of errors: twice that of log-densities


def test_labels_are_rewards_of_texts_and_of_images():
    for name, form in (("real", "anchor"), ("pacs", "leave_one_out")):
        method = resolve(tiny_text.config(method=name), "tokens")
        assert method.loss.surrogate.form == form and method == preset(name)
    parts = {"surrogate": {"type": "RewardLabels"}, "advantage": {"type": "NoBaseline"}, "shaping": {"type": "WinRate"}}
    for name in ("flow_grpo", "awm"):
        assert resolve(tiny.config(method=name, parts=parts)).loss.surrogate == RewardLabels()


# Two completions of one prompt, of 3 and 2 tokens. Sums of log p: -3 and -1; of log p_reference: -4 and -1.5.
OF_TWO = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
NEW, BASE = f64([[-1, -1.5, -0.5], [-0.25, -0.75, 0]]), f64([[-2, -1, -1], [-0.5, -1, 0]])


def loss_of(part: PairLoss, advantage=(1.0, 0.0), new=NEW, base=BASE, mask=OF_TWO, group=None, rows=None):
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
        loss = reduce_loss(part(torch.zeros_like(piece.new.logp), advantage[at, None], piece), reduction(mask[at]),
                       reduction.count(mask))
        loss.backward()
        total += loss.detach()
    return total.item(), new.grad


def near(found: torch.Tensor, values: list) -> bool:
    return torch.allclose(found, f64(values), rtol=0, atol=1e-7)  # a reduction's weights are float32


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
    assert near(found, [[-slope, -slope, -slope], [slope, slope, 0]])
    other = 2 / (1 + math.exp(-1))
    assert near(loss_of(PairLoss(2.0), (0.0, 1.0))[1], [[other] * 3, [-other, -other, 0]])


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
