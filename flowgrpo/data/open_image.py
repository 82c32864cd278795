"""Image files that others made: opened within limits, upright, as RGB of what their maker saw. A reward server opens
no file that a client names.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError
from PIL.Image import Transpose

from flowgrpo.errors import UserError
from flowgrpo.files import address, unfit

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others start programs, such as EPS
PIXELS = 2**26  # of an image; RGB and its source take 448 MiB
FLOATS = 2**25  # pixels of what is read as floats, over all frames; 384 MiB
ORIENTATION = 0x0112  # EXIF tag
# What undoes each orientation; from SIDEWAYS on height and width are swapped.
TURNS = {2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
         6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90}
SIDEWAYS = 5
BITS, WHITE_IS, SAMPLES, SUBFILE = 258, 262, 339, 254  # TIFF tags
SIGNED = 2  # TIFF sample format
SRGB_GAMMA = 0.45455  # of a PNG; another one is of other lightness
# First bytes of formats that are not read, at an offset.
OTHERS = ((4, b"ftypavi", "AVIF"), (4, b"ftyphe", "HEIF"), (4, b"ftypmif1", "HEIF"), (0, b"\xff\x0a", "JPEG XL"),
          (4, b"JXL ", "JPEG XL"), (4, b"jP  ", "JPEG 2000"), (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
          (0, b"8BPS", "Photoshop"), (0, b"%PDF", "PDF"), (0, b"%!PS", "EPS"), (0, b"\x76\x2f\x31\x01", "OpenEXR"),
          (0, b"#?RADIANCE", "Radiance HDR"), (0, b"<svg", "SVG"), (0, b"<?xml", "SVG"), (0, b"qoif", "QOI"))
# A module's variable, since rewards also run in threads, to which a context variable is not passed on.
_closed = 0


class Unclear(ValueError):
    """Image whose values have no certain meaning; its message says why and how to convert it."""


@contextmanager
def open_checked(path: str | Path, most: int = PIXELS, what: str = "an image") -> Iterator[Image.Image]:
    """Open an image's file. most: its pixels. what: expected content in an error, such as "a video".

    Raises UserError for a file that is not regular, of another format than FORMATS, too large or damaged; also for an
    error of the body, since many files are decoded there.
    """
    if why := unfit(path):
        raise UserError(f"{address(path) or path} cannot be read as {what} (it {why})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of sizes and of damaged metadata
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > most:
                    raise UserError(f"{path} has {image.width} x {image.height} pixels, expected {most:,} at most: "
                                    "scale it down")
                yield image
    except UserError:
        raise
    except Unclear as error:
        raise UserError(f"{path} {error}") from None
    except Image.DecompressionBombError:
        raise UserError(f"{path} has more than {most:,} pixels: scale it down") from None
    except UnidentifiedImageError:
        raise UserError(f"{path} cannot be read as {what} ({_unidentified_reason(Path(path))})") from None
    except Exception as error:  # a broken file can raise anything
        layout = ", or of a layout that Pillow does not read: save it as PNG" * _starts_as_tiff(path)
        why = getattr(error, "strerror", None) or f"it is damaged{layout}"
        raise UserError(f"{path} cannot be read as {what} ({why})") from None


def _unidentified_reason(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        return "it is empty"
    read = f"expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}: convert it"
    for offset, magic, name in OTHERS:
        if start[offset:].startswith(magic):
            return f"its format is {name}, {read}"
    if _starts_as_tiff(path):
        return "a TIFF of a layout that Pillow does not read, such as RGB of floats: save it with 8 or 16 bits"
    return "it is damaged, or no image"


def _starts_as_tiff(path: str | Path) -> bool:
    with Path(path).open("rb") as file:
        return file.read(4) in (b"II*\0", b"MM\0*")


def orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 without one, for damaged EXIF, and for a TIFF, which Pillow turns as it loads it."""
    try:
        value = None if image.format == "TIFF" else image.getexif().get(ORIENTATION)
    except Exception:  # broken EXIF can raise anything
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def upright(image: Image.Image) -> Image.Image:
    """Image turned and mirrored as its EXIF orientation says."""
    turn = TURNS.get(orientation(image))
    return image if turn is None else image.transpose(turn)


def pages(image: Image.Image) -> list[int]:
    """Numbers of a file's frames or pages, without the previews of a TIFF and the still image of an APNG."""
    numbers = range(getattr(image, "n_frames", 1))
    if image.format == "TIFF" and len(numbers) > 1:
        kept = []
        for page in numbers:
            image.seek(page)
            tags: Any = getattr(image, "tag_v2")  # of this page
            if not int(_first(tags.get(SUBFILE, 0))) & 1:
                kept.append(page)
        image.seek(0)
        return kept or [0]
    return [*numbers][1 if image.info.get("default_image") and len(numbers) > 1 else 0:]


def require_single(image: Image.Image) -> None:
    """Raise Unclear for a file of several images, such as an animation; a phone's photo with previews is one."""
    if image.format != "MPO" and (count := len(pages(image))) > 1:
        raise Unclear(f"holds {count} images, expected one: save the one that is meant, or give the file as a "
                      "`video`")


def levels(image: Image.Image) -> np.ndarray | None:
    """Samples [H, W] in [0, 1], float32, of a grey image of more than 8 bits; None for other images.

    Integers of 16 bits, and TIFFs of 12, have their full range. Values of 32 bits have none: floats from 0 to 1 are
    taken, and integers that end between 256 and 65,535, as 16 bits. Raises Unclear for others.
    """
    tags: Any = getattr(image, "tag_v2", {})
    bits, signed = (_first(tags.get(tag)) for tag in (BITS, SAMPLES))
    if signed == SIGNED and (image.mode == "L" or bits == 16):
        raise Unclear("has signed integers, whose black and white are not known: save it with 8 or 16 unsigned bits")
    if not image.mode.startswith(("I", "F")):
        return None
    inverted = _first(tags.get(WHITE_IS)) == 0
    values = np.asarray(image, dtype=np.float32 if image.mode == "F" else np.int64)
    low, high = (values.min(), values.max()) if np.isfinite(values).all() else (np.nan, np.nan)
    if image.mode == "F":
        if not (low >= 0 and high <= 1):
            raise Unclear(f"has float values from {low:g} to {high:g}, expected 0 to 1: scale them, or save it with 8 "
                          "or 16 bits")
        top = 1.0
    else:
        top = 4095.0 if bits == 12 else 65535.0
        if image.mode == "I" and image.format != "PPM" and not (low >= 0 and 255 < high <= 65535):
            raise Unclear(f"has 32-bit values from {low} to {high}, whose white is not known: save it with 8 or 16 "
                          "bits")
    scaled = values.astype(np.float32) / np.float32(top)
    return 1 - scaled if inverted else scaled


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def rgb(image: Image.Image, opaque: bool = False) -> Image.Image:
    """Image as upright RGB in sRGB: profiles are applied, samples of more bits rounded to 8. Transparency is laid on
    white; opaque: refused. Raises Unclear for that, and for values of an unknown range."""
    image = upright(image)
    image.load()
    info, wide, alpha = image.info, levels(image), None
    if image.has_transparency_data:  # its opacity, as mode L
        alpha = image.convert("RGBA").getchannel("A") if not image.mode.startswith("I") else Image.fromarray(
            np.where(np.asarray(image) == info["transparency"], 0, 255).astype(np.uint8))
    if wide is not None:
        image = Image.fromarray((wide * 255).round().astype(np.uint8))
    coloured = _to_srgb(image, info.get("icc_profile"))
    gamma = info.get("gamma")
    if gamma and not {"icc_profile", "srgb"} & info.keys() and abs(gamma - SRGB_GAMMA) > 0.02:
        coloured = coloured.point([round(255 * (level / 255) ** (SRGB_GAMMA / gamma)) for level in range(256)] * 3)
    if alpha is None or alpha.getextrema() == (255, 255):
        return coloured
    if opaque:
        raise Unclear("has transparency, of which it is not known what stands for: save it on black or on white")
    white = Image.new("RGB", coloured.size, "white")
    white.paste(coloured, mask=alpha)
    return white


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """An image's colours as RGB in sRGB, whatever its transparency. profile: its ICC profile."""
    if image.mode in ("La", "RGBa"):  # colours times opacity
        image = image.convert(f"{image.mode[:-1]}A")
    if profile:
        base = {"LA": "L", "1": "L"}.get(image.mode, image.mode)
        with contextlib.suppress(ImageCms.PyCMSError, OSError):  # a damaged profile, or of another kind of colours
            own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if not ImageCms.getProfileDescription(own).startswith("sRGB"):
                shown = ImageCms.profileToProfile(image.convert(base if base in ("L", "CMYK") else "RGB"), own,
                                                  ImageCms.createProfile("sRGB"),
                                                  ImageCms.Intent.RELATIVE_COLORIMETRIC, "RGB")
                assert shown is not None  # of a call that is not in place
                return shown
    return image.convert("RGB")


@contextmanager
def refuse_opening() -> Iterator[None]:
    """Context manager, for every thread: `require_open` refuses."""
    global _closed
    _closed += 1
    try:
        yield
    finally:
        _closed -= 1


def require_open() -> None:
    """Raise UserError inside `closed`. Called before the first look at a file that metadata name."""
    if _closed:
        raise UserError("this reward reads files that the metadata name, and a reward server opens none of a client's: "
                        "use the reward in the run's own process")
