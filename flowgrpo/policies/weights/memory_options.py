"""Memory options: a quantised denoiser, offloaded text encoders, images decoded in parts.

The section `memory` of a recipe sets them. The denoiser is quantised while it is read, so it is never in memory as a
whole. A LoRA on it is in fp32, and its file is the same as ever.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.weights.host_weights import HostWeights

PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}


def require_quantiser(weights: str) -> None:
    """Raise UserError if the package for such weights is missing."""
    if weights != "full":
        require_package(f"memory.weights is {weights!r}", PACKAGES[weights])


def require_package(setting: str, package: str) -> None:
    """Raise UserError if a package is not installed; setting: the option that needs it, with its value."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{setting}, which needs {package}: pip install 'flowgrpo[{package}]'")


def quantisation(names: Iterable[str], weights: str, dtype: torch.dtype) -> Any:
    """Return diffusers' quantisation config for the components `names`; None for full weights.

    int8: integers with a scale per row of a weight, by torchao. fp8: floats of 4 bits of exponent and 3 of mantissa
    (e4m3) with a scale per row, by torchao; products are in `dtype`. nf4: 4 bits of a normal distribution's quantiles
    with a scale per 64 values (QLoRA, 2305.14314), by bitsandbytes, computed with in `dtype`.
    """
    if weights == "full":
        return None
    from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig

    form: Any
    if weights in ("int8", "fp8"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        # The settings of torch's compiler are global to the process.
        kind = Int8WeightOnlyConfig if weights == "int8" else Float8WeightOnlyConfig
        form = TorchAoConfig(kind(set_inductor_config=False))
    else:
        form = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return PipelineQuantizationConfig(quant_mapping=dict.fromkeys(names, form))


class Offloaded:
    """Frozen modules that leave the device for `away` while they have nothing to do; with `away` None they stay.

    Their weights stay in the CPU's memory, pinned for a GPU, and to leave drops the copies on the device.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: torch.device, away: str | None, here: bool):
        """here: they are on the device now."""
        self.device, self.away, self.here = device, away, here
        self._weights = HostWeights(modules, device)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return self._weights.modules

    def come(self) -> None:
        """Copy the modules to the device; the host does not wait for the copies."""
        if self.here:
            return
        self.here = True
        self._weights.come()
        for module in self.modules:
            module.to(self.device)  # quantised weights, which know how they are moved

    def offload(self) -> None:
        """Drop the copies on the device; nothing is copied back."""
        if not self.here or self.away is None:
            return
        self._weights.offload()
        self.here = False
        for module in self.modules:
            module.to(self.away)  # what was quantised, or added since


class Encoders(Offloaded):
    """Text encoders of a pipeline, offloaded to the device `away` unless a prompt is encoded; with None they stay.

    They come when a prompt is encoded and leave before other work, so a series of prompts moves them once.
    """

    def __init__(self, pipe: Any, device: torch.device, away: str | None, later: Iterable[str] = ()):
        """later: the components that come to the device in another way."""
        later = set(later)
        self.beside: HostWeights | None = None  # weights that leave while encoders are on the device
        named = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)
                 and name not in later}
        super().__init__([part for name, part in named.items() if name.startswith("text_encoder")], device, away,
                         here=away is None)
        if away is None and not later:
            pipe.to(device)  # it knows which quantised parts may be moved
        for part in named.values() if away is not None or later else ():
            if away is None or part not in self.modules:
                part.to(device)

    def attend(self, pipe: Any) -> None:
        """Make the stock pipeline's own calls bring the encoders for their prompts, and offload them afterwards."""
        encode = pipe.encode_prompt

        @functools.wraps(encode)
        def attended(*args: Any, **kwargs: Any) -> Any:
            self.come()
            try:
                return encode(*args, **kwargs)
            finally:
                self.offload()

        pipe.encode_prompt = attended

    def come(self) -> None:
        """Copy the encoders to the device, where `beside` gives them room."""
        if self.beside is not None and not self.here:
            self.beside.offload()
        super().come()


ONE_BY_ONE = ("AutoencoderKLHunyuanVideo15",)  # in diffusers 0.42 their attention mask serves one clip alone


def decode_in_parts(pipe: Any, how: str) -> None:
    """Make the pipeline decode image by image ("sliced"), or also tile by tile ("tiled").

    With "whole" nothing changes, but for autoencoders that cannot decode several images. Raises UserError if its
    autoencoder cannot.
    """
    vaes: list[Any] = [part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)
                       and ("vae" in name or name == "vqgan")]
    if how == "whole" and not any(type(vae).__name__ in ONE_BY_ONE for vae in vaes):
        return
    for option in ["slicing"] + ["tiling"] * (how == "tiled"):
        able = [vae for vae in vaes if hasattr(vae, f"use_{option}")]  # all have the method, but some raise in it
        if not able:
            raise UserError(f"memory.vae is {how!r}, but the autoencoder of {type(pipe).__name__} has no {option}: use "
                            f"{'whole' if option == 'slicing' else 'sliced'}")
        for vae in able:
            getattr(vae, f"enable_{option}")()
            if type(vae).__name__ == "AutoencoderTiny":  # it assumes images 8 times the size of its latents
                factor = vae.config.upsampling_scaling_factor ** (len(vae.config.num_decoder_blocks) - 1)
                vae.spatial_scale_factor, vae.tile_latent_min_size = factor, vae.tile_sample_min_size // factor
