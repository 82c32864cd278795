"""Images and clips from the files that prompts name."""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from flowgrpo.data.open_image import SIDEWAYS, open_checked, orientation, pages, require_open, require_single, rgb
from flowgrpo.errors import UserError
from flowgrpo.files import address, unfit
from flowgrpo.nouns import quantity
from flowgrpo.packages import import_optional

STILLS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".pnm")  # of a folder
UNREAD = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".exr", ".hdr", ".tga", ".psd")  # images, of other formats
STARTS = (b"GIF8", b"RIFF", b"\x89PNG", b"II*\0", b"MM\0*")  # of clips that PIL reads
KEPT = 4  # clips whose frames stay in memory
FRAME = 2**25  # pixels of a clip's frame, of which decoders take several copies
PIXELS = 2**28  # of a clip's frames together; 768 MiB

SQUEEZE, CROP = "squeeze", "crop"
SOURCE = "source_path"  # attribute of images that were read: their file

Size = tuple[int, int]  # height, width
_seen: dict[str, Size] = {}  # by file: the size that a pipeline squeezed it to


def read_image(path: str | Path, size: Size | None = None, opaque: bool = False, fit: str | None = None) -> Image.Image:
    """Image of a file as upright RGB; with a size, as a model that draws in that size saw it.

    fit: "squeeze" to scale it without regard to its proportions, "crop" to scale it to fill the size and to cut the
    sides that stand over; None: as `fit_of`. Transparency is laid on white; opaque: refused. Raises UserError if it is
    none, for several in a file, and for one whose values are not clear.
    """
    require_open()
    with open_checked(path) as image:
        require_single(image)
        read = rgb(image, opaque)
    if size is not None and (fit or fit_of(path, size)) == SQUEEZE:
        return read.resize(size[::-1], Image.Resampling.LANCZOS)
    read = _fit(read, size)
    setattr(read, SOURCE, str(path))
    return read


def fit_of(path: str | Path, size: Size) -> str:
    """"squeeze" if a pipeline of this process changed the image's proportions to get this size, else "crop"."""
    return SQUEEZE if _seen.get(str(Path(path).resolve())) == size else CROP


def note_seen(image: Any, size: Size) -> None:
    """Note that a pipeline scaled an image of `read_image` to a size without regard to its proportions."""
    if path := getattr(image, SOURCE, None):
        _seen[str(Path(path).resolve())] = size


def noised_image(path: str | Path, deviation: float, seed: int) -> Image.Image:
    """Image of a file with Gaussian noise on its values from 0 to 1. Raises UserError if it is none."""
    values = np.asarray(read_image(path)) / 255
    values = values + deviation * np.random.default_rng(seed).standard_normal(values.shape)
    return Image.fromarray((values.clip(0, 1) * 255).round().astype(np.uint8))


def image_size(path: str | Path) -> Size:
    """(height, width) of an image's file, upright, from its header. Raises UserError if it is no image."""
    require_open()
    with open_checked(path) as image:
        require_single(image)
        return image.size if orientation(image) >= SIDEWAYS else image.size[::-1]


@dataclass(frozen=True)
class Clip:
    """Clip that is decoded when `frames` is read.

    path: of a video, an animated WebP, GIF or PNG, a TIFF of several pages, or a folder of images in the order of
    their names, numbers in them by value. count: frames, from the first on. size: (height, width) that each frame is
    scaled to fill; None leaves them. modified: of the file, so that a changed one is another clip.
    Raises UserError in `frames` for a clip that is shorter, and for one that cannot be read.
    """

    path: str
    count: int
    size: Size | None = None
    modified: int = 0

    @classmethod
    def open(cls, path: str, count: int, size: Size | None = None) -> "Clip":
        require_open()
        return cls(path, count, size, Path(path).stat().st_mtime_ns)

    @property
    def frames(self) -> list[Image.Image]:
        return list(_decode(self))


@functools.lru_cache(maxsize=KEPT)
def _decode(clip: Clip) -> tuple[Image.Image, ...]:
    frames: list[Image.Image] = []
    for frame in frames_of(Path(clip.path)):
        frames.append(_fit(frame, clip.size))
        if sum(kept.width * kept.height for kept in frames) > PIXELS:
            raise UserError(f"{clip.path} has more than {PIXELS:,} pixels in its first "
                            f"{quantity(len(frames), 'frame')}: scale it down")
        if len(frames) == clip.count:
            return tuple(frames)
    raise UserError(f"{clip.path} has {quantity(len(frames), 'frame')}, expected {clip.count}")


def frame_count(path: str | Path) -> int:
    """Number of frames of a clip. Raises UserError if it is none, or has no frame."""
    require_open()
    path = Path(path)
    if path.is_dir():
        count = len(stills(path))
    elif _by_pillow(path):
        with open_checked(path, FRAME, "a video") as image:
            count = len(pages(image))
    else:
        capture, cv2 = _open_video(path)
        count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        capture.release()
        if count <= 0:  # the container does not say
            count = sum(1 for _ in frames_of(path))
    if not count:
        raise UserError(f"{path} holds no frame: expected a video, or a folder of {', '.join(STILLS)} files")
    return count


def frames_of(path: Path) -> Iterator[Image.Image]:
    """Yield the frames of a clip as RGB images of one size. Raises UserError where it cannot be read."""
    size = None
    for number, frame in enumerate(_frames(path), 1):
        if frame.size != (size := size or frame.size):
            raise UserError(f"{path}: frame {number} has {frame.width} x {frame.height} pixels, and the first "
                            f"{size[0]} x {size[1]}: scale them to one size")
        yield frame


def _frames(path: Path) -> Iterator[Image.Image]:
    if path.is_dir():
        yield from map(read_image, stills(path))
        return
    if _by_pillow(path):
        with open_checked(path, FRAME, "a video") as image:
            for page in pages(image):
                image.seek(page)
                yield rgb(image)
        return
    capture, cv2 = _open_video(path)
    try:
        while (read := capture.read())[0]:
            yield Image.fromarray(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    except (cv2.error, TypeError) as error:  # TypeError: frames of 16 bits
        raise UserError(f"{path} cannot be read as a video ({' '.join(str(error).split())[:120]})") from None
    finally:
        capture.release()


def _by_pillow(path: Path) -> bool:
    """True for a clip in a format of images, by its first bytes and its name. UserError for an empty file."""
    if why := unfit(path):
        raise UserError(f"{address(path) or path} cannot be read as a video (it {why})")
    with path.open("rb") as file:
        start = file.read(12)
    if not start:
        raise UserError(f"{path} cannot be read as a video (it is empty)")
    known = start.startswith(STARTS) and (start[:4] != b"RIFF" or start[8:] == b"WEBP")  # AVI begins with RIFF too
    return known or path.suffix.lower() in (*STILLS, *UNREAD, ".apng")


def _open_video(path: Path) -> tuple[Any, Any]:
    cv2: Any = import_optional("cv2", "video", str(path))
    capture = cv2.VideoCapture(str(path))
    if not capture.isOpened():
        raise UserError(f"{path} cannot be read as a video: expected one that OpenCV reads, such as .mp4, or a .webp, "
                        "a .gif or a folder of frames")
    width, height = (int(capture.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    if width * height > FRAME:
        raise UserError(f"{path} has frames of {width} x {height} pixels, expected {FRAME:,} at most: scale it down")
    return capture, cv2


def stills(folder: Path) -> list[Path]:
    """Images of a folder in the order of their names, numbers in them by value: frame2, frame10. Raises UserError for
    images of a format that is not read, and for two of one name."""
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    if other := sorted(file.name for file in files if file.suffix.lower() in UNREAD):
        raise UserError(f"{folder} holds {other[0]}, expected frames of {', '.join(STILLS)}: convert it")
    frames = sorted((file for file in files if file.suffix.lower() in STILLS), key=_natural)
    for one, two in itertools.pairwise(frames):
        if one.stem == two.stem:
            raise UserError(f"{folder} holds {one.name} and {two.name}, expected one file for each frame: remove one")
    return frames


def _natural(file: Path) -> tuple[list[tuple[int, str]], str]:
    parts = re.split(r"(\d+)", file.stem)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts if part], file.name


def _fit(image: Image.Image, size: Size | None) -> Image.Image:
    if size is None or image.size == size[::-1]:
        return image
    return ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
