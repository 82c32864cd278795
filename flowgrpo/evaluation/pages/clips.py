"""Clips on disk: an animated WebP and an mp4 for viewing, and a tall image for reading back. H.264 is encoded by
ffmpeg: that of imageio-ffmpeg (extra `mp4`), or one on the PATH.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.frames import USUAL
from flowgrpo.storage import atomic

if TYPE_CHECKING:
    import torch

TYPE = "video/mp4"
SMALL = 160  # longer side in pixels
MISSING = "mp4 needs ffmpeg with H.264: pip install 'flowgrpo[mp4]'"
COLOURS = "scale=out_color_matrix=bt709,setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709"
CODEC = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "17", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
MOMENTS = 48  # frames of an animated page


def encoder() -> str | None:
    """Path of ffmpeg; None if there is none."""
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # not installed, or without a binary for this system
        return shutil.which("ffmpeg")


def encode(frames: Sequence[Image.Image], seconds: float, comment: str = "") -> bytes | None:
    """RGB images of one size as an mp4; None, with a line printed once, if it cannot be encoded.

    H.264 halves the resolution of colours: small images are enlarged by a whole factor, to at most SMALL pixels, and
    odd sizes grow by a repeated pixel.
    seconds: of the clip. comment: metadata.
    """
    import numpy as np

    program = encoder()
    if program is None:
        _warn(f"clips are saved as WebP alone: {MISSING}")
        return None
    factor = max(1, SMALL // max(frames[0].size))
    width, height = (length * factor + length * factor % 2 for length in frames[0].size)
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{len(frames) / seconds:.6g}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        command = [program, "-loglevel", "error", *source, "-i", "-", "-vf", COLOURS, *CODEC,
                   "-metadata", f"comment={comment}", str(file)]
        pixels = []
        for frame in frames:  # enlarged, and grown to this size by repeating the last column and row
            shown = np.asarray(frame.convert("RGB")).repeat(factor, 0).repeat(factor, 1)
            grown = (0, height - shown.shape[0]), (0, width - shown.shape[1]), (0, 0)
            pixels.append(np.pad(shown, grown, mode="edge").tobytes())
        done = subprocess.run(command, input=b"".join(pixels), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode == 0 and file.is_file():
            return file.read_bytes()
    said = " ".join(done.stderr.decode(errors="replace").split())[:160]
    _warn(f"clips are saved as WebP alone: {program} failed ({said or f'exit status {done.returncode}'}); {MISSING}")
    return None


@functools.cache
def _warn(line: str) -> None:
    """Print a line to stderr, above progress bars; a repeated one is not printed."""
    tqdm.write(line, file=sys.stderr)


def as_image(image: torch.Tensor) -> Image.Image:
    """Convert an image [3, H, W] in [0, 1] to PIL, clamped."""
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def save_png(path: Path, image: Image.Image, facts: Mapping[str, str] = {}) -> None:
    """Write an image as PNG. facts: its text chunks."""
    chunks = PngInfo()
    for key, text in facts.items():
        chunks.add_text(key, text)
    with atomic.replacing(path) as file:
        image.save(file, format="PNG", pnginfo=chunks)


def seconds_of(frames: int, fps: float | None) -> float:
    """fps: frames per second; None: USUAL."""
    return frames / (fps or USUAL)


def durations(seconds: float, frames: int, unit: int = 1) -> list[int]:
    """Milliseconds of each of the frames that share so many seconds, in whole units of `unit` ms, one at least;
    rounding does not add up."""
    ends = [round(1000 * seconds * i / frames / unit) for i in range(frames + 1)]
    return [max(1, end - start) * unit for start, end in itertools.pairwise(ends)]


def animate(path: str | Path, frames: Sequence[Image.Image], seconds: float, facts: str | None = None) -> Path:
    """Write images of one size as a lossless animated WebP that loops forever, and beside it as an mp4 of the same
    name if there is an encoder. facts: the WebP's EXIF user comment, and the comment of the mp4."""
    path = Path(path)
    with atomic.replacing(path) as file:
        frames[0].save(file, format="WEBP", save_all=True, append_images=frames[1:], loop=0, lossless=True,
                       duration=durations(seconds, len(frames)), exif=b"" if facts is None else comment(facts))
    if video := encode(frames, seconds, facts or ""):
        atomic.write_bytes(path.with_suffix(".mp4"), video)
    return path


def comment(text: str) -> bytes:
    """EXIF data with a user comment."""
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"UNICODE\0" + text.encode("utf-16-be")
    return exif.tobytes()


def save_clip(path: str | Path, clip: torch.Tensor, facts: str | None = None, fps: float | None = None) -> Path:
    """Write a clip [F, 3, H, W] in [0, 1] as `animate` does, or for a path that ends with .mp4 as that alone.

    fps: frames per second; None: USUAL.
    Raises UserError if such an mp4 cannot be encoded.
    """
    path, frames, seconds = Path(path), [as_image(frame) for frame in clip], seconds_of(len(clip), fps)
    if path.suffix.lower() != ".mp4":
        return animate(path, frames, seconds, facts)
    video = encode(frames, seconds, facts or "")
    if video is None:
        raise UserError(f"{path} cannot be written: {MISSING}")
    atomic.write_bytes(path, video)
    return path


def moving(images: Sequence[torch.Tensor | str]) -> list[float]:
    """Moments, in [0, 1], at which a page of images, clips and texts is drawn; empty without clips."""
    count = min(max((len(image) for image in images if getattr(image, "ndim", 0) == 4), default=0), MOMENTS)
    return [i / max(count - 1, 1) for i in range(count)]


def still(image: torch.Tensor, moment: float) -> torch.Tensor:
    """Frame [3, H, W] of an image or a clip at a moment in [0, 1]."""
    return image if image.ndim == 3 else image[round(moment * (len(image) - 1))]


def tall(image: torch.Tensor) -> torch.Tensor:
    """Stack a clip's frames [F, 3, H, W] vertically, [3, F * H, W]; an image is unchanged."""
    return image if image.ndim == 3 else image.transpose(0, 1).flatten(1, 2)


def untall(image: torch.Tensor, frames: int | None) -> torch.Tensor:
    """Invert `tall`: return the image (frames: None) or the clip."""
    return image if frames is None else image.unflatten(1, (frames, -1)).transpose(0, 1)
