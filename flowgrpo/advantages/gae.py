"""Value model of token traces: generalised advantage estimation (GAE), value loss, settings."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from flowgrpo.parts import Above, AtLeast, part


@part("value", target="tokens", jointly={"gamma decay": "0 to 1", "clip lr passes": "above 0, above 0 and 1 or more"})
class ValueHead:
    """Value model (TraceRL, 2509.06949; of causal models PPO's, 1707.06347): the method's advantage of a completion is
    the terminal reward of its trace, and `over_traces` gives the advantages of its tokens.

    gamma, decay: GAE's; decay is lambda.
    clip: `value_loss`'s range, in units of reward.
    lr, passes: of AdamW; the number of steps over all of an epoch's tokens, after the policy's updates.
    """

    gamma: Annotated[float, AtLeast(0, to=1)] = 1.0
    decay: Annotated[float, AtLeast(0, to=1)] = 1.0
    clip: Annotated[float, Above(0)] = 0.2
    lr: Annotated[float, Above(0)] = 1e-3
    passes: Annotated[int, AtLeast(1)] = 4


@part("value", target="tokens", jointly={"lr passes": "above 0, and 1 or more"})
class OutcomeHead:
    """Critic of the outcome's class at every token: its probability of the true
    class weighs the token, A times `outcome_weights` (CodeRL, 2207.01780). It is a linear head on the policy's states.

    With `code_run: {outcomes: true}` and the method `remax`, whose baseline is the greedy completion, it is CodeRL's
    training; the paper's critic is a model of its own, on the maximum of its states.

    bounds: rewards that part the classes, ascending. lr, passes: as of `ValueHead`, of the cross-entropy.
    """

    bounds: tuple[float, ...] = (-0.8, -0.45, 0.35)
    lr: Annotated[float, Above(0)] = 1e-3
    passes: Annotated[int, AtLeast(1)] = 4

    def __post_init__(self) -> None:
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"OutcomeHead: bounds is {list(self.bounds)}, expected ascending numbers")


def outcome_weights(logits: Tensor, classes: Tensor, mask: Tensor) -> Tensor:
    """Probability of its row's class at every token, over the row's mean: [B,L], 0 where mask is false.

    logits: [k,C] of the k tokens of the mask [B,L], row by row; classes: int64 [B].
    """
    of = classes[:, None].expand(mask.shape)[mask]
    chance = torch.zeros(mask.shape).to(logits).masked_scatter(mask, logits.softmax(1).gather(1, of[:, None])[:, 0])
    return chance / (chance.sum(1) / mask.sum(1).clamp(min=1)).clamp(min=1e-12)[:, None]


def over_traces(rewards: Tensor, values: Tensor, steps: Tensor, mask: Tensor, gamma: float, decay: float
                ) -> tuple[Tensor, Tensor]:
    """Advantages and returns of tokens, [B,L] each, 0 where mask is false (TraceRL, 2509.06949, its value
    model).

    rewards: [B], of the tokens of a trace's last step.
    values: [B,L].
    steps: int64 [B,L], the steps at which tokens were drawn.

    A step with a token where mask is true has the means of their values, V*, and rewards, r*; it is followed by the
    next such step: A*_t = r*_t - V*_t + gamma V*_t+1 + gamma decay A*_t+1, R*_t = r*_t + gamma R*_t+1. Each of its
    tokens has A = r - V + gamma V*_t+1 + gamma decay A*_t+1 and R = r + gamma R*_t+1. With gamma = decay = 1, A = R -
    V.
    """
    count = int(steps.max()) + 1
    size = values.new_zeros(len(steps), count).scatter_add(1, steps, mask.to(values))
    value = torch.zeros_like(size).scatter_add(1, steps, values * mask) / size.clamp(min=1)
    last = (torch.arange(count, device=steps.device) * (size > 0)).amax(1)
    reward = one_hot(last, count) * rewards.to(values)[:, None]
    ahead, behind = torch.zeros_like(size), torch.zeros_like(size)  # gamma (V* + decay A*), gamma R*: next step
    for step in range(count - 1, 0, -1):
        there = size[:, step] > 0
        before = step - 1
        advantage = reward[:, step] - value[:, step] + ahead[:, step]
        ahead[:, before] = torch.where(there, gamma * (value[:, step] + decay * advantage), ahead[:, step])
        behind[:, before] = torch.where(there, gamma * (reward[:, step] + behind[:, step]), behind[:, step])
    returns = (reward + behind).gather(1, steps)
    advantages = (reward + ahead).gather(1, steps) - values
    return advantages * mask, returns * mask


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 of values, old ones and returns, all [n]: [n]."""
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


@part("value", target="edits")
class Recall:
    """Off-policy training of the critic of edits, as EXPO's (2507.07986): after an epoch's updates, `steps` steps of
    AdamW with `lr`.

    Each step uses `batch` of the `kept` newest samples, bases and edits alike. EXPO takes 20 such steps per step of its
    environment; the defaults read every sample about as often. The samples are held in main memory and in every
    checkpoint: of FLUX at 1024 x 1024, 0.5 MB each in bf16, 8192 are 4 GB.
    """

    kept: Annotated[int, AtLeast(1)] = 8192
    steps: Annotated[int, AtLeast(1)] = 40
    batch: Annotated[int, AtLeast(1)] = 96
    lr: Annotated[float, Above(0)] = 1e-3

