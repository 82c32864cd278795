"""Rollouts that keep the graphs of their trained steps, and the update that reads them.

Where every sample is trained once by the weights that drew it, the ratio is 1. The gradient of a part is then that of
its own outputs: the state before a step and its noise are constants, as in a replay. A trained step is one call of the
denoiser with gradients. The loss is the ordinary one, at these outputs in the place of those of a replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.device import ran_out
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.rollouts.targets import RecordedSteps, Replayed
from flowgrpo.samplers import replay
from flowgrpo.samplers.denoiser import C
from flowgrpo.samplers.growth import Grower, Nodes, explore
from flowgrpo.samplers.pruning import Judge
from flowgrpo.samplers.rollout import Part, RolloutSpec, Seed


class HeldOutputs:
    """Outputs of a part's trained steps, with their graphs: a `Replayer` that answers every state once, in order.

    device: of the outputs. outputs: by step, those of each micro-batch, [b,*D] of b states.
    """

    def __init__(self, device: torch.device, outputs: dict[int, list[Tensor]]):
        self.device = self.states = device
        self.outputs = outputs
        self._read: tuple[int, int, Tensor] | None = None  # a step, how many of its states are read, and its leaf

    def covers(self, part: Part) -> bool:
        """Return True if the graphs of all steps of a part are there."""
        return all(taken.step in self.outputs for taken in part.transitions)

    def scored(self, part: Part, conditioning: Any, micro_batch: int) -> Replayed:
        """Score the transitions of the part, as a replay would, and hand their gradients on to the weights."""
        self._read = None  # of an earlier reading that broke off
        yield from replay.replay(self, conditioning, part, micro_batch)
        self.backward()

    def replay(self, conditioning: Any, x: Tensor, grid: Tensor, step: int | Tensor, timesteps: Tensor | None = None
               ) -> Tensor:
        """Return the outputs [b,*D] at the next b states of a step, whose gradient `backward` hands on."""
        assert isinstance(step, int), "outputs are held step by step"
        if self._read is None or self._read[0] != step:
            self.backward()
            self._read = step, 0, torch.cat([each.detach() for each in self.outputs[step]]).requires_grad_()
        _, first, leaf = self._read
        self._read = step, first + len(x), leaf
        return leaf[first:first + len(x)]

    def backward(self) -> None:
        """Add the weights' gradient of the step that was read last, and let its graph go."""
        if self._read is None:
            return
        (step, _, leaf), self._read = self._read, None
        outputs = self.outputs.pop(step)
        if leaf.grad is not None:
            torch.autograd.backward(outputs, leaf.grad.split([len(each) for each in outputs]))

    def of_states(self, left: dict[int, Tensor]) -> HeldOutputs:
        """Return the outputs at some states. left: by step their places among those of the step, ascending."""
        return HeldOutputs(self.device, {step: _chosen(self.outputs[step], places) for step, places in left.items()
                                         if step in self.outputs})


def _chosen(outputs: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """Return the rows at places of outputs that follow on each other; one without any is left out."""
    found, first = [], 0
    for each in outputs:
        own = places[(places >= first) & (places < first + len(each))] - first
        if len(own):
            found.append(each if len(own) == len(each) else each[own.to(each.device)])
        first += len(each)
    return found


@dataclass(frozen=True)
class HeldPart(Part):
    """Part whose trained steps have their graphs. held: until its update has read them."""

    held: HeldOutputs | None = None

    def credited(self, advantages: Sequence[Tensor], keep: Sequence[Tensor], rewards: Sequence[Tensor] | None = None
                 ) -> Part | None:
        left = super().credited(advantages, keep, rewards)
        if not isinstance(left, HeldPart) or self.held is None:
            return left
        places = {taken.step: taken.parent[at.cpu() & taken.counts].unique_consecutive()
                  for taken, at in zip(self.transitions, keep, strict=True)}
        return replace(left, held=self.held.of_states({taken.step: places[taken.step] for taken in left.transitions}))


class HeldGrower(Grower[C]):
    """`Grower` whose trained steps keep their graphs, each from a call of its own."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.outputs: dict[int, list[Tensor]] = {}

    def grow(self, groups: range, prompts: Tensor, trunks: dict[int, Nodes]) -> Part:
        part = super().grow(groups, prompts, trunks)
        return HeldPart(**vars(part), held=HeldOutputs(self.policy.device, self.outputs))

    def _advance(self, nodes: Nodes, start: int, stop: int, exploration: RolloutSpec | None = None) -> Nodes:
        for step in sorted(self.exploration.schedule.trained):
            if start <= step < stop:
                nodes = super()._advance(nodes, start, step, exploration)
                nodes, start = self._draw(nodes, step, 1, nodes.generators), step + 1
        return super()._advance(nodes, start, stop, exploration)

    def _evaluated(self, prompts: Tensor, x: Tensor, step: int) -> Tensor:
        exploration = self.exploration
        if step not in exploration.schedule.trained:
            return super()._evaluated(prompts, x, step)
        with torch.enable_grad():
            output = self.policy.replay(self.conditioning.rows(prompts), x, exploration.grid, step,
                                        exploration.timesteps)
        self.outputs.setdefault(step, []).append(output)
        return output.detach()


class HeldSteps(RecordedSteps):
    """Stochastic steps of a rollout, which the update scores by the graphs that the rollout kept.

    A part is replayed as ever before its advantages are known, without gradients, and once its graphs are read.
    """

    def sample(self, conditioning: Conditioning, explorations: list[RolloutSpec], seed: Seed, judge: Judge
               ) -> Iterator[Part]:
        """Yield whole groups with their graphs. Raises UserError where memory does not hold them."""
        try:
            yield from explore(self.policy, conditioning, explorations, self.micro_batch, seed,
                               self.rollouts.together(len(conditioning.prompts)), HeldGrower)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            raise UserError("out of memory in the rollout: train.one_pass keeps the graphs of all trained steps of an "
                            "epoch until its update; set it to false, train fewer steps or prompts at once, or set "
                            "train.checkpointing: true") from error

    def replay(self, part: Part, conditioning: Conditioning) -> Replayed:
        if isinstance(part, HeldPart) and part.held is not None and part.advantages and torch.is_grad_enabled() \
                and part.held.covers(part):
            return part.held.scored(part, conditioning, self.micro_batch)
        return super().replay(part, conditioning)
