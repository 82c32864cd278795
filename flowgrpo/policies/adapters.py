"""The trainable weights of a policy: a LoRA or all of the denoiser, its reference, its moving average, its files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from flowgrpo.errors import UserError
from flowgrpo.log import quiet

LORA_FILE = "pytorch_lora_weights.safetensors"


class Weights:
    """Trainable parameters of a pipeline's denoisers.

    With `adapter.rank` >= 1 a LoRA by peft, in fp32, its A gaussian and its B zero, so that it starts as the base. With
    rank 0 all of the denoisers' weights, in fp32, and the first weights are kept on the CPU as the reference.
    """

    def __init__(self, pipe, denoisers: dict[str, torch.nn.Module], adapter):
        self.pipe, self.denoisers, self.adapter = pipe, denoisers, adapter
        for name, module in denoisers.items():
            self._add_lora(name, module) if adapter.rank else module.float().requires_grad_(True)
        self.named = {f"{name}.{key}": parameter for name, module in denoisers.items()
                      for key, parameter in module.named_parameters() if parameter.requires_grad}
        self._first = None if adapter.rank else {k: p.detach().cpu().clone() for k, p in self.named.items()}

    def _add_lora(self, name: str, module: torch.nn.Module) -> None:
        from peft import LoraConfig

        if getattr(module, "peft_config", None):
            raise UserError(f"the {name} has an adapter already ({', '.join(module.peft_config)}): fuse or unload it")
        rank, targets = self.adapter.rank, self.adapter.targets
        found = sorted(key for key, m in module.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))
                       and any(key == t or key.endswith("." + t) for t in targets))
        if not found:
            names = sorted({key.split(".")[-1] for key, m in module.named_modules() if isinstance(m, torch.nn.Linear)})
            raise UserError(f"adapter.targets {targets} match no module of the {name}: its linear layers are called "
                            f"{', '.join(names)}")
        module.add_adapter(LoraConfig(r=rank, lora_alpha=self.adapter.alpha or 2 * rank, target_modules=found,
                                      init_lora_weights="gaussian"))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.named.values())

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Inside, the denoisers are the base model."""
        if self._first is not None:
            with self.swapped(self._first):
                yield
            return
        for module in self.denoisers.values():
            module.disable_adapters()
        try:
            yield
        finally:
            for module in self.denoisers.values():
                module.enable_adapters()

    @contextlib.contextmanager
    def swapped(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the parameters hold `values` (a moving average, the first weights)."""
        kept = {key: parameter.detach().clone() for key, parameter in self.named.items()}
        self.load(values)
        try:
            yield
        finally:
            self.load(kept)

    @torch.no_grad()
    def load(self, values: dict[str, torch.Tensor]) -> None:
        for key, parameter in self.named.items():
            parameter.copy_(values[key])

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {key: parameter.detach().cpu().clone() for key, parameter in self.named.items()}

    def save(self, folder: Path) -> str:
        """Write what stock diffusers loads, read it back and compare. Returns a sentence for the log.

        A LoRA goes to `pytorch_lora_weights.safetensors` with rank, alpha and targets in its metadata; without them
        `load_lora_weights` would rebuild it with a silently wrong scale. All weights go to a folder per denoiser.
        """
        if not self.adapter.rank:
            for name, module in self.denoisers.items():
                module.save_pretrained(folder / name, safe_serialization=True)
            return f"saved all weights of {', '.join(self.denoisers)} to {folder}"
        from peft.utils import get_peft_model_state_dict

        layers, metadata = {}, {}
        for name, module in self.denoisers.items():
            layers[f"{name}_lora_layers"] = get_peft_model_state_dict(module)
            metadata[f"{name}_lora_adapter_metadata"] = module.peft_config["default"].to_dict()
        type(self.pipe).save_lora_weights(folder, **layers, **metadata)
        self._verify(folder)
        return f"saved {folder / LORA_FILE}; read back by load_lora_weights: same weights, same scale"

    def _verify(self, folder: Path) -> None:
        """Load the file as a user would, beside the live adapter, and compare every weight and scale."""
        from peft.tuners.lora import LoraLayer

        try:
            with quiet():  # a second adapter, and an absent one for the text encoders, are what is wanted here
                self.pipe.load_lora_weights(folder, adapter_name="check")
            for module in self.denoisers.values():
                for key, layer in module.named_modules():
                    if not isinstance(layer, LoraLayer):
                        continue
                    # diffusers casts what it loads to the denoiser's dtype.
                    sides = [(side["check"].weight, side["default"].weight) for side in (layer.lora_A, layer.lora_B)]
                    if layer.scaling["check"] != layer.scaling["default"] or \
                            not all(torch.equal(loaded, live.to(loaded.dtype)) for loaded, live in sides):
                        raise RuntimeError(f"{folder / LORA_FILE} does not give {key} back as it was saved")
        finally:
            with quiet():
                self.pipe.delete_adapters("check")
            for module in self.denoisers.values():
                module.set_adapter("default")
