"""An update of a trainer in its two halves: the parts of an epoch that teach, and the gradient of their loss."""

from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo.samplers.rollout import Part
from flowgrpo.train import Trainer
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny_text


def credited(trainer: Trainer) -> tuple[list[Part], Any]:
    """The parts of two prompts of which something is left to train, with their advantages, and the conditioning."""
    batch = trainer.prompts[:2]
    parts, conditioning, scores = sampling.sample(trainer, batch)
    found = loop.credit(trainer, parts, scores, [prompt.key for prompt in batch])
    return [part for part in found if part is not None], conditioning


def gradient(trainer: Trainer, parts: Sequence[Part], conditioning: Any) -> torch.Tensor:
    """The gradient of these parts of texts of the same two prompts, one flat tensor."""
    trainer.optimization.optimizer.zero_grad()
    trainer.kl_reference.start_epoch(loop.epoch(trainer, own=trainer.prompts[:2]), trainer.rollouts, 0, 1)
    count = decisions(parts, trainer.method.loss.reduction)
    for part in parts:
        loop.backward(trainer, part, conditioning, {0: 1.0}, count, UpdateStats())
    return torch.cat([parameter.grad.flatten() for parameter in trainer.policy.weights.parameters()])


def moved_gradient(trainer: Trainer) -> torch.Tensor:
    """The gradient of an epoch's parts away from ratios of 1, where some methods agree."""
    parts, conditioning = credited(trainer)
    tiny_text.stir(trainer.policy, 0.05)
    return gradient(trainer, parts, conditioning)


def assert_one_gradient(found: Sequence[torch.Tensor]) -> None:
    """Require that gradients are the same up to rounding, and not 0."""
    assert found[0].norm() > 0
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-4 * found[0].norm()
