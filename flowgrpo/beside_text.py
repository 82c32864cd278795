"""What a surrogate of completions reads beside ratio and advantage, batch by batch of a part's replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowgrpo import objectives
from flowgrpo.method import Method
from flowgrpo.objectives.completion import OfCompletions
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Compared, Peers, Scored

Replay = Callable[[], Iterator[tuple[int, slice, Scored]]]


class BesideText:
    """Of most surrogates `objectives.beside`, of an `OfCompletions` a `Compared`.

    reference: its scores of the replay's batches, where anything reads them. replay: of the same batches: a surrogate
    that compares whole groups sees a part, which is whole groups, in a first pass, without gradients, which costs a
    forward per sample; where one batch holds the part it is not needed.
    """

    def __init__(self, method: Method, part: Part, reference: Sequence[Scored], device: torch.device, replay: Replay):
        self.method, self.reference, self.device, self.replay = method, reference, device, replay
        [self.taken], [advantage] = part.transitions, part.advantages
        every = {"ids": self.taken.ids, "mask": self.taken.old.mask, "expert": self.taken.expert}
        self.every = {name: each if each is None else each.to(device) for name, each in every.items()}
        # Until it is known what is compared, peers have nothing to compare.
        self.peers = Peers(torch.empty(len(advantage), 0, device=device), advantage.to(device),
                           self.taken.prompts.to(device))
        self.seen = not getattr(method.surrogate, "of_groups", False)

    def __call__(self, batch: int, k: int, rows: slice, new: Scored, old: Scored) -> Tensor | Compared:
        """What is read of these rows of the completions, the replay's batch of that number."""
        if not isinstance(self.method.surrogate, OfCompletions):
            return objectives.beside(self.method.surrogate, new, old)
        compared = self._compared(batch, rows, new, old)
        if not self.seen:
            self.peers, self.seen = replace(self.peers, gap=self._gaps(compared)), True
        return replace(compared, peers=self.peers)

    def _compared(self, batch: int, rows: slice, new: Scored, old: Scored) -> Compared:
        surrogate = self.method.surrogate
        at = torch.arange(rows.start, min(rows.stop, len(self.taken.ids)), device=self.device)
        reference = self.reference[batch].to(self.device) if surrogate.of_reference else None
        return Compared(new, old, self.method.log_ratio(new, old), at, **self.every, reference=reference)

    @torch.no_grad()
    def _gaps(self, first: Compared) -> Tensor:
        """What is compared of all completions, from the present weights; `first`: of the replay's first batch."""
        if len(first.rows) == len(self.taken.ids):
            return self.method.surrogate.gap(first).detach()
        return torch.cat([
            self.method.surrogate.gap(self._compared(batch, rows, new, self.taken.old.rows(rows).to(self.device)))
            for batch, (_, rows, new) in enumerate(self.replay())])
