"""Recording: the trained steps of a rollout. A state that two steps share is stored once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flowgrpo.samplers.scheduler import StepRecord
from flowgrpo.types import Scored, Transitions

Predict = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def cat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate values [n,...] along rows; a single one is not copied."""
    return values[0] if len(values) == 1 else torch.cat(list(values))


class Recorder:
    """Recorded steps of one exploration, by step: `taken`.

    x_next of one step, x of the next and the final states are one tensor where they are the same states, also when a
    step has several micro-batches.

    states: the device of recorded states. means: the loss reads the means and deviations of the old policy.
    predict: return the clean data predicted at states x [n,*D] of a step, from the means of transitions that leave
        them; None: it is not recorded.
    """

    def __init__(self, states: torch.device, means: bool, predict: Predict | None = None):
        self.states, self.means, self.predict = states, means, predict
        self.taken: dict[int, Transitions] = {}
        self._joined: tuple[list[torch.Tensor], torch.Tensor] | None = None  # the last states, by micro-batch and whole
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None  # the last state, here and on its device

    def joined(self, states: list[torch.Tensor], before: torch.Tensor | None = None) -> torch.Tensor:
        """Return the states [b,*D] of micro-batches as one tensor [n,*D], the last result if it has the same states.

        before: [n,*D], returned in their place if equal.
        """
        if self._joined is not None and list(map(id, states)) == list(map(id, self._joined[0])):
            return self._joined[1]
        whole = cat(states)
        if before is not None and before.dtype == whole.dtype and torch.equal(before, whole):
            whole = before
        self._joined = states, whole
        return whole

    def keep(self, step: int, prompts: torch.Tensor, parent: torch.Tensor, x: torch.Tensor, x_next: torch.Tensor,
             records: list[StepRecord]) -> None:
        """Record a step from the states x [n,*D] to x_next [m,*D]. records: of its micro-batches."""
        logp = torch.cat([record.logp[step] for record in records])[:, None]
        means, std = None, None
        if self.means:
            means = torch.cat([record.transition[step].mean for record in records])[:, None].to(self.states)
            std = records[0].transition[step].std.reshape(1)
        score = Scored(logp, torch.ones_like(logp, dtype=torch.bool), means, std)
        clean = None
        if self.predict is not None:
            first = torch.searchsorted(parent, torch.arange(len(x)))  # one transition of each state
            drawn = torch.cat([record.transition[step].mean for record in records])
            clean = self.predict(x, drawn[first.to(drawn.device)], step).to(self.states)
        self.taken[step] = Transitions(step, self._put(x), prompts, parent, self._put(x_next), score, clean=clean)

    def _put(self, state: torch.Tensor) -> torch.Tensor:
        """Return the state on the device of recorded states; the last stored one is not copied again."""
        if self._stored is None or self._stored[0] is not state:
            self._stored = state, state.to(self.states)
        return self._stored[1]
