"""Tiny random pipelines, built in code: real diffusers classes with a few thousand weights, for `flowgrpo check` and
tests. Nothing is loaded from anywhere.

Every factory takes a seed and returns (the pipeline, what its call needs beside prompts): see the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowgrpo.errors import UserError, nearest

Factory = Callable[[int], tuple[Any, dict[str, Any]]]


# Classes that cannot be driven; `check` tells why.
UNFIT = ("FluxInpaintPipeline", "HiDreamImagePipeline", "OmniGenPipeline", "QwenImageInpaintPipeline",
         "StableDiffusionInpaintPipeline (4 channels)")


def factories() -> dict[str, Factory]:
    """The factory of every pipeline class that has one, by the class's name."""
    from flowgrpo.check.tiny import images, unets, videos

    return images.FACTORIES | unets.FACTORIES | videos.FACTORIES


def make(name: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A tiny random instance of the pipeline class `name`. UserError for one without a factory."""
    known = factories()
    if name not in known:
        raise UserError(f"no tiny {name!r} can be built{nearest(name, sorted(known))}")
    return known[name](seed)
