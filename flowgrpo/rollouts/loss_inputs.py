"""Inputs of a loss beside ratio and advantage, batch by batch of a part's replay; and what a loss compares among the
samples of a group that lie on several processes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flowgrpo.config.geometry import BatchShape
from flowgrpo.device import to_device
from flowgrpo.distributed.processes import Processes
from flowgrpo.methods.groups import Loss
from flowgrpo.methods.method import Method
from flowgrpo.objectives.forward_process import OfNoised
from flowgrpo.objectives.sequence_losses import SampleLoss
from flowgrpo.objectives.surrogates import Origin, Seen
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.edits import Editor
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import CompletionBatch, GroupStatistics, NoisedBatch, Scored, unwrap

Replay = Callable[[], Iterator[tuple[int, slice, Scored]]]
LossInput: TypeAlias = Tensor | Origin | NoisedBatch | CompletionBatch | Seen  # the surrogate's third argument
# (batch, k, rows, new, old) -> that of a batch of a part's replay.
LossInputs: TypeAlias = Callable[[int, int, slice, Scored, Scored], LossInput]
COLUMNS = 6  # process, part, step, statistic, advantage, group


class NoisedInputs:
    """Inputs of a loss of noised samples, or of one that compares samples: a `NoisedBatch`.

    reference: its scores of the replay's batches, where anything reads them. cut: a replay of the same batches, where
    they cut groups; a surrogate that compares the samples of a group then sees all of it in a first pass, without
    gradients, which costs a forward per sample. Without it every batch holds whole groups. peers: of groups that are
    split over processes, for each recorded step the samples on all of them, and the place of the part's first.
    """

    def __init__(self, loss: Loss, part: Part, reference: Sequence[Scored], device: torch.device,
                 cut: Replay | None = None, peers: Sequence[tuple[GroupStatistics, int]] = ()):
        assert isinstance(loss.surrogate, (OfNoised, SampleLoss)), loss.surrogate
        self.surrogate, self.measure = loss.surrogate, loss.log_ratio
        self.part, self.reference, self.device = part, reference, device
        self.peers: Sequence[GroupStatistics | None] = [of for of, _ in peers] or [None] * len(part.transitions)
        self.firsts = [first for _, first in peers] or [0] * len(part.transitions)
        if self.surrogate.reads_groups and cut:
            self.peers = [self._peers(k, values) for k, values in enumerate(self.statistics(cut))]

    def __call__(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> NoisedBatch:
        noised = self._make_batch(batch, k, rows, new, old)
        if not self.surrogate.reads_groups:
            return noised
        peers = self.peers[k] or self._peers(k, self.surrogate.statistic(noised).detach())
        return replace(noised, peers=peers)

    def _make_batch(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> NoisedBatch:
        taken = self.part.transitions[k]
        reference = self.reference[batch].to(self.device) if self.surrogate.reads_reference else None
        target = to_device(taken.x_next[rows], self.device)
        return NoisedBatch(self.part.exploration.grid[taken.step].item(), new, old, target,
                           self.firsts[k] + torch.arange(rows.start, rows.stop, device=self.device), reference,
                           measure=self.measure)

    def statistics(self, replay: Replay) -> list[Tensor]:
        """Compared statistic [m] of every step's samples, under the present weights."""
        statistics: list[list[Tensor]] = [[] for _ in self.part.transitions]
        for batch, (k, rows, new) in enumerate(replay()):
            old = self.part.transitions[k].old.rows(rows).to(self.device)
            statistics[k].append(self.surrogate.statistic(self._make_batch(batch, k, rows, new, old)).detach())
        return [torch.cat(values).flatten() for values in statistics]

    def _peers(self, k: int, statistic: Tensor) -> GroupStatistics:
        taken, advantage = self.part.transitions[k], self.part.advantages[k]
        assert len(statistic) == len(advantage), "the batch holds a part of a group, and there was no first pass"
        prompts = to_device(taken.prompts[taken.parent], self.device)
        return GroupStatistics(statistic.flatten(), to_device(advantage, self.device), prompts)


class CompletionInputs:
    """Inputs of a `GroupLoss` on completions: a `CompletionBatch`.

    reference: its scores of the replay's batches, where anything reads them. replay: of the same batches, by which a
    surrogate that compares groups sees the whole part in a first pass, without gradients, a forward per sample; where
    one batch holds the part it is not needed. progress: as of a `CompletionBatch`.
    """

    def __init__(self, method: Method, part: Part, reference: Sequence[Scored], device: torch.device,
                 replay: Replay, progress: float = 0.0):
        self.method, self.reference, self.device, self.replay = method, reference, device, replay
        self.progress = progress
        [self.taken], [advantage] = part.transitions, part.advantages
        every = {"ids": self.taken.ids, "mask": self.taken.old.mask, "expert": self.taken.expert}
        self.every: dict[str, Any] = {name: tensor if tensor is None else tensor.to(device)
                                      for name, tensor in every.items()}
        # Until it is known what is compared, peers have nothing to compare.
        self.peers = GroupStatistics(torch.empty(len(advantage), 0, device=device), advantage.to(device),
                                     self.taken.prompts.to(device))
        self.seen = not method.loss.surrogate.reads_groups

    def __call__(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> CompletionBatch:
        compared = self._make_batch(batch, rows, new, old)
        if not self.seen:
            self.peers, self.seen = replace(self.peers, statistic=self._statistics(compared)), True
        return replace(compared, peers=self.peers)

    def _make_batch(self, batch: int, rows: slice, new: Scored, old: Scored) -> CompletionBatch:
        surrogate = self.method.loss.surrogate
        at = torch.arange(rows.start, min(rows.stop, len(self.taken.ids)), device=self.device)
        reference = self.reference[batch].to(self.device) if surrogate.reads_reference else None
        return CompletionBatch(new, old, self.method.loss.log_ratio(new, old), at, **self.every, reference=reference,
                               measure=self.method.loss.log_ratio, progress=self.progress)

    @torch.no_grad()
    def _statistics(self, first: CompletionBatch) -> Tensor:
        """Statistic of all completions under the present weights. first: the replay's first batch."""
        surrogate = self.method.loss.surrogate
        if len(first.rows) == len(self.taken.ids):
            return surrogate.statistic(first).detach()
        return torch.cat([
            surrogate.statistic(self._make_batch(batch, rows, new, self.taken.old.rows(rows).to(self.device)))
            for batch, (_, rows, new) in enumerate(self.replay())])


@dataclass(frozen=True)
class EditInputs:
    """Inputs of the actor-critic surrogate, `Seen` of each batch's rows. through: it reads the value of new edits."""

    editor: Editor
    conditioning: Conditioning
    part: Part
    through: bool = False

    def __call__(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> Seen:
        taken, device = self.part.transitions[k], self.editor.device
        assert taken.rewards is not None, "the critic learns from rewards: `with_rewards` was not called"
        of = taken.parent[rows]
        x = self.editor.edit.apply(taken.x[of.to(taken.x.device)].to(device), taken.x_next[rows].to(device))
        value = self.editor.value(self.conditioning.rows(taken.prompts[of]), x)
        seen = Seen(value[:, None], taken.rewards[rows, None].to(value))
        if not self.through:
            return seen
        noise = taken.proposed[rows].to(device) - unwrap(old.mean)[:, 0].to(device)
        decisions = unwrap(new.mean)[:, 0] + noise
        # A base and its edit left the same state, which is valued once.
        left, at, count = of.unique_consecutive(return_inverse=True, return_counts=True)
        first = (count.cumsum(0) - count).to(decisions.device)
        x = self.editor.edit.apply(taken.x[left.to(taken.x.device)].to(decisions.device), decisions[first])
        value = self.editor.value(self.conditioning.rows(taken.prompts[left]), x, frozen=True)
        return replace(seen, edited=value[at.to(value.device), None])


class SplitGroups:
    """Compared statistics of the samples of one optimizer step, on all processes."""

    def __init__(self, geometry: BatchShape, processes: Processes):
        self.geometry, self.processes = geometry, processes
        self.table = torch.empty(0, COLUMNS, dtype=torch.float64)

    def gather(self, statistics: Iterable[tuple[Part, Sequence[Tensor]]]) -> None:
        """Gather the statistics [m] of the recorded steps of this process's parts; all processes call it."""
        with self.processes.collective():
            rows = [self._rows(part, k, values) for part, of in statistics for k, values in enumerate(of)]
        self.table = self.processes.gather(torch.cat([torch.empty(0, COLUMNS, dtype=torch.float64), *rows]))

    def peers(self, part: Part, device: torch.device) -> list[tuple[GroupStatistics, int]]:
        """For each recorded step of a part the samples of all processes, and the place of the part's first."""
        found = []
        for k, taken in enumerate(part.transitions):
            here = (self.table[:, 1] == self._number(part)) & (self.table[:, 2] == taken.step)
            process, _, _, statistic, advantage, group = self.table[here].unbind(1)
            of = GroupStatistics(statistic.float().to(device), advantage.to(part.advantages[k].dtype).to(device),
                                 group.long().to(device))
            found.append((of, int((process < self.processes.rank).sum())))
        return found

    def _rows(self, part: Part, k: int, statistic: Tensor) -> Tensor:
        """Rows of the table [m,COLUMNS] of the k-th recorded step."""
        taken = part.transitions[k]
        first = self.processes.rank * self.geometry.prompts
        groups = (first + taken.prompts[taken.parent].cpu()) // self.geometry.slices
        columns = [torch.full((len(groups),), value) for value in (self.processes.rank, self._number(part), taken.step)]
        return torch.stack([column.cpu().double() for column in (*columns, statistic, part.advantages[k], groups)], 1)

    def _number(self, part: Part) -> int:
        return self.geometry.part_of(self.processes.rank, part.groups.start)
