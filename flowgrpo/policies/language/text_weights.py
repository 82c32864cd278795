"""Trainable weights of a language model, in the files of transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowgrpo.log import quiet
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.storage import paths


class TextWeights(TrainableWeights):
    """Trainable weights of a language model: a LoRA, or all, in the files that transformers and peft read.

    pipe: its tokenizer or processor, which is saved with all weights.
    """

    def save(self, folder: Path) -> str:
        """Write `adapter_model.safetensors` and `adapter_config.json`, or all weights as a model folder, read them back
        and compare. Returns a sentence for the log."""
        module: Any = self.modules["model"]
        if not self.adapter.rank:
            module.save_pretrained(folder / "model")
            paths.readable(folder / "model")
            self.pipe.save_pretrained(folder / "model")
            return f"saved all weights to {folder / 'model'}"
        with quiet():
            module.save_pretrained(folder)
            paths.readable(folder / "adapter_model.safetensors")
            module.load_adapter(str(folder), adapter_name="check")
        try:
            for key, layer in self.layers().items():
                parts: list[Any] = [layer.lora_A, layer.lora_B]
                parts += [layer.lora_magnitude_vector] if self.adapter.dora else []
                if layer.scaling["check"] != layer.scaling["default"] or not all(
                        torch.equal(part["check"].weight, part["default"].weight.to(part["check"].weight))
                        for part in parts):  # inputs take the model's dtype
                    raise RuntimeError(f"{folder} does not give {key} back as it was saved")
        finally:
            with quiet():
                module.delete_adapter("check")
            module.set_adapter("default")
        return f"saved {folder / 'adapter_model.safetensors'}; read back by load_adapter: same weights, same scale"
