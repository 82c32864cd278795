"""Trainers under TRL's names, thin over `align`: a script of GRPO, RLOO or DDPO runs with this import.

    from flowgrpo.trl import GRPOConfig, GRPOTrainer

What their loops do otherwise is in docs/reference/python.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo.trl.config import FlowGRPOConfig, GRPOConfig, RLOOConfig
    from flowgrpo.trl.ddpo import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
    from flowgrpo.trl.grpo import FlowGRPOTrainer, GRPOTrainer, RLOOTrainer
    from flowgrpo.trl.scripts import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

__all__ = ["DDPOConfig", "DDPOTrainer", "DefaultDDPOStableDiffusionPipeline", "FlowGRPOConfig", "FlowGRPOTrainer",
           "GRPOConfig", "GRPOTrainer", "ModelConfig", "RLOOConfig", "RLOOTrainer", "ScriptArguments", "TrlParser",
           "get_peft_config", "get_quantization_config"]
_HOMES = {"config": ("FlowGRPOConfig", "GRPOConfig", "RLOOConfig"),
          "ddpo": ("DDPOConfig", "DDPOTrainer", "DefaultDDPOStableDiffusionPipeline"),
          "grpo": ("FlowGRPOTrainer", "GRPOTrainer", "RLOOTrainer"),
          "scripts": ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config")}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"flowgrpo.trl.{module}"), name)
    raise AttributeError(f"module 'flowgrpo.trl' has no attribute {name!r}")
