"""Decoupled PPO: weights of decisions that older weights of the policy drew.

The loss is (pi_prox / pi_behaviour) * clipped(pi / pi_prox): the proximal policy is the one before the update, around
which the surrogate clips, and the behaviour policy is the one that drew the decision (AReaL, 2505.24298).
"""

from __future__ import annotations

import math

from torch import Tensor


def behaviour_weights(log_ratio: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return the weight pi_prox / pi_behaviour [B, N] of every decision, without a gradient.

    It is 0 above the cap and 1 where mask is false. log_ratio: [B, N], the method's log-ratio of the proximal policy to
    the behaviour policy. mask: bool [B, N].
    """
    excess = log_ratio.detach().masked_fill(~mask, 0.0)
    return excess.exp().masked_fill(excess > math.log(cap), 0.0)
