"""Tiny random pipelines for `flowgrpo check` and tests: real diffusers classes with a few thousand weights, built in
code. Nothing is loaded.

Every factory takes a seed and returns (pipeline, arguments of its call besides prompts): see the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowgrpo.errors import UserError, nearest

Factory = Callable[[int], tuple[Any, dict[str, Any]]]


# Classes that cannot be driven, with the reason that `check` prints.
UNFIT = ("FluxInpaintPipeline", "HiDreamImagePipeline", "OmniGenPipeline", "QwenImageInpaintPipeline",
         "StableDiffusionInpaintPipeline (4 channels)", "StableDiffusionInstructPix2PixPipeline")


def factories() -> dict[str, Factory]:
    """Return all factories by the name of their pipeline class."""
    from flowgrpo.tools.check.tiny import images, unets, videos

    return images.FACTORIES | images.NEWEST | unets.FACTORIES | unets.CONDITIONED | videos.FACTORIES


def make(name: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Build a tiny random instance of the pipeline class `name`.
    Raises UserError for a class without a factory."""
    known = factories()
    if name not in known:
        raise UserError(f"no tiny {name!r} can be built{nearest(name, sorted(known))}")
    return known[name](seed)
