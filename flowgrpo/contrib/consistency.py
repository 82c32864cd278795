"""Reward of answers that follow from their reasoning, as a slow reference sees it."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.shaping import Shaping
from flowgrpo.parts import Above, part
from flowgrpo.types import Completions, Context, unwrap, wide


@part("shaping", target="texts", reads_reference=True)
class LikelihoodConsistency(Shaping):
    """`bonus` for right samples whose answer the reference finds likely: at least as much as the right ones of the
    group in the mean (GRPO-CARE, 2506.16141). It is added to the first reward.

    Right is a sample whose first reward reaches `right`. The likelihood is the mean log-probability of the tokens
    behind the last occurrence of the token ids `behind`, such as those of <answer>, after the reasoning before it; all
    tokens without any. `reference: {type: EMA}` is the paper's; its bonus takes the place of a KL (weight 0). A group
    with one right sample has no peers to compare with, and no bonus (ours).
    """

    bonus: Annotated[float, Above(0)] = 0.5
    right: float = 1.0
    behind: tuple[int, ...] = ()

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        likelihood = unwrap(unwrap(context).samples.likelihood).to(rewards.device)
        (rewards,) = wide(rewards)
        right = rewards[..., 0] >= self.right
        count = right.sum(1, keepdim=True)
        mean = (likelihood * right).sum(1, keepdim=True) / count.clamp(min=1)
        earned = self.bonus * (right & (likelihood >= mean) & (count > 1))
        return torch.cat([rewards[..., :1] + earned[..., None], rewards[..., 1:]], dim=2)

    def likelihood(self, taken: Completions, logp: Tensor) -> Tensor:
        """Return the mean of the reference's log-probabilities logp [m, L] over each completion's answer: [m]."""
        mask = taken.old.mask.to(logp.device)
        answer = mask & self.answers(taken.ids.to(logp.device))
        answer = answer.where(answer.any(1, keepdim=True), mask)  # a completion without the marker is all answer
        return (logp * answer).sum(1) / answer.sum(1).clamp(min=1)

    def answers(self, ids: Tensor) -> Tensor:
        """Return the tokens behind the last marker, bool [m, L]; none in rows without one, all without a marker."""
        size, places = len(self.behind), torch.arange(ids.shape[1], device=ids.device)
        if not size:
            return torch.ones_like(ids, dtype=torch.bool)
        if ids.shape[1] < size:
            return torch.zeros_like(ids, dtype=torch.bool)
        marker = torch.tensor(self.behind, device=ids.device)
        begins = (ids.unfold(1, size, 1) == marker).all(2)
        last = torch.where(begins, places[:begins.shape[1]], -1).amax(1, keepdim=True)
        return (last >= 0) & (places >= last + size)
