"""A target: blocks of consecutive recorded steps, each one decision. docs/extending.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from flowgrpo.methods.targets import JointDensity
from flowgrpo.rollouts.targets import TARGETS, RecordedSteps
from flowgrpo.samplers.joint_density import merge, single_score, step_log_prob


@dataclass(frozen=True)
class Blocks(JointDensity):
    """Blocks of `size` consecutive recorded steps, each one decision by its mean log-density."""

    size: int = 2
    trains: ClassVar[str] = "blocks of steps"


class BlockRollouts(RecordedSteps):
    """Recorded steps in blocks. own: the target's fields."""

    own: Blocks

    def record(self, part, conditioning, epoch, seed):
        steps = [part.transitions[at:at + self.own.size] for at in range(0, len(part.transitions), self.own.size)]
        old = [torch.stack([each.old.logp[:, 0] for each in block]).mean(0) for block in steps]
        return replace(part, transitions=tuple(merge(block, single_score(logp)) for block, logp in zip(steps, old)))

    def replay(self, part, conditioning):
        for k, block in enumerate(part.transitions):
            for start in range(0, len(block.x), self.micro_batch):
                rows = slice(start, start + self.micro_batch)
                prompts = conditioning.rows(block.prompts[rows])
                logp = [step_log_prob(self.policy, prompts, part.exploration, each, rows) for each in block.links]
                yield k, rows, single_score(torch.stack(logp).mean(0))


TARGETS[Blocks] = BlockRollouts
