"""Weights of supervised terms: the balance of two gradients, and of an answer's tokens."""

import math

import pytest
import torch

from flowgrpo.methods.supervised import NextToken, PassRate
from flowgrpo.objectives import supervised
from flowgrpo.training.extensions.supervised import combine_gradients
from tests.helpers.tables import close, f64


# --- two gradients ---------------------------------------------------------------------------------------------------
def test_chords_mu_rises_linearly_and_falls_as_a_cosine():
    part = supervised.WarmupCosine(peak=0.5, valley=0.1, warmup=10, decay=20)
    # (1 + cos(pi/2)) / 2 = 1/2 in the middle of the decay: 0.1 + 0.4 / 2.
    mus = {0: 0.0, 5: 0.25, 10: 0.5, 20: 0.3, 30: 0.1, 1000: 0.1}
    for update, mu in mus.items():
        assert part(supervised.Now(update))[1] == pytest.approx(mu, abs=1e-12)
        assert part(supervised.Now(update)) == pytest.approx((1 - mu, mu), abs=1e-12)
    assert part(supervised.Now(0)) == (1.0, 0.0)  # GRPO as it is
    assert supervised.FixedWeights(0.3)(supervised.Now(7)) == (1.0, 0.3)


def test_sasr_draws_a_loss_by_the_norms_of_the_gradients():
    part = supervised.GradientNorms(gamma=2.0, warmup=3)
    assert part.probability(rl=1.0, data=2.0) == 0.5
    assert part.probability(1.0, 0.0) == 0.0 == part.probability(0.0, 0.0)
    assert part.probability(1.0, 1e9) == pytest.approx(1.0, abs=1e-8)
    assert part(supervised.Now(3, drawn=0.49, norms=(1.0, 2.0))) == (0.0, 1.0)
    assert part(supervised.Now(3, drawn=0.51, norms=(1.0, 2.0))) == (1.0, 0.0)
    assert part(supervised.Now(2, drawn=0.99, norms=(1.0, 0.0))) == (0.0, 1.0)  # the warm-up is data alone


def test_equal_norms_scale_the_data_to_a_share_of_the_reinforcement_gradient():
    part = supervised.EqualNorms(share=0.5)
    assert part(supervised.Now(0, norms=(0.1, 1.3))) == (1.0, pytest.approx(0.5 * 0.1 / 1.3))
    assert part(supervised.Now(0, norms=(3.0, 0.5))) == (1.0, 3.0)  # and up
    assert part(supervised.Now(0, norms=(0.0, 1.3))) == (1.0, 0.0) == part(supervised.Now(0, norms=(0.1, 0.0)))


def test_recap_moves_away_from_what_is_flat():
    """Equation 1 of the paper: s = m / n + deviation / (m + n), weights softmax(s / T)."""
    part = supervised.Convergence(window=2, temperature=1.0)
    assert part.priority([2.0, 4.0, 1.0, 2.0]) == pytest.approx(1.5 / 3 + 0.5 / 4.5)  # a loss that halves
    assert part.priority([2.0] * 4) == 1.0  # a flat one
    assert part.priority([1.0, 1.0, 2.0, 2.0], rises=True) == 0.5
    rl, data = part(supervised.Now(0, signals={"rl": [9.0, 1.0, 1.0, 1.0, 1.0], "data": [2.0, 4.0, 1.0, 2.0]}))
    assert rl == pytest.approx(1 / (1 + math.exp(0.5 + 1 / 9 - 1))) and rl + data == pytest.approx(1.0)
    assert part(supervised.Now(0, signals={"rl": [1.0] * 4, "data": [2.0, 1.0, 2.0]})) == (0.5, 0.5)
    volatile, flat = part(supervised.Now(0, signals={"rl": [1.0, 0.5, 1.0, 0.5], "data": [1.0] * 4}))
    assert volatile > 0.5 > flat and supervised.Convergence() == supervised.Convergence(3, 5.0)


def test_gradients_are_combined_and_absent_ones_are_zeros():
    def of(*values):
        return torch.tensor(values, dtype=torch.float64)
    close(combine_gradients(of(1, 2), 0.5, of(10, 20), 0.1), [1.5, 3.0])
    close(combine_gradients(of(1, 2), 1.0, of(10, 20), 0.1), [2.0, 4.0])
    close(combine_gradients(of(1, math.inf), 0.0, of(10, 20), 1.0), [10.0, 20.0])
    close(combine_gradients(None, 1.0, of(10, 20), 0.1), [1.0, 2.0])
    kept = of(1, 2)
    assert combine_gradients(kept, 1.0, of(math.nan, 1), 0.0) is kept
    assert combine_gradients(None, 1.0, None, 1.0) is None


# --- tokens and examples ---------------------------------------------------------------------------------------------
def test_chord_weighs_a_token_by_p_times_1_minus_p():
    p = f64([[1e-12, 0.2, 0.5, 0.9, 1.0]]).log().requires_grad_()
    weights = supervised.Uncertain()(p, None, torch.ones(1, 5, dtype=torch.bool))
    close(weights, [[0.0, 0.16, 0.25, 0.09, 0.0]], atol=1e-9)
    assert not weights.requires_grad
    close(supervised.EqualTokens()(p, None, p > 0).double(), [[1.0] * 5])


def test_srft_weighs_an_answer_by_its_mean_entropy():
    entropy, mask = f64([[1.0, 3.0, 99.0], [0.0, 99.0, 99.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    weights = supervised.EntropyAware(0.5)(torch.zeros(2, 3), entropy, mask)
    close(weights, [[0.5 * math.exp(-2.0)] * 3, [0.5] * 3])


def test_one_token_rollouts_learn_from_drawn_tokens_alone():
    # Two of three tokens have all probability, so that of any number of draws each is one of them.
    logits = torch.tensor([[0.0, math.log(3), -1e4]], dtype=torch.float64, requires_grad=True)
    log_probs = torch.tensor([0.25, 0.75]).double().log()
    read = supervised.OneToken(samples=4000, wrong=0.0).distribution(7)(logits, torch.tensor([1]))
    share = read[0, 1].item() / log_probs[1].item()  # of the draws that are the answer's token
    assert 0.7 < share < 0.8 and share * 4000 == pytest.approx(round(share * 4000))
    close(read[0, [0, 2]].detach(), [0.0, 0.0])
    again = supervised.OneToken(samples=4000, wrong=-0.5).distribution(7)(logits, torch.tensor([1]))
    assert again[0, 1].item() == pytest.approx(share * log_probs[1].item() - 0.5 * (1 - share) * log_probs[0].item())
    never = supervised.OneToken(samples=4000).distribution(7)(logits, torch.tensor([2]))
    never[0, 2].backward()
    assert never[0, 2].item() == 0 and not logits.grad.any()  # cross entropy would have a gradient


def test_openchats_weights_by_reward():
    part = NextToken(beta=0.5)
    assert part.weight(1.0) / part.weight(0.1) == pytest.approx(math.exp(0.9 / 0.5)) and part.weight(1.0) == 1
    assert NextToken().weight(0.1) == 1


def test_which_prompts_give_which_examples():
    """Metis-RISE's router on pass rates of 0, 1/2 and 1; ReLIFT's, which takes the hardest alone."""
    groups = [(0, 4), (2, 4), (4, 4), (0, 0)]
    assert [PassRate().takes(*each) for each in groups] == ["recorded", "own", "", ""]
    assert [PassRate(solved=False).takes(*each) for each in groups] == ["recorded", "", "", ""]
    assert [PassRate(failed=False, mastered=True).takes(*each) for each in groups] == ["", "own", "own", ""]
