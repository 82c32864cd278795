"""Comparison of an engine with the pipeline: its samples, replayed, and what a difference comes from.

Each row is one way to draw and to replay: the precision of the pipeline, the samples of a request, and the LoRA. Its
numbers are the largest |log ratio| of every step. A first-ratio check takes a tenth of a run's clip range: ten times
the largest of a method's kind is the smallest clip range that the engine allows without rescoring.

Faults of an engine are named by what its samples fit better than what was asked for. Each hypothesis is a replay:
without the LoRA, under another prompt, with the other kernel, on shifted sigmas. The one that makes the log-ratio at
least ten times smaller is named. Equal, exchanged and rounded states are seen directly.
"""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowgrpo.contrib.engine.client import Engine, EngineError, Sample
from flowgrpo.contrib.engine.lora import LoraSender
from flowgrpo.contrib.engine.sampler import part_of, requests
from flowgrpo.errors import UserError
from flowgrpo.objectives.ratios import Guard, LogRatio, PlainRatio, SquaredErrorRatio
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.grids import shift_grid, stock
from flowgrpo.samplers.growth import replay, sampler_steps
from flowgrpo.samplers.kernels import CPS, Euler, FlowSDE, Kernel
from flowgrpo.samplers.plans import AllSteps
from flowgrpo.samplers.rollout import Part, RolloutSpec, seeder
from flowgrpo.types import unwrap

KERNELS: dict[str, Callable[[float], Kernel]] = {"sde": FlowSDE, "cps": CPS}
LOG_RATIOS = (PlainRatio(), Guard(), SquaredErrorRatio())  # those of the presets that an engine can sample for
SHARE = 0.1  # of the clip range that a first log-ratio may take (`training.first_ratio`)
ROUNDING = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # first |log ratio| that different programs explain
BETTER = 10.0  # how many times smaller the ratio of what an engine did is
SHIFTS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0)  # of sigmas that are tried


@dataclass(frozen=True)
class Asked:
    """Samples of a comparison: `count` of each prompt. kind, level: of the noise, "sde" or "cps"."""

    prompts: tuple[str, ...]
    negative: str = ""
    count: int = 4
    steps: int = 10
    kind: str = "sde"
    level: float = 0.7
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """Comparison of one way to draw and to replay. by_step: the largest |log ratio| of each step with noise.

    clips: smallest clip ranges whose first-ratio check passes, by the class of the log-ratio.
    found: what the difference comes from, a line for each fault.
    """

    precision: str
    batch: int
    lora: bool
    by_step: tuple[float, ...]
    clips: dict[str, float]
    found: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        return max(self.by_step)


def rows(engine: Engine, policy_of: Callable[[str], PipelinePolicy], precisions: Sequence[str], asked: Asked,
         sender: LoraSender | None) -> list[Row]:
    """Rows of all precisions, batches and, with a sender, of the base model and of the LoRA.

    policy_of: the policy of a precision, whose adapter "default" is the LoRA. Raises EngineError where the engine gives
    no samples.
    """
    found = list[Row]()
    samples: dict[tuple[bool, int], list[Sample]] = {}
    try:
        for precision in precisions:
            policy = policy_of(precision)
            conditioning = policy.encode(list(asked.prompts), [asked.negative] * len(asked.prompts))
            spec = rollout_spec(policy, conditioning, asked)
            samples = samples or _sample(engine, policy, conditioning, spec, asked, sender)
            found += [_row(policy, conditioning, spec, precision, batch, lora, samples) for lora, batch in samples]
    finally:
        if sender is not None:
            with contextlib.suppress(EngineError):  # of an engine that has failed before
                engine.unset_lora()
    return found


def rollout_spec(policy: PipelinePolicy, conditioning: Conditioning, asked: Asked) -> RolloutSpec:
    """Rollout on the pipeline's own sigmas, with noise in all steps but the last."""
    if policy.process != "flow":
        raise UserError("flowgrpo verify: got a pipeline that predicts noise or v, expected a flow: a stock engine "
                        "samples no noise for others")
    grid = policy.stock_grid(conditioning, asked.steps)
    try:
        kernel = KERNELS[asked.kind](asked.level)
    except ValueError as error:
        raise UserError(f"--level: {error}") from None
    return RolloutSpec(grid, AllSteps()(asked.steps, 0, 0), kernel, Euler(), asked.count, asked.count, keep_means=True)


def _sample(engine: Engine, policy: PipelinePolicy, conditioning: Conditioning, spec: RolloutSpec, asked: Asked,
            sender: LoraSender | None) -> dict[tuple[bool, int], list[Sample]]:
    """Samples by (with the LoRA, samples of a request); all have the same seeds."""
    of, places = seeder(asked.seed, 0), range(len(asked.prompts))
    seeds = [[of(prompt, sample) for sample in range(asked.count)] for prompt in places]
    found = {}
    if sender is not None:
        engine.unset_lora()
    for lora in (False, True) if sender is not None else (False,):
        if lora and sender is not None:
            sender.sync(policy.pipe, list(policy.weights.modules))
        for batch in sorted({1, asked.count}):
            asks = requests(policy, conditioning, places, seeds, spec, batch, means=True)
            found[lora, batch] = [*chain.from_iterable(map(engine.rollout, asks))]
    return found


def _row(policy: PipelinePolicy, conditioning: Conditioning, spec: RolloutSpec, precision: str, batch: int, lora: bool,
         samples: dict[tuple[bool, int], list[Sample]]) -> Row:
    of, groups = samples[lora, batch], range(len(conditioning.prompts))
    try:
        part = part_of(policy, conditioning, of, groups, torch.tensor(groups).repeat_interleave(spec.group), spec)
    except EngineError as error:
        return Row(precision, batch, lora, (float("inf"),), {}, (f"{error.fault}: {error}",))
    each = by_step(policy, conditioning, part, batch, lora, LOG_RATIOS)
    clips = {type(log_ratio).__name__: float(values.max()) / SHARE for log_ratio, values in zip(LOG_RATIOS, each)}
    found = find_faults(policy, conditioning, part, of, samples[lora, 1], each[0], batch, lora)
    return Row(precision, batch, lora, tuple(each[0].amax(0).tolist()), clips, tuple(found))


def table(found: Sequence[Row]) -> list[str]:
    """Lines of a table of rows, and lines on what the engine allows."""
    steps = max(len(row.by_step) for row in found)
    lines = [f"first |log ratio|, by step 0 to {steps - 1}:"]
    for row in found:
        head = f"{row.precision}, batch {row.batch}, {'LoRA' if row.lora else 'base'}:"
        lines.append(f"{head:<24} largest {row.largest:.1e}; " + " ".join(f"{value:.0e}" for value in row.by_step))
    named = {f"fault: {line}": None for row in found for line in row.found}
    lines += named
    if not named:
        for precision in dict.fromkeys(row.precision for row in found):
            clips = [row.clips for row in found if row.precision == precision]
            lines.append(f"smallest clip range in {precision}: " + ", ".join(
                f"{max(each[name] for each in clips):.1e} of {name}" for name in clips[0]))
        lines.append("a narrower one works where a run computes old log-probabilities again, as it does by itself")
    return lines


# --- faults -----------------------------------------------------------------------------------------------------------

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
    first, own = (torch.stack([sample.states[0] for sample in of]).flatten(1) for of in (samples, alone))
    # The sample with the same noise among those drawn alone; None of an engine whose noise depends on the request.
    places = [next((place for place, other in enumerate(own) if torch.equal(row, other)), None) for row in first]
    if len(first.unique(dim=0)) < len(first):
        one, other = next((one, other) for one, other in combinations(range(len(first)), 2)
                          if torch.equal(first[one], first[other]))
        yield f"repeated seed: samples {one} and {other} of {len(first)} have one initial noise"
    elif None not in places and places != [*range(len(first))]:
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
    for shift in SHIFTS:  # of plain sigmas, and of those of the pipeline's scheduler
        grids, scheduler = [shift_grid(spec.steps, shift).float()], copy.deepcopy(policy.stock)
        if hasattr(scheduler, "set_shift") and not scheduler.config.get("use_dynamic_shifting"):
            scheduler.set_shift(shift)
            scheduler.set_timesteps(spec.steps)
            grids.append(stock(scheduler, spec.steps))
        for grid in grids:
            if not torch.allclose(grid, spec.grid, atol=1e-4):
                yield f"wrong sigma: the engine draws on sigmas of the shift {shift:g} and sends others", \
                    largest(replace(part, exploration=replace(spec, grid=grid)))


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


# --- LoRAs ------------------------------------------------------------------------------------------------------------

def adapter_of(path: Path) -> dict[str, Any]:
    """Keys of the section `adapter` of a LoRA: its rank, scale and targets, and the file as its values.

    Raises UserError for a file without them.
    """
    file = path if path.is_file() else path / LORA_FILE
    if not file.is_file():
        raise UserError(f"--lora {path}: expected a folder with {LORA_FILE}, its file, or random")
    try:
        with safe_open(file, "pt") as opened:
            found = json.loads((opened.metadata() or {})["lora_adapter_metadata"])
        own = {key.partition(".")[2]: value for key, value in found.items() if key.startswith("transformer.")}
        given = {"rank": own["r"], "alpha": own["lora_alpha"], "targets": own["target_modules"], "init": str(path)}
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError):
        raise UserError(f"--lora {file}: expected a LoRA of a denoiser with its rank, alpha and targets in the "
                        "metadata, as flowgrpo and diffusers write it") from None
    for key in ("use_rslora", "use_dora"):
        if own.get(key):
            raise UserError(f"--lora {file}: has {key}, expected a plain LoRA: an engine holds no other as it is")
    return given


def randomise_lora(policy: PipelinePolicy, seed: int) -> None:
    """Give a policy's LoRA drawn values, the same on every device and in every precision."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
