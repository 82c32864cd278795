"""ControlNets, adapters and inpainting over the parts of tiny pipelines: rows of derived.py.

A row is (class without "Pipeline" whose parts it has, further parts or None, further arguments of its call).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers

from flowgrpo.tools.check.tiny import unets
from flowgrpo.tools.check.tiny.parts import image, lively, still_autoencoder

Parts = dict[str, Any]


def changed(**configurations: dict[str, Any]) -> Callable[[Parts], Parts]:
    """Return a function that builds named parts anew, each with these values over its own configuration."""
    def build(parts: Parts) -> Parts:
        return {name: lively(type(parts[name])(**{key: value for key, value in parts[name].config.items()
                                                  if not key.startswith("_")} | values))
                for name, values in configurations.items()}
    return build


def like(kind: str, denoiser: str = "transformer", **values: Any) -> Callable[[Parts], Parts]:
    """Return a function that builds a ControlNet of a class with the configuration of the denoiser, as far as both have
    it; its layers that start at zero are filled, so that it has an effect."""
    def build(parts: Parts) -> Parts:
        cls: Any = getattr(diffusers, kind)
        known = inspect.signature(cls.__init__).parameters
        network = lively(cls(**{name: value for name, value in parts[denoiser].config.items()
                                if name in known and not name.startswith("_")} | values))
        for parameter in network.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.data.normal_(std=0.3)
        return {"controlnet": network}
    return build


def still(parts: Parts) -> Parts:
    """An autoencoder whose draws have next to no deviation."""
    return {"vae": still_autoencoder()}


def both(*builders: Callable[[Parts], Parts]) -> Callable[[Parts], Parts]:
    return lambda parts: {name: part for build in builders for name, part in build(parts).items()}


NINE = changed(unet={"in_channels": 9})
WIDER = both(still, changed(transformer={"in_channels": 32, "out_channels": 16}))
MASKED = {"image": unets.large_image(), "mask_image": (unets.large_image(1) > 0.5).float(), "strength": 1.0}
STARTED = {"image": image(), "control_image": image(), "strength": 0.9}
UNION = like("ControlNetUnionModel", "unet", conditioning_embedding_out_channels=(8, 8), num_trans_channel=8,
             num_trans_head=2, num_proj_channel=8)
UNION_CALL = {"control_image": [image()], "control_mode": [0]}
ROWS: dict[str, tuple[Any, ...]] = {
    "StableDiffusionControlNetImg2Img": ("StableDiffusionControlNet", None, STARTED),
    "StableDiffusionControlNetPAG": ("StableDiffusionControlNet",),
    "StableDiffusionControlNetInpaint": ("StableDiffusionControlNet", NINE, MASKED | {"control_image": image()}),
    "StableDiffusionPAGInpaint": ("StableDiffusionInpaint",),
    "StableDiffusionXLInpaint": ("StableDiffusionXL", NINE, MASKED),
    "StableDiffusionXLPAGInpaint": ("StableDiffusionXL", NINE, MASKED),
    "StableDiffusionXLControlNetImg2Img": ("StableDiffusionXLControlNet", None, STARTED),
    "StableDiffusionXLControlNetPAG": ("StableDiffusionXLControlNet",),
    "StableDiffusionXLControlNetPAGImg2Img": ("StableDiffusionXLControlNet", None, STARTED),
    "StableDiffusionXLControlNetInpaint": ("StableDiffusionXLControlNet", NINE, MASKED | {"control_image": image()}),
    "StableDiffusionXLControlNetUnion": ("StableDiffusionXL", UNION, UNION_CALL),
    "StableDiffusionXLControlNetUnionImg2Img": ("StableDiffusionXL", UNION, UNION_CALL | {
        "image": image(), "strength": 0.9}),
    "FluxControlNetImg2Img": ("FluxControlNet", None, STARTED),
    "FluxControl": ("Flux", WIDER, {"control_image": image()}),
    "FluxControlImg2Img": ("Flux", WIDER, STARTED),
    "QwenImageControlNet": ("QwenImage", like("QwenImageControlNetModel"), {"control_image": image()}),
    "CogView4Control": ("CogView4", both(still, changed(transformer={"in_channels": 8})), {"control_image": image()}),
}
