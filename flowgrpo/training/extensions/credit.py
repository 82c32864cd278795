"""Measurements that a method's credit reads: entropies, log-probabilities under the reference, drift of the policy; and
its value model, or the quality head of its draws (`text.critic`).

A measurement is one replay of recorded decisions without gradients, for methods that need it alone (`Method.needs`).
For the critic of edits a buffer keeps samples of earlier epochs.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo import domains
from flowgrpo.advantages.gae import Recall
from flowgrpo.distributed.processes import Processes
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.edits import Editor, prompt_tokens
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage import checkpoint
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.training.kl_reference import Replay
from flowgrpo.types import unwrap


class Recalling:
    """Buffer of a run, on the CPU, of each process's own samples: final states [n,*D], the indices `of` [n] of their
    prompts among `prompts` [u,T,E], and their rewards [n]."""

    def __init__(self, part: Recall, editor: Editor, processes: Processes):
        self.part, self.editor, self.processes, self.fits = part, editor, processes, 0
        self.optimizer = torch.optim.AdamW(editor.networks.critic.parameters(), lr=part.lr, weight_decay=0.0)
        self.states = self.prompts = self.of = self.rewards = torch.zeros(0)

    def __call__(self, parts: list[Part], conditioning: Encoded) -> list[Part]:
        """Store the samples of the parts, which stay as they are."""
        taken = [edits for part in parts for edits in part.transitions]
        if taken:
            states = [self.editor.edit.apply(edits.x[edits.parent], edits.x_next).cpu() for edits in taken]
            self.remember(torch.cat(states), prompt_tokens(cast(Conditioning, conditioning)).cpu(),
                          torch.cat([edits.prompts[edits.parent] for edits in taken]),
                          torch.cat([edits.rewards.float().cpu() for edits in taken]))
        return parts

    def remember(self, states: Tensor, prompts: Tensor, of: Tensor, rewards: Tensor) -> None:
        """Add samples [m]; of: [m], their indices among prompts [P,T,E]. Earlier ones of other shapes are dropped."""
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
        """The first process's buffer and the optimizer's state, for a checkpoint."""
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
        checkpoint.load_optimizer(self.optimizer, checkpoint.within(tensors, "optimizer."))


class MeasuredCredit(Extension):
    """Measurements that the credit reads besides rewards: taken before rewards are compared, and after the updates."""

    def on_drawn(self, epoch: Epoch) -> None:
        epoch.parts = self.trainer.with_oom_retry(partial(self._measure, epoch), "update")

    @torch.no_grad()
    def _measure(self, epoch: Epoch) -> list[Part]:
        """The epoch's parts with the entropies of their decisions and their log-probabilities under the reference, as
        far as the credit reads them; the policy is still the one that drew them."""
        needs, processes, reference = self.trainer.method.needs, self.trainer.processes, self.trainer.kl_reference
        parts, replay = epoch.parts, self._replay(epoch)
        if "entropy" in needs:
            with processes.collective():
                measured = []
                for part in parts:
                    entropies = [torch.zeros_like(taken.old.logp) for taken in part.transitions]
                    for k, rows, new in replay(part):
                        entropies[k][rows] = unwrap(new.entropy).to(entropies[k])
                    transitions = tuple(replace(taken, old=replace(taken.old, entropy=entropy))
                                        for taken, entropy in zip(part.transitions, entropies))
                    measured.append(replace(part, transitions=transitions))
                parts = measured
        if "reference" in needs:
            with processes.collective():
                parts = [part.with_measured(reference=reference.leaves(part, replay)) for part in parts]
        reference.score_samples(parts, replay, processes)
        return parts

    def on_trained(self, epoch: Epoch) -> Metrics:
        trainer, method, memory = self.trainer, self.trainer.method, self.trainer.memory
        if "drift" in method.needs and method.target.has_logp:
            work = partial(drift, epoch.parts, self._replay(epoch), trainer.processes)
            memory["drift"] = memory.get("drift", 0.0) + trainer.with_oom_retry(work, "update")
        return {}

    def _replay(self, epoch: Epoch) -> Replay:
        return partial(self.trainer.rollouts.replay, conditioning=epoch.conditioning)


@torch.no_grad()
def drift(parts: list[Part], replay: Replay, processes: Processes) -> float:
    """The KL of the policy that drew the parts to the present one, the mean of r - 1 - log r over the decisions of all
    processes but those under guidance that is not learned; 0 without any."""
    total = torch.zeros(2, dtype=torch.float64)  # sum and number
    with processes.collective():
        for part in parts:
            for k, rows, new in replay(part):
                old = part.transitions[k].old.rows(rows)
                log_ratio, counted = new.logp.float().cpu() - old.logp.float().cpu(), new.mask.cpu()
                if old.guided is not None:
                    counted = counted & ~old.guided.cpu()[:, None]
                terms = (log_ratio.expm1() - log_ratio).where(counted, 0)
                total += torch.stack([terms.double().sum(), counted.sum()])
    value, count = processes.gather(total[None]).sum(0).tolist()
    return value / count if count else 0.0


class ValueModel(Extension):
    """Gives parts the advantages of their tokens, and learns from an epoch's returns behind its updates."""

    name = "critic"
    changes = True

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        part, policy = trainer.method.credit.value, cast(Any, trainer.policy)  # of edits, or of texts
        self.critic: Any = Recalling(part, policy.editor, trainer.processes) if isinstance(part, Recall) else \
            domains.sampled_by(policy.process).critic(trainer.method, policy, trainer.geometry, trainer.processes)

    def on_credited(self, epoch: Epoch) -> None:
        self.critic.geometry = self.trainer.geometry
        epoch.parts = self.critic(epoch.parts, epoch.conditioning)

    def on_trained(self, epoch: Epoch) -> Metrics:
        with self.trainer.clock("update"):
            return self.critic.fit()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.critic.state()

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.critic.load_state(tensors, values)
