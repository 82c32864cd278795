"""One-pass updates: `train.one_pass`. Rollouts keep the graphs of their trained steps, and the update reads them.

Where every sample is trained once by the weights that drew it, the ratio is 1. The gradient of a part is then that of
its own outputs: the state before a step and its noise are constants, as in a replay. A trained step is one call of the
denoiser with gradients. The loss is the ordinary one, at these outputs in the place of those of a replay.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from flowgrpo.config.features import DryRun
from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import OnePassKeys
from flowgrpo.data.prompts import encodable
from flowgrpo.device import AUTO, free_memory, ran_out
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities, targets
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import build
from flowgrpo.policies.pipelines import encoded_prompts
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.forwards import folded, replaced
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.rollouts.targets import RecordedSteps, Replayed
from flowgrpo.samplers import cost
from flowgrpo.samplers.growth import Grower, Nodes, explore, replay
from flowgrpo.samplers.preview import Judge
from flowgrpo.samplers.rollout import C, Part, RolloutSpec, Seed
from flowgrpo.training import extensions, memory
from flowgrpo.training.batch_size import MOST
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.training.memory import Measured, plan_first_epoch


class HeldOutputs:
    """Outputs of a part's trained steps, with their graphs: a `Replayer` that answers every state once, in order.
    outputs: by step, those of each micro-batch, [b,*D] of b states."""

    def __init__(self, device: torch.device, outputs: dict[int, list[Tensor]]):
        self.device = self.states = device
        self.outputs = outputs
        self._read: tuple[int, int, Tensor] | None = None  # a step, how many of its states are read, and its leaf

    def covers(self, part: Part) -> bool:
        return all(taken.step in self.outputs for taken in part.transitions)

    def score(self, part: Part, conditioning: Any, micro_batch: int) -> Replayed:
        """Score the transitions of the part, as a replay would, and hand their gradients on to the weights."""
        self._read = None  # of an earlier reading that broke off
        yield from replay(self, conditioning, part, micro_batch)
        self.backward()

    def replay(self, conditioning: Any, x: Tensor, grid: Tensor, step: int | Tensor, timesteps: Tensor | None = None
               ) -> Tensor:
        """Outputs [b,*D] at the next b states of a step, whose gradient `backward` hands on."""
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


@dataclass(frozen=True)
class HeldPart(Part):
    """Part whose trained steps have their graphs. held: until its update has read them."""

    held: HeldOutputs | None = None

    def with_advantages(self, advantages: Sequence[Tensor], keep: Sequence[Tensor],
                        rewards: Sequence[Tensor] | None = None) -> Part | None:
        left = super().with_advantages(advantages, keep, rewards)
        if not isinstance(left, HeldPart) or self.held is None:
            return left
        places = {taken.step: taken.parent[at.cpu() & taken.counts].unique_consecutive()
                  for taken, at in zip(self.transitions, keep, strict=True)}
        outputs = {}
        for step in (taken.step for taken in left.transitions):
            # The rows that are left, of outputs that follow on each other; an output without any is left out.
            if (held := self.held.outputs.get(step)) is not None:
                kept = torch.zeros(sum(map(len, held)), dtype=torch.bool)
                kept[places[step]] = True
                outputs[step] = [each if at.all() else each[at.to(each.device)]
                                 for each, at in zip(held, kept.split([*map(len, held)])) if at.any()]
        return replace(left, held=HeldOutputs(self.held.device, outputs))


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

    def _evaluate(self, prompts: Tensor, x: Tensor, step: int) -> Tensor:
        exploration = self.exploration
        if step not in exploration.schedule.trained:
            return super()._evaluate(prompts, x, step)
        with torch.enable_grad():
            output = self.policy.replay(self.conditioning.rows(prompts), x, exploration.grid, step,
                                        exploration.timesteps)
        self.outputs.setdefault(step, []).append(output)
        return output.detach()


class HeldSteps(RecordedSteps):
    """Stochastic steps of a rollout, which the update scores by the graphs that the rollout kept. A part is replayed as
    ever before its advantages are known, without gradients, and once its graphs are read."""

    def sample(self, conditioning: Any, explorations: list[RolloutSpec], seed: Seed, judge: Judge) -> Iterator[Part]:
        """Yield whole groups with their graphs. Raises UserError where memory does not hold them."""
        policy = cast(PipelinePolicy, self.policy)
        # Steps without a graph read a folded LoRA, a copy of the weights: for a CPU, where bf16 rounds none of it away.
        fold = policy.device.type == "cpu" and policy.dtype == torch.float32
        layers = [layer for layer in policy.weights.layers().values() if fold and hasattr(layer, "folded")]
        try:
            with folded(layers):
                yield from explore(policy, conditioning, explorations, self.micro_batch, seed,
                                   self.rollouts.together(len(conditioning.prompts)), HeldGrower)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            raise UserError("out of memory in the rollout: train.one_pass keeps the graphs of all trained steps of an "
                            "epoch until its update; set it to false, train fewer steps or prompts at once, or set "
                            "train.checkpointing: true") from error

    def replay(self, part: Part, conditioning: Any) -> Replayed:
        if isinstance(part, HeldPart) and part.held is not None and part.advantages and torch.is_grad_enabled() \
                and part.held.covers(part):
            return part.held.score(part, conditioning, self.micro_batch)
        return super().replay(part, conditioning)


def add(phases: dict[str, dict[str, int]], measured: Measured) -> None:
    """Add the activations of all trained states to the phases, in the place of those of an update's micro-batch."""
    if OnePassKeys.read(measured.config).one_pass is not True:  # `auto`, which this decides
        return
    _, _, explorations = plan_first_epoch(measured.policy, measured.config, measured.conditioning)
    states = cost.update(explorations, measured.config.train.prompts, 1)  # each is evaluated once
    for name in ("rollout", "decode", "update"):
        phases[name]["graphs of the rollout"] = measured.activations * states
    phases["update"]["activations"] = 0


class OnePass(Extension):
    """Rollouts that keep the graphs of their trained steps. holds: they do, which `auto` decides once. states: of the
    present epoch, those whose graphs were kept."""

    needs = frozenset({capabilities.PRESENT_WEIGHTS, capabilities.ONE_DRAW, capabilities.AS_LEARNED,
                       capabilities.ONE_POLICY, capabilities.OWN_SAMPLES, capabilities.ENCODED_ONCE,
                       capabilities.LORA, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        one_pass = OnePassKeys.read(trainer.config).one_pass
        self.holds = one_pass is True or one_pass == AUTO and _can_keep_graphs(trainer)
        self.states = 0

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        present = OnePassKeys.read(setup.config).one_pass is True  # `auto` may not be
        return "train.one_pass is true" if present else ""

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        method, train, memory = setup.method, setup.config.train, setup.config.memory
        if type(method.target) is not targets.RecordedSteps:
            return {f"a method that trains {method.target.trains}": True}
        denoising = method.denoising
        return {
            f"train.inner_epochs {train.inner_epochs}, which trains a sample again": train.inner_epochs > 1,
            f"train.updates {train.updates}, which trains samples by other weights than drew them": train.updates > 1,
            "train.pack, which is about replays": train.pack,
            "parts.pruning, which stops samples on their way": denoising.pruning is not None,
            f"the kernel {type(denoising.kernel).__name__}, which learns": denoising.learned_noise is not None,
            "memory.context_parallel, whose processes share every call": memory.context_parallel > 1,
            "memory.offload or memory.denoiser, whose weights come and go": memory.offload != "none"
                or memory.denoiser != "keep",
            "groups that are split over processes and compared by the loss": method.loss.surrogate.reads_groups
                and setup.shape.slices > 1}

    def around_epoch(self) -> contextlib.AbstractContextManager[None]:
        rollouts = cast(DenoisingRollouts, self.trainer.rollouts)
        return replaced("target", (rollouts, HeldSteps(rollouts) if self.holds else rollouts.target))

    def on_drawn(self, epoch: Epoch) -> None:
        """Count what is held; replay one part of a run's first epoch for the first-ratio check. The update reads the
        outputs of the rollout, whose ratio is 1, so that no old score is computed again."""
        if not self.holds:
            return
        held = [part.held for part in epoch.parts if isinstance(part, HeldPart) and part.held is not None]
        self.states = sum(len(output) for each in held for outputs in each.outputs.values() for output in outputs)
        trainer, first = self.trainer, self.trainer.first_ratio
        if first.max_log_ratio is None:
            first.rollouts = trainer.rollouts
            trainer.with_oom_retry(partial(first, epoch.parts[:1], epoch.conditioning, lambda line: None), "update")
        first.rescore = False

    def on_trained(self, epoch: Epoch) -> Metrics:
        return {"one_pass/states": self.trainer.processes.total([self.states])[0]}


class OnePassDryRun(DryRun):
    """Epochs without a replay, counted from those of a run that replays: the update has no forwards, and the graphs of
    the rollout are all there until it."""

    options = (("train.one_pass", True, False),)
    reported = ("train.one_pass",)
    holding: ClassVar = ("rollout", "decode", "base", "reward", "update")  # phases

    def resolve_auto(self, config: Config, processes: int, fits: Callable[[Config], bool]) -> Config:
        if OnePassKeys.read(config).one_pass != AUTO:
            return config
        held = config.having({"train.one_pass": True})
        goes = not any(extensions.obstacles(OnePass, setup_of(config, processes))) and fits(held)
        return held if goes else config.having({"train.one_pass": False})

    def require(self, config: Config, processes: int) -> None:
        if OnePassKeys.read(config).one_pass is True:
            extensions.require(OnePass, setup_of(config, processes))

    def run(self, config: Config) -> Config:
        return config.having({"train.one_pass": False})

    def count(self, phases: dict[str, Any], calls: Any, times: float) -> None:
        for name in (name for name in self.holding if name in phases):
            more = round(calls.kept * times) - calls.graph * (name == "update")  # which has one graph at a time already
            phases[name].allocated += more
            phases[name].reserved += more
        phases["update"].add(calls.forwards, -times)


def setup_of(config: Config, processes: int) -> Setup:
    """Setup of a pipeline's run from its recipe alone, before anything is loaded."""
    return Setup(config, build.PIPELINE, resolve(config), processes=processes)


def _can_keep_graphs(trainer: Run) -> bool:
    """True if a run can keep its graphs and all processes have the memory for them; say so."""
    setup = Setup(trainer.config, build.PIPELINE, trainer.method, processes=trainer.processes.count)
    fits, reason = False, next(extensions.obstacles(OnePass, setup), "")
    if not reason:
        needed, free = _graph_bytes(trainer), MOST * free_memory(trainer.policy.device)
        fits = not trainer.processes.any(not needed <= free)
        reason = f"{needed / 2**30:.3g} GiB of {free / 2**30:.3g}, {MOST:.0%} of the free memory" if needed < math.inf \
            else "the size of a reward model is not known"
    if trainer.processes.first:
        trainer.log(f"train.one_pass: {str(fits).lower()} (auto: {reason})")
    return fits


def _graph_bytes(trainer: Run) -> float:
    """Bytes of this process with the graphs; infinite where those of a reward model are not known."""
    config, policy = trainer.config, cast(PipelinePolicy, trainer.policy)
    sizes = memory.reward_weights(config)
    if any(size is None for size in sizes.values()):
        return math.inf
    before, states = policy.evaluations, torch.get_rng_state()
    encode = encoded_prompts.prompt_cache(config, policy, policy.live)
    conditioning = encode(*encodable(trainer.prompts[:1], config.negative_prompt))
    if config.image.sizes:
        conditioning = replace(conditioning, sizes=[max(config.image.sizes, key=math.prod)])
    own = config.having({"train.prompts": math.ceil(config.train.prompts / trainer.processes.count),
                         "train.one_pass": True})
    phases = memory.memory(policy, own, conditioning, memory.on_device(sizes, policy.device))
    policy.evaluations = before
    torch.set_rng_state(states)
    return float(max(sum(parts.values()) for parts in phases.values()))
