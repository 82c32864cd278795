"""A value model beside a language model: advantages per token, by GAE over the steps in which tokens were drawn.

It is a linear head on the policy's last hidden states, of a masked model each in the state of its token's own decoding
step. The states are constants to it, so that it changes nothing of the policy; it is saved in checkpoints, and no
adapter has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from flowgrpo import checkpoint
from flowgrpo.geometry import Geometry
from flowgrpo.parts.recall import Recall, Recalling
from flowgrpo.parts.spreads import Evenly
from flowgrpo.processes import Processes
from flowgrpo.samplers.rollout import Part
from flowgrpo.samplers.tokens import Decoding


@dataclass(frozen=True)
class ValueHead:
    """A value model (TraceRL, 2509.06949; of causal models PPO's, 1707.06347): what the method's advantage is of a
    completion becomes the terminal reward of its trace, and `over_traces` the advantages of its tokens.

    gamma and decay (lambda) are GAE's; clip: `value_loss`'s range, in units of reward; lr and passes: of AdamW, so many
    steps over all of an epoch's tokens, after the policy's updates.
    """

    gamma: float = 1.0
    decay: float = 1.0
    clip: float = 0.2
    lr: float = 1e-3
    passes: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1 or not 0 <= self.decay <= 1:
            raise ValueError(f"ValueHead: gamma is {self.gamma} and decay {self.decay}, expected 0 to 1")
        if not self.clip > 0 or not self.lr > 0 or self.passes < 1:
            raise ValueError(f"ValueHead: clip is {self.clip}, lr {self.lr} and passes {self.passes}, expected above "
                             "0, above 0 and 1 or more")


def over_traces(rewards: Tensor, values: Tensor, steps: Tensor, mask: Tensor, gamma: float, decay: float
                ) -> tuple[Tensor, Tensor]:
    """Advantages and returns of tokens, [B,L] each, 0 where mask is false (TraceRL, 2509.06949, its value model).

    rewards: [B], of the tokens of a trace's last step; values [B,L]; steps: int64 [B,L], those at which tokens were
    drawn. A step that has a token where mask is true is worth the mean of their values V* and rewards r*, and goes on
    to the next such step: A*_t = r*_t - V*_t + gamma V*_t+1 + gamma decay A*_t+1, R*_t = r*_t + gamma R*_t+1. A token
    of it has A = r - V + gamma V*_t+1 + gamma decay A*_t+1 and R = r + gamma R*_t+1. With gamma = decay = 1, A = R - V.
    """
    count = int(steps.max()) + 1
    size = values.new_zeros(len(steps), count).scatter_add(1, steps, mask.to(values))
    value = torch.zeros_like(size).scatter_add(1, steps, values * mask) / size.clamp(min=1)
    last = (torch.arange(count, device=steps.device) * (size > 0)).amax(1)
    reward = one_hot(last, count) * rewards.to(values)[:, None]
    ahead, behind = torch.zeros_like(size), torch.zeros_like(size)  # gamma (V* + decay A*) and gamma R* of what follows
    for step in range(count - 1, 0, -1):
        there, before = size[:, step] > 0, step - 1
        advantage = reward[:, step] - value[:, step] + ahead[:, step]
        ahead[:, before] = torch.where(there, gamma * (value[:, step] + decay * advantage), ahead[:, step])
        behind[:, before] = torch.where(there, gamma * (reward[:, step] + behind[:, step]), behind[:, step])
    returns = (reward + behind).gather(1, steps)
    advantages = (reward + ahead).gather(1, steps) - values
    return advantages * mask, returns * mask


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 of values, old ones and returns, all [n]."""
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


class NoCritic:
    """A method without a value model."""

    def __call__(self, parts: list[Part], asked: Any) -> list[Part]:
        return parts

    def fit(self) -> dict[str, float]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        pass


class Critic:
    """The value model of a run. seen: of every part of the epoch the states [k,H] of its tokens, float32 on the CPU,
    their values and returns [k]."""

    def __init__(self, part: ValueHead, policy: Any, kernel: Decoding, geometry: Geometry, processes: Processes):
        self.part, self.policy, self.kernel = part, policy, kernel
        self.together, self.processes = geometry.micro_batch, processes
        self.head = torch.nn.Linear(policy.width, 1).to(policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=part.lr, weight_decay=0.0)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, parts: Sequence[Part], asked: Any) -> list[Part]:
        """The parts with advantages [m,L] of tokens in place of those [m] of completions."""
        self.seen = []
        return [self._credited(part, asked) for part in parts]

    @torch.no_grad()
    def _credited(self, part: Part, asked: Any) -> Part:
        [taken], [reward], mask = part.transitions, part.advantages, part.transitions[0].old.mask
        hidden, turns = self.policy.hidden(asked, taken, self.kernel, self.together)
        values = self.values(hidden).cpu()
        advantages, returns = over_traces(reward.cpu(), torch.zeros(mask.shape).masked_scatter(mask, values), turns,
                                          mask, self.part.gamma, self.part.decay)
        self.seen.append((hidden.cpu(), values, returns[mask]))
        return replace(part, advantages=(advantages,))

    def values(self, hidden: Tensor) -> Tensor:
        """[k] of states [k,H]."""
        return self.head(hidden.to(self.policy.device, torch.float32))[:, 0]

    def fit(self) -> dict[str, float]:
        """Follow the clipped loss of what was seen; all processes take the same steps. Returns the loss before them."""
        [count] = self.processes.total([sum(len(returns) for _, _, returns in self.seen)])
        losses = []
        for _ in range(self.part.passes if count else 0):
            self.optimizer.zero_grad()
            losses.append(sum(self._backward(*each, count) for each in self.seen))
            self.processes.add_gradients(list(self.head.parameters()))
            self.optimizer.step()
        if not losses:
            return {}
        return {"value_loss": self.processes.gather(torch.tensor([float(losses[0])])).sum().item()}

    def _backward(self, hidden: Tensor, old: Tensor, returns: Tensor, count: int) -> float:
        device = self.policy.device
        loss = value_loss(self.values(hidden), old.to(device), returns.to(device), self.part.clip).sum() / count
        loss.backward()
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the head and its optimiser's state."""
        return dict(self.head.state_dict()) | {f"optimizer.{key}": each for key, each in
                                               checkpoint.optimizer_tensors(self.optimizer).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from `tensors`; from a checkpoint without any, from the start."""
        if not tensors:
            return
        self.head.load_state_dict({key: tensors[key] for key in self.head.state_dict()})
        state = {key.removeprefix("optimizer."): each for key, each in tensors.items() if key.startswith("optimizer.")}
        checkpoint.load_optimizer(self.optimizer, state)


def make_critic(method: Any, policy: Any, geometry: Geometry, processes: Processes) -> NoCritic | Critic | Recalling:
    """The value model that a method asks for."""
    if method.value is None:
        return NoCritic()
    if isinstance(method.value, Recall):
        return Recalling(method.value, policy.editor, processes)
    return Critic(method.value, policy, method.kernel, geometry, processes)


def require(method: Any) -> None:
    """ValueError where a method with a value model has no tokens for it, or no edits."""
    if isinstance(method.value, Recall):
        if method.edit is None:
            raise ValueError("value is Recall, which trains the critic of edits: leave it out, or use expo")
        return
    if method.value is not None and (not method.for_tokens or method.backprop):
        raise ValueError(f"value is {type(method.value).__name__}, which reads a language model's tokens and their "
                         "log-probabilities: leave it out, or use ppo or trace_rl_value")
    if method.value is not None and type(method.spread) is not Evenly:
        raise ValueError(f"value and spread ({type(method.spread).__name__}) both make advantages of tokens: set "
                         "parts.spread: {type: Evenly}, or leave the value model out")
