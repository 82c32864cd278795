"""Which tokens a loss is about: entropies, conflict tokens and good texts that drift down, worked by hand."""

import math
from dataclasses import replace

import torch

from flowgrpo.contrib.surrogates import TokenWeights, disagreement
from flowgrpo.methods import preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.objectives.ratios import PlainRatio
from flowgrpo.objectives.surrogates import Clip, Reinforce
from flowgrpo.text.losses import ConflictTokens, EntropyBonus, HighEntropy, LikelihoodFloor, conflicts
from flowgrpo.text.samplers.decoding import Decoding, entropy_of, score
from flowgrpo.types import CompletionBatch, GroupStatistics, Scored
from tests.helpers import tiny_text
from tests.helpers.refusals import refused
from tests.helpers.tables import close, draw, f64

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
GROUP = torch.tensor([0, 0, 0, 1, 1])
ADVANTAGE = f64([1, -1, 0.5, 2, -2])


def compared(surrogate=None, entropy=None, ids=None, rows=slice(0, 5)) -> CompletionBatch:
    """Five completions of two groups, with the statistics of all of them."""
    ids = torch.zeros(5, 4, dtype=torch.int64) if ids is None else ids
    new, old = (Scored(0.3 * draw(5, 4, seed=seed) * MASK, MASK, entropy=entropy) for seed in (1, 2))
    def of(at, peers):
        own, before = new.rows(at), old.rows(at)
        return CompletionBatch(own, before, PlainRatio()(own, before), at, ids, MASK, None, peers)
    every, peers = torch.arange(5), GroupStatistics(torch.empty(5, 0), ADVANTAGE, GROUP)
    if surrogate is not None and surrogate.reads_groups:
        peers = GroupStatistics(surrogate.statistic(of(every, peers)).detach(), ADVANTAGE, GROUP)
    return of(every[rows], peers)


# Entropy
def test_entropies_by_hand_and_their_gradient():
    close(entropy_of(f64([[0.5, 0.25, 0.25], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3]]).log()),
          [1.5 * math.log(2), 0, math.log(3)])
    logits = draw(3, 4, seed=2).requires_grad_()
    score(logits, lambda states: states, torch.tensor([0, 1, 2]), Decoding(), entropy=True)[:, 1].sum().backward()
    own = logits.detach().clone().requires_grad_()
    torch.distributions.Categorical(logits=own).entropy().sum().backward()
    close(logits.grad, own.grad.tolist())
    entropy = draw(5, 4, seed=4).abs()
    read = compared(entropy=entropy)
    advantage = ADVANTAGE[:, None]
    plain = Clip(0.2, 0.2)(read.log_ratio, advantage, read.old.logp)
    close(EntropyBonus(Clip(0.2, 0.2), 0.05)(read.log_ratio, advantage, read), (plain - 0.05 * entropy).tolist())
    assert torch.equal(EntropyBonus().clip_mask(read.log_ratio, advantage, read),
                       Clip(0.2, 0.2).clip_mask(read.log_ratio, advantage))


def test_the_score_has_the_entropy_of_what_was_drawn_from():
    hidden, ids = draw(7, 5, seed=1).requires_grad_(), torch.tensor([0, 4, 2, 3, 1, 1, 0])
    decoding = Decoding(temperature=0.7, top_k=3)
    found = score(hidden, lambda states: states, ids, decoding, chunk=2, entropy=True)
    close(found[:, 0].detach(), score(hidden, lambda states: states, ids, decoding).tolist())
    logits = (hidden.detach() / 0.7)
    kept = (logits >= logits.topk(3)[0][:, -1:]).scatter(1, ids[:, None], True)
    expected = torch.distributions.Categorical(logits=logits.masked_fill(~kept, -1e300)).entropy()
    close(found[:, 1].detach(), expected.tolist())
    found.sum().backward()
    assert torch.isfinite(hidden.grad).all() and hidden.grad.norm() > 0.1


def test_a_models_entropies_are_those_of_its_distributions_and_only_where_asked():
    policy = tiny_text.policy()
    asked = policy.encode(tiny_text.PROMPTS[:2])
    ids, mask = torch.tensor([[3, 4, 5], [6, 7, 2]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    plain = policy.log_probs(asked, torch.tensor([0, 1]), ids, mask, Decoding())
    found = policy.log_probs(asked, torch.tensor([0, 1]), ids, mask, Decoding(), entropy=True)
    assert plain.entropy is None and torch.equal(found.logp, plain.logp)
    for row, own in enumerate(ids):
        whole = torch.cat([asked.ids[row], own])[None]
        logits = policy.model(input_ids=whole).logits[0, len(asked.ids[row]) - 1:-1]
        expected = torch.distributions.Categorical(logits=logits).entropy() * mask[row]
        torch.testing.assert_close(found.entropy[row], expected, rtol=0, atol=1e-4)


def test_a_groups_most_uncertain_tokens_by_hand():
    # Of 10 tokens of the first group 3 (a quarter, rounded up), of 3 of the second 1; masked ones never.
    entropy = f64([[1, 9, 2, 3], [4, 8, 99, 99], [1, 1, 7, 0], [5, 99, 99, 99], [6, 1, 99, 99]])
    part = HighEntropy(share=0.25)
    read = compared(part, entropy)
    expected = [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0] * 4, [1, 0, 0, 0]]
    assert part.weights(read).tolist() == [[bool(one) for one in row] for row in expected]
    loss, plain = part(read.log_ratio, ADVANTAGE[:, None], read), Clip(0.2, 0.28)(read.log_ratio, ADVANTAGE[:, None])
    close(loss, (plain * f64(expected)).tolist())
    some = compared(part, entropy, rows=slice(2, 5))
    assert torch.equal(part.weights(some), part.weights(read)[2:])
    assert HighEntropy(share=1.0).weights(read)[MASK].all()


def test_uncertain_tokens_of_the_better_completion():
    # |A| H of the first group: 1, 9, 2, 3 / 4, 8 / .5, .5, 3.5, 0: the three largest are 9, 8 and 4.
    entropy = f64([[1, 9, 2, 3], [4, 8, 99, 99], [1, 1, 7, 0], [5, 99, 99, 99], [6, 1, 99, 99]])
    part = HighEntropy(share=0.25, by="advantage")
    read = compared(part, entropy)
    expected = [[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0] * 4, [1, 0, 0, 0]]
    assert part.weights(read).tolist() == [[bool(one) for one in row] for row in expected]
    assert part.reads_advantages and not HighEntropy().reads_advantages
    # Of 10 tokens and of 3: 1 and 1 in the first epoch, 6 and 2 halfway (0.1 + 0.9 / 2, rounded up), all in the last.
    entropy = f64([[1, 9, 2, 3], [4, 8, 99, 99], [1, 5, 7, 0], [5, 99, 99, 99], [6, 1, 99, 99]])
    part, counts = HighEntropy(share=0.1, last=1.0), []
    for progress in (0.0, 0.5, 1.0):
        chosen = part.weights(replace(compared(part, entropy), progress=progress))
        counts.append((int(chosen[:3].sum()), int(chosen[3:].sum())))
    assert counts == [(1, 1), (6, 2), (10, 3)]


# Weights of tokens
def test_places_where_a_group_agrees_have_the_least_weight():
    ids = torch.tensor([[1, 2, 3, 4], [1, 5, 0, 0], [1, 2, 6, 4], [7, 0, 0, 0], [7, 8, 0, 0]])
    # First group: all agree at place 0; 2, 5, 2 at 1; 3, 6 at 2; 4, 4 at 3. The second agrees where both go on.
    at_1, at_2 = math.log(3) - 2 / 3 * math.log(2), math.log(2)
    close(disagreement(ids[:3], MASK[:3])[0].double(), [0, at_1, at_2, 0], 1e-6)
    part = TokenWeights(Reinforce(), strength=0.5)
    read = compared(part, ids=ids)
    close(part.weights(read)[GROUP == 1], [[1] * 4] * 2)
    close(part.weights(read)[0], [1, 1 + 0.5 * at_1 / at_2, 1.5, 1], 1e-6)
    plain = Reinforce()(read.log_ratio, ADVANTAGE[:, None])
    close(part(read.log_ratio, ADVANTAGE[:, None], read), (plain * part.weights(read)).tolist())
    some = compared(part, ids=ids, rows=slice(1, 4))
    assert torch.equal(part.weights(some), part.weights(read)[1:4])


def test_weights_by_entropy_surprise_and_probability_by_hand():
    entropy = f64([[1, 3, 2, 2], [1, 2, 99, 99], [1, 1, 1, 1], [5, 99, 99, 99], [5, 5, 99, 99]])
    part = TokenWeights(Reinforce(), "entropy", 2.0)
    weights = part.weights(compared(part, entropy))
    close(weights[:2][MASK[:2]], [1, 3, 2, 2, 1, 2])
    close(weights[3:][MASK[3:]], [1, 1, 1])  # of one value
    assert part.reads_entropy and not TokenWeights(by="surprise").reads_entropy
    for kind in ("surprise", "probability"):
        part = TokenWeights(Reinforce(), kind, -1.0)
        read = compared(part)
        logp = read.old.logp
        if kind == "probability":
            close(part.weights(read), (1 - logp.exp()).tolist())
        else:
            least, most = -logp[:3][MASK[:3]].amax(), -logp[:3][MASK[:3]].amin()
            close(part.weights(read)[:3][MASK[:3]], (1 - (-logp[:3][MASK[:3]] - least) / (most - least)).tolist())


# Conflict tokens
def test_conflict_tokens_by_hand():
    # Good: 1 2 3 9. Bad: 1 2 4 9, which shares two tokens in front and one behind; 5 9 shares the one behind.
    ids = torch.tensor([[1, 2, 3, 9], [1, 2, 4, 9], [5, 9, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    found = conflicts(ids, mask, f64([1, -1, -1]))
    assert found.tolist() == [[True, True, False, True], [True, True, False, True], [False, True, False, False]]
    # After the first gap nothing counts: the third tokens agree again.
    ids = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 6]])
    assert conflicts(ids, ids > 0, f64([1, -1])).tolist() == [[True, False, False, False]] * 2
    # Completions of one sign are in no conflict.
    assert not conflicts(ids[:, :1], ids[:, :1] > 0, f64([1, 2])).any()
    assert not conflicts(ids[:, :1], ids[:, :1] > 0, f64([1, 0])).any()


def test_conflict_tokens_are_not_pushed_down_and_are_pulled_up_twice():
    ids = torch.tensor([[1, 2, 3, 4], [1, 5, 0, 0], [7, 7, 7, 7], [1, 0, 0, 0], [1, 6, 0, 0]])
    part, read = ConflictTokens(), compared(ids=ids)
    expected = [[2, 1, 1, 1], [0, 1, 1, 1], [1] * 4, [2, 1, 1, 1], [0, 1, 1, 1]]
    close(part.weights(read).double(), expected)
    plain = Reinforce()(read.log_ratio, ADVANTAGE[:, None])
    close(part(read.log_ratio, ADVANTAGE[:, None], read), (plain * f64(expected)).tolist())
    close(part.weights(compared(ids=ids, rows=slice(1, 4))).double(), expected[1:4])


def test_uncertain_completions_are_left_out_of_groups_that_have_others():
    entropy = f64([[1, 1, 1, 1], [0.1, 0.2, 9, 9], [0, 0, 0, 2], [0.7, 9, 9, 9], [0.6, 0.6, 9, 9]])
    part = ConflictTokens(most_entropy=math.log(2))
    assert part.reads_entropy and not ConflictTokens().reads_entropy and not ConflictTokens().reads_groups
    assert preset("gtpo").parts()["surrogate"] == part
    ids = torch.arange(20).view(5, 4)
    assert part.weights(compared(part, entropy, ids))[:, 0].tolist() == [0, 1, 1, 0, 1]
    assert part.weights(compared(part, entropy, ids, rows=slice(2, 5)))[:, 0].tolist() == [1, 0, 1]
    # Of a model that is above the threshold everywhere nothing is left out: here the second group.
    entropy[4] = 1
    assert part.weights(compared(part, entropy, ids))[:, 0].tolist() == [0, 1, 1, 1, 1]


# Good texts that become less likely
def test_only_good_texts_that_fell_are_held():
    log_ratio = f64([[-0.5, 0.2, -0.1], [-0.5, 0.6, 0], [-0.5, 0.2, -0.1], [-0.5, 0.2, -0.1]]).requires_grad_()
    advantage = f64([[1], [1], [-1], [0]])
    loss = LikelihoodFloor(Reinforce(), 0.1)(log_ratio, advantage)
    held = loss - Reinforce()(log_ratio, advantage)
    close(held.detach(), [[0.05, 0, 0.01], [0, 0, 0], [0, 0, 0], [0.05, 0, 0.01]])
    held.sum().backward()
    close(log_ratio.grad, [[-0.1, 0, -0.1], [0, 0, 0], [0, 0, 0], [-0.1, 0, -0.1]])
    log_ratio = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    own, plain = LikelihoodFloor(weight=5.0), Clip(0.2, 0.2)
    advantage = f64([[1], [-1]])
    assert torch.equal(own(log_ratio, advantage), plain(log_ratio, advantage))
    [one] = torch.autograd.grad(own(log_ratio, advantage).sum(), log_ratio)
    [other] = torch.autograd.grad(plain(log_ratio, advantage).sum(), log_ratio)
    assert torch.equal(one, other)


def test_good_texts_stop_drifting_down_with_the_bad_ones_they_resemble():
    # Texts 0 and 1 share a logit; pushing the bad text 1 drags the good text 0 along.
    def logp_of_good(weight):
        features = f64([[1, 0.0], [1, 0.5], [0, 0]])
        parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        surrogate, old = LikelihoodFloor(Reinforce(), weight), -math.log(3)
        for _ in range(200):
            log_ratio = ((features @ parameters).log_softmax(0)[:2] - old)[:, None]
            [step] = torch.autograd.grad(surrogate(log_ratio, f64([[0.1], [-0.5]])).sum(), parameters)
            parameters = (parameters - 0.05 * step).detach().requires_grad_()
        return (features @ parameters).log_softmax(0)[0].item() - old
    assert logp_of_good(0.0) < -0.1 and logp_of_good(2.0) > -0.05


# As presets
def test_options_go_over_any_host_of_tokens():
    assert preset("gspo+high_entropy").parts()["surrogate"] == HighEntropy(preset("gspo").parts()["surrogate"], 0.2)
    assert preset("high_entropy") == preset("dapo+high_entropy") and preset("llds") == preset("grpo+llds")
    assert preset("dr_grpo+entropy_bonus").parts()["surrogate"] == EntropyBonus(Clip(0.2, 0.2), 0.01)
    assert preset("entropy_bonus").reads_entropy and preset("high_entropy").reads_entropy
    assert not preset("llds").reads_entropy and preset("gtpo").reads_entropy
    assert preset("gigpo+high_entropy").on("tokens").reads_entropy  # beside an advantage of each token
    changed = with_parts(preset("high_entropy"), {"surrogate": {"share": 0.3, "surrogate": {"high": 0.4}}})
    assert changed.loss.surrogate == HighEntropy(Clip(0.2, 0.4), 0.3)
    refused("HighEntropy: surrogate is Regressed.*expected one of single tokens", preset, "reg_grpo+high_entropy")
