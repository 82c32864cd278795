"""Divergences from the base model on its own samples: closed forms, modes kept, and a run that draws them once."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from flowgrpo.contrib.rehearsal import Rehearsal
from flowgrpo.errors import UserError
from flowgrpo.methods.validate import resolve
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message
from tests.helpers.tables import close, draw, f64

BASE = f64([0.5, 0.3, 0.15, 0.05])


def forward(p, q):
    return kl_divergence(Categorical(probs=q), Categorical(probs=p))


def shannon(p, q):
    middle = Categorical(probs=(p + q) / 2)
    return sum(kl_divergence(Categorical(probs=each), middle) for each in (p, q))


def alpha(p, q):
    return ((p ** 0.7 * q ** 0.3).sum() - 1) / (0.3 * -0.7)


@pytest.mark.parametrize("part, divergence", [
    (Rehearsal(1.0), forward), (Rehearsal(1.0, "js"), shannon), (Rehearsal(1.0, "alpha", 0.3), alpha)])
def test_the_mean_over_the_bases_samples_is_the_divergence_and_so_is_its_gradient(part, divergence):
    logits = draw(4, seed=1).requires_grad_()
    found = (BASE * part(logits.log_softmax(0), BASE.log())).sum()
    expected = divergence(logits.softmax(0), BASE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (found, expected)), rtol=0,
                               atol=1e-12)


def test_alpha_and_divergences_where_nothing_moved():
    # Outputs of DPH-RL's alpha_divergence_f for log-probabilities of the policy and of the base.
    policy, base = f64([-1.0, -2.0, -0.5]), f64([-1.5, -1.0, -0.5])
    close(Rehearsal(1.0, "alpha")(policy, base), [0.16970199324270216, 0.281091180124577, 0], 1e-12)
    close(Rehearsal(1.0, "alpha", 0.8)(policy, base), [0.1535833504023615, 0.34278209472691645, 0], 1e-12)
    logp = f64([[-3.0, -1.0, -0.1]])
    for part in (Rehearsal(1.0), Rehearsal(1.0, "js"), Rehearsal(1.0, "alpha", 0.3)):
        close(part(logp, logp), [[0, 0, 0]])
    for part in (Rehearsal(1.0, "js"), Rehearsal(1.0, "alpha", 0.3)):
        assert (part(logp + f64([[0.5, -2.0, 0.01]]), logp) > 0).all()
    ratio = f64([0.5]).log()
    close(Rehearsal(2.0, "js")(ratio, f64([0])), [2 * (0.5 * math.log(0.5) - 1.5 * math.log(0.75))])
    close(Rehearsal(2.0, "forward_kl")(ratio, f64([0])), [2 * math.log(2)])


def fitted(loss) -> torch.Tensor:
    """A policy of one bump on 11 places, fitted to a base of two: its mass at each of the two modes."""
    places = torch.arange(11, dtype=torch.float64)
    def bump(middle, width):
        return (-((places - middle) / width).square() / 2).log_softmax(0)
    base = ((bump(2.0, 0.7).exp() + bump(8.0, 0.7).exp()) / 2 + 1e-6).log().log_softmax(0)
    middle, width = f64([3.0]).requires_grad_(), f64([0.7]).requires_grad_()
    optimizer = torch.optim.Adam([middle, width], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        loss(bump(middle, width), base).backward()
        optimizer.step()
    found = bump(middle, width).exp().detach()
    return torch.stack([found[1:4].sum(), found[7:10].sum()])


def test_a_forward_kl_keeps_both_modes_of_the_base_where_the_reverse_one_keeps_one():
    kept = fitted(lambda new, base: (base.exp() * Rehearsal(1.0)(new, base)).sum())
    lost = fitted(lambda new, base: (new.exp() * (new - base)).sum())
    assert kept.amin() > 0.15 and lost.amin() < 0.01 and lost.amax() > 0.9


def test_a_run_rehearses_the_bases_samples_which_it_draws_once():
    trainer = tiny_text.trainer(parts={"rehearsal": {"type": "Rehearsal", "weight": 5.0}, "kl": {"weight": 0.0}})
    tiny_text.stir(trainer.policy)  # as a run that goes on from a checkpoint
    metrics = trainer.run_epoch()
    spent = loop.extension(trainer, "RehearsedSamples")
    drawn = spent.parts
    assert metrics["rehearsal"] > 0 and "kl_weight" not in metrics
    with trainer.policy.reference():
        for part in drawn:
            [(_, rows, base)] = trainer.rollouts.replay(part, spent.conditioning)
            torch.testing.assert_close(base.logp, part.transitions[0].old.logp, rtol=0, atol=1e-4)
    trainer.epoch = 1
    trainer.run_epoch()
    assert spent.parts is drawn
    plain = tiny_text.trainer(parts={"kl": {"weight": 0.0}})
    tiny_text.stir(plain.policy)
    plain.run_epoch()
    again = tiny_text.trainer(parts={"rehearsal": {"type": "Rehearsal", "weight": 5.0}, "kl": {"weight": 0.0}})
    tiny_text.stir(again.policy)
    again.run_epoch()
    moved = [torch.cat([p.flatten() for p in each.policy.weights.parameters()]) for each in (plain, again)]
    assert (moved[0] - moved[1]).abs().max() > 1e-4


def test_image_runs_rehearse_and_unsolved_samples_are_left_out():
    trainer = tiny.trainer(parts={"rehearsal": {"type": "Rehearsal", "divergence": "js"}})
    metrics = trainer.run_epoch()
    assert math.isfinite(metrics["rehearsal"]) and loop.extension(trainer, "RehearsedSamples").parts
    def last(texts, prompts):
        return [float(place % 2) for place in range(len(texts))]
    trainer = tiny_text.trainer(rewards={"short": last}, parts={"rehearsal": {"type": "Rehearsal", "least": 0.5}})
    trainer.run_epoch()
    assert [len(part.transitions[0].ids) for part in loop.extension(trainer, "RehearsedSamples").parts] == [2, 2]
    trainer = tiny_text.trainer(rewards={"short": last}, parts={"rehearsal": {"type": "Rehearsal", "least": 2.0}})
    assert "least is 2.0, which no sample of the base model reaches: lower it" in message(trainer.run_epoch)


@pytest.mark.parametrize("make, problem", [
    (lambda: Rehearsal(0), "weight is 0, expected above 0"),
    (lambda: Rehearsal(1, "reverse"), "divergence is 'reverse', expected one of forward_kl, js, alpha"),
    (lambda: Rehearsal(1, "alpha", 1), "alpha is 1, expected another number")])
def test_settings_out_of_range_are_refused(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


def test_methods_that_draw_no_samples_of_the_base_refuse_a_rehearsal():
    for name, problem in (("diffusion_nft", "generated by the base model, and this method's by an old"),
                          ("draft", "reads no rehearsal"), ("reinflow", "reads no rehearsal")):
        with pytest.raises(UserError, match=problem):
            resolve(tiny.config(method=name, parts={"rehearsal": {"type": "Rehearsal"}}))
