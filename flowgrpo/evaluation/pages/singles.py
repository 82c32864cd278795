"""Pictures of a page one by one, full-sized: what `flowgrpo compare vote` shows.

The PNG of the page names their folders in its text chunk `flowgrpo`, relative to itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.pages import sources
from flowgrpo.evaluation.pages.clips import as_image, save_clip
from flowgrpo.storage import atomic

if TYPE_CHECKING:
    import torch


def save(folder: Path, samples: Sequence[torch.Tensor] | torch.Tensor, fps: float | None = None) -> None:
    """Write pictures [3, H, W] as 000.png, and clips [F, 3, H, W] as 000.webp, into a folder, in place of earlier
    ones. fps: frames per second of clips."""
    atomic.make_folder(folder)
    for file in folder.iterdir():
        if re.fullmatch(r"\d+\.(png|webp|mp4)", file.name):
            file.unlink()
    for number, sample in enumerate(samples):
        if sample.ndim == 4:
            save_clip(folder / f"{number:03d}.webp", sample, fps=fps)
        else:
            with atomic.replacing(folder / f"{number:03d}.png") as file:
                as_image(sample).save(file, format="PNG")


def save_sources(place: Path, prompts: Sequence[Prompt], samples: Sequence[torch.Tensor | str] | torch.Tensor
                 ) -> list[list[str]]:
    """Write what the prompts of a page bring into the folder `source` of a run, or below the name of a page; return the
    files of each prompt, relative to the page. samples: the page's, whose number of frames a source video has."""
    root, folder = (place, sources.FOLDER) if place.is_dir() else (place.parent, f"{place.stem}/{sources.FOLDER}")
    clips = [len(sample) for sample in samples[:1] if not isinstance(sample, str) and sample.ndim == 4]
    written = sources.save(root / folder, prompts, clips[0] if clips else None)
    return [[f"{folder}/{name}" for name in files] for files in written]


def save_columns(page: Path, names: Sequence[str], columns: Sequence[Sequence[Any]], fps: float | None = None
                 ) -> list[str]:
    """Write the pictures of each column of a page into a folder below the page's name; return the folders.

    columns: of pictures and clips, as of `save`.
    """
    folders = [f"{page.stem}/{number}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
               for number, name in enumerate(names)]
    for folder, pictures in zip(folders, columns, strict=True):
        save(page.parent / folder, pictures, fps)
    return folders
