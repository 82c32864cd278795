"""Calls of a stock pipeline: for one image, and for several in one call that equal what single calls give."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo.config.sections import STEPS
from flowgrpo.data.pictures import Clip
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.policies.checkpoints import config_of
from flowgrpo.policies.pipelines import edits, frames, prompt_inputs
from flowgrpo.policies.pipelines.call import guidance_argument, seeded
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.samplers.grids import require_steps
from flowgrpo.starter import CALLS, EVAL, RATES

SHARE = 0.1  # maximum effect of the batch in half precision, as a share of the difference between two pictures
# Errors of a pipeline that takes one prompt; any other error is raised again by drawing singly.
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def call_arguments(model: str, lora: Path | None, steps: int | None = None, guidance: float | None = None
                   ) -> dict[str, Any]:
    """Return the arguments of the pipeline's calls besides prompt and seed. The guidance scale is `guidance`, whatever
    the pipeline calls it, and the frames per second are `fps`.

    lora: a run's `eval` and `picture` set what is absent; otherwise a starter's card, or the pipeline, does.
    Raises UserError for more than STEPS steps, and for a guidance that is not finite.
    """
    if steps is not None and steps > STEPS:
        raise UserError(f"--steps: got {steps}, expected {STEPS} at most")
    if guidance is not None and not math.isfinite(guidance):
        raise UserError(f"--guidance: got {guidance}, expected a finite number")
    arguments: dict[str, Any] = EVAL.get(model, {}) | CALLS.get(model, {})
    config, fps = config_of(lora), RATES.get(model)
    if config is not None:
        arguments |= config.eval_call | {"num_inference_steps": config.eval.steps, "guidance": config.eval.guidance}
        fps = config.fps
    given = {"num_inference_steps": steps, "guidance": guidance, "fps": fps}
    return arguments | {key: value for key, value in given.items() if value is not None}


@torch.no_grad()
def draw_one(pipe: Any, prompt: Prompt, seed: int, arguments: dict[str, Any], negative: str = "") -> torch.Tensor:
    """Draw a picture [3, H, W] or clip [F, 3, H, W] in [0, 1], by one pipeline call with noise of that seed.

    arguments: further ones of the call, from `call_arguments`. negative: for a prompt without its own.
    Raises UserError for a pipeline with another output, and for a missing input file.
    """
    if (editing := edits.attached(pipe)) is not None:
        return editing.draw([prompt], [seed], arguments, negative)[0]
    generator, image = torch.Generator().manual_seed(seed), _brought(pipe, prompt, arguments)
    with seeded(pipe.scheduler, generator), _picture_missed(pipe, arguments | image):
        pictures = call(pipe, arguments, prompt=prompt.text, generator=generator, output_type="pt", **image,
                    negative_prompt=negative if prompt.negative is None else prompt.negative)
    if pictures.ndim not in (4, 5):
        raise UserError(f"{type(pipe).__name__} gives {list(pictures.shape)}: only images [1, 3, H, W] and clips "
                        "[1, F, 3, H, W] can be written")
    return pictures[0].float().cpu()


def call(pipe: Any, arguments: dict[str, Any], **inputs: Any) -> torch.Tensor:
    """Call the pipeline and return its output. arguments: result of `call_arguments`. inputs: prompts, generators
    and the like. Arguments that the pipeline does not take are dropped."""
    require_steps(pipe.scheduler, arguments.get("num_inference_steps"))
    accepted, merged = inspect.signature(pipe.__call__).parameters, arguments | inputs
    if "fps" in arguments and (name := frames.taken(type(pipe))):
        merged[name] = arguments["fps"]
    if "guidance" in arguments:
        merged[guidance_argument(accepted, arguments, denoisers(pipe).values())] = arguments["guidance"]
    return pipe(**{key: value for key, value in merged.items() if key in accepted}, return_dict=False)[0]


def _brought(pipe: Any, prompt: Prompt, call: dict[str, Any]) -> dict[str, Any]:
    """Return what a prompt brings beside its text as arguments of a call.
    Raises UserError for an unreadable file, and for one that the pipeline does not take."""
    values = prompt_inputs.decoded(pipe, prompt.inputs, call) if prompt.brings is not None else {}
    return {name: value.frames if isinstance(value, Clip) else value for name, value in values.items()}


@contextlib.contextmanager
def _picture_missed(pipe: Any, given: dict[str, Any]) -> Iterator[None]:
    """Context manager: if a call without a picture fails on a pipeline that takes one, name that as a possible cause.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        if "image" in given or "image" not in inspect.signature(pipe.__call__).parameters:
            raise
        raise UserError(f"{type(pipe).__name__} takes an image, and fails without one ({' '.join(str(error).split())}):"
                        " give `sample` an --image FILE, or every prompt of the file an `image`") from error


class Together:
    """Draw pictures in batched calls. The first call tests the pipeline: one of its pictures is also drawn singly.
    `works` is None before that, then True or False."""

    def __init__(self) -> None:
        self.works: bool | None = None

    def draw(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
             negative: str) -> list[torch.Tensor]:
        """Draw pictures [3, H, W] or clips [F, 3, H, W] in [0, 1], one per prompt and seed. They equal those of
        `draw_one` up to rounding of other matrix shapes. Prompts that bring files are drawn singly.
        Raises UserError if the device runs out of memory."""
        if (editing := edits.attached(pipe)) is not None and len(prompts) > 1:
            return list(editing.draw(prompts, seeds, arguments, negative))
        if len(prompts) < 2 or self.works is False or any(prompt.brings for prompt in prompts):
            return [draw_one(pipe, prompt, seed, arguments, negative) for prompt, seed in zip(prompts, seeds)]
        try:
            if self.works is None:
                return self._tried(pipe, prompts, seeds, arguments, negative)
            return list(_drawn(pipe, prompts, seeds, arguments, negative))
        except torch.OutOfMemoryError as error:
            raise UserError(f"{len(prompts)} images in one call do not fit into the device's memory: give a --batch "
                            f"below {len(prompts)}") from error

    def _tried(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
               negative: str) -> list[torch.Tensor]:
        try:
            pictures = list(_drawn(pipe, prompts, seeds, arguments, negative))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            pictures = []
        # The second picture: the first would match even if all rows had its noise or prompt.
        alone = draw_one(pipe, prompts[1], seeds[1], arguments, negative)
        self.works = bool(pictures) and _same(pictures, alone)
        if self.works:
            return pictures
        tqdm.write(f"{type(pipe).__name__} does not draw several prompts in one call as it draws each: one at a time")
        return [alone if i == 1 else draw_one(pipe, prompt, seed, arguments, negative)
                for i, (prompt, seed) in enumerate(zip(prompts, seeds))]


def _same(pictures: Sequence[torch.Tensor], alone: torch.Tensor) -> bool:
    if pictures[1].shape != alone.shape:
        return False
    return bool((pictures[1] - alone).abs().mean() <= SHARE * (pictures[1] - pictures[0]).abs().mean())


@torch.no_grad()
def _drawn(pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
           negative: str) -> torch.Tensor:
    """Return the output of one call, [B, ...].
    Raises ValueError unless it has one picture or clip per prompt."""
    pictures = call(pipe, arguments, prompt=[prompt.text for prompt in prompts], output_type="pt",
                    generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                    negative_prompt=[negative if prompt.negative is None else prompt.negative for prompt in prompts])
    if pictures.ndim not in (4, 5) or len(pictures) != len(prompts):
        raise ValueError(f"expected {len(prompts)} images or clips, got {list(pictures.shape)}")
    return pictures.float().cpu()
