"""Scores of the KL reference: which epoch they belong to."""

from __future__ import annotations

import torch

from flowgrpo.training import sampling
from tests.helpers import loop, tiny


def test_an_epoch_reads_no_scores_of_an_earlier_one():
    """Scores are kept for the passes of one epoch, and the next one computes them anew, also where the last broke off.

    The reference is the base model, whose weights are changed here between the epochs.
    """
    trainer = tiny.trainer(parts__kl={"type": "GaussianKL", "weight": 0.1}, train__inner_epochs=2)
    [part], conditioning, _ = sampling.sample(trainer, trainer.prompts[:1])
    epoch = loop.epoch(trainer, [part], conditioning)
    def scores() -> torch.Tensor:
        return torch.cat([score.logp for score in trainer.kl_reference.scores(part)])
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 0, 2)
    before = scores()
    with torch.no_grad():
        for name, weight in trainer.policy.pipe.transformer.named_parameters():
            if "lora" not in name:
                weight.mul_(1.1)
    assert torch.equal(scores(), before)  # the second pass
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 1, 2)
    assert (scores() - before).abs().max() > 1e-4
