"""Pictures of several prompts in one call of a pipeline: check that each prompt sees its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from flowgrpo.data.pictures import Clip
from flowgrpo.policies.pipelines.prompt_inputs import SHARED
from flowgrpo.samplers.denoiser import Denoiser, EncodedPrompts
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.scheduler import Segment

SHARE = 0.1  # of the difference that another picture makes: what company may change, in half precision


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


def stay_apart(policy: Pipeline[P], twice: P) -> bool:
    """Return True if a step of two prompts with separate pictures gives the result of each prompt alone.

    Some pipelines (Flux2) silently take a list for several references of one prompt.
    twice: one prompt, two times, not yet encoded. What is shared (`SHARED`) never differs within a call.
    """
    if not set(twice.inputs) - set(SHARED):
        return True
    pair = replace(twice, inputs={name: [first, second if name in SHARED else other(second)]
                                  for name, (first, second) in twice.inputs.items()})
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
    if isinstance(picture, Clip):
        return other(picture.frames)
    if isinstance(picture, (list, tuple)):
        return [other(part) for part in picture]
    return picture.flip(-1) if torch.is_tensor(picture) else picture[..., ::-1]
