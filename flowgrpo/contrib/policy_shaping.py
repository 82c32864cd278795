"""Bounded ratio of samples that another policy drew than the one that is learned (LUFFY)."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.objectives.surrogates import Clip, Origin, Surrogate
from flowgrpo.parts import Above, part
from flowgrpo.text.losses import WrappedLoss


@part("surrogate", target="likelihood", reads_guided=True, jointly={"gamma probability": "above 0, and above 0 to 1"})
class PolicyShaping(WrappedLoss):
    """-A r/(r+gamma) on samples of guidance that the loss does not read and on prompts' own answers;
    the surrogate's loss on the others, [B, N] (policy shaping of LUFFY, 2504.14945).

    Of a guided sample r is p(o | prompt) / p_old(o | guidance), of an answer p / `probability` (LUFFY: 1). f is below 1
    and is not clipped. Its gradient by log r, gamma r / (r + gamma)^2, is largest at r = gamma: unlikely decisions
    count more than they do by r.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    gamma: Annotated[float, Above(0)] = 0.1
    probability: Annotated[float, Above(0, to=1)] = 1.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Origin) -> Tensor:
        of_answer = old.new - math.log(self.probability)
        ratio = torch.where(old.answers[:, None], of_answer, log_ratio)
        shaped = -advantage * torch.sigmoid(ratio - math.log(self.gamma))
        return torch.where(self._elsewhere(old), shaped, self.surrogate(log_ratio, advantage, old.old))

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Origin) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old.old) & ~self._elsewhere(old)

    @staticmethod
    def _elsewhere(old: Origin) -> Tensor:
        return (old.guided | old.answers)[:, None]
