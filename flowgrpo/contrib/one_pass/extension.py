"""One-pass updates of a run: `train.one_pass`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from flowgrpo.check import memory, reward_models
from flowgrpo.config.schema import Config
from flowgrpo.contrib.one_pass.held import HeldPart, HeldSteps
from flowgrpo.device import AUTO, free_memory
from flowgrpo.methods import capabilities, targets
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import build
from flowgrpo.policies.pipelines import encoded_prompts
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.training import extensions
from flowgrpo.training.batch_size import MOST
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.run import Run


class OnePass(Extension):
    """Rollouts that keep the graphs of their trained steps. holds: they do, which `auto` decides once.

    states: of the present epoch, those whose graphs were kept.
    """

    needs = frozenset({capabilities.PRESENT_WEIGHTS, capabilities.ONE_DRAW, capabilities.AS_LEARNED,
                       capabilities.ONE_POLICY, capabilities.OWN_SAMPLES, capabilities.ENCODED_ONCE,
                       capabilities.LORA, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        train = trainer.config.train
        self.holds = train.one_pass is True or train.one_pass == AUTO and _chosen(trainer)
        self.states = 0

    @classmethod
    def asked(cls, setup: Setup) -> str:
        return "train.one_pass is true" if setup.config.train.one_pass is True else ""  # `auto` is false there

    @classmethod
    def refused(cls, setup: Setup) -> dict[str, bool]:
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

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        """Context manager: the trainer's rollouts keep graphs."""
        rollouts = cast(DenoisingRollouts, self.trainer.rollouts)
        before = rollouts.target
        if self.holds:
            rollouts.target = HeldSteps(rollouts)
        try:
            yield
        finally:
            rollouts.target = before

    def on_drawn(self, epoch: Epoch) -> None:
        """Count what is held. In a run's first epoch one part is replayed for the first-ratio check.

        The update reads the outputs of the rollout, whose ratio is 1, so that no old score is computed again.
        """
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


def settled(config: Config, processes: int, fits: Callable[[Config], bool]) -> Config:
    """Return a recipe with a value in place of `auto`: true where it goes with the run and fits. fits: a test of a
    recipe with graphs."""
    train = config.train
    if train.one_pass != AUTO:
        return config
    held, replayed = (config.model_copy(update={"train": train.model_copy(update={"one_pass": value})})
                      for value in (True, False))
    goes = not any(extensions.obstacles(OnePass, setup_of(config, processes)))
    return held if goes and fits(held) else replayed


def require_one_pass(config: Config, processes: int) -> None:
    """Raise UserError for a recipe with `train.one_pass: true` that cannot have it."""
    if config.train.one_pass is True:
        extensions.require(OnePass, setup_of(config, processes))


def setup_of(config: Config, processes: int) -> Setup:
    """Return what is known of a pipeline's run by its recipe alone."""
    return Setup(config, build.PIPELINE, resolve(config), processes=processes)


def _chosen(trainer: Run) -> bool:
    """Return True if a run can keep its graphs and all processes have the memory for them; say so."""
    setup = Setup(trainer.config, build.PIPELINE, trainer.method, processes=trainer.processes.count)
    fits, reason = False, next(extensions.obstacles(OnePass, setup), "")
    if not reason:
        needed, free = _needed(trainer), MOST * free_memory(trainer.policy.device)
        fits = not trainer.processes.any(not needed <= free)
        reason = f"{needed / 2**30:.3g} GiB of {free / 2**30:.3g}, {MOST:.0%} of the free memory" if needed < math.inf \
            else "the size of a reward model is not known"
    if trainer.processes.first:
        trainer.say(f"train.one_pass: {str(fits).lower()} (auto: {reason})")
    return fits


def _needed(trainer: Run) -> float:
    """Return the bytes of this process with the graphs; infinite where those of a reward model are not known."""
    config, policy, prompt = trainer.config, cast(PipelinePolicy, trainer.policy), trainer.prompts[0]
    sizes = reward_models.reward_weights(config)
    if any(size is None for size in sizes.values()):
        return math.inf
    negative = config.negative_prompt if prompt.negative is None else prompt.negative
    before, states = policy.evaluations, torch.get_rng_state()
    conditioning = encoded_prompts.prompt_cache(config, policy, policy.live)([prompt.text], [negative], [prompt.brings])
    if config.picture.sizes:
        conditioning = replace(conditioning, sizes=[max(config.picture.sizes, key=math.prod)])
    share = {"prompts": math.ceil(config.train.prompts / trainer.processes.count), "one_pass": True}
    own = config.model_copy(update={"train": config.train.model_copy(update=share)})
    phases = memory.memory(policy, own, conditioning, reward_models.on_device(sizes, policy.device))
    policy.evaluations = before
    torch.set_rng_state(states)
    return float(max(sum(parts.values()) for parts in phases.values()))
