"""Trainers that are built as TRL's are, over `align`: `DDPOTrainer`, which TRL has no more, and `FlowGRPOTrainer`."""

from typing import NoReturn

from flowgrpo.errors import UserError
from flowgrpo.trl.ddpo import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from flowgrpo.trl.grpo import FlowGRPOConfig, FlowGRPOTrainer

__all__ = ["DDPOConfig", "DDPOTrainer", "DefaultDDPOStableDiffusionPipeline", "FlowGRPOConfig", "FlowGRPOTrainer"]


def __getattr__(name: str) -> NoReturn:
    if name in ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"):
        raise UserError(f"flowgrpo.trl has no {name}: run a language model's script by TRL itself, or call "
                        "flowgrpo.align(model, rewards, prompts, 'grpo')")
    raise AttributeError(f"module 'flowgrpo.trl' has no attribute {name!r}")
