"""Replay buffer: samples of earlier epochs too, for the critic of edits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from flowgrpo.advantages.gae import Recall
from flowgrpo.distributed.processes import Processes
from flowgrpo.policies.pipelines.edits import prompt_tokens
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage import checkpoint

if TYPE_CHECKING:
    from flowgrpo.policies.pipelines.conditioning import Conditioning
    from flowgrpo.policies.pipelines.edits import Editor


class Recalling:
    """Buffer of a run, on the CPU; every process keeps its own samples.

    It holds final states [n,*D], the indices [n] of their prompts among `prompts` [u,T,E], and their rewards [n].
    """

    def __init__(self, part: Recall, editor: Editor, processes: Processes):
        self.part, self.editor, self.processes, self.fits = part, editor, processes, 0
        self.optimizer = torch.optim.AdamW(editor.networks.critic.parameters(), lr=part.lr, weight_decay=0.0)
        self.states = self.prompts = self.of = self.rewards = torch.zeros(0)

    def __call__(self, parts: list[Part], conditioning: Encoded) -> list[Part]:
        """Return the parts unchanged; store their samples."""
        taken = [edits for part in parts for edits in part.transitions]
        if taken:
            states = [self.editor.edit.applied(edits.x[edits.parent], edits.x_next).cpu() for edits in taken]
            self.remember(torch.cat(states), prompt_tokens(cast("Conditioning", conditioning)).cpu(),
                          torch.cat([edits.prompts[edits.parent] for edits in taken]),
                          torch.cat([edits.rewards.float().cpu() for edits in taken]))
        return parts

    def remember(self, states: Tensor, prompts: Tensor, of: Tensor, rewards: Tensor) -> None:
        """Add samples [m]; of: [m], their indices among prompts [P,T,E].

        Samples of another shape, with prompts of another length, are dropped.
        """
        if self.states.shape[1:] != states.shape[1:] or self.prompts.shape[1:] != prompts.shape[1:]:
            self.states, self.of, self.rewards = states[:0], of[:0], rewards[:0]
            self.prompts = prompts[:0]
        newest = slice(-self.part.kept, None)
        self.states = torch.cat([self.states, states])[newest]
        self.rewards = torch.cat([self.rewards, rewards])[newest]
        places = torch.cat([self.of, of + len(self.prompts)])[newest]
        used, self.of = places.unique(return_inverse=True)
        self.prompts = torch.cat([self.prompts, prompts])[used]

    def fit(self) -> dict[str, float]:
        """Minimise (Q - R)^2 / 2; all processes take the same steps. Return the mean loss of the steps."""
        self.fits += 1
        generator = torch.Generator().manual_seed(self.fits)
        [everywhere] = self.processes.total([len(self.states)])
        losses = []
        for _ in range(self.part.steps if everywhere else 0):
            self.optimizer.zero_grad()
            losses.append(self._backward(generator) if len(self.states) else 0.0)
            self.processes.add_gradients(list(self.editor.networks.critic.parameters()))
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"critic_loss": sum(losses) / len(losses)} if losses else {}

    def _backward(self, generator: torch.Generator) -> float:
        rows = torch.randint(len(self.states), (self.part.batch,), generator=generator)
        prompts, critic = self.prompts[self.of[rows]], cast(torch.nn.Module, self.editor.networks.critic)
        weight = next(critic.parameters())
        values = critic(self.states[rows].to(weight), prompts.to(weight))
        loss = (values - self.rewards[rows].to(weight)).square().mean() / 2
        (loss / self.processes.count).backward()
        return loss.item()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the first process's buffer and the optimizer's state, for a checkpoint."""
        optimizer = checkpoint.optimizer_tensors(self.optimizer)
        return {"states": self.states, "prompts": self.prompts, "of": self.of, "rewards": self.rewards,
                "fits": torch.tensor(self.fits)} | {f"optimizer.{key}": tensor for key, tensor in optimizer.items()}, {}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; if there is none, start anew."""
        if not tensors:
            return
        self.states, self.prompts, self.of, self.rewards = (
            tensors[key] for key in ("states", "prompts", "of", "rewards"))
        self.fits = int(tensors["fits"])
        state = {key.removeprefix("optimizer."): tensor for key, tensor in tensors.items()
                 if key.startswith("optimizer.")}
        checkpoint.load_optimizer(self.optimizer, state)
