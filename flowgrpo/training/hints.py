"""Hints: lines on what makes a run slow, or keeps it from learning. They do not stop a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.device import bf16_speed
from flowgrpo.policies.pipelines.load import few_steps


def of_machine(precision: str, device: str | torch.device) -> Iterator[str]:
    """Return hints on a run's use of a CPU; none on another device.

    precision: as the recipe asks for, `auto` included.
    """
    if torch.device(device).type != "cpu":
        return
    if precision == "bf16" and (speed := bf16_speed()) < 1:
        yield (f"hint: this CPU has no bf16 arithmetic, and multiplies it {speed:.2g} times as fast as fp32: "
               "--precision=fp32")


def of_steps(config: Config, pipe: Any) -> Iterator[str]:
    """Yield the hint on a model of few steps for which the recipe leaves steps or guidance at their defaults."""
    left = {f"{key}.{name}": getattr(section, name) for key, section in (("train", config.train), ("eval", config.eval))
            for name in ("steps", "guidance") if name not in section.model_fields_set}
    left = {key: value for key, value in left.items() if key != "train.guidance"}  # whose default is none
    if not left or (why := few_steps(pipe, config.model)) is None:
        return
    fitting = {"train.steps": 4, "eval.steps": 4, "eval.guidance": 1}
    own = "; rlcm trains its own steps" if "scheduler is a" in why and not config.method.startswith("rlcm") else ""
    yield (f"hint: {config.model} is taken for a model of few steps ({why}), but "
           f"{', '.join(f'{key} is {value:g}' for key, value in left.items())} by default: set those of its card, such "
           f"as {' '.join(f'--{key}={fitting[key]}' for key in left)}{own}; methods that train on noised samples "
           "(diffusion_nft, awm, diffusion_dpo) blur such models")
