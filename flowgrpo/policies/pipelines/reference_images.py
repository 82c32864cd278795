"""Reference pictures of prompts, several of them in one call of a pipeline: does each prompt see its own?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.scheduler import Segment

# Arguments of a pipeline's call that belong to a prompt.
PICTURES = ("image", "image_reference", "mask_image", "control_image", "last_image", "video")
SHARE = 0.1  # of the difference that another picture makes: what company may change, in half precision


def pictures_of(policy, count: int, images: Sequence[Any] | None = None) -> dict[str, list[Any]]:
    """The reference pictures of `count` prompts by the name of the pipeline's argument.

    images: of each prompt a picture, its file, or None for that of the policy's `call`. UserError where the pipeline
    takes none.
    """
    from PIL import Image

    found = {name: [value] * count for name, value in policy.given.items()}
    if any(image is not None for image in images or ()):
        if "image" not in policy.accepts:
            raise UserError(f"{type(policy.pipe).__name__} takes no image, but a prompt brings one: leave it out")
        opened = [Image.open(each).convert("RGB") if isinstance(each, (str, Path)) else each for each in images]
        found["image"] = [policy.given.get("image") if each is None else each for each in opened]
        if any(each is None for each in found["image"]):
            raise UserError("some prompts of a batch bring an `image` and others do not: give all one, or none")
    return found


def stay_apart(policy, twice) -> bool:
    """Return True if a step of two prompts with separate pictures gives the result of each prompt alone.

    Some pipelines (Flux2) silently take a list for several references of one prompt.
    twice: the Conditioning of one prompt, two times, not yet encoded.
    """
    pair = replace(twice, inputs={name: [first, other(second)] for name, (first, second) in twice.inputs.items()})
    grid, timesteps = make_grid("shifted", 2, 1.0, policy.stock, policy.strength)
    task = Segment(grid, range(1), timesteps=timesteps)

    def step(conditioning) -> torch.Tensor:
        seeds = [7] * len(conditioning.prompts)
        return policy.run(task, policy.encode_prompt(conditioning, policy.guidance), None, policy.generators(seeds))[0]

    together, alone = step(pair), [step(pair.rows(torch.tensor([i]))) for i in range(2)]
    if together.shape[1:] != alone[0].shape[1:] or alone[0].shape != alone[1].shape:
        return False
    return bool((together - torch.cat(alone)).abs().max() <= SHARE * (alone[0] - alone[1]).abs().max())


def other(picture: Any) -> Any:
    """A picture of the same size that looks different: its negative; of frames or several pictures, of each."""
    from PIL import Image, ImageOps

    if isinstance(picture, Image.Image):
        return ImageOps.invert(picture.convert("RGB"))
    if isinstance(picture, (list, tuple)):
        return [other(each) for each in picture]
    return picture.flip(-1) if torch.is_tensor(picture) else picture[..., ::-1]
