"""H.264 video in mp4, encoded by ffmpeg: that of imageio-ffmpeg (extra `mp4`), or one on the PATH."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

TYPE = "video/mp4"
SMALL = 160  # longer side in pixels
MISSING = "mp4 needs ffmpeg with H.264: pip install 'flowgrpo[mp4]'"
COLOURS = "scale=out_color_matrix=bt709,setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709"
CODEC = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "17", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]


def encoder() -> str | None:
    """Return the path of ffmpeg; None if there is none."""
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # not installed, or without a binary for this system
        return shutil.which("ffmpeg")


def require(what: str) -> None:
    """Raise UserError that begins with `what` if there is no ffmpeg."""
    if encoder() is None:
        raise UserError(f"{what}: {MISSING}")


def encode(frames: Sequence[Image.Image], seconds: float, comment: str = "") -> bytes | None:
    """Return RGB pictures of one size as an mp4; None, with a line printed once, if it cannot be encoded.

    H.264 halves the resolution of colours: small pictures are enlarged by a whole factor, to at most SMALL pixels, and
    odd sizes grow by a repeated pixel.
    seconds: of the clip. comment: metadata.
    """
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
        pixels = b"".join(_pixels(frame, factor, width, height) for frame in frames)
        done = subprocess.run(command, input=pixels, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode == 0 and file.is_file():
            return file.read_bytes()
    said = " ".join(done.stderr.decode(errors="replace").split())[:160]
    _warn(f"clips are saved as WebP alone: {program} failed ({said or f'exit status {done.returncode}'}); {MISSING}")
    return None


def _pixels(frame: Image.Image, factor: int, width: int, height: int) -> bytes:
    """Return the pixels of a frame, enlarged by a factor, and grown to this size by repeating its last column and row.
    """
    import numpy as np

    pixels = np.asarray(frame.convert("RGB")).repeat(factor, 0).repeat(factor, 1)
    grown = (0, height - pixels.shape[0]), (0, width - pixels.shape[1]), (0, 0)
    return np.pad(pixels, grown, mode="edge").tobytes()


@functools.cache
def _warn(line: str) -> None:
    """Print a line to stderr, above progress bars; a repeated one is not printed."""
    tqdm.write(line, file=sys.stderr)
