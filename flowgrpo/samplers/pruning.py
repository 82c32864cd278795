"""Pruning of a rollout: begin many samples, and finish those whose clean predictions make the best group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import torch

from flowgrpo.device import queued
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.samplers.denoiser import C, Denoiser
from flowgrpo.samplers.growth import Grower, Nodes
from flowgrpo.samplers.preview import contrasting
from flowgrpo.samplers.rollout import RolloutSpec, Seed

# The rewards [P,pool] of clean predictions [P*pool,*D] of the prompts [P*pool].
Judge = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@part("pruning", jointly={"pool step": "2 or more, and above 0"})
class Pruning:
    """Samples that are begun, and the step before which some stop (ARRoL).

    At `step` the clean prediction of every sample is decoded and scored by the run's rewards. As many go on as a group
    has; the others cost no further evaluation and are not trained. The rewards are in the place of ARRoL's quality
    head, and the rest of the pool in that of its new samples: a reconstruction.

    pool: samples begun per prompt.
    step: an index, or below 1 a share of the steps; at least one step is made before.
    right: reward from which a prediction counts as a success: successes and failures that go on are as equal in number
        as the pool allows, the first drawn of each. None: the best half and the worst half go on.
    """

    pool: Annotated[int, AtLeast(2)] = 16
    step: Annotated[float, Above(0)] = 0.4
    right: float | None = None

    def at(self, steps: int) -> int:
        """Return the step before which samples are stopped. Raises ValueError if it is not before the last."""
        step = max(1, round(self.step * steps)) if self.step < 1 else int(self.step)
        if step > steps - 1:
            raise ValueError(f"Pruning: step is {self.step:g}, expected at most {steps - 1} of {steps} steps")
        return step

    def chosen(self, scores: torch.Tensor, group: int) -> torch.Tensor:
        """Return the samples that go on, int64 [P,group], ascending, of scores [P,pool]."""
        if self.right is None:
            return contrasting(scores, group).sort(dim=1)[0]
        return torch.stack([torch.tensor(_balanced((row >= self.right).tolist(), group)) for row in scores])

    def require(self, explorations: Sequence[RolloutSpec], group: int) -> None:
        """Raise ValueError unless every sample of a group has a separate initial noise, once per epoch."""
        [spec, *others] = explorations
        if others or spec.roots < group or spec.splits or len(spec.strides) > 1:
            raise ValueError("pruning begins samples that share no state, finished once: set parts: {roots: null} and "
                             "a plan without splits")
        self.at(spec.steps)
        if self.pool < group:
            raise ValueError(f"Pruning: pool is {self.pool}, expected at least the group of {group}")
        self.chosen(torch.zeros(1, self.pool), group)


def _balanced(right: list[bool], group: int) -> list[int]:
    """Return `group` places of which as near to half as possible are right, the first of each kind, ascending."""
    wins, losses = ([place for place, one in enumerate(right) if one is kind] for kind in (True, False))
    count = min(len(wins), max(group // 2, group - len(losses)))
    return sorted(wins[:count] + losses[:group - count])


class PrunedGrower(Grower[C]):
    """`Grower` of samples that are stopped before they are finished, but for a group of them."""

    def __init__(self, pruning: Pruning, judge: Judge, policy: Denoiser[C], conditioning: C, exploration: RolloutSpec,
                 micro_batch: int, seed: Seed, number: int):
        super().__init__(policy, conditioning, exploration, micro_batch, seed, number)
        self.pruning, self.judge = pruning, judge
        self.places: dict[int, list[int]] = {}  # of each prompt, the samples that go on

    def _begun(self, prompts: torch.Tensor, trunks: dict[int, Nodes]) -> tuple[Nodes, int]:
        pool, group, step = self.pruning.pool, self.exploration.group, self.pruning.at(self.exploration.steps)
        leaves = [(int(p), leaf) for p in prompts for leaf in range(pool)]
        nodes = self._advance(Nodes(None, prompts.repeat_interleave(pool), self._generators(leaves)), 0, step)
        places = self.pruning.chosen(self.judge(self._clean(nodes, step), nodes.prompts, pool), group)
        self.places = dict(zip(prompts.tolist(), places.tolist()))
        rows = (torch.arange(len(prompts))[:, None] * pool + places).flatten()
        keep = torch.zeros(len(leaves), dtype=torch.bool).index_fill(0, rows, True)
        self.recorder.taken = {at: left for at, taken in self.recorder.taken.items()
                               if (left := taken.kept(keep)) is not None}
        x, x0 = (None if value is None else value[queued(rows, value.device)] for value in (nodes.x, nodes.x0))
        return Nodes(x, nodes.prompts[rows], [nodes.generators[row] for row in rows.tolist()], x0), step

    def _clean(self, nodes: Nodes, step: int) -> torch.Tensor:
        """Return the clean data [n,*D] predicted at the nodes of a step, by one more evaluation of each."""
        exploration, states, found = self.exploration, nodes.x, []
        assert states is not None, "samples that have not begun"
        for rows in torch.arange(len(nodes.prompts)).split(self.micro_batch):
            x = states[queued(rows, states.device)]
            with self.policy.sampling():
                v = self.policy.replay(self.conditioning.rows(nodes.prompts[rows]), x, exploration.grid, step,
                                       exploration.timesteps).detach()
            found.append(exploration.task(step, step + 1).predict_x0(x, v, step))
        return torch.cat(found)

    def _seeds(self, prompts: torch.Tensor) -> list[int]:
        return [self.seed(int(p), self.offset + place) for p in prompts for place in self.places[int(p)]]
