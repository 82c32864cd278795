"""Dry run of an epoch: the run's own trainer on a pretended GPU, and what it says by phase."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo.check.memory import tensor_bytes
from flowgrpo.config.geometry import geometry, prompts_per_part
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES
from flowgrpo.dry_run import from_configs
from flowgrpo.dry_run.gpus import GIB, named
from flowgrpo.dry_run.meta_gpu import META, MetaGPU
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.policies.build import make_policy
from flowgrpo.train import Trainer

PHASES = ("encode", "rollout", "decode", "update")
PROMPT = "a lighthouse at dusk, two owls on a branch, and a sign that says open"
STORED = {"full": 1.0, "int8": 0.51, "nf4": 0.28}  # bytes of a weight, as a share of two


@dataclass(frozen=True)
class Estimate:
    """Estimate of a phase, for one process and a whole epoch.

    peak: GiB that are allocated at most. tflops: FLOPs in 10^12. seconds: of the roofline. kernels: launched.
    waits: times that the host waits for the GPU, by its reason.
    """

    peak: float
    tflops: float
    seconds: float
    kernels: int
    waits: dict[str, int]


class Phases(PhaseTimer):
    """Clock of a trainer that tells the pretended GPU which phase it is in; held: bytes when a phase first began."""

    def __init__(self, gpu: MetaGPU):
        super().__init__()
        self.gpu, self.held = gpu, dict[str, int]()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.held.setdefault(phase, self.gpu.bytes)
        with super().__call__(phase), self.gpu.during(phase):
            yield


def dry_run(config: Config, gpu: str = "H100", processes: int = 1, pipe: Any = None) -> dict[str, Estimate]:
    """Run an epoch of a pipeline's recipe on a pretended GPU; return estimates by phase.

    processes: of the run, which share the epoch's prompts. pipe: a pipeline on the meta device; None: of the
    configuration files of `config.model`. Fewer prompts than the epoch's are run, and the rest is extrapolated.
    Raises UserError for what a dry run does not cover: all weights, DoRA, and trained text encoders.
    """
    _require_covered(config)
    shape = geometry(config.train, processes)
    few = min(shape.prompts, prompts_per_part(shape.group, shape.micro_batch) * config.train.updates)
    short = config.model_copy(update={
        "preferences": None, "train": config.train.model_copy(update={"prompts": few, "compile": False}),
        "memory": config.memory.model_copy(update={"encoders": "keep", "weights": "full", "shard": False})})
    meta = MetaGPU(named(gpu))
    with meta.running():
        pipe = pipe or from_configs.pipeline(config.model, DTYPES[config.precision])
        policy: Any = make_policy(short, META, pipe)
        prompts = [Prompt(f"{PROMPT} {number}") for number in range(few)]
        trainer = Trainer(short, Accelerator(cpu=True), policy, {"any": _any}, (prompts, []))
        trainer.clock = trainer.rollouts.clock = clock = Phases(meta)
        trainer.first_ratio.found = 0.0  # there are no values to compare
        trainer.run_epoch()
    per_prompt = max(clock.held["update"] - clock.held["rollout"], 0) / few
    absent = _absent(config, pipe, policy)
    found = {}
    for name in PHASES:
        phase, times = meta.phases[name], shape.prompts / few
        peak = phase.peak - absent["weights"] - (0 if name == "encode" else absent["encoders"])
        peak += 0 if name == "encode" else (shape.prompts - few) * per_prompt
        found[name] = Estimate(peak / GIB, phase.flops * times / 1e12, phase.seconds * times,
                               round(phase.kernels * times), dict(phase.waits))
    return found


def fits(estimates: dict[str, Estimate], gpu: str) -> bool:
    """Return True if every phase's peak fits the GPU."""
    return all(estimate.peak * GIB <= named(gpu).room for estimate in estimates.values())


def _any(images: torch.Tensor, prompts: list[str]) -> list[float]:
    """Return scores that differ, for samples without values."""
    drawn = random.Random(len(prompts))
    return [drawn.random() for _ in prompts]


def _absent(config: Config, pipe: Any, policy: Any) -> dict[str, float]:
    """Return the bytes that the run does not hold and the dry run does: of quantised weights, and of text encoders
    outside of the encoding."""
    frozen = sum(tensor_bytes(each for key, each in module.named_parameters() if "lora_" not in key)
                 for module in policy.denoisers.values())
    encoders = [part for name, part in pipe.components.items()
                if name.startswith("text_encoder") and isinstance(part, torch.nn.Module)]
    away = config.memory.encoders != "keep"
    return {"weights": frozen * (1 - STORED[config.memory.weights]),
            "encoders": sum(tensor_bytes(part.parameters()) for part in encoders) if away else 0}


def _require_covered(config: Config) -> None:
    wrong = {"adapter.rank: 0": not config.adapter.rank, "adapter.dora": config.adapter.dora,
             "adapter.encoder_targets with trained text encoders": "adapted" in config.parts,
             "precision: auto or fp16 (say bf16)": config.precision not in ("bf16", "fp32")}
    for name in (name for name, found in wrong.items() if found):
        raise UserError(f"a dry run does not cover {name}")
