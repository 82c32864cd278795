"""Comparison of an engine with the pipeline: its samples, replayed, and what a difference comes from.

Each row is one way to draw and to replay: the precision of the pipeline, the samples of a request, and the LoRA. Its
numbers are the largest |log ratio| of every step. A first-ratio check takes a tenth of a run's clip range: ten times
the largest of a method's kind is the smallest clip range that the engine allows without rescoring.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flowgrpo.contrib.engine import faults
from flowgrpo.contrib.engine.client import Engine, EngineError, Sample
from flowgrpo.contrib.engine.lora import LoraSender
from flowgrpo.contrib.engine.sampler import part_of, requests
from flowgrpo.errors import UserError
from flowgrpo.objectives.ratios import Guard, PlainRatio, SquaredErrorRatio
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.kernels import CPS, Euler, FlowSDE, Kernel
from flowgrpo.samplers.plans import AllSteps
from flowgrpo.samplers.rollout import RolloutSpec, seeder

KERNELS: dict[str, Callable[[float], Kernel]] = {"sde": FlowSDE, "cps": CPS}
LOG_RATIOS = (PlainRatio(), Guard(), SquaredErrorRatio())  # those of the presets that an engine can sample for
SHARE = 0.1  # of the clip range that a first log-ratio may take (`training.first_ratio`)


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
    each = faults.by_step(policy, conditioning, part, batch, lora, LOG_RATIOS)
    clips = {type(log_ratio).__name__: float(values.max()) / SHARE for log_ratio, values in zip(LOG_RATIOS, each)}
    found = faults.find_faults(policy, conditioning, part, of, samples[lora, 1], each[0], batch, lora)
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
