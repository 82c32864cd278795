"""Trainable weights of a language model, in the files of transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.nouns import counted
from flowgrpo.packages import broken
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.storage import atomic, paths


def present(model: torch.nn.Module, targets: list[str]) -> list[str]:
    """Return the targets that name a module of the model; all of them if none does."""
    names = {key.rpartition(".")[2] for key, _ in model.named_modules()}
    return [target for target in targets if target in names] or targets


class TextWeights(TrainableWeights):
    """Trainable weights of a language model: a LoRA, or all, in the files that transformers and peft read.

    pipe: its tokenizer or processor, which is saved with all weights.
    """

    def save(self, folder: Path) -> str:
        """Write `adapter_model.safetensors` and `adapter_config.json`, or all weights as a model folder, read them back
        and compare. Returns a sentence for the log."""
        module: Any = self.modules["model"]
        if not self.adapter.rank:
            with atomic.filling(folder / "model") as place:
                module.save_pretrained(place)
                paths.readable(place)
                self.pipe.save_pretrained(place)
            return f"saved all weights to {folder / 'model'}"
        with atomic.filling(folder) as place:
            adapters.save(module, place, wrapped=True)
            paths.readable(place / adapters.WEIGHTS)
        with self._beside(folder, "check"):
            for key, layer in self.layers().items():
                if not adapters.same(layer, "check"):
                    raise RuntimeError(f"{folder} does not give {key} back as it was saved")
        return f"saved {folder / adapters.WEIGHTS}; read back by peft: same weights, same scale"

    def _others(self) -> dict[str, torch.nn.Module]:
        return {}

    def _attach(self, path: Path, adapter: str) -> str:
        """Load a folder's adapter; return what was applied, in words. Raises UserError if it does not load."""
        attach(self.modules["model"], path, adapter)
        count = sum(adapter in layer.lora_A for layer in self.layers().values())
        return f"{path}: LoRA applied to {counted(count, 'layer')}"

    def _base_name(self, module: Any) -> str | None:
        return getattr(module, "name_or_path", None)


def attach(model: torch.nn.Module, folder: Path, adapter: str = "default") -> None:
    """Load the LoRA of a folder into a language model, as an adapter of that name.

    Raises UserError if it does not load.
    """
    try:
        with quiet():
            adapters.load(model, folder, adapter)
    except UserError:
        raise
    except Exception as error:  # third-party files can raise anything
        why = broken(error) or " ".join(str(error).split())[:200]
        raise UserError(f"{folder} does not load into {type(model).__name__}: {why}") from error
