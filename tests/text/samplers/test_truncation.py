"""Completions without an end: what `penalise` takes off, and from what."""

import torch

from flowgrpo.training import sampling
from tests.helpers import loop, tiny_text


def advantages(truncated: str, **options):
    """(advantages [P,G], scores [P,G,R], which completions were cut [P,G]) of an epoch's first two prompts."""
    trainer = tiny_text.trainer(tiny_text.policy(truncated=truncated), method="dr_grpo", text__truncated=truncated,
                                **options)
    batch = trainer.prompts[:2]
    parts, _, scores = sampling.sample(trainer, batch)
    ends = torch.cat([(part.transitions[0].ids == 2).any(1) for part in parts]).view(-1, 4)
    credited = loop.credit(trainer, parts, scores, [prompt.key for prompt in batch])
    return torch.cat([part.advantages[0] for part in credited]).view(-1, 4), scores, ~ends


def test_a_completion_that_was_cut_off_loses_the_penalty():
    plain, scores, cut = advantages("keep")
    found, penalised, _ = advantages("penalise", text__penalty=0.5)
    assert 0 < cut.sum() < cut.numel() and torch.equal(scores, penalised)  # what is reported is what was scored
    less = scores[..., 0] - 0.5 * cut
    assert torch.allclose(plain, scores[..., 0] - scores[..., 0].mean(1, keepdim=True))
    assert torch.allclose(found, less - less.mean(1, keepdim=True)) and not torch.allclose(found, plain)
