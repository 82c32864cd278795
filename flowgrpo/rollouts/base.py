"""Group sampling, common to pipelines and language models: seeds, whole groups, counters."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.loss_inputs import LossInputs, SplitGroups
from flowgrpo.samplers.growth import rescore
from flowgrpo.samplers.old_policy import OldPolicy
from flowgrpo.samplers.rollout import Part, RolloutSpec, Seed, seeder
from flowgrpo.storage.checkpoint import Stateful
from flowgrpo.types import Scored

Encoded: TypeAlias = Any  # prompts: a `Conditioning` of a pipeline, `TokenizedPrompts` of a language model
Outputs: TypeAlias = torch.Tensor | list[str]
# Rewards [b], with their gradient: of the places [b] of prompts, and of their images [b,...] or relaxed texts.
RewardValue: TypeAlias = Callable[[torch.Tensor, Any], torch.Tensor]
C = TypeVar("C")  # `Encoded`


class TotalReward(Protocol):
    """Weighted sum of the rewards of outputs, `group` for each of the prompts `rows`; None: of all in turn.

    names: of the rewards that count (`token_credit.select_weights`); empty: all.
    """

    def __call__(self, outputs: Outputs | None, group: int, rows: torch.Tensor | None = None,
                 latents: torch.Tensor | None = None, names: Sequence[str] = (), /) -> torch.Tensor: ...


class Groups(NamedTuple):
    """Whole groups that are sampled at once.

    groups: places of their prompts; prompts: [B], the place of each sample's prompt; samples: [B], its place in the
    group; rows: places of the samples among all.
    """

    groups: range
    prompts: torch.Tensor
    samples: torch.Tensor
    rows: slice


class GroupSampler(Generic[C]):
    """Policy under a method: the seeds of an epoch's groups, and the evaluations that they cost.

    rollout_evaluations: rows that went through a denoiser to sample, or tokens through a language model, on all
    processes; saved_evaluations: additional ones if no two samples of a group shared any.
    split_groups: what the loss compares among samples of other processes; None where groups are whole.
    target: what the loss scores, of the method's target; subclasses set it.
    decodes: samples are decoded for the rewards; False where all rewards score latents.
    """

    target: Any
    decodes = True

    def __init__(self, config: Config, policy: Policy, method: Method, geometry: BatchShape, processes: Processes,
                 clock: PhaseTimer):
        self.config, self.policy, self.method, self.geometry = config, policy, method, geometry
        self.processes, self.clock = processes, clock
        self.rollout_evaluations = self.saved_evaluations = 0
        self.old_policy = OldPolicy(method.rollout.lag, policy.weights)
        splits = geometry.slices > 1 and method.loss.surrogate.reads_groups
        self.split_groups = SplitGroups(geometry, processes) if splits else None

    @property
    def exact(self) -> float | None:
        """Largest |log ratio| of a replay to the rollout that rounding explains; None in half precision."""
        return self.policy.exact

    def seeds(self, epoch: int, turn: int, prompts: int) -> Seed:
        """Seeds of a turn, by the places of prompts among those of all processes, each of which has `prompts` of them.
        turn: how often the epoch has drawn before; its seeds follow those of the turns before."""
        shape, before = self.geometry, turn * self.config.train.prompts if self.geometry.slices == 1 else 0
        return seeder(self.config.seed, epoch, before + self.processes.rank * prompts, shape.slices, shape.group)

    def together(self, count: int) -> list[int]:
        """Number of groups, or of slices of groups, in each part of this process's `count`."""
        return self.geometry.part_sizes(self.processes.rank, count)

    def whole_groups(self, count: int) -> Iterator[Groups]:
        """Yield the groups of `count` prompts, as many at once as a micro-batch holds, one at least."""
        group = self.geometry.group
        for prompts in torch.arange(count).split(self.together(count)):
            groups = range(int(prompts[0]), int(prompts[-1]) + 1)
            yield Groups(groups, prompts.repeat_interleave(group), torch.arange(group).repeat(len(prompts)),
                         slice(groups.start * group, groups.stop * group))

    def drawn_together(self, count: int) -> Iterator[list[Groups]]:
        """The parts of `count` prompts, as many at once as `train.generation_batch` has rows, one at least."""
        together: list[Groups] = []
        for groups in self.whole_groups(count):
            if together and groups.rows.stop - together[0].rows.start > self.geometry.generation_batch:
                yield together
                together = []
            together.append(groups)
        yield together

    def count(self, spent: int) -> None:
        """Add the evaluations of this process's share: every process spends the same."""
        self.rollout_evaluations += spent * self.processes.count

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> C:
        """Encode prompts, each once. epoch: in which they are sampled, where their images have sizes of the epoch."""
        raise NotImplementedError

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for a training prompt that brings what the run cannot read."""

    def prepare(self, batch: list[Prompt]) -> None:
        """Encode prompts that are read in small batches later, all at once where encoders have to come for that."""

    def sample(self, conditioning: C, epoch: int, judge: TotalReward, value: RewardValue | None = None,
               turn: int = 0) -> Iterator[tuple[Part, Sequence[Outputs | None]]]:
        """Sample a group per prompt: the parts as they are finished, each with its outputs per granularity. judge: the
        total reward. value: the reward whose gradient is followed. turn: how often the epoch has drawn before."""
        raise NotImplementedError

    def base(self, part: Part, conditioning: C) -> torch.Tensor | None:
        """Base model's outputs beside a part's; None for a part that has none."""
        return None

    def replay(self, part: Part, conditioning: C) -> Iterator[tuple[int, slice, Scored]]:
        """Score a part's decisions under the present weights: (place in `part.transitions`, its rows, scores)."""
        return self.target.replay(part, conditioning)

    def rescore(self, part: Part, conditioning: C) -> Part:
        """Part with old scores that are those of its replay."""
        return rescore(part, self.replay(part, conditioning))

    def loss_inputs(self, part: Part, conditioning: C, reference: list[Scored]) -> LossInputs:
        """Function of every batch of the part's replay, for the surrogate's third argument."""
        return self.target.loss_inputs(part, conditioning, reference)

    def gather_groups(self, parts: list[Part], conditioning: C, reference: Callable[[Part], list[Scored]]) -> None:
        """Gather what the loss of these parts compares, if their groups are split over processes; all call it.
        reference: the reference's scores of a part."""

    def step_weights(self, parts: list[Part], epoch: int) -> dict[int, float]:
        """Weight of every trained step, by its index."""
        return {0: 1.0}

    def stateful(self) -> dict[str, Stateful]:
        """Objects, by name, whose state a checkpoint keeps beside the weights."""
        return {}

    def explorations(self, epoch: int) -> list[RolloutSpec]:
        """Epoch's plans, one per schedule; none of a language model."""
        return []

    def splits(self, epoch: int) -> tuple[int, ...]:
        """Children per state at each split that the plan lists, in order; none of a language model."""
        return next((spec.split_widths for spec in self.explorations(epoch)), ())

    def metrics(self) -> dict[str, float]:
        """Metrics of the epoch's sampling."""
        return {}
