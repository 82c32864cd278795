"""Rollouts by an engine (`rollout.engine`): requests of whole groups, the parts that their answers become, and what a
stock engine cannot do."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.config.schema import Config
from flowgrpo.contrib.engine.client import Engine, EngineError, Request, Sample
from flowgrpo.contrib.engine.lora import LoraSender
from flowgrpo.contrib.features import EngineKeys, OnePassKeys
from flowgrpo.errors import UserError
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards.reward import sees_base
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.samplers.kernels import CPS, Euler, FlowSDE
from flowgrpo.samplers.rollout import Part, RolloutSpec, Seed
from flowgrpo.training.extension import Extension
from flowgrpo.types import Scored, Transitions, unwrap

SDE: dict[type, str] = {FlowSDE: "sde", CPS: "cps"}  # kernels of SGLang-Diffusion by ours
DRAWN = (targets.RecordedSteps, targets.JointDensity, targets.NoisedFinals)


def of_method(config: Config, method: Method) -> Iterator[str]:
    """Yield what a method and its configuration need and a stock engine lacks, in words."""
    target, denoising = method.target, method.denoising
    needs = {
        f"a method that trains {target.trains}, which is not read off a finished sample": type(target) not in DRAWN,
        "given sigmas: set train.grid: stock": config.train.grid != "stock",
        "parts.preview, which chooses initial noises": denoising.preview is not None,
        "parts.pruning, which stops samples on their way": denoising.pruning is not None,
        f"the advantage {type(method.credit.advantage).__name__}, which draws from the same initial noise":
            method.credit.advantage.reads_baseline,
        "parts.rehearsal, which draws from the base model": method.loss.rehearsal is not None,
        "text encoders that are trained": denoising.adapted.encoders,
        "adapter.rank: 0, whose weights are no LoRA": not config.adapter.rank,
        "adapter.dora: true": config.adapter.dora,
        "train.one_pass, whose graphs are the trainer's": bool(OnePassKeys.read(config).one_pass),
        "memory.shard, whose processes share every call": bool(config.memory.shard)}
    return (need for need, applies in needs.items() if applies)


def of_rollout(spec: RolloutSpec, stock: torch.Tensor) -> Iterator[str]:
    """Yield what a rollout needs and a stock engine lacks, in words. stock: the pipeline's own sigmas [T+1]."""
    schedule, kernel = spec.schedule, spec.kernel
    needs = {
        "a variance-preserving process (the model predicts noise or v)": spec.timesteps is not None,
        f"the kernel {type(kernel).__name__}: it draws by {' or '.join(cls.__name__ for cls in SDE)}":
            bool(schedule.stochastic) and type(kernel) not in SDE,
        "trees, which split states on their way": bool(schedule.children),
        "a shared initial noise: set parts.roots: null": not spec.alone and not schedule.children,
        "noise that differs from step to step": any(factor != 1 for factor in schedule.noise),
        "samples that are finished on several grids (strides)": len(spec.strides) > 1 or spec.strides[0] != 1,
        f"the solver {type(spec.solver).__name__}: it takes Euler steps": not isinstance(spec.solver, Euler),
        "given sigmas: set parts.tail: 1": spec.grid.shape != stock.shape or not torch.equal(spec.grid, stock),
        "clean predictions on the way (parts.progress)": spec.keep_clean}
    return (need for need, applies in needs.items() if applies)


def require(needs: Iterator[str]) -> None:
    if need := next(needs, ""):
        raise UserError(f"rollout.engine: a stock engine does not do {need}; or leave rollout.engine out")


TOGETHER = 8  # requests that wait for the engine at the same time
SAME = 1e-5  # difference of two sigmas that are the same, in float32


def requests(policy: PipelinePolicy, conditioning: Conditioning, prompts: Sequence[int], seeds: Sequence[Sequence[int]],
             spec: RolloutSpec, most: int, means: bool = False) -> list[Request]:
    """Requests for samples of prompts, of at most `most` samples each. seeds: of each prompt's samples.

    Raises UserError for prompts with inputs that are not sent.
    """
    if conditioning.inputs:
        raise UserError(f"rollout.engine: the prompts' {', '.join(conditioning.inputs)} is not sent: leave it or "
                        "rollout.engine out")
    kernel, trained = spec.kernel, spec.schedule.trained
    kind, level = (SDE[type(kernel)], getattr(kernel, "level")) if spec.schedule.stochastic else ("ode", 0.0)
    states = sorted({spec.steps, *trained, *(step + 1 for step in trained)} if not means else range(spec.steps + 1))
    found = []
    for prompt, of in zip(prompts, seeds, strict=True):
        row = conditioning.rows(torch.tensor([prompt]))
        further = policy.call | row.size | {policy.driver.scale: row.scale(policy.guidance)}
        for start in range(0, len(of), most):
            found.append(Request(row.prompts[0], row.negatives[0], tuple(of[start:start + most]), spec.steps, kind,
                                 level, spec.schedule.stochastic, tuple(states), means or spec.keep_means, further))
    return found


def part_of(policy: PipelinePolicy, conditioning: Conditioning, samples: Sequence[Sample], groups: range,
            prompts: Tensor, spec: RolloutSpec) -> Part:
    """Part that an engine's samples are. prompts: int64 [b], of each.

    Its log-probabilities are the engine's; it has no seeds, since the engine's noise is not the pipeline's.
    Raises EngineError for sigmas or states that are not those of the pipeline.
    """
    for sigmas in (sample.sigmas for sample in samples):
        apart = (sigmas.double() - spec.grid.double()).abs() if sigmas.shape == spec.grid.shape else \
            torch.tensor([math.inf])
        if not apart.max() <= SAME:
            at = int(apart.argmax())
            raise EngineError("wrong sigma", f"the engine samples on other sigmas than the pipeline: {sigmas[at]:.6g} "
                              f"at step {at}, expected {spec.grid[at]:.6g}: compare the scheduler's shift "
                              "(--flow-shift of the server) and the size of the image")
    before, generators = policy.evaluations, policy.generators([0])
    own, _ = policy.run(spec.task(0, 0, generators), conditioning.rows(torch.tensor([0])), None, generators)
    policy.evaluations = before
    if odd := [sample.states.shape[1:] for sample in samples if sample.states.shape[1:] != own.shape[1:]]:
        raise EngineError("answer", f"the engine's states have the shape {list(odd[0])}, the pipeline's "
                          f"{list(own.shape[1:])}: give both one size (image.height, image.width), and the engine "
                          "no other layout of latents")
    trained, device = spec.schedule.trained, policy.states
    kept = sorted({spec.steps, *trained, *(step + 1 for step in trained)})
    # A tensor per state, which two steps share.
    places = range(samples[0].states.shape[0]) if len(kept) != len(samples[0].states) else kept
    states = {step: torch.stack([sample.states[place] for sample in samples]).to(device, policy.dtype)
              for place, step in enumerate(places)}
    rows, logp = torch.arange(len(samples)), torch.stack([sample.logp for sample in samples]).to(policy.device)
    transitions = []
    for step in trained:
        scored = Scored(logp[:, step:step + 1], torch.ones(len(samples), 1, dtype=torch.bool, device=policy.device))
        if spec.keep_means:  # the loss reads them
            mean = torch.stack([unwrap(sample.means)[step] for sample in samples])[:, None].float().to(device)
            std = spec.transition(mean[:1, 0], mean[:1, 0], spec.grid, step).std.reshape(1)
            scored = replace(scored, mean=mean, std=std)
        transitions.append(Transitions(step, states[step], prompts, rows, states[step + 1], scored))
    return Part(groups, prompts, spec, tuple(transitions), (states[spec.steps].to(policy.device),))


class EngineRollouts(Extension):
    """Rollouts whose samples an engine draws, by the weights that are in place when it is asked: the present ones, or
    those of an old policy. Replays stay the trainer's, so that the first-ratio check of every run compares the engine's
    log-probabilities with theirs."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.own = EngineKeys.read(trainer.config)
        self.engine = Engine(unwrap(self.own.engine), self.own.timeout, self.own.retries)
        self.lora = LoraSender(self.engine, self.own.folder)
        for spec in trainer.rollouts.explorations(0):
            require(of_rollout(spec, trainer.rollouts.grid))
        served = self.engine.info()
        trainer.log(f"rollouts by {self.engine.url}: {served.get('model_path', 'an unnamed model')}, version "
                    f"{served.get('version', 'unknown')}")
        trainer.rollouts.drawer = self

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a run that a stock engine cannot sample, before the model is loaded."""
        require(of_method(setup.config, setup.method))
        if setup.all_processes > 1:
            raise UserError(f"rollout.engine: got {setup.all_processes} processes, expected 1: an engine is driven by "
                            "one trainer; give the other GPUs to the engine (its --num-gpus)")
        if seen := [name for name, reward in setup.trained.items() if sees_base(reward)]:
            raise UserError(f"rollout.engine: the reward {seen[0]!r} compares with the base model's sample of the same "
                            "initial noise, which only the engine knows: leave it or rollout.engine out")
        if any(prompt.brings is not None for prompt in setup.split[0]):
            raise UserError("rollout.engine: prompts bring images or other inputs, which are not sent: leave them or "
                            "rollout.engine out")

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        cast(DenoisingRollouts, self.trainer.rollouts).drawer = self  # of those that a phase made anew too
        yield

    def sample(self, conditioning: Conditioning, explorations: list[RolloutSpec], seed: Seed, judge: object
               ) -> Iterator[Part]:
        """Yield whole groups, as `growth.explore` does. judge: is not read."""
        rollouts = cast(DenoisingRollouts, self.trainer.rollouts)
        policy, group = rollouts.policy, explorations[0].group
        grid, _ = rollouts.grid_of(conditioning.sizes[0] if conditioning.sizes else None)
        for spec in explorations:
            require(of_rollout(spec, grid))
        if self.own.release:
            self.engine.resume()
        self.lora.sync(policy.pipe, list(policy.weights.modules))
        first, count = 0, len(conditioning.prompts)
        with ThreadPoolExecutor(TOGETHER, "engine") as threads:
            for prompts in torch.arange(count).split(rollouts.together(count)):
                for number, spec in enumerate(explorations):
                    leaves = [[seed(int(p), number * group + leaf) for leaf in range(group)] for p in prompts]
                    asked = requests(policy, conditioning, prompts.tolist(), leaves, spec,
                                     rollouts.geometry.micro_batch)
                    samples = [*chain.from_iterable(threads.map(self.engine.rollout, asked))]
                    policy.evaluations += len(samples) * spec.steps
                    groups = range(first, first := first + len(prompts))
                    yield part_of(policy, conditioning, samples, groups, prompts.repeat_interleave(group), spec)
        self.lora.require_held()
        if self.own.release:
            self.engine.release()

    def close(self) -> None:
        self.lora.close()
