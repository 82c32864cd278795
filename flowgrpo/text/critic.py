"""Value model of a language model: advantages per token, by GAE over the steps in which tokens were drawn.

It is a linear head on the policy's last hidden states; of a masked model each is in the state of its token's decoding
step. The states are detached, so it does not change the policy. Checkpoints hold it; adapters do not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowgrpo.advantages.gae import OutcomeHead, ValueHead, outcome_weights, over_traces, value_loss
from flowgrpo.config.geometry import BatchShape
from flowgrpo.distributed.processes import Processes
from flowgrpo.methods.method import Method
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage import checkpoint
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.samplers.decoding import Decoding, completion_masks
from flowgrpo.text.samplers.groups import PrunedDraws, states_at
from flowgrpo.text.samplers.language_model import TokenizedPrompts
from flowgrpo.types import Completions


class Critic:
    """Value model of a run.

    seen: per part of the epoch, the states [k,H] of its tokens, float32 on the CPU, and what `_loss` reads besides:
    their values and returns [k].
    """

    def __init__(self, part: ValueHead | OutcomeHead | PrunedDraws, policy: CausalLM, kernel: Decoding,
                 geometry: BatchShape, processes: Processes, *, outputs: int = 1):
        self.part, self.policy, self.kernel = part, policy, kernel
        self.geometry, self.processes = geometry, processes
        self.head = torch.nn.Linear(policy.width, outputs).to(policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=part.lr, weight_decay=0.0)
        self.seen: list[tuple[Tensor, ...]] = []

    def __call__(self, parts: Sequence[Part], conditioning: Encoded) -> list[Part]:
        """The parts with advantages [m,L] of tokens in place of those [m] of completions."""
        self.seen = []
        return [self._assign_credit(part, cast(TokenizedPrompts, conditioning)) for part in parts]

    @torch.no_grad()
    def _assign_credit(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        [taken], [reward], mask = part.transitions, part.advantages, part.transitions[0].old.mask
        assert isinstance(taken, Completions) and isinstance(self.part, ValueHead)
        hidden, turns = self.policy.last_hidden_states(conditioning, taken, self.kernel, self.geometry.micro_batch)
        values = self.values(hidden).cpu()
        advantages, returns = over_traces(reward.cpu(), torch.zeros(mask.shape).masked_scatter(mask, values), turns,
                                          mask, self.part.gamma, self.part.decay)
        self.seen.append((hidden.cpu(), values, returns[mask]))
        return replace(part, advantages=(advantages,))

    def values(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.policy.device, torch.float32))[:, 0]

    def fit(self) -> dict[str, float]:
        """Minimise the clipped loss on the stored tokens; all processes take the same steps. Return the loss before
        them."""
        [count] = self.processes.total([sum(len(tokens[0]) for tokens in self.seen)])
        losses = []
        for _ in range(self.part.passes if count else 0):
            self.optimizer.zero_grad()
            losses.append(0.0)
            for tokens in self.seen:
                loss = self._loss(*tokens) / count
                loss.backward()
                losses[-1] += loss.item()
            self.processes.add_gradients(list(self.head.parameters()))
            self.optimizer.step()
        if not losses:
            return {}
        return {"value_loss": self.processes.gather(torch.tensor([losses[0]])).sum().item()}

    def _loss(self, hidden: Tensor, *known: Tensor) -> Tensor:
        assert isinstance(self.part, ValueHead)
        old, returns = (each.to(self.policy.device) for each in known)
        return value_loss(self.values(hidden), old, returns, self.part.clip).sum()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer = checkpoint.optimizer_tensors(self.optimizer)
        return dict(self.head.state_dict()) | {f"optimizer.{key}": tensor for key, tensor in optimizer.items()}, {}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; if there is none, start anew."""
        if tensors:
            self.head.load_state_dict({key: tensors[key] for key in self.head.state_dict()})
            checkpoint.load_optimizer(self.optimizer, checkpoint.within(tensors, "optimizer."))


class OutcomeCritic(Critic):
    """Critic of a run that weighs tokens by the outcome that it predicts.

    seen: per part of the epoch, the states [k,H] of its tokens, and the classes [k] of their completions.
    """

    def __init__(self, part: OutcomeHead, *of_run: Any):
        super().__init__(part, *of_run, outputs=len(part.bounds) + 1)
        self.bounds = torch.tensor(part.bounds)

    @torch.no_grad()
    def _assign_credit(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        [taken], [advantage], [reward] = part.transitions, part.advantages, part.rewards
        mask, classes = taken.old.mask.cpu(), torch.bucketize(reward.float().cpu(), self.bounds, right=True)
        hidden, _ = self.policy.last_hidden_states(conditioning, cast(Completions, taken), self.kernel,
                                                   self.geometry.micro_batch)
        logits = self.head(hidden.to(self.policy.device, torch.float32)).cpu()
        of = classes[:, None].expand(mask.shape)[mask]
        self.seen.append((hidden.cpu(), of))
        return replace(part, advantages=(advantage.cpu()[:, None] * outcome_weights(logits, classes, mask),))

    def _loss(self, hidden: Tensor, *known: Tensor) -> Tensor:
        logits = self.head(hidden.to(self.policy.device, torch.float32))
        return torch.nn.functional.cross_entropy(logits, known[0].to(logits.device), reduction="sum")


class QualityCritic(Critic):
    """Quality head of a run whose draws are pruned: the chance that a partial completion succeeds.

    It gives no advantages. seen: per part of the epoch, the states [m,H] of its completions at the place where they
    could be stopped, and whether they succeeded [m].
    """

    def __init__(self, part: PrunedDraws, *of_run: Any):
        super().__init__(part, *of_run)
        self.policy.quality = self.values

    @torch.no_grad()
    def _assign_credit(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        [taken], [reward] = part.transitions, part.rewards
        assert isinstance(taken, Completions) and isinstance(self.part, PrunedDraws)
        lengths = completion_masks(taken.ids, self.policy.ends)[0].sum(1)
        states = states_at(self.policy, conditioning, taken.prompts, taken.ids,
                           (lengths - 1).clamp(max=self.part.tokens), self.geometry.micro_batch)
        right = (reward.cpu() >= self.part.right).float()
        self.seen.append((states.cpu(), right))
        return part

    def _loss(self, hidden: Tensor, *known: Tensor) -> Tensor:
        logits = self.values(hidden)
        return binary_cross_entropy_with_logits(logits, known[0].to(logits), reduction="sum")


def make_critic(method: Method, policy: Policy, geometry: BatchShape, processes: Processes) -> Critic:
    """Create the value model of a method, or the quality head of its draws."""
    rollout, part = method.generation, method.credit.value
    of_run = cast(CausalLM, policy), rollout.decoding, geometry, processes
    if isinstance(rollout.draws, PrunedDraws):
        return QualityCritic(rollout.draws, *of_run)
    if isinstance(part, OutcomeHead):
        return OutcomeCritic(part, *of_run)
    assert isinstance(part, ValueHead), "a method without a value model"
    return Critic(part, *of_run)
