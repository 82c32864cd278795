"""Output of a pipeline: channels of its images; number and rate of the frames of its clips."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.policies import sources

if TYPE_CHECKING:
    from torch import Tensor

# Attributes of pipelines: frames of one latent frame.
FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
IRREGULAR = ("AllegroPipeline",)  # their frames are no 1 more than a multiple
DROPPED = {"HunyuanVideoImageToVideoPipeline": 4}  # first frames, those of its image, that some of its models cut off
ARGUMENTS = ("fps", "frame_rate", "target_fps")  # of a pipeline's call: the rate that the model is told
# Frames per second of the models whose pipelines are not told, by the beginning of the pipeline's name; the longest
# beginning counts. Of the models' own scripts, else of diffusers' examples.
RATES = {"Allegro": 15, "AnimateDiff": 8, "AnyFlow": 16, "ChronoEdit": 16, "CogVideoX": 8, "ConsisID": 8,
         "Cosmos2_5": 16, "EasyAnimate": 8, "Helios": 24, "Hunyuan": 24, "Kandinsky": 24, "Latte": 8, "Lucy": 24,
         "Mochi": 30, "MotifVideo": 24, "PIA": 8, "SanaImageToVideo": 16, "SanaVideo": 16, "SkyReels": 24,
         "TextToVideoSD": 8, "TextToVideoZero": 4, "VideoToVideoSD": 8, "Wan": 16, "WanAnimate": 30}
USUAL = 16.0  # of a pipeline that is not in the table
DENSE, COGVIDEOX_15 = 24.0, 16.0  # of Wan 2.2's dense model and of CogVideoX 1.5, which have the pipelines of others


def call_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(cls.__call__)).parameters


def fps_argument(cls: type) -> str | None:
    """Return the argument of a pipeline class's call that takes the frames per second; None if it has none."""
    return next((name for name in ARGUMENTS if name in call_parameters(cls)), None)


def is_video(cls: type) -> bool:
    """Return True for a pipeline class of clips, by the arguments of its call."""
    return any("frame" in name or "video" in name for name in call_parameters(cls))


def with_fps(cls: type, call: Mapping[str, Any], fps: float | None) -> dict[str, Any]:
    """Return the arguments of a pipeline's call with the frames per second, where it takes them.

    fps: `image.fps`. Raises UserError for a pipeline of images.
    """
    if fps is None:
        return dict(call)
    if not is_video(cls):
        raise UserError(f"image.fps is {fps:g}, but {cls.__name__} generates images: leave it out")
    name = fps_argument(cls)
    return dict(call) | ({name: fps} if name else {})


def rate(cls: type, config: Mapping[str, Any], call: Mapping[str, Any], fps: float | None = None) -> float:
    """Return the frames per second of a pipeline's clips.

    That is `image.fps`, else the call's own argument or its default, else the model's in RATES.
    config: of the pipeline and of its denoiser. fps: `image.fps`.
    """
    if (name := fps_argument(cls)) is not None:
        return float(fps or call.get(name) or call_parameters(cls)[name].default)
    if fps is not None:
        return float(fps)
    if config.get("expand_timesteps"):
        return DENSE
    if cls.__name__.startswith("CogVideoX") and config.get("patch_size_t"):
        return COGVIDEOX_15
    known = [begin for begin in RATES if cls.__name__.startswith(begin)]
    return float(RATES[max(known, key=len)]) if known else USUAL


def rate_of(pipe: Any, call: Mapping[str, Any], fps: float | None = None) -> float:
    denoiser = getattr(pipe, "transformer", None)
    return rate(type(pipe), {**getattr(denoiser, "config", {}), **pipe.config}, call, fps)


@contextlib.contextmanager
def clips_of(policy: Any, frames: int | None) -> Iterator[None]:
    """Context manager: the policy's clips have so many frames; None: those of its call."""
    if frames is None:
        yield
        return
    before = dict(policy.call)
    policy.call["num_frames"] = frames
    try:
        yield
    finally:
        policy.call.clear()
        policy.call.update(before)


def require(key: str, count: int, pipe: Any) -> None:
    """Raise UserError for a number of frames that a pipeline does not make.

    key: of the configuration. pipe: a pipeline; or (its class, frames of one latent frame) before it is loaded.
    """
    cls, every = pipe if isinstance(pipe, tuple) else (
        type(pipe), next((factor for name in FACTORS if (factor := getattr(pipe, name, None))), 1))
    takes = call_parameters(cls)
    if "num_frames" not in takes or "video" in takes:
        if key == "eval.frames":
            why = "has the frames of its source video" if "video" in takes else "takes no number of frames"
            raise UserError(f"{key} is {count}, but {cls.__name__} {why}: leave it out (expected the default, None)")
        return
    if cls.__name__ not in IRREGULAR and (count - 1) % every:
        below = count - (count - 1) % every
        raise UserError(f"{key} is {count}, but {cls.__name__} takes 1 more than a multiple of {every}: expected "
                        f"{below} or {below + every}")


def ahead(folder: Path) -> tuple[Any, int] | None:
    """Return (class, frames of one latent frame) of the pipeline in a folder, before it is loaded; None if unknown."""
    from flowgrpo.policies.pipelines import modular  # imports torch, which the page of a report does not need

    cls = modular.class_of(sources.described(sources.index_file(folder)).get("_class_name"))
    vae = sources.described(folder / "vae" / "config.json")
    if cls is None or not vae:
        return None
    halved = vae.get("temperal_downsample")  # diffusers' own spelling
    return cls, vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio") or (
        2 ** sum(halved) if isinstance(halved, list) else 1)


def require_made(count: int | None, made: Any, pipe: Any, height: int | None = None, width: int | None = None) -> None:
    """Raise UserError for images [B, 3, H, W] or clips [B, F, 3, H, W] that are not as their call asked: several
    pipelines round sizes and numbers of frames, and only log it. None: any."""
    name = type(pipe).__name__
    if count is not None and made.ndim == 5 and made.shape[1] not in (count, count - DROPPED.get(name, 0)):
        raise UserError(f"image.frames is {count}, but {name} makes clips of "
                        f"{quantity(made.shape[1], 'frame')}: expected {made.shape[1]}")
    sides = {"height": (height or made.shape[-2], made.shape[-2]), "width": (width or made.shape[-1], made.shape[-1])}
    if any(asked != side for asked, side in sides.values()):
        rounded = [2**power for power in range(1, 10) if all(asked >> power << power == side
                                                             for asked, side in sides.values())]
        expected = fitting_sides({"height": height, "width": width}, rounded[-1]) if rounded else \
            " and ".join(f"{key} {side}" for key, (_, side) in sides.items())
        raise UserError(f"image.height x image.width is {' x '.join(str(asked) for asked, _ in sides.values())}, but "
                        f"{name} makes {' x '.join(str(side) for _, side in sides.values())}: expected {expected}")


def fitting_sides(asked: Mapping[str, Any], multiple: int) -> str:
    """Return the multiples around each height and width that is none, in words."""
    around = {key: [side for side in (asked[key] // multiple * multiple, -(-asked[key] // multiple) * multiple) if side]
              for key in ("height", "width") if isinstance(asked.get(key), int) and asked[key] % multiple}
    return " and ".join(f"{key} {' or '.join(map(str, sides))}" for key, sides in around.items())


def rgb(images: Tensor, pipe: Any) -> Tensor:
    """Images or frames [..., C, H, W] in [0, 1] as rewards, guards, grids and files read them, [..., 3, H, W].

    Four channels are composed on white by the fourth, the opacity; one channel is repeated. Gradients pass.
    Raises UserError for any other number of channels.
    """
    channels = images.shape[-3]
    if channels == 3:
        return images
    if channels == 4:
        colours, opacity = images.split([3, 1], -3)
        return colours * opacity + (1 - opacity)
    if channels != 1:
        raise UserError(f"{type(pipe).__name__} makes images of {channels} channels: expected 1 (grey), 3 (RGB) or 4 "
                        "(RGB and opacity)")
    return images.expand(*images.shape[:-3], 3, *images.shape[-2:])
