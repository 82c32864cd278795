"""Trainable weights of a language model, in the files of transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.tensor_files import order_config


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
        with quiet(), atomic.filling(folder) as place:
            module.save_pretrained(place)
            order_config(place / "adapter_config.json")
            paths.readable(place / "adapter_model.safetensors")
        with self._beside(folder, "check"):
            for key, layer in self.layers().items():
                parts: list[Any] = [layer.lora_A, layer.lora_B]
                parts += [layer.lora_magnitude_vector] if self.adapter.dora else []
                if layer.scaling["check"] != layer.scaling["default"] or not all(
                        torch.equal(part["check"].weight, part["default"].weight.to(part["check"].weight))
                        for part in parts):  # inputs take the model's dtype
                    raise RuntimeError(f"{folder} does not give {key} back as it was saved")
        return f"saved {folder / 'adapter_model.safetensors'}; read back by load_adapter: same weights, same scale"

    def _others(self) -> dict[str, torch.nn.Module]:
        return {}

    def _attach(self, path: Path, adapter: str) -> None:
        """Load a folder's adapter. Raises UserError if it does not load."""
        module: Any = self.modules["model"]
        try:
            with quiet():
                module.load_adapter(str(path), adapter_name=adapter)
        except Exception as error:  # third-party files can raise anything
            raise UserError(f"{path} does not load into {type(module).__name__}: "
                            f"{' '.join(str(error).split())[:200]}") from error

    def _detach(self, adapter: str) -> None:
        module: Any = self.modules["model"]
        if adapter in module.peft_config:
            module.delete_adapter(adapter)
        module.set_adapter("default")
