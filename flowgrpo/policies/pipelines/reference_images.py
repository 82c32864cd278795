"""Reference pictures of prompts, several of them in one call of a pipeline: does each prompt see its own?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from flowgrpo.errors import UserError
from flowgrpo.samplers.denoiser import Denoiser, EncodedPrompts
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.scheduler import Segment

# Arguments of a pipeline's call that belong to a prompt.
PICTURES = ("image", "image_reference", "mask_image", "control_image", "last_image", "video")
SHARE = 0.1  # of the difference that another picture makes: what company may change, in half precision


class Pictured(Protocol):
    """Policy whose pipeline may take pictures; given: those of its `call`, accepts: the call's arguments."""

    pipe: Any
    given: dict[str, Any]

    @property
    def accepts(self) -> Collection[str]: ...


class PicturedPrompts(EncodedPrompts, Protocol):
    """Prompts with their pictures, by the name of the pipeline's argument: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def inputs(self) -> dict[str, list[Any]]: ...


P = TypeVar("P", bound=PicturedPrompts)


class Pipeline(Denoiser[P], Protocol[P]):
    """Policy that encodes prompts with pictures and runs them; stock: the pipeline's own scheduler."""

    stock: Any
    strength: float
    guidance: float

    @property
    def encode_prompt(self) -> Callable[[P, float], P]: ...


def pictures_of(policy: Pictured, count: int, images: Sequence[Any] | None = None) -> dict[str, list[Any]]:
    """Return the reference pictures of `count` prompts by the name of the pipeline's argument.

    images: of each prompt a picture, its file, or None for that of the policy's `call`. UserError where the pipeline
    takes none.
    """
    from PIL import Image

    pictures = {name: [value] * count for name, value in policy.given.items()}
    if any(image is not None for image in images or ()):
        if "image" not in policy.accepts:
            raise UserError(f"{type(policy.pipe).__name__} takes no image, but a prompt brings one: leave it out")
        opened = [Image.open(picture).convert("RGB") if isinstance(picture, (str, Path)) else picture
                  for picture in images or ()]
        pictures["image"] = [policy.given.get("image") if picture is None else picture for picture in opened]
        if any(picture is None for picture in pictures["image"]):
            raise UserError("some prompts of a batch bring an `image` and others do not: give all one, or none")
    return pictures


def stay_apart(policy: Pipeline[P], twice: P) -> bool:
    """Return True if a step of two prompts with separate pictures gives the result of each prompt alone.

    Some pipelines (Flux2) silently take a list for several references of one prompt.
    twice: one prompt, two times, not yet encoded.
    """
    pair = replace(twice, inputs={name: [first, other(second)] for name, (first, second) in twice.inputs.items()})
    grid, timesteps = make_grid("shifted", 2, 1.0, policy.stock, policy.strength)
    task = Segment(grid, range(1), timesteps=timesteps)

    def step(conditioning: P) -> torch.Tensor:
        seeds = [7] * len(conditioning.prompts)
        return policy.run(task, policy.encode_prompt(conditioning, policy.guidance), None, policy.generators(seeds))[0]

    together, alone = step(pair), [step(pair.rows(torch.tensor([i]))) for i in range(2)]
    if together.shape[1:] != alone[0].shape[1:] or alone[0].shape != alone[1].shape:
        return False
    return bool((together - torch.cat(alone)).abs().max() <= SHARE * (alone[0] - alone[1]).abs().max())


def other(picture: Any) -> Any:
    """Return a different picture of the same size: its negative; of frames or several pictures, of each."""
    from PIL import Image, ImageOps

    if isinstance(picture, Image.Image):
        return ImageOps.invert(picture.convert("RGB"))
    if isinstance(picture, (list, tuple)):
        return [other(part) for part in picture]
    return picture.flip(-1) if torch.is_tensor(picture) else picture[..., ::-1]
