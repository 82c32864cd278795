"""Episodic memory: bonuses for samples unlike those of earlier epochs, and for samples near the successful ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.advantages.group import rows_of, weighted_sum
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.parts import AtLeast, part
from flowgrpo.types import Context


@part("shaping")
class Episodic(Shaping):
    """Total reward plus `explore` times the novelty and `exploit` times the nearness of a sample (Memory-R1+, Reasoning
    Under 1 Billion).

    A sample is described by the scores of the rewards `rewards`, which may have the weight 0; they stand for the
    paper's embedding, for images and texts alike. Novelty is the mean distance to the `nearest` samples of the
    prompt's earlier epochs, 0 for an exact repeat. Nearness is 1 / (1 + the distance to the nearest success), whose
    total reward reached `right`. Both are 0 without such a sample. Distances are Euclidean.

    memory["Episodic"] holds the last `size` samples of every prompt. As in `group.running`, every call of an epoch
    starts from the epochs before, and the first one's samples are stored.
    """

    rewards: tuple[str, ...] = ()
    explore: Annotated[float, AtLeast(0)] = 0.1
    exploit: Annotated[float, AtLeast(0)] = 0.1
    nearest: Annotated[int, AtLeast(1)] = 3
    right: float = 0.5
    size: Annotated[int, AtLeast(1)] = 64
    merges = True

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None, "Episodic compares with earlier epochs: it needs a context"
        run, names = context.run, context.rewards.names
        columns = [number for number, name in enumerate(names) if not self.rewards or name in self.rewards]
        described, total = rewards[..., columns].float(), weighted_sum(rewards, list(context.rewards.weights))
        memory, bonus = run.memory.setdefault("Episodic", {}), torch.zeros_like(total)
        for prompt, rows in rows_of(context.groups.prompts).items():
            known = ~(described[rows].isnan().any(2) | total[rows].isnan())
            now, won = described[rows][known], total[rows][known] >= self.right
            past = torch.tensor(self._past(memory, prompt, run.epoch, now, won)).view(-1, len(columns) + 1)
            bonus[rows] = torch.zeros_like(bonus[rows]).masked_scatter(known, self.bonuses(now, past).to(bonus))
        return (total + bonus)[..., None]

    def bonuses(self, samples: Tensor, past: Tensor) -> Tensor:
        """Return the bonuses [n] of samples [n, D]. past: [m, D + 1], earlier ones, the last column 1 for a success."""
        bonus = samples.new_zeros(len(samples))
        if len(past):
            apart = torch.cdist(samples, past[:, :-1].to(samples), compute_mode="donot_use_mm_for_euclid_dist")
            bonus = self.explore * apart.topk(min(self.nearest, len(past)), dim=1, largest=False)[0].mean(1)
            if len(wins := apart[:, past[:, -1] > 0].T):
                bonus = bonus + self.exploit / (1 + wins.amin(0))
        return bonus

    def _past(self, memory: dict[str, Any], prompt: str, epoch: int, now: Tensor, won: Tensor
              ) -> Sequence[Sequence[float]]:
        """Return a prompt's samples of earlier epochs; store those of this one."""
        present = torch.cat([now, won[:, None].to(now)], 1).tolist()
        entry = memory.setdefault(prompt, {"epoch": epoch, "past": [], "present": present})
        if entry["epoch"] != epoch:
            past = (entry["past"] + entry["present"])[-self.size:]
            entry = memory[prompt] = {"epoch": epoch, "past": past, "present": present}
        return entry["past"]
