"""Tokens as decisions, in closed form: distributions, draws, densities, and what losses of tokens are a mean over."""

import math

import pytest
import torch

from flowgrpo.advantages.baselines import First
from flowgrpo.advantages.selection import ButFirst
from flowgrpo.advantages.shaping import Overlong
from flowgrpo.objectives.ratios import SequenceRatio
from flowgrpo.objectives.reductions import SequenceMean, SequenceSum, TokenMean, reduce_loss
from flowgrpo.objectives.surrogates import Clip, Reinforce, TruncatedIS
from flowgrpo.text.samplers.decoding import Decoding, Draw, completion_masks, sample_inverse_cdf, score, uniforms
from flowgrpo.types import Context, SampleMeasures, Scored
from tests.helpers.refusals import message
from tests.helpers.tables import draw as draws

F64 = torch.float64
LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=F64).log()
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def close(found, expected, tolerance=1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, equal_nan=True)


# --- distributions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_a_temperature_divides_logits(temperature):
    logits = draws(5, 7)
    expected = torch.distributions.Categorical(logits=logits / temperature).logits
    close(Decoding(temperature)(logits), expected)


@pytest.mark.parametrize("decoding, kept", [
    (Decoding(top_p=0.79), [0.625, 0.375, 0, 0]),  # 0.5 + 0.3 pass 0.79
    (Decoding(top_p=0.81), [50 / 95, 30 / 95, 15 / 95, 0]),
    (Decoding(top_p=0.01), [1, 0, 0, 0]),
    (Decoding(top_k=3), [50 / 95, 30 / 95, 15 / 95, 0]),
    (Decoding(top_k=9), [0.5, 0.3, 0.15, 0.05]),
    (Decoding(min_p=0.3), [50 / 95, 30 / 95, 15 / 95, 0]),  # 0.15 is 0.3 of the likeliest
    (Decoding(min_p=0.31), [0.625, 0.375, 0, 0]),
    (Decoding(top_k=3, top_p=0.6), [0.625, 0.375, 0, 0]),  # of 50 / 95 and 30 / 95 the second passes 0.6
    (Decoding(2.0, min_p=0.7), [0.5**0.5 / (0.5**0.5 + 0.3**0.5), 0.3**0.5 / (0.5**0.5 + 0.3**0.5), 0, 0])])
def test_cuts_by_hand(decoding, kept):
    close(decoding(LOGITS).exp(), [kept])
    close(decoding(LOGITS[:, [2, 0, 3, 1]]).exp(), [[kept[i] for i in (2, 0, 3, 1)]])


def test_sampled_tokens_stay_up_to_the_first_end():
    found = Decoding(top_p=0.79)(LOGITS, torch.tensor([3])).exp()
    close(found, [[50 / 85, 30 / 85, 0, 5 / 85]])
    scores, greedy = draws(3, 6).float(), torch.tensor([False, False, True])
    draw = Draw(Decoding(0.7), torch.tensor([[0.1, 0.5], [0.9, 0.2], [0.0, 0.0]]), greedy)
    left = [draw(torch.zeros(3, 1), scores), draw(torch.zeros(3, 2), scores + 1)]
    taken = torch.stack([each.argmax(-1) for each in left], 1)
    assert all((each > -torch.inf).sum() == 3 for each in left)
    assert taken[2].tolist() == [scores[2].argmax()] * 2
    expected = (scores / 0.7).log_softmax(-1)
    assert taken[:2, 0].tolist() == sample_inverse_cdf(expected[:2], torch.tensor([0.1, 0.9])).tolist()
    close(draw.log_probs(), expected.gather(1, taken), 1e-6)
    mask, cut = completion_masks(torch.tensor([[5, 2, 2, 7], [5, 6, 7, 8], [9, 1, 1, 1], [1, 2, 3, 9]]), [2, 9])
    assert mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False],
                             [True, True, False, False]]
    assert cut.tolist() == [False, True, False, False]


# --- draws -----------------------------------------------------------------------------------------------------------
def test_draws_by_hand():
    at = torch.tensor([0.0, 0.499, 0.501, 0.799, 0.801, 0.949, 0.951, 0.999999])
    assert sample_inverse_cdf(LOGITS.expand(8, 4), at).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    cut = Decoding(top_k=2)(LOGITS[:, [3, 0, 2, 1]]).expand(3, 4)
    assert sample_inverse_cdf(cut, torch.tensor([0.0, 0.624, 0.999999])).tolist() == [1, 1, 3]  # never one that is cut
    logits, count = draws(1, 11, seed=3), 20_000
    found = sample_inverse_cdf(logits.log_softmax(-1).expand(count, -1), (torch.arange(count, dtype=F64) + 0.5) / count)
    expected = logits.softmax(-1)[0] * count
    assert ((torch.bincount(found, minlength=11) - expected).abs() <= 1).all()
    def numbers(*seeds):
        return uniforms([torch.Generator().manual_seed(seed) for seed in seeds], 5)
    assert torch.equal(numbers(1, 2)[1], numbers(2)[0]) and not torch.equal(*numbers(1, 2))


# --- densities -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("decoding", [Decoding(), Decoding(0.6, top_k=4)])
def test_scores_are_log_probabilities_with_their_gradient_whatever_the_chunk(chunk, decoding):
    hidden, head, ids = draws(8, 5).requires_grad_(), draws(5, 9, seed=1), torch.arange(8) % 9
    found = score(hidden, lambda states: states @ head, ids, decoding, chunk)
    logits = hidden.detach() @ head
    close(found.detach(), decoding(logits, ids)[torch.arange(8), ids])
    found.sum().backward()
    # d log p(id) / d logits = (onehot - p) / temperature
    slope = torch.nn.functional.one_hot(ids, 9) - decoding(logits, ids).exp()
    close(hidden.grad, slope @ head.T / decoding.temperature)


# --- reductions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction, weights, count", [
    (TokenMean(), [[1, 1, 0], [1, 0, 0], [0, 0, 0]], 3),
    (SequenceMean(), [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]], 3),
    (SequenceSum(), [[1, 1, 0], [1, 0, 0], [0, 0, 0]], 3),
    (SequenceSum(budgeted=True), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]], 3)])
def test_reductions_by_hand(reduction, weights, count):
    close(reduction(MASK).to(F64), weights, 1e-7)
    assert reduction.count(MASK) == count


@pytest.mark.parametrize("reduction", [TokenMean(), SequenceMean(), SequenceSum(), SequenceSum(budgeted=True)])
def test_pieces_of_batches_and_rows_of_one_decision(reduction):
    loss, mask = draws(6, 4), draws(6, 4, seed=1) > 0
    count = reduction.count(mask)
    whole = reduce_loss(loss, reduction(mask), count)
    pieces = [reduce_loss(loss[rows], reduction(mask[rows]), count) for rows in (slice(0, 1), slice(1, 6))]
    close(sum(pieces), whole.item(), 1e-7)
    if reduction == TokenMean():
        close(whole, loss[mask].mean().item())
    assert sum(reduction.count(mask[rows]) for rows in (slice(0, 1), slice(1, 6))) == count
    mask = torch.ones(5, 1, dtype=torch.bool)
    assert torch.equal(reduction(mask).float(), torch.ones(5, 1)) and reduction.count(mask) == 5


# --- ratios and surrogates -------------------------------------------------------------------------------------------
def scored(logp: torch.Tensor) -> Scored:
    return Scored(logp.masked_fill(~MASK, 0), MASK)


def test_gspo_is_the_clipped_objective_of_whole_completions():
    old, moved, advantage = draws(3, 3), draws(3, 3, seed=1) / 10, torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64)
    new = (old + moved).requires_grad_()
    log_ratio = SequenceRatio()(scored(new), scored(old))
    loss = reduce_loss(Clip(0.02, 0.03)(log_ratio, advantage), SequenceMean()(MASK).to(F64), SequenceMean().count(MASK))
    ratios = torch.stack([(new - old)[0, :2].mean().exp(), (new - old)[1, 0].exp()])
    side = advantage[:2, 0]
    expected = -torch.minimum(ratios * side, ratios.clamp(0.98, 1.03) * side).sum() / 3  # of all rows
    close(loss.detach(), expected.item(), 1e-7)
    [found], [wanted] = torch.autograd.grad(loss, new, retain_graph=True), torch.autograd.grad(expected, new)
    close(found, wanted, 1e-7)


def test_truncated_weights_leave_every_token_its_gradient():
    old, advantage = draws(3, 3), torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64)
    moved = torch.tensor([[2.0, 0.0, -1.0], [0.3, 1.9, -3.0], [0.0, 0.1, 0.2]], dtype=F64)
    new = (old + moved).requires_grad_()
    surrogate = TruncatedIS(low=0.5, high=1.0)  # weights within 0.5 to 2
    surrogate(new - old, advantage, old).sum().backward()
    close(new.grad, -advantage * moved.exp().clamp(0.5, 2.0))
    assert surrogate.clip_mask(moved, advantage).tolist() == [[True, False, True], [False, True, True], [False] * 3]


def test_sums_tails_and_first_samples():
    new, advantage = draws(3, 3).requires_grad_(), torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64)
    reduce_loss(Reinforce()(new - new.detach(), advantage), SequenceSum()(MASK), SequenceSum().count(MASK)).backward()
    close(new.grad, -advantage * MASK / 3)
    context = Context(samples=SampleMeasures(lengths=torch.tensor([[4, 8, 9, 10]]), longest=10))
    rewards = torch.tensor([[[1.0], [1.0], [1.0], [torch.nan]]], dtype=F64)
    close(Overlong(0.2)(rewards, context)[0, :, 0], [1, 1, 0.5, math.nan])
    close(Overlong(1.0)(rewards, context)[0, :3, 0], [0.6, 0.2, 0.1])
    rewards = torch.tensor([[[0.5], [1.0], [0.0]], [[1.0], [1.0], [torch.nan]]], dtype=F64)
    close(First()(rewards, [2.0]), [[0, 1, -1], [0, 0, 0]])
    assert ButFirst()(torch.zeros(2, 3)).tolist() == [[False, True, True]] * 2
    assert "ButFirst" in message(lambda: ButFirst()(torch.zeros(2, 1)), error=ValueError)
