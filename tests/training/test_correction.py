"""Factors on the loss of a decision, in closed form: the weight of its step, and the correction of one that other
weights drew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny, tiny_text


def many(completions, prompts):
    """Of several values, so that groups differ."""
    return [len(text) + text.count("7") / 2 for text in completions]


def corrected(part, factors):
    """The part with a random correction from 0.5 to 2 of each decision; they are appended to `factors`."""
    transitions = []
    for taken in part.transitions:
        generator = torch.Generator().manual_seed(len(factors))
        factors.append(0.5 + 1.5 * torch.rand(taken.old.logp.shape, generator=generator))
        transitions.append(replace(taken, importance=factors[-1]))
    return replace(part, transitions=tuple(transitions))


@pytest.mark.parametrize("made, options", [(tiny, {"method": "mix_grpo"}), (tiny_text, {"method": "dapo"})])
def test_each_decision_weighs_its_step_and_its_correction_in_loss_and_gradient(made, options):
    """Before the first update every ratio is 1: the loss of decision i is -w_i A_i, and the gradient of the whole
    -sum_i w_i A_i grad log p_i / n, where w_i is the product of both factors."""
    trainer = made.trainer(rewards={"many": many} if made is tiny_text else None, **options)
    batch = trainer.prompts[:trainer.geometry.prompts]
    parts, conditioning, scores = sampling.sample(trainer, batch)
    credited = loop.credit(trainer, parts, scores, [prompt.key for prompt in batch])
    parts = [part for part in credited if part is not None]
    factors: list[torch.Tensor] = []
    parts = [corrected(part, factors) for part in parts]
    weights = {taken.step: 1.5 + taken.step / 4 for part in parts for taken in part.transitions}
    count, stats, expected, summed = decisions(parts), UpdateStats(), [], torch.zeros(())
    assert trainer.kl_reference.kl.weight == 0
    trainer.optimization.zero_grad()
    for part in parts:
        loop.backward(trainer, part, conditioning, weights, count, stats)
    found = [parameter.grad.clone() for parameter in trainer.optimization.parameters]
    trainer.optimization.zero_grad()
    for part in parts:
        for k, rows, new in trainer.rollouts.replay(part, conditioning):
            weighed = part.transitions[k].importance[rows] * part.advantage(k, rows).expand(new.logp.shape)
            weighed = weighed * weights[part.transitions[k].step]
            expected.append(-weighed[new.mask])
            summed = summed - (weighed * new.logp * new.mask).sum() / count
    summed.backward()
    rows = torch.cat(stats.decisions)
    torch.testing.assert_close(rows[rows[:, 5] > 0, 3], torch.cat(expected).float(), rtol=1e-4, atol=1e-5)
    assert max(each.abs().max().item() for each in found) > 0
    for gradient, parameter in zip(found, trainer.optimization.parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6 * float(gradient.abs().max()) + 1e-9)
