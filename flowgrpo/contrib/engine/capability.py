"""Limits of a stock engine, by what a method and its rollouts need; one line each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.rewards.reward import sees_base
from flowgrpo.samplers.kernels import CPS, FlowSDE
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.samplers.solvers import Euler

SDE: dict[type, str] = {FlowSDE: "sde", CPS: "cps"}  # kernels of SGLang-Diffusion by ours
DRAWN = (targets.RecordedSteps, targets.JointDensity, targets.NoisedFinals)


def sde(spec: RolloutSpec) -> tuple[str, float]:
    """Return the engine's name of a rollout's noise, and its level; ("ode", 0) for a rollout without noise."""
    if not spec.schedule.stochastic:
        return "ode", 0.0
    level: float = getattr(spec.kernel, "level")
    return SDE[type(spec.kernel)], level


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
        "train.one_pass, whose graphs are the trainer's": bool(config.train.one_pass),
        "memory.shard, whose processes share every call": bool(config.memory.shard)}
    yield from (need for need, applies in needs.items() if applies)


def of_rollout(spec: RolloutSpec, stock: torch.Tensor) -> Iterator[str]:
    """Yield what a rollout needs and a stock engine lacks, in words. stock: the pipeline's own sigmas [T+1]."""
    if spec.timesteps is not None:
        yield "a variance-preserving process (the model predicts noise or v)"
        return
    schedule, kernel = spec.schedule, spec.kernel
    needs = {
        f"the kernel {type(kernel).__name__}: it draws by {' or '.join(cls.__name__ for cls in SDE)}":
            bool(schedule.stochastic) and type(kernel) not in SDE,
        "trees, which split states on their way": bool(schedule.children),
        "a shared initial noise: set parts.roots: null": not spec.alone and not schedule.children,
        "noise that differs from step to step": any(factor != 1 for factor in schedule.noise),
        "samples that are finished on several grids (strides)": len(spec.strides) > 1 or spec.strides[0] != 1,
        f"the solver {type(spec.solver).__name__}: it takes Euler steps": not isinstance(spec.solver, Euler),
        "given sigmas: set parts.tail: 1": spec.grid.shape != stock.shape or not torch.equal(spec.grid, stock),
        "clean predictions on the way (parts.progress)": spec.keep_clean}
    yield from (need for need, applies in needs.items() if applies)


def require(needs: Iterator[str]) -> None:
    """Raise UserError for the first of what a run needs and a stock engine lacks."""
    for need in needs:
        raise UserError(f"rollout.engine: a stock engine does not do {need}; or leave rollout.engine out")


def check(setup: Setup) -> None:
    """Raise UserError for a run that a stock engine cannot sample, before the model is loaded."""
    require(of_method(setup.config, setup.method))
    if setup.all_processes > 1:
        raise UserError(f"rollout.engine: got {setup.all_processes} processes, expected 1: an engine is driven by one "
                        "trainer; give the other GPUs to the engine (its --num-gpus)")
    if seen := [name for name, reward in setup.trained.items() if sees_base(reward)]:
        raise UserError(f"rollout.engine: the reward {seen[0]!r} compares with the base model's sample of the same "
                        "initial noise, which only the engine knows: leave it or rollout.engine out")
    if any(prompt.brings is not None for prompt in setup.split[0]):
        raise UserError("rollout.engine: prompts bring images or other inputs, which are not sent: leave them or "
                        "rollout.engine out")

