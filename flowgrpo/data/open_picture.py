"""Picture files that others made: opened within limits, upright, as RGB."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo.errors import UserError
from flowgrpo.files import unfit

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others start programs, such as EPS
PIXELS = 2**26  # of a picture; RGB and its source take 448 MiB
FLOATS = 2**25  # pixels of what is read as floats, over all frames; 384 MiB
ORIENTATION = 0x0112  # EXIF tag
SIDEWAYS = 5  # first orientation that swaps height and width


@contextmanager
def opened(path: str | Path, most: int = PIXELS, what: str = "a picture") -> Iterator[Image]:
    """Open a picture's file. most: its pixels. what: expected content in an error, such as "a video".

    Raises UserError for a file that is not regular, of another format than FORMATS, too large or damaged; also for an
    error of the body, since many files are decoded there.
    """
    from PIL import Image

    if why := unfit(path):
        raise UserError(f"{path} cannot be read as {what} (it {why})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of sizes and of damaged metadata
            with Image.open(path, formats=FORMATS) as picture:
                if picture.width * picture.height > most:
                    raise UserError(f"{path} has {picture.width} x {picture.height} pixels, expected {most:,} at most: "
                                    "scale it down")
                yield picture
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise UserError(f"{path} has more than {most:,} pixels: scale it down") from None
    except Exception as error:  # a broken file can raise anything
        why = getattr(error, "strerror", None) or "it is damaged, or no picture"
        raise UserError(f"{path} cannot be read as {what} ({why})") from None


def orientation(picture: Image) -> int:
    """Return a picture's EXIF orientation, 1 to 8; 1 where there is none, and where the EXIF is damaged."""
    try:
        value = picture.getexif().get(ORIENTATION)
    except Exception:  # broken EXIF can raise anything
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def upright(picture: Image) -> Image:
    """Return a picture turned and mirrored as its EXIF orientation says."""
    from PIL.Image import Transpose

    turns = {2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
             5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90}
    turn = turns.get(orientation(picture))
    return picture if turn is None else picture.transpose(turn)


def rgb(picture: Image) -> Image:
    """Return a picture as upright RGB; levels of 16 bits are scaled to 8, where Pillow would cut them off."""
    import numpy as np
    from PIL import Image

    picture = upright(picture)
    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
    return picture.convert("RGB")
