"""Stage I of SCoRe in a run: what the second attempt earns trains both, and the first alone is held to the base."""

from __future__ import annotations

import torch

from flowgrpo.advantages.group import group_relative
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from tests.helpers import loop, tiny_text

AGAIN, WEIGHT = "=+", 3.0


def sevens(texts, prompts):
    return [float(text.count("7")) - 0.1 * len(text) for text in texts]


def made(**kl):
    parts = {"draws": {"type": "SecondAttempt", "again": AGAIN},
             "spread": {"type": "StepScores", "kind": "last", "ends": AGAIN, "whole": False, "outcome": 0},
             "kl": {"type": "SpanKL", "weight": WEIGHT, "estimator": "k2"} | kl}
    own = tiny_text.stir(tiny_text.policy(max_tokens=10))
    return tiny_text.trainer(own, {"sevens": sevens}, reward="sevens", method="rloo", text__max_tokens=10,
                            train__micro_batch=8, parts=parts)


def seconds(trainer, taken):
    """The texts of the second attempts."""
    shown = [ids[:int(mask.nonzero().max()) + 1] for ids, mask in zip(taken.ids, taken.old.mask)]
    return [trainer.policy.tokenizer.decode(ids, skip_special_tokens=True).partition(AGAIN)[2] for ids in shown]


def test_the_gradient_by_hand():
    """-A log p of all tokens, A of the second attempts alone, and the k2 estimate on the tokens of the first."""
    trainer = made()
    parts, conditioning, scores = sampling.sample(trainer, trainer.prompts[:2])
    credited = loop.credit(trainer, parts, scores, ["1", "2"])
    trainer.kl_reference.start_epoch(loop.epoch(trainer), trainer.rollouts, 0, 1)
    [part], stats = credited, UpdateStats()
    loop.backward(trainer, part, conditioning, {0: 1.0}, 8, stats)
    found = [p.grad.clone() for p in trainer.policy.weights.parameters()]
    taken, own = part.transitions[0], trainer.policy
    advantage = group_relative(torch.tensor(sevens(seconds(trainer, taken), [])).view(2, 4), "group").flatten()
    assert advantage.abs().max() > 0.5
    torch.testing.assert_close(part.advantages[0], advantage[:, None] * taken.old.mask)
    given = conditioning, taken.prompts, taken.ids, taken.old.mask, Decoding()
    with torch.no_grad(), own.reference([]):
        base = own.log_probs(*given).logp
    trainer.optimization.optimizer.zero_grad()
    new = own.log_probs(*given).logp
    first = torch.arange(10) < taken.old.mask.int().argmin(1)[:, None]
    assert 0 < first.sum() < taken.old.mask.sum() and not base[first].equal(new[first])
    (-(advantage[:, None] * new).sum() + WEIGHT / 2 * (new - base)[first].square().sum()).div(8).backward()
    for one, parameter in zip(found, own.weights.parameters()):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)


def test_an_epoch_measures_the_kl_of_the_first_attempts():
    held, both = (made(factors=factors).run_epoch() for factors in ((1, 0), (1, 1)))
    assert held["grad_norm"] > 0 and 0 < held["kl"] < both["kl"]
