"""Arguments that TRL's example scripts read beside trainers: those of the command line, and of a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from flowgrpo.errors import UserError
from flowgrpo.trl.arguments import NamedArguments, require_known


@dataclass
class ScriptArguments(NamedArguments):
    """Data set of a script, by TRL's names."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class ModelConfig(NamedArguments):
    """Model and LoRA of a script, by TRL's names and with its defaults."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None


class TrlParser(HfArgumentParser):
    """Parser of a script's dataclasses, and of a YAML file of their values by --config."""

    def parse_args_and_config(self, args: Sequence[str] | None = None, return_remaining_strings: bool = False,
                              fail_with_unknown_args: bool = True) -> tuple[Any, ...]:
        """Return one object per dataclass; arguments come before the file's values."""
        import sys

        given = list(sys.argv[1:] if args is None else args)
        if "--config" in given:
            at = given.index("--config")
            path = Path(given[at + 1]) if at + 1 < len(given) else Path()
            if not path.is_file():
                raise UserError(f"--config: got {path}, expected a YAML file")
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            del given[at:at + 2]
            require_known(str(path), list(values), [action.dest for action in self._actions], "--help")
            self.set_defaults(**values)
        found = self.parse_args_into_dataclasses(args=given, return_remaining_strings=True)
        *made, unknown = found
        if unknown and fail_with_unknown_args and not return_remaining_strings:
            raise UserError(f"got the unknown arguments {' '.join(unknown)}")
        return (*made, unknown) if return_remaining_strings else tuple(made)


def get_peft_config(model_args: ModelConfig) -> Any:
    """Return the LoraConfig of a script's arguments; None without use_peft."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    targets = model_args.lora_target_modules
    return LoraConfig(task_type=model_args.lora_task_type, r=model_args.lora_r, lora_alpha=model_args.lora_alpha,
                      target_modules=targets[0] if targets and len(targets) == 1 else targets,
                      lora_dropout=model_args.lora_dropout, use_rslora=model_args.use_rslora,
                      use_dora=model_args.use_dora, modules_to_save=model_args.lora_modules_to_save,
                      target_parameters=model_args.lora_target_parameters)


def get_quantization_config(model_args: ModelConfig) -> None:
    """Return None. Raises UserError for load_in_4bit and load_in_8bit, which are not supported for language models."""
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise UserError("load_in_4bit and load_in_8bit: not supported for language models: set dtype bfloat16")
