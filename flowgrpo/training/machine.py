"""Machine of a run: what its launcher was configured for, its device, its processes and its precision."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo.config import features
from flowgrpo.config.geometry import teams
from flowgrpo.config.parse import load
from flowgrpo.config.schema import Config
from flowgrpo.device import AUTO
from flowgrpo.distributed import launchers
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.distributed.sides import Side
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup
from flowgrpo.policies import build
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.training import run_folder

if TYPE_CHECKING:
    from accelerate import Accelerator


def as_launched(config: Config, kind: str) -> tuple[Config, list[str]]:
    """The configuration with what accelerate was configured for, and a line on each key that this sets.
    Raises UserError for a recipe that says otherwise, and for a language model."""
    lines = []
    for key, value in launchers.take_over(os.environ).items():
        if kind != build.PIPELINE:
            raise UserError(f"launched with accelerate's FSDP or ParallelismConfig, which stands for {key}, but a "
                            f"language model is trained: {launchers.PLAIN}")
        section, name = key.split(".")
        group = getattr(config, section)
        if (got := getattr(group, name)) == value:
            continue
        if got != type(group).model_fields[name].default:
            raise UserError(f"{key} is {got} in the recipe, but accelerate was configured for {value}: make them equal,"
                            " or leave the key out")
        config = config.having({key: value})
        lines.append(f"{key}: {str(value).lower()} (from accelerate's configuration)")
    return config, lines


def place_setup(setup: Setup, resume: bool | Literal["auto"]) -> tuple[Setup, Accelerator, str]:
    """The setup on its device and processes, accelerate's object or that of this process's side, and the precision in
    words."""
    config = setup.config
    accelerator = make_accelerator(str(setup.device))  # before rewards: it selects the GPU that they will use
    count, first = accelerator.num_processes, accelerator.is_main_process
    device = accelerator.device if count > 1 else setup.device
    samplers = [features.at(feature.rollout_ranks)(config, count) for feature in
                features.active_features(config, setup.method) if feature.rollout_ranks]
    side: Any = Side(accelerator, max(samplers)) if any(samplers) else accelerator
    resumes = run_folder.resumes(config, accelerator, resume)
    # A resumed run goes on with what `auto` chose when it began; the first process chooses the precision for all.
    file = config.folder / "config.yaml"
    if (began := load(file) if resumes and file.is_file() else None) is not None:
        config = config.having({f"train.{key}": getattr(began.train, key) for key in ("micro_batch", "checkpointing")
                                if getattr(config.train, key) == AUTO})
    precision = None if began is None else began.precision
    config, told = run_folder.of_first(
        accelerator, lambda: resolve_precision(config, device, setup.loaded, precision))
    return replace(setup, config=config, device=device, all_processes=count, first=first, resumes=resumes,
                   processes=teams(config.memory.context_parallel, side.num_processes)), side, told
