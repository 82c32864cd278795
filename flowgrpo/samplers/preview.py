"""Choice among more samples than are trained: previews of noises, and pruning of a rollout.

A preview (Sol-RL, 2604.06916) scores many initial noises with a cheap run, deterministic and short. The chosen noises
enter the rollout by their seeds, so its images start from the same noise. They are scored again; the preview's scores
only choose noises. Pruning begins many samples, and finishes those whose clean predictions make the best group.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch

from flowgrpo.device import to_device
from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.samplers.growth import Grower, Nodes
from flowgrpo.samplers.rollout import C, Denoiser, RolloutSpec, Seed
from flowgrpo.samplers.scheduler import Segment

PRECISIONS = ("full", "auto", "int8", "fp8", "nvfp4")


@part("preview", jointly={"pool steps": "2 or more and 1 or more"})
class Preview:
    """Pool of initial noises scored before a rollout, and the cost of each preview (Sol-RL, 2604.06916).

    pool: noises per prompt.
    steps: steps of the deterministic preview grid.
    precision: of the products of the denoiser's linear layers in a preview: "full" or, by torchao, "int8", "fp8",
        "nvfp4". "auto" is the one that suits the GPU, and "full" on other devices and without torchao
        (policies/weights/low_precision.py).

    Raises ValueError for an unknown precision, a pool below 2 or steps below 1.
    """

    pool: Annotated[int, AtLeast(2)] = 96
    steps: Annotated[int, AtLeast(1)] = 6
    precision: Annotated[str, OneOf(PRECISIONS)] = "auto"


def previews(policy: Denoiser[C], conditioning: C, grid: torch.Tensor, timesteps: torch.Tensor | None, pool: int,
             micro_batch: int, seed: Seed) -> torch.Tensor:
    """Final states [P*pool,*D] of deterministic runs on a grid of `make_grid`, from seed(prompt, 0) to seed(prompt,
    pool-1)."""
    prompts = torch.arange(len(conditioning.prompts)).repeat_interleave(pool)
    task = Segment(grid, range(len(grid) - 1), timesteps=timesteps)
    finals = []
    for rows in torch.arange(len(prompts)).split(micro_batch):
        generators = policy.generators(seed(int(row) // pool, int(row) % pool) for row in rows)
        finals.append(policy.run(task, conditioning.rows(prompts[rows]), None, generators)[0])
    return torch.cat(finals)


def contrasting(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Indices of the group/2 largest and smallest of the scores [P,pool]: int64 [P,group], best first; NaN only where
    too few have a score. Raises UserError if the group is odd or larger than the pool."""
    if group % 2 or group > scores.shape[1]:
        raise UserError(f"a group of {group} cannot be the best and the worst of a pool of {scores.shape[1]}: "
                         "expected an even number, at most the pool")
    ranked = []
    for row in scores:
        order, lost = row.argsort(descending=True, stable=True), int(row.isnan().sum())
        middle = (len(row) + lost) // 2  # NaN, which sorts as the largest, goes there
        ranked.append(torch.cat([order[lost:middle], order[:lost], order[middle:]]))
    return torch.stack([torch.cat([order[:group // 2], order[len(order) - group // 2:]]) for order in ranked])


def require_choice(explorations: Sequence[RolloutSpec], pool: int) -> None:
    """Raise UserError unless a pool can give each sample of a group a separate initial noise, once per epoch."""
    group, roots = explorations[0].group, explorations[0].roots
    if roots < group or len(explorations) > 1:
        raise UserError(f"previews choose an initial noise for each of the {group} samples of a group, but those of "
                        "this method share theirs or use it several times: name sol_rl last, over a method without "
                        "branches")
    contrasting(torch.zeros(1, pool), group)


# The rewards [P,pool] of clean predictions [P*pool,*D] of the prompts [P*pool].
Judge = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@part("pruning", jointly={"pool step": "2 or more, and above 0"})
class Pruning:
    """Number of begun samples, and the step before which some stop (ARRoL).

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

    def stop_step(self, steps: int) -> int:
        """Step before which samples are stopped. Raises ValueError if it is not before the last."""
        step = max(1, round(self.step * steps)) if self.step < 1 else int(self.step)
        if step > steps - 1:
            raise ValueError(f"Pruning: step is {self.step:g}, expected at most {steps - 1} of {steps} steps")
        return step

    def choose(self, scores: torch.Tensor, group: int) -> torch.Tensor:
        """Samples that go on, int64 [P,group], ascending, of scores [P,pool]."""
        if self.right is None:
            return contrasting(scores, group).sort(dim=1)[0]
        chosen = []
        for row in (scores >= self.right).tolist():  # as near to half as possible are right, the first of each kind
            wins, losses = ([place for place, one in enumerate(row) if one is kind] for kind in (True, False))
            count = min(len(wins), max(group // 2, group - len(losses)))
            chosen.append(sorted(wins[:count] + losses[:group - count]))
        return torch.tensor(chosen)

    def require(self, explorations: Sequence[RolloutSpec], group: int) -> None:
        """Raise ValueError unless every sample of a group has a separate initial noise, once per epoch."""
        [spec, *others] = explorations
        if others or spec.roots < group or spec.splits or len(spec.strides) > 1:
            raise ValueError("pruning begins samples that share no state, finished once: set parts: {roots: null} and "
                             "a plan without splits")
        self.stop_step(spec.steps)
        if self.pool < group:
            raise ValueError(f"Pruning: pool is {self.pool}, expected at least the group of {group}")
        self.choose(torch.zeros(1, self.pool), group)


class PrunedGrower(Grower[C]):
    """`Grower` of samples that are stopped before they are finished, but for a group of them."""

    def __init__(self, pruning: Pruning, judge: Judge, policy: Denoiser[C], conditioning: C, exploration: RolloutSpec,
                 micro_batch: int, seed: Seed, number: int):
        super().__init__(policy, conditioning, exploration, micro_batch, seed, number)
        self.pruning, self.judge = pruning, judge
        self.places: dict[int, list[int]] = {}  # of each prompt, the samples that go on

    def _start(self, prompts: torch.Tensor, trunks: dict[int, Nodes]) -> tuple[Nodes, int]:
        pool = self.pruning.pool
        group = self.exploration.group
        step = self.pruning.stop_step(self.exploration.steps)
        leaves = [(int(p), leaf) for p in prompts for leaf in range(pool)]
        nodes = self._advance(Nodes(None, prompts.repeat_interleave(pool), self._generators(leaves)), 0, step)
        places = self.pruning.choose(self.judge(self._clean(nodes, step), nodes.prompts, pool), group)
        self.places = dict(zip(prompts.tolist(), places.tolist()))
        rows = (torch.arange(len(prompts))[:, None] * pool + places).flatten()
        keep = torch.zeros(len(leaves), dtype=torch.bool).index_fill(0, rows, True)
        self.recorder.taken = {at: left for at, taken in self.recorder.taken.items()
                               if (left := taken.select(keep)) is not None}
        x, x0 = (None if value is None else value[to_device(rows, value.device)] for value in (nodes.x, nodes.x0))
        return Nodes(x, nodes.prompts[rows], [nodes.generators[row] for row in rows.tolist()], x0), step

    def _clean(self, nodes: Nodes, step: int) -> torch.Tensor:
        """Clean data [n,*D] predicted at the nodes of a step, by one more evaluation of each."""
        exploration = self.exploration
        states = nodes.x
        found = []
        assert states is not None, "samples that have not begun"
        for rows in torch.arange(len(nodes.prompts)).split(self.micro_batch):
            x = states[to_device(rows, states.device)]
            v = self._evaluate(nodes.prompts[rows], x, step)
            found.append(exploration.task(step, step + 1).predict_x0(x, v, step))
        return torch.cat(found)

    def _seeds(self, prompts: torch.Tensor) -> list[int]:
        return [self.seed(int(p), self.offset + place) for p in prompts for place in self.places[int(p)]]
