"""Files beside a prompt's text: reference images, a mask, a last frame, a source video, a control image, an image
for an IP-Adapter.

A prompt file names them by path, relative to itself. They are decoded later, by images.py.
"""

import difflib
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError, excerpt
from flowgrpo.files import address, beside, parse_json, unfit, unsafe

FILES = ("mask_image", "last_image", "video", "control_image", "ip_adapter_image")  # keys of one path, besides `image`
SCALE = "controlnet_conditioning_scale"
KEYS = ("image", "images", *FILES, SCALE)
SEPARATOR = ";"  # between the paths of a .csv file's cell


@dataclass(frozen=True)
class Inputs:
    """Files that a prompt brings, as paths, and the scale of its control image.

    images: reference images, in order. mask_image: white where an inpainting pipeline paints. last_image: last frame
    of a video that begins with the reference image. video: a file, or a folder of frames. control_image: an edge map,
    depth map or similar, for a ControlNet. ip_adapter_image: image whose content or style an IP-Adapter takes up.
    controlnet_conditioning_scale: factor of the ControlNet's part; None for the pipeline's default.
    place: file and line, for error messages.
    """

    images: tuple[str, ...] = ()
    video: str | None = None
    control_image: str | None = None
    ip_adapter_image: str | None = None
    controlnet_conditioning_scale: float | None = None
    mask_image: str | None = None
    last_image: str | None = None
    place: str = field(default="a prompt", compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Present inputs by their keys; one reference image is under `image`, several are under `images`."""
        images = {"image": self.images[0]} if len(self.images) == 1 else {"images": self.images} if self.images else {}
        others = {key: getattr(self, key) for key in (*FILES, SCALE)}
        return images | {key: value for key, value in others.items() if value is not None}

    def paths(self) -> Iterator[tuple[str, str]]:
        for key, value in self.as_dict().items():
            for path in (value if isinstance(value, tuple) else (value,)) if key != SCALE else ():
                yield key, path

    def metadata(self) -> dict[str, Any]:
        """Full paths under the keys of `as_dict`, for rewards. The first of several images is under `image` too."""
        facts: dict[str, Any] = {"image": str(Path(self.images[0]).resolve())} if self.images else {}
        for key, value in self.as_dict().items():
            facts[key] = value if key == SCALE else [str(Path(path).resolve()) for path in value] \
                if isinstance(value, tuple) else str(Path(value).resolve())
        return facts

    @property
    def key(self) -> str:
        """Identity among prompts of the same text and reference images; empty without other files."""
        given = self.as_dict().items()
        return "\n".join(f"{key}={value}" for key, value in given if key not in ("image", "images"))

    def error(self, key: str, what: str) -> UserError:
        return UserError(f"{self.place}, {key!r}: {what}")


def read_inputs(record: dict[str, Any], path: Path, line: int) -> Inputs:
    """Files that a record of the prompt file `path` names. Raises UserError with file, line and key: for another type,
    an absent file, and `image` beside `images`."""
    inputs = Inputs(place=f"prompts {path}, line {line}")
    values: dict[str, Any] = {key: _file(inputs, key, record[key], path) for key in ("image", *FILES)
                              if record.get(key) is not None}
    if record.get("images") is not None:
        if "image" in values:
            raise inputs.error("images", "got `image` and `images`: put all images into `images`")
        values["images"] = tuple(_file(inputs, "images", name, path) for name in _entries(inputs, record["images"]))
    if "image" in values:
        values["images"] = (values.pop("image"),)
    if (given := record.get(SCALE)) is not None:
        values[SCALE] = number(given)
        if not 0 <= values[SCALE] < math.inf:
            raise inputs.error(SCALE, f"expected a number of 0 or more, such as 0.8, got {excerpt(given)}")
    return Inputs(**values, place=inputs.place)


def number(given: Any) -> float:
    """Number of a value or of a table's cell; NaN for anything else."""
    try:
        return math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _entries(inputs: Inputs, names: Any) -> list[Any]:
    """Entries of `images`; a text, of a table's cell, is a JSON list or paths with semicolons between."""
    if isinstance(names, str) and names.lstrip().startswith("["):
        try:
            names = parse_json(names)
        except ValueError:
            raise inputs.error("images", f"not a JSON list: {excerpt(names)}") from None
    elif isinstance(names, str) and SEPARATOR in names:
        names = [name.strip() for name in names.split(SEPARATOR)]
    if not isinstance(names, list) or not names:
        raise inputs.error("images", f"expected a list of paths, got {excerpt(names)}: a single path goes under "
                           "`image`")
    return names


@functools.cache
def note_unread(source: str, columns: tuple[str, ...]) -> None:
    """Print, once, that a table's columns of images are left out, where a prompt file would have paths."""
    if named := [name for name in columns if name in KEYS]:
        print(f"{source}: the images in the column {named[0]!r} are not read, so that its prompts go without: to use "
              "them save each as a file, and give its path", file=sys.stderr)


def _file(inputs: Inputs, key: str, name: Any, file: Path) -> str:
    name = str(name) if isinstance(name, Path) else name
    if not isinstance(name, str) or not name.strip():
        raise inputs.error(key, f"expected a path, got {excerpt(name)}"
                           + ": several images go under `images`" * (key == "image" and isinstance(name, list)))
    if why := unsafe(name):
        raise inputs.error(key, f"expected a path, got {excerpt(name)}, which holds {why}")
    try:
        path = beside(file, name)
    except UserError as error:
        raise inputs.error(key, str(error)) from None
    why = unfit(path)
    if why and (found := address(name)):
        raise inputs.error(key, f"got the address {found}, expected a path: download it first")
    if why and not (key == "video" and path.is_dir()):
        what = "video" if key == "video" else "image"
        raise inputs.error(key, f"no {what} at {path}{_nearest(path) if why == 'does not exist' else f': it {why}'}")
    return str(path)


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, sorted(other.name for other in path.parent.iterdir()), n=1)
    return f": did you mean {close[0]!r}?" if close else ""
