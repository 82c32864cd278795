"""Files that prompts bring, as arguments of a pipeline's call."""

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowgrpo.data import sources
from flowgrpo.data.images import Clip, Size, frame_count, image_size, note_seen, read_image
from flowgrpo.data.inputs import SCALE, Inputs
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import ran_out
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.policies.pipelines.frames import call_parameters, fitting_sides, is_video, with_fps

# What a pipeline raises that refuses its arguments.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError,
            TypeError, ValueError)
# Arguments of a pipeline's call that belong to a prompt.
IMAGES = ("image", "image_reference", "mask_image", "control_image", "last_image", "video", "reference_images",
            "ip_adapter_image")
MASKED = ("image", "mask_image")  # what an inpainting pipeline needs
# Names of pipelines that start from an image, though their call may have a default of None for it.
EDITORS = re.compile(r"Edit|Kontext|Pix2Pix|Img2Img|ImageToVideo")
ALIKE = 0.02  # by which the aspect ratio of a mask may differ from its image's
# Of these a call has one for all its rows: rows with other values need a call of their own.
SHARED = (SCALE, "ip_adapter_image")
PROCESSORS = ("image_processor", "video_processor")  # of pipelines: what scales images for them
# Pipelines that take several reference images of one prompt.
SEVERAL = ("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline", "QwenImageEditPlusPipeline",
           "WanVACEPipeline")


class Pictured(Protocol):
    """Policy whose pipeline may take images.

    given: images of its `call`. frames: number of a source video's; None: all.
    """

    pipe: Any
    call: dict[str, Any]
    given: dict[str, Any]
    frames: int | None


def names(cls: type) -> dict[str, str]:
    """Return the keys of a prompt file that a pipeline class takes, each with the argument of its call."""
    takes = call_parameters(cls)
    steered = "controlnet" in inspect.signature(cls).parameters
    control = "control_image" if "control_image" in takes else "image" if steered and "image" in takes else None
    reference = "image" if "image" in takes else "reference_images" if "reference_images" in takes else None
    known = {"image": reference, "images": reference if cls.__name__ in SEVERAL else None, "control_image": control}
    known |= {key: key for key in ("mask_image", "last_image", "video", "ip_adapter_image", SCALE) if key in takes}
    return {key: argument for key, argument in known.items() if argument}


def needs_image(cls: type) -> bool:
    """Return True for a pipeline class that starts from an image; False where one is optional, as of FLUX.2."""
    argument = names(cls).get("image")
    return argument is not None and bool(
        EDITORS.search(cls.__name__) or call_parameters(cls)[argument].default is inspect.Parameter.empty)


def split_arguments(cls: type, call: Mapping[str, Any],
                    fps: float | None = None) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
    """Return (the number of frames of a source video, the call's other arguments, the images among them).

    `num_frames` stays an argument only where the pipeline takes it, or no video. fps: `image.fps`, which becomes an
    argument where the pipeline takes it.
    """
    call = with_fps(cls, call, fps)
    takes, given = call_parameters(cls), {key: value for key, value in call.items() if key in IMAGES}
    alone = "video" in takes and "num_frames" not in takes
    others = {key: value for key, value in call.items() if key not in given and not (alone and key == "num_frames")}
    return call.get("num_frames"), others, given


def require(cls: type, prompts: Iterable[Prompt], call: Mapping[str, Any] = {}, ip_adapter: bool | None = None,
            last: bool | None = None) -> None:
    """Raise UserError for the first prompt whose files a pipeline class does not take, or that lacks one.

    call: arguments of every call. ip_adapter: True if the pipeline has one; None if that is not known. last: True if
    its model makes videos between a first and a last frame, False if it takes the first alone; None: either, or not
    known. Files are opened, and not decoded.
    """
    known, takes, sizes = names(cls), call_parameters(cls), set[Size]()
    frames, sized = call.get("num_frames"), {"height", "width"} <= {key for key in call if call[key]}
    for prompt in prompts:
        given = prompt.inputs.as_dict()
        for key in given:
            _require_key(cls, known, prompt.inputs, key)
        if {"image", "control_image"} <= given.keys() and known["image"] == known["control_image"]:
            raise prompt.inputs.error("image", f"{cls.__name__} takes a `control_image` and no other image: leave it "
                                      "out")
        _require_present(cls, known, prompt, call, ip_adapter, last)
        shapes = dict[str, Size]()
        for key, path in prompt.inputs.paths():
            shapes[key] = size = _image_size(prompt.inputs, key, path, frames)
            if key == "control_image" and not sized and {"height", "width"} <= takes.keys():
                sizes.add(size)
        if "mask_image" in shapes and "image" in shapes:  # a pipeline scales both to one size
            (height, width), mask = shapes["image"], shapes["mask_image"]
            if not math.isclose(height * mask[1], width * mask[0], rel_tol=ALIKE):
                raise prompt.inputs.error("mask_image", f"the mask has {mask[1]} x {mask[0]} pixels and its image "
                                          f"{width} x {height}: expected the same aspect ratio")
        if len(sizes) > 1:
            raise prompt.inputs.error("control_image", "differs in size from that of other prompts, and the pipeline "
                                      "draws in its size: set image.height and image.width")


def _require_key(cls: type, known: Mapping[str, str], inputs: Inputs, key: str) -> None:
    if key in known:
        return
    name = cls.__name__
    if key == "images" and "image" in known:
        raise inputs.error(key, f"{name} takes one image per prompt, got {len(inputs.images)}: give one `image`, or "
                           f"take a pipeline for several ({', '.join(SEVERAL)})")
    hint = ": set load.controlnet" if key in ("control_image", SCALE) else ""
    raise inputs.error(key, f"{name} takes no {key}{hint}; of a prompt file's keys it takes "
                       f"{', '.join(known) or 'none beside the text'}")


def _require_present(cls: type, known: Mapping[str, str], prompt: Prompt, call: Mapping[str, Any],
                     ip_adapter: bool | None, last: bool | None) -> None:
    """Raise UserError for a prompt without an image that the pipeline needs, and for one that it has no part for."""
    given = prompt.inputs.as_dict().keys() | call.keys()
    if "ip_adapter_image" in given and ip_adapter is False:
        raise prompt.inputs.error("ip_adapter_image", f"{cls.__name__} has no IP-Adapter loaded: set load.ip_adapter")
    if "last_image" in given and last is False:
        raise prompt.inputs.error("last_image", "the model takes a first frame alone (its transformer has no "
                                  "pos_embed_seq_len): leave it out, or take a model of first and last frames")
    needed = [("ip_adapter_image", "the model has an IP-Adapter", ", or leave load.ip_adapter out")] * bool(ip_adapter)
    if "ControlNet" in cls.__name__ and known.get("control_image") not in given:
        needed.append(("control_image", "the model has a ControlNet", ", or leave load.controlnet out"))
    if "mask_image" in known:
        needed += [(key, f"{cls.__name__} paints into an image where a mask is white", "") for key in MASKED]
    if last:
        needed += [(key, "the model makes the frames between a first and a last one", "")
                   for key in ("image", "last_image")]
    if needs_image(cls) and not {"images", "control_image", known["image"]} & given:
        needed.append(("image", f"{cls.__name__} starts from an image", ""))
    for key, why, otherwise in needed:
        if key not in given:
            raise UserError(f"{prompt.inputs.place}: {why}, but the prompt {prompt.text[:40]!r} has no {key}: give "
                            f"every prompt one{otherwise}")


def _image_size(inputs: Inputs, key: str, path: str, frames: int | None) -> Size:
    """Return the size of an image; (0, 0) of a clip. Raises UserError for one that cannot be read, or is too short."""
    try:
        if key != "video":
            return image_size(path)
        count = frame_count(path)
    except UserError as error:
        raise inputs.error(key, str(error)) from None
    if frames is not None and count < frames:
        raise inputs.error(key, f"{path} has {quantity(count, 'frame')}, but image.frames is {frames}: expected as "
                                "many or more")
    return 0, 0


def images_of(policy: Pictured, count: int, images: Sequence[Any] | None = None) -> dict[str, list[Any]]:
    """Return what `count` prompts bring beside their text, by the name of the pipeline's argument.

    images: of each prompt an image, its file, its `Inputs`, or None for what the policy's `call` gives. UserError
    where the pipeline takes none.
    """
    brought = [_call_inputs(policy, image) for image in images or [None] * count]
    pictures = {name: [value] * count for name, value in policy.given.items()}
    for name in dict.fromkeys(name for row in brought for name in row):
        pictures[name] = [row.get(name, policy.given.get(name)) for row in brought]
        if any(value is None for value in pictures[name]):
            raise UserError(f"some prompts of a batch bring an `{name}` and others do not: give all one, or none")
    return pictures


def watch(pipe: Any) -> None:
    """Note from here on to which size a pipeline's processor squeezes the images of prompts."""
    from diffusers.image_processor import VaeImageProcessor

    for name in PROCESSORS:
        processor = getattr(pipe, name, None)
        if isinstance(processor, VaeImageProcessor) and not hasattr(processor.preprocess, "noting"):
            setattr(processor, "preprocess", _noting(processor.preprocess))


def _noting(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(preprocess)

    @functools.wraps(preprocess)
    def noting(*args: Any, **kwargs: Any) -> Any:
        given, made = parameters.bind(*args, **kwargs).arguments, preprocess(*args, **kwargs)
        pictures = given.get("image", given.get("video"))
        squeezed = given.get("resize_mode", "default") == "default" and given.get("crops_coords") is None
        if squeezed and hasattr(made, "shape"):
            for image in pictures if isinstance(pictures, (list, tuple)) else [pictures]:
                note_seen(image, (made.shape[-2], made.shape[-1]))
        return made

    setattr(noting, "noting", True)
    return noting


def refusal(pipe: Any, error: Exception, images: Sequence[Any] | None, pictures: Mapping[str, Sequence[Any]],
            call: Mapping[str, Any]) -> UserError | None:
    """Return the line of what a pipeline's call raised; None for a line of ours, and if memory ran out.

    call: its further arguments. Others: see `describe_bad_images`.
    """
    if isinstance(error, UserError) or ran_out(error):
        return None
    plain, said = isinstance(error, (TypeError, ValueError)), " ".join(str(error).split())[:300]
    divisor = re.search(r"divisible by (\d+)", said) if plain else None
    expected = fitting_sides(call, int(divisor[1])) if divisor else ""
    said = f"{said.rstrip('.')}; expected {expected}" if expected else said
    own = not plain and is_video(type(pipe)) and "num_frames" not in call
    return UserError(f"{describe_bad_images(images, pictures)}{type(pipe).__name__} refuses its arguments: "
                     f"{said if plain else f'{type(error).__name__}: {said}'}"
                     + "; it was called with its own number of frames, and image.frames sets another" * own)


@contextlib.contextmanager
def one_line(pipe: Any, call: Mapping[str, Any], images: Sequence[Any] | None = None,
             pictures: Mapping[str, Sequence[Any]] | None = None) -> Iterator[None]:
    """Context manager: what the call of a pipeline raises is the line of `refusal`."""
    try:
        yield
    except REFUSALS as error:
        if (told := refusal(pipe, error, images, pictures or {}, call)) is None:
            raise
        raise told from error


def describe_bad_images(images: Sequence[Any] | None, pictures: Mapping[str, Sequence[Any]]) -> str:
    """Return the place and files of the prompts whose images a pipeline refuses, as the begin of a message.

    images: of each prompt an image, its file, its `Inputs`, or None. images: what the pipeline was given for them.
    """
    told = []
    for image in dict.fromkeys(image for image in images or () if isinstance(image, (str, Path, Inputs))):
        if isinstance(image, Inputs):
            told.append(f"{image.place}: {', '.join(path for _, path in image.paths())}")
        else:
            told.append(f"{sources.place_of(str(image))}{image}")
    sizes = [f"{one.width} x {one.height}" for values in pictures.values() for value in values
             for one in (value if isinstance(value, list) else [value]) if hasattr(one, "width")]
    of = f" ({', '.join(dict.fromkeys(sizes))} pixels)" if sizes else ""
    return f"{'; '.join(told)}{of}: " if told else ""


def _call_inputs(policy: Pictured, image: Any) -> dict[str, Any]:
    if image is None:
        return {}
    if isinstance(image, Inputs):
        return decode_inputs(policy.pipe, image, policy.call | {"num_frames": policy.frames})
    known = names(type(policy.pipe))
    if "image" not in known:
        raise UserError(f"{type(policy.pipe).__name__} takes no image, but a prompt brings one: leave it out")
    if not isinstance(image, (str, Path)):
        return {known["image"]: image}
    try:
        return {known["image"]: read_image(image)}
    except UserError as error:
        sources.forget(str(image))
        raise UserError(f"{sources.place_of(str(image))}{error}") from None


def decode_inputs(pipe: Any, inputs: Inputs, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt's images, clip and scale by the argument of a pipeline's call.

    call: arguments of every call. The control image and the clip's frames are scaled to fill its height and width,
    and what stands over is cut off; a clip is a `Clip` of its `num_frames`, counted from the first one.
    Raises UserError for a file that cannot be read, and for what the pipeline, or its autoencoder, does not take.
    """
    known = names(type(pipe))
    values: dict[str, Any] = {}
    height, width = (call.get(name) or _default(pipe, name) for name in ("height", "width"))
    for key, value in inputs.as_dict().items():
        _require_key(type(pipe), known, inputs, key)
        try:
            match key:
                case "images":
                    given: Any = [read_image(path) for path in value]
                case "video":
                    count = call.get("num_frames") or frame_count(value)
                    every = getattr(pipe, "vae_scale_factor_temporal", 1) or 1
                    if (count - 1) % every:
                        raise UserError(f"{quantity(count, 'frame')}, but {type(pipe).__name__} takes 1 more than a "
                                        f"multiple of {every}: set image.frames: {max(1, count - (count - 1) % every)}")
                    given = Clip.open(value, count, (height, width) if height and width else None)
                case "control_image":
                    sized = call.get("height") and call.get("width")
                    given = read_image(value, (call["height"], call["width"]) if sized else None, opaque=True)
                case "mask_image":
                    given = read_image(value, opaque=True).convert("L")
                case _:
                    given = value if key == SCALE else read_image(value)
            values[known[key]] = given
        except UserError as error:
            for path in value if isinstance(value, tuple) else [value]:
                sources.forget(path)
            raise inputs.error(key, str(error)) from None
    if inputs.control_image is not None and SCALE in known:  # all rows of a batch have it, or none
        values.setdefault(SCALE, call.get(SCALE, _default(pipe, SCALE)))
    return values


def _default(pipe: Any, name: str) -> Any:
    parameter = call_parameters(type(pipe)).get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default
