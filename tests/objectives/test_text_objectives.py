"""Losses of completions as wholes, against tables worked by hand and the losses written out for whole groups."""

import math

import pytest
import torch

from flowgrpo.advantages.baselines import Correctness, Signed
from flowgrpo.objectives.ratios import CompletionRatio, PlainRatio
from flowgrpo.objectives.reductions import SequenceMean, SequenceSum, reduce_loss
from flowgrpo.objectives.sequence_losses import (
    Discriminative,
    NegativeAwareText,
    PairwisePreference,
    Regressed,
    TaperedReinforce,
)
from flowgrpo.text.losses import RandomPolicyValue
from flowgrpo.training import sampling
from flowgrpo.types import CompletionBatch, GroupStatistics, Scored
from tests.helpers import tiny_text, updates
from tests.helpers.tables import close, draw, f64

# Two groups, of 3 and 2 completions of up to 4 tokens; numbers of them by which float32 divides exactly.
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
GROUP = torch.tensor([0, 0, 0, 1, 1])
RIGHT = f64([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5])


def scored(seed: int) -> Scored:
    return Scored((-1 + 0.3 * draw(5, 4, seed=seed)) * MASK, MASK)


def reduced(surrogate, log_ratio, reduction, advantage=RIGHT, rows=(slice(0, 5),)) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduced loss, taken in pieces `rows`, and its gradient by log p."""
    new, old, base = (scored(seed) for seed in (1, 2, 3))
    new.logp.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    def compared(at, peers=None):
        own = [each.rows(torch.arange(5)[at]) for each in (new, old, base)]
        return CompletionBatch(own[0], own[1], log_ratio(own[0], own[1]), torch.arange(5)[at], torch.zeros(5, 4).long(),
                               MASK, own[2], peers, measure=log_ratio)
    peers = GroupStatistics(surrogate.statistic(compared(slice(0, 5))).detach(), advantage, GROUP)
    for at in rows:
        piece = compared(at, peers)
        loss = surrogate(piece.log_ratio, advantage[at, None], piece)
        loss = reduce_loss(loss, reduction(piece.new.mask), reduction.count(MASK))
        loss.backward()
        total += loss.detach()
    return total, new.logp.grad


def gradient(*arguments, **options) -> torch.Tensor:
    return reduced(*arguments, **options)[1]


def mean(values):
    """Of a completion's tokens."""
    return (values * MASK).sum(1) / MASK.sum(1)


def written_out(loss) -> torch.Tensor:
    """The gradient of loss(new, old, base), log-probabilities [5, 4], summed over groups."""
    new, old, base = (scored(seed).logp for seed in (1, 2, 3))
    new.requires_grad_()
    loss(new, old, base).backward()
    return new.grad


# TOPR
def test_bad_samples_are_tapered_and_good_ones_are_not():
    # Ratios 5, 1, 0.01 of a good and of a bad sample; the gradient by the log-ratio is -A w.
    log_ratio = f64([[5, 1, 0.01], [5, 1, 0.01]]).log().requires_grad_()
    advantage = f64([[2], [-2]])
    loss = TaperedReinforce()(log_ratio, advantage)
    close(loss.detach(), [[-2 * (1 + math.log(5)), -2, -2 * (1 + math.log(0.01))],
                          [2 * (1 + math.log(5)), 2, 0.02 * (1 + math.log(0.01))]])
    loss.sum().backward()
    close(log_ratio.grad, [[-2, -2, -2], [2, 2, 0.02]])
    assert TaperedReinforce().clip_mask(log_ratio, advantage).tolist() == [[False] * 3, [True, False, False]]
    assert torch.isfinite(TaperedReinforce()(f64([[900.0]]), f64([[-1.0]]))).all()


@pytest.mark.parametrize("tapered", [True, False])
def test_one_old_batch_with_bad_samples_keeps_tapered_logits_finite(tapered):
    # Ten answers, the first of which is bad; 500 updates on the same ten samples.
    logits = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], 1.0)
    advantage = f64([-1.0] * 5 + [0.2] * 5)[:, None]
    taken = torch.tensor([0] * 5 + [1, 2, 3, 4, 5])
    for _ in range(500):
        log_ratio = (logits.log_softmax(0)[taken] + math.log(10))[:, None]
        loss = TaperedReinforce()(log_ratio, advantage) if tapered else -advantage * log_ratio
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert (logits[0].item() > -10) is tapered and (logits[0].item() < -100) is not tapered


# NFT
def test_nft_by_hand():
    # p = 1/2: w = 1 with "sqrt". Right: -log r. Wrong: (1 - r/2) / (1/2) = 2 - r, at least the floor.
    log_ratio = f64([[1, 1.5, 0.5]]).log().expand(2, 3)
    loss = NegativeAwareText("sqrt", 0.1)(log_ratio, f64([[0.5], [-0.5]]))
    close(loss, [[0, -math.log(1.5), math.log(2)], [0, math.log(2), -math.log(1.5)]])
    close(NegativeAwareText("sqrt")(log_ratio, f64([[0.5], [-0.5]]))[1:], [[0, 0, -math.log(1.5)]])  # the floor is 1
    # p = 4/5: w = 1/2, and 1/5 with "linear"; the negative ratio is 5 - 4 r.
    close(NegativeAwareText("sqrt")(log_ratio[:1], f64([[-0.8]]))[:, 2:], [[-0.5 * math.log(3)]])
    close(NegativeAwareText("linear")(log_ratio[:1], f64([[-0.8]]))[:, 2:], [[-0.2 * math.log(3)]])
    close(NegativeAwareText()(log_ratio[:1], f64([[0.0]])), [[0, 0, 0]])


@pytest.mark.parametrize("weight, scale", [("sqrt", 0.4), ("linear", 1.0)])
def test_nfts_first_gradient_is_grpos(weight, scale):
    # p = 4/5, whose deviation is 0.4: advantages 0.2 and -0.8 over it, or as they are.
    log_ratio = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    NegativeAwareText(weight)(log_ratio, f64([[0.2], [-0.8]])).sum().backward()
    close(log_ratio.grad, [[-0.2 / scale], [0.8 / scale]])


def test_below_its_floor_the_negative_ratio_keeps_its_gradient():
    log_ratio = f64([[1.5]]).log().requires_grad_()
    advantage = f64([[-0.5]])
    NegativeAwareText("sqrt", 0.8)(log_ratio, advantage).sum().backward()
    close(log_ratio.grad, [[1.5 / 0.8]])
    assert NegativeAwareText(floor=0.8).clip_mask(log_ratio, advantage).all()
    assert not NegativeAwareText(floor=0.4).clip_mask(log_ratio, advantage).any()


# Groups
@pytest.mark.parametrize("score, temperature, delta", [("log", 10, 1e-4), ("ratio", 1, 1e-4), ("log", math.inf, 99)])
def test_discos_gradient_is_that_of_the_groups_losses(score, temperature, delta):
    def loss(new, old, base):
        total = 0
        for own, right, wrong in (([0, 1, 2], [0], [1, 2]), ([3, 4], [3], [4])):
            scores = mean(new if score == "log" else (new - old).exp())
            worst = scores[wrong].mean() if temperature == math.inf else \
                temperature * ((scores[wrong] / temperature).exp().mean()).log()
            over = (mean(old - new)[own].mean() - delta).clamp(min=0)
            total += len(own) * (worst - scores[right].mean() + 50 * over.square())
        return total / 5
    found = gradient(Discriminative(score, temperature, 50.0, delta), PlainRatio(), SequenceMean())
    torch.testing.assert_close(found, written_out(loss), rtol=0, atol=1e-12)


def of_single_tokens(advantage) -> torch.Tensor:
    """The gradient of DisCO's loss by log p, of completions of one token in one group, at the old policy."""
    zero = torch.zeros(len(advantage), 1, dtype=torch.float64)
    new = Scored(zero.clone().requires_grad_(), zero == 0)
    peers = GroupStatistics(torch.zeros(len(advantage), 2, dtype=torch.float64), advantage, zero[:, 0].long())
    compared = CompletionBatch(new, new, new.logp, torch.arange(len(advantage)), zero.long(), new.mask, None, peers)
    Discriminative()(new.logp - new.logp.detach(), advantage[:, None], compared).mean().backward()
    return new.logp.grad[:, 0]


def test_discos_weight_does_not_depend_on_how_many_are_right():
    # Of 8 completions 1 or 4 are right: together they pull by the same, and the wrong ones push by it.
    for right in (1, 4):
        found = of_single_tokens(torch.where(torch.arange(8) < right, 1 - right / 8, -right / 8).double())
        close(found[:right].sum(), -1)
        close(found[right:].sum(), 1)


def test_right_completions_are_weighted_by_their_advantages():
    # Of four completions three are right, with shares 1/2, 1/3 and 1/6 of the pull.
    close(of_single_tokens(f64([0.6, 0.4, 0.2, -0.75])), [-1 / 2, -1 / 3, -1 / 6, 1])


def test_within_its_trust_region_disco_has_no_penalty():
    free = gradient(Discriminative(beta=0), PlainRatio(), SequenceMean())
    far = gradient(Discriminative(delta=9.0), PlainRatio(), SequenceMean())
    near = gradient(Discriminative(delta=0.0), PlainRatio(), SequenceMean())
    assert torch.equal(free, far) and not torch.equal(free, near)


def test_reg_grpos_gradient_is_that_of_the_groups_losses():
    advantage = f64([1, 0.5, -1.5, 2, -2])
    def loss(new, old, base):
        total = 0
        for own in ([0, 1, 2], [3, 4]):
            found = ((new - old) * MASK).sum(1)[own]
            spread = found.std(correction=0).detach().clamp(min=0.1)
            total += ((found - found.mean()) / spread - advantage[own]).square().sum()
        return total / 5
    found = gradient(Regressed(0.1), CompletionRatio(), SequenceSum(), advantage)
    torch.testing.assert_close(found, written_out(loss), rtol=0, atol=1e-12)


def test_reg_grpo_rests_where_standardised_log_ratios_are_the_advantages():
    advantage = f64([1.5, -1.5])
    spread = advantage / advantage.std(correction=0)
    zero = torch.zeros(2, 1, dtype=torch.float64)
    for shift in (0, 7):
        ratios = 3 * spread[:, None] + shift
        peers = GroupStatistics(ratios[:, 0], spread, torch.zeros(2).long())
        scored = Scored(zero, zero == 0)
        compared = CompletionBatch(scored, scored, ratios, torch.arange(2), zero.long(), zero == 0, None, peers)
        close(Regressed()(ratios, spread[:, None], compared), [[0], [0]])
        assert (Regressed()(ratios, 2 * spread[:, None], compared) > 0.9).all()


def test_trpas_gradient_is_that_of_the_groups_pairs():
    # Levels 2, 1, 1 and 3, 3: of the first group the first is preferred to both, the second has no pair.
    advantage = f64([2, 1, 1, 3, 3])
    def loss(new, old, base):
        apart = mean(new - base)
        pairs = torch.stack([-torch.nn.functional.logsigmoid(2.5 * 2 * (apart[0] - apart[j])) for j in (1, 2)])
        moved = new - old
        return (3 * pairs.mean() + 0.7 * mean(moved.exp() - 1 - moved).sum()) / 5
    found = gradient(PairwisePreference(2.0, 2.5, 0.7), PlainRatio(), SequenceMean(), advantage)
    torch.testing.assert_close(found, written_out(loss), rtol=0, atol=1e-12)


def test_of_trpas_pairs_those_below_the_best_level_count_once():
    advantage = f64([2, 1, 0, 3, 3])
    def loss(new, old, base):
        apart = mean(new - base)
        pairs = [-torch.nn.functional.logsigmoid(scale * (apart[i] - apart[j]))
                 for i, j, scale in ((0, 1, 2.5), (0, 2, 2.5), (1, 2, 1.0))]
        return 3 * torch.stack(pairs).mean() / 5
    found = gradient(PairwisePreference(1.0, trust=0.0), PlainRatio(), SequenceMean(), advantage)
    torch.testing.assert_close(found, written_out(loss), rtol=0, atol=1e-12)


@pytest.mark.parametrize("surrogate, log_ratio, reduction", [
    (Discriminative(), PlainRatio(), SequenceMean()),
    (Regressed(), CompletionRatio(), SequenceSum()),
    (PairwisePreference(1.0), PlainRatio(), SequenceMean())])
def test_pieces_of_groups_have_the_gradient_of_whole_ones(surrogate, log_ratio, reduction):
    whole = gradient(surrogate, log_ratio, reduction)
    pieces = gradient(surrogate, log_ratio, reduction, rows=(slice(0, 2), slice(2, 4), slice(4, 5)))
    assert whole.norm() > 0.1
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)


# Values of the random policy
def test_rover_regresses_on_the_reward_and_the_mean_value_of_the_next_state():
    # A row of three tokens and one of one; Q of the tokens, means of log(p / p_old) over all tokens per state.
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    ratio, uniform = f64([[0.1, -0.2, 0.3], [0.4, 0, 0]]).requires_grad_(), f64([[-0.5, -0.1, 0.2], [0.7, 9, 9]])
    old = Scored(torch.zeros(2, 3).double(), mask, entropy=torch.ones(2, 3).double())
    new = Scored(ratio, mask, entropy=uniform + 1)
    batch = CompletionBatch(new, old, ratio, torch.arange(2), torch.zeros(2, 3).long(), mask)
    loss = RandomPolicyValue(2.0)(ratio, f64([[0.5], [-0.5]]), batch)
    expected = [[(0.2 - 0.5 + 0.2) ** 2, (-0.4 - 0.5 - 0.4) ** 2, (0.6 - 0.5) ** 2], [(0.8 + 0.5) ** 2]]
    close(loss.detach()[mask], [*expected[0], *expected[1]])
    loss[mask].sum().backward()
    close(ratio.grad[mask], [2 * 2 * (0.2 - 0.5 + 0.2), 2 * 2 * (-0.4 - 0.5 - 0.4), 2 * 2 * 0.1, 2 * 2 * 1.3])


def test_of_three_last_tokens_the_two_that_win_become_equally_likely():
    logits = f64([0.3, 0.1, -0.2]).requires_grad_()
    start, won = torch.zeros(3).double().log_softmax(0), f64([2 / 3, 2 / 3, -4 / 3])
    optimizer = torch.optim.Adam([logits], lr=0.05)
    mask = torch.ones(3, 1).bool()
    for _ in range(300):
        optimizer.zero_grad()
        logp = logits.log_softmax(0)
        new, old = (Scored(each[:, None], mask, entropy=torch.zeros(3, 1).double()) for each in (logp, start))
        ratio = new.logp - old.logp
        batch = CompletionBatch(new, old, ratio, torch.arange(3), torch.zeros(3, 1).long(), mask)
        RandomPolicyValue()(ratio, won[:, None], batch).sum().backward()
        optimizer.step()
    found = logits.softmax(0).detach()
    assert found[0] == pytest.approx(found[1].item(), abs=1e-3) and found[2] < 0.2


def test_a_run_records_the_means_of_the_policy_that_drew():
    halves = {"short": lambda texts, prompts: [float(place % 2) for place in range(len(texts))]}
    trainer = tiny_text.trainer(rewards=halves, method="rover")
    tiny_text.stir(trainer.policy)
    parts, asked, _ = sampling.sample(trainer, trainer.prompts[:2])
    [taken] = parts[0].transitions
    whole = torch.cat([asked.ids[0], taken.ids[0]])[None]
    logits = trainer.policy.model(input_ids=whole).logits[0, len(asked.ids[0]) - 1:-1]
    expected = logits.log_softmax(-1).mean(-1).detach() * taken.old.mask[0]
    torch.testing.assert_close(taken.old.entropy[0], expected, rtol=0, atol=1e-4)
    assert trainer.run_epoch()["grad_norm"] > 0


# Right and wrong
def test_right_is_what_earns_more_than_the_groups_mean():
    rewards = f64([[1, 0, 0, 0], [3, 9, 8, math.nan], [1, 1, 1, 1], [0, 0, 0, 0]])[..., None]
    close(Correctness()(rewards, [1.0]), [[0.75, -0.25, -0.25, -0.25], [-2 / 3, 1 / 3, 1 / 3, 0], [0] * 4, [0] * 4])


def test_signed_advantages_by_hand():
    rewards = f64([[1, 0, 0.5, math.nan], [0, 0, 0, 0]])[..., None]
    close(Signed()(rewards, [1.0]), [[0.1, -1, 0.1, 0], [-1] * 4])
    close(Signed(positive=0, threshold=0.6)(rewards, [1.0]), [[0, -1, -1, 0], [-1] * 4])
    close(Signed(1, 0)(rewards, [1.0]), [[1, 0, 1, 0], [0] * 4])


def test_a_tenth_of_the_pull_keeps_all_right_answers():
    # Three answers, two of them right, at first alike: 64 policies, 200 updates on 4 samples each.
    def rarer(positive, negative):
        """The share of the rarer right answer, and of the wrong one."""
        advantage = Signed(positive, negative)(f64([[1, 1, 0]])[..., None], [1.0])[0]
        logits, generator = torch.zeros(64, 3, dtype=torch.float64), torch.Generator().manual_seed(0)
        for _ in range(200):
            policy = logits.softmax(1)
            taken = policy.multinomial(4, replacement=True, generator=generator)
            push = torch.nn.functional.one_hot(taken, 3) - policy[:, None]
            logits = logits + 0.5 * (push * advantage[taken][..., None]).mean(1)
        return logits.softmax(1)[:, :2].amin(1).mean(), logits.softmax(1)[:, 2].mean()
    (pulled, wrong), (pushed, left) = rarer(1.0, 0.0), rarer(0.1, 1.0)
    assert pulled < 0.2 < 0.3 < pushed and wrong < 0.02 and left < 0.02


@pytest.mark.parametrize("method", ["disco", "reg_grpo", "trpa"])
def test_a_first_pass_is_made_where_batches_cut_groups_and_only_there(method):
    for size, passes in ((8, 1), (3, 2)):
        trainer = tiny_text.trainer(tiny_text.policy(), {"short": lambda texts, prompts: [len(t) for t in texts]},
                                    method=method, train__micro_batch=size)
        parts, asked = updates.credited(trainer)
        seen, replay = [], trainer.rollouts.replay
        def counted(part, conditioning):
            seen.append(len(part.transitions[0].ids))
            return replay(part, conditioning)
        trainer.rollouts.replay = counted
        updates.gradient(trainer, parts, asked)
        assert len(seen) == len(parts) * (passes + (method == "trpa"))
