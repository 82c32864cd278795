"""Bonus of answers that a slow reference finds likely, by hand and in a run."""

import pytest
import torch

from flowgrpo.contrib.consistency import LikelihoodConsistency
from flowgrpo.errors import UserError
from flowgrpo.methods.validate import resolve
from flowgrpo.training import sampling
from flowgrpo.types import Completions, Context, SampleMeasures, Scored
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.tables import close, f64

CARE = {"shaping": {"type": "LikelihoodConsistency", "right": 0.5}, "reference": {"type": "EMA"}, "kl": {"weight": 0.0}}


def test_only_right_samples_above_their_peers_earn_the_bonus():
    rewards = f64([[1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0]])[..., None]
    likelihood = f64([[-1, -3, 0, -2], [-1, -1, -1, -9], [-2, -2, 0, 0]])
    context = Context(samples=SampleMeasures(likelihood=likelihood))
    found = LikelihoodConsistency(0.5)(rewards, context)
    close(found[..., 0], [[1.5, 1, 0, 1.5], [0, 0, 0, 1], [1.5, 1.5, 0, 0]])
    both = LikelihoodConsistency(0.5)(torch.cat([rewards, rewards + 7], 2), context)
    close(both[..., 1], (rewards[..., 0] + 7).tolist())


def test_the_likelihood_is_that_of_the_tokens_behind_the_last_marker():
    ids = torch.tensor([[7, 8, 5, 7, 8, 6], [1, 2, 3, 4, 0, 0], [7, 8, 1, 2, 0, 0]])
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]).bool()
    logp = f64([[-1, -2, -3, -4, -5, -6], [-1, -1, -1, -5, 0, 0], [-9, -9, -1, -2, 0, 0]])
    taken = Completions(ids, torch.zeros(3).long(), Scored(logp, mask))
    close(LikelihoodConsistency(behind=[7, 8]).likelihood(taken, logp), [-6, -2, -1.5])
    close(LikelihoodConsistency().likelihood(taken, logp), [-3.5, -2, -5.25])


def test_a_run_reads_the_likelihood_of_its_slow_reference():
    trainer = tiny_text.trainer(rewards={"short": lambda texts, prompts: [1.0] * len(texts)}, parts=CARE)
    tiny_text.stir(trainer.policy)
    trainer.run_epoch()
    assert len(trainer.kl_reference.snapshots) == 1 and trainer.kl_reference.likelihood.shape == (2, 4)
    parts, asked, _ = sampling.sample(trainer, trainer.prompts[:2])
    trainer.kl_reference.score_samples(parts, lambda part: trainer.rollouts.replay(part, asked), trainer.processes)
    found = trainer.kl_reference.likelihood
    with trainer.policy.reference(trainer.kl_reference.snapshots):
        expected = torch.cat([(new.logp * new.mask).sum(1) / new.mask.sum(1) for part in parts
                              for _, _, new in trainer.rollouts.replay(part, asked)])
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=1e-5)
    context = loop.context(trainer, parts, ["a", "b"])
    assert torch.equal(context.samples.likelihood, found)


def test_a_bonus_needs_texts_and_a_value_above_zero():
    with pytest.raises(UserError, match="got LikelihoodConsistency, which reads completions or"):
        resolve(tiny.config(parts={"shaping": {"type": "LikelihoodConsistency"}}))
    with pytest.raises(ValueError, match="bonus is 0, expected above 0"):
        LikelihoodConsistency(0)
