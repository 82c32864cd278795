"""ViSurf's control of the reward of answers that came with their prompts (2510.10606)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowgrpo.advantages.group import weighted_sum
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.errors import UserError
from flowgrpo.types import Context, required

if TYPE_CHECKING:
    from flowgrpo.config.schema import Config


@dataclass(frozen=True)
class ExpertReward(Shaping):
    """Rewards of a group that holds the prompt's own answer (ViSurf, 2510.10606).

    without: names of rewards that an answer does not earn, such as one for a thinking part that it lacks: it has 0.
    smooth: an answer has the mean of the group's samples where one of them scores as high as it, so that its advantage
        is 0.
    shaping: another shaping, which is applied behind; None: none.
    """

    without: tuple[str, ...] = ()
    smooth: bool = True
    shaping: Shaping | None = None

    reads_target = "tokens"
    reads_answers = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "without", tuple(self.without))  # a recipe gives a list

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for a name that is no reward of the run."""
        for name in self.without:
            if name not in config.rewards:
                raise UserError(f"parts.shaping.without names {name!r}, which is no reward of the run: expected names "
                                f"among {', '.join(config.rewards)}")

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return self.shaping is not None and self.shaping.merges

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        known = required(context)
        expert = required(known.samples.expert).to(rewards.device)
        lost = torch.tensor([name in self.without for name in known.rewards.names], device=rewards.device)
        if lost.any():
            zero = torch.where(rewards.isnan(), rewards, torch.zeros_like(rewards))
            rewards = torch.where(expert[..., None] & lost, zero, rewards)
        if self.smooth:
            rewards = smoothed(rewards, expert, known.rewards.weights or [1.0] * rewards.shape[2])
        return rewards if self.shaping is None else self.shaping(rewards, context)


def smoothed(rewards: Tensor, expert: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the rewards [P, G, R] with those of answers replaced by the samples' mean, where a sample's weighted sum
    reaches the answer's. expert: bool [P, G]."""
    totals = weighted_sum(rewards, weights)
    best = totals.masked_fill(expert | totals.isnan(), -torch.inf).amax(1, keepdim=True)
    mean = rewards.masked_fill(expert[..., None], torch.nan).nanmean(1, keepdim=True)
    return torch.where((expert & (best >= totals))[..., None], mean, rewards)
