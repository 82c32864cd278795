"""Faults of an engine, by what its samples fit better than what was asked for.

Each hypothesis is a replay: without the LoRA, under another prompt, with the other kernel, on shifted sigmas. The one
that makes the log-ratio at least ten times smaller is named. Equal, exchanged and rounded states are seen directly.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.engine.client import Sample
from flowgrpo.objectives.ratios import LogRatio, PlainRatio
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import shift_grid, stock
from flowgrpo.samplers.growth import replay, sampler_steps
from flowgrpo.samplers.kernels import CPS, FlowSDE
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import unwrap

ROUNDING = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # first |log ratio| that different programs explain
BETTER = 10.0  # how many times smaller the ratio of what an engine did is
SHIFTS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0)  # of sigmas that are tried


def _weights(policy: PipelinePolicy, lora: bool) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if lora or policy.weights is None else policy.reference()


@torch.no_grad()
def by_step(policy: PipelinePolicy, conditioning: Conditioning, part: Part, micro_batch: int, lora: bool,
            log_ratios: Sequence[LogRatio] = (PlainRatio(),)) -> Tensor:
    """Each |log-ratio| [M,b,K] of an engine's samples at their K steps with noise; NaN becomes infinite. lora: the
    replay has it."""
    found = torch.zeros(len(log_ratios), len(part.prompts), len(part.transitions))
    with _weights(policy, lora):
        for k, rows, new in replay(policy, conditioning, part, micro_batch):
            old = part.transitions[k].old.rows(rows).to(new.logp.device)
            for measured, log_ratio in zip(found, log_ratios):
                measured[rows, k] = log_ratio(new, old)[:, 0].abs().nan_to_num(torch.inf).cpu()
    return found


def find_faults(policy: PipelinePolicy, conditioning: Conditioning, part: Part, samples: Sequence[Sample],
                alone: Sequence[Sample], ratios: Tensor, micro_batch: int, lora: bool) -> Iterator[str]:
    """Yield what makes an engine's samples differ from what was asked, as "fault: how it shows".

    alone: the same samples, from a request each. ratios: [b,K], of the replay.
    """
    first = torch.stack([sample.states[0] for sample in samples]).flatten(1)
    if len(first.unique(dim=0)) < len(first):
        one, other = next((one, other) for one, other in combinations(range(len(first)), 2)
                          if torch.equal(first[one], first[other]))
        yield f"repeated seed: samples {one} and {other} of {len(first)} have one initial noise"
    elif (places := _places(first, alone)) is not None and places != list(range(len(first))):
        moved = next(place for place, of in enumerate(places) if of != place)
        yield f"shuffled batch: sample {moved} of a request of {micro_batch} is sample {places[moved]} of those that " \
              "come one by one"
    asked, rounded = float(ratios.max()), policy.precision == "fp32" and all(
        torch.equal(sample.states[1:].bfloat16().to(sample.states.dtype), sample.states[1:]) for sample in samples)
    if rounded:
        yield "bf16 states: all values of the states are of bf16, and the pipeline computes in fp32: serve the model " \
              "in fp32, or compare with --precision bf16"
    if asked <= ROUNDING["bf16" if rounded else policy.precision]:
        return
    # The hypothesis that explains the ratios best; without one, whether outputs or transitions differ.
    best, ratio = min(_hypotheses(policy, conditioning, part, micro_batch, lora), key=lambda pair: pair[1])
    if ratio * BETTER <= asked:
        yield f"{best} (first |log ratio| {ratio:.1e} in place of {asked:.1e})"
        return
    gap, size = _outputs(policy, conditioning, part, samples, micro_batch, lora)
    if gap > 10 * ROUNDING[policy.precision] * size:
        yield f"other model outputs: they differ by {gap:.1e} of {size:.1e} (root mean squares): compare weights, " \
              "the LoRA's scale, guidance, negative prompt and text encoders"
    else:
        step = int(ratios.amax(0).argmax())
        yield f"other transitions: model outputs agree, and log-probabilities differ by {asked:.1e} at step " \
              f"{part.transitions[step].step}: compare sigmas, kernel and level of noise"


def _hypotheses(policy: PipelinePolicy, conditioning: Conditioning, part: Part, micro_batch: int, lora: bool
                ) -> Iterator[tuple[str, float]]:
    """Yield what an engine may have done, and the largest |log ratio| of the replay that does so too."""
    def largest(of: Part, with_lora: bool = lora) -> float:
        return float(by_step(policy, conditioning, of, micro_batch, with_lora).max())

    spec = unwrap(part.exploration)
    level = getattr(spec.kernel, "level")
    for name, other in (("FlowSDE (sde)", FlowSDE), ("CPS (cps)", CPS)):
        if not isinstance(spec.kernel, other) and (other is not CPS or level <= 1):
            yield f"wrong kernel: the engine draws by {name}, asked for {type(spec.kernel).__name__}", \
                largest(replace(part, exploration=replace(spec, kernel=other(level))))
    if policy.weights is not None:
        yield "another LoRA: the engine draws " + ("without the LoRA, from the base model" if lora else
                                                   "with a LoRA, asked for the base model"), largest(part, not lora)
    if (count := len(conditioning.prompts)) > 1:  # each sample is of the prompt under which its ratio is smallest
        under = [replace(part, transitions=tuple(replace(taken, prompts=torch.full_like(taken.prompts, prompt))
                                                 for taken in sampler_steps(part))) for prompt in range(count)]
        each = torch.stack([by_step(policy, conditioning, of, micro_batch, lora)[0].amax(1) for of in under])  # [P,b]
        fits = each.argmin(0)
        row = int((fits != part.prompts.cpu()).int().argmax())  # the first that fits another, if any
        yield f"shuffled batch: sample {row}, of prompt {int(part.prompts[row])}, was drawn for prompt " \
              f"{int(fits[row])}", float(each.amin(0).max())
    for shift in SHIFTS:
        for grid in _grids(policy, spec.steps, shift):
            if not torch.allclose(grid, spec.grid, atol=1e-4):
                yield f"wrong sigma: the engine draws on sigmas of the shift {shift:g} and sends others", \
                    largest(replace(part, exploration=replace(spec, grid=grid)))


def _grids(policy: PipelinePolicy, steps: int, shift: float) -> Iterator[Tensor]:
    """Yield the sigmas [steps+1] of a shift: plain ones, and those of the pipeline's scheduler."""
    yield shift_grid(steps, shift).float()
    scheduler = copy.deepcopy(policy.stock)
    if hasattr(scheduler, "set_shift") and not scheduler.config.get("use_dynamic_shifting"):
        scheduler.set_shift(shift)
        scheduler.set_timesteps(steps)
        yield stock(scheduler, steps)


@torch.no_grad()
def _outputs(policy: PipelinePolicy, conditioning: Conditioning, part: Part, samples: Sequence[Sample],
             micro_batch: int, lora: bool) -> tuple[float, float]:
    """Root mean squares of the difference of model outputs at the recorded states, and of the outputs."""
    spec, gaps, sizes = unwrap(part.exploration), [], []
    for taken in sampler_steps(part):
        for rows in torch.arange(len(samples)).split(micro_batch):
            with _weights(policy, lora):
                own = policy.replay(conditioning.rows(taken.prompts[rows]), taken.x[rows].to(policy.device), spec.grid,
                                    taken.step).float().cpu()
            sent = torch.stack([unwrap(samples[int(row)].outputs)[taken.step] for row in rows]).float()
            gaps.append((own - sent).square().mean())
            sizes.append(own.square().mean())
    return float(torch.stack(gaps).mean().sqrt()), float(torch.stack(sizes).mean().sqrt())


def _places(first: Tensor, alone: Sequence[Sample]) -> list[int] | None:
    """For each initial state [b,n] the sample with the same one among those drawn alone; None where one has
    none, as of an engine whose noise depends on the request."""
    own = torch.stack([sample.states[0] for sample in alone]).flatten(1)
    same = [[place for place, other in enumerate(own) if torch.equal(row, other)] for row in first]
    return [places[0] for places in same] if all(same) else None
