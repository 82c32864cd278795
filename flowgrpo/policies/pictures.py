"""Reference pictures of several prompts in one call of a pipeline: does each prompt see its own?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flowgrpo.samplers.rollout import make_grid
from flowgrpo.samplers.scheduler import Task

# Arguments of a pipeline's call that belong to a prompt.
PICTURES = ("image", "image_reference", "mask_image", "control_image", "last_image", "video")
SHARE = 0.1  # of the difference that another picture makes: what company may change, in half precision


def stay_apart(policy, twice) -> bool:
    """Whether one denoising step of two prompts, each with its own picture, gives what each gives alone.

    Some pipelines (Flux2) take a list for several references of one prompt, and say nothing.
    twice: the Conditioning of one prompt, two times, not yet encoded.
    """
    pair = replace(twice, inputs={name: [first, other(second)] for name, (first, second) in twice.inputs.items()})
    grid, timesteps = make_grid("shifted", 2, 1.0, policy.stock, policy.strength)
    task = Task(grid, range(1), timesteps=timesteps)

    def step(conditioning) -> torch.Tensor:
        seeds = [7] * len(conditioning.prompts)
        return policy.run(task, policy.encoded(conditioning), None, policy.generators(seeds))[0]

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
