"""What `flowgrpo rewards` shows and what `flowgrpo score` does: rewards by name, and the scores of files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, about
from flowgrpo.rewards.find import find, locate, names, source
from flowgrpo.rewards.score import score

if TYPE_CHECKING:
    import torch

    from flowgrpo.data.prompts import Prompt

AT_ONCE = 16  # files of one size that a reward sees together


def listed() -> list[dict[str, Any]]:
    """Every reward that has a name, as what it says of itself: None where it does not. No reward is made.

    A package's reward that does not import has its error under "broken", and does not hide the others.
    """
    return [_listed(name) for name in names()]


def _listed(name: str) -> dict[str, Any]:
    try:
        thing, broken = locate(name), None
    except UserError as error:
        thing, broken = None, str(error)
    known = About() if thing is None else about(thing)
    doc = (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0].rstrip(".")
    return {"name": name, "modality": known.modality, "range": known.range, "needs": known.needs,
            "licence": known.licence, "installed": False if broken else known.installed, "does": doc,
            "source": source(name), "broken": broken}


def cells(reward: dict[str, Any]) -> list[str]:
    """A row of the table: name, modality, range, needs, licence, whether it is installed."""
    low_high = "?" if reward["range"] is None else f"{_bound(reward['range'][0], '-')} to {_bound(reward['range'][1])}"
    installed = {True: "yes", False: "no", None: "?"}[reward["installed"]]
    needs = "nothing" if reward["needs"] == "" else reward["needs"] or "?"
    return [reward["name"], reward["modality"] or "?", low_high, needs, reward["licence"] or "?",
            "broken" if reward["broken"] else installed]


def _bound(value: float | None, sign: str = "") -> str:
    return f"{sign}inf" if value is None else f"{value:g}"


def score_files(name: str, arguments: dict[str, Any], files: Sequence[Path], prompts: Sequence[Prompt]) -> list[float]:
    """The scores of files, each with its prompt, by the reward of that name; NaN where it does not apply.

    A file is a picture; a folder of pictures, or a GIF or WebP that moves, is a video; a .txt file a text. UserError
    for what cannot be read, and as of `find` and `score`.
    """
    reward, outputs, scores = find(name, arguments), [_read(file) for file in files], {}
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, output in enumerate(outputs):
        alike[getattr(output, "shape", None)].append(i)
    for rows in alike.values():
        for some in (rows[start:start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)):
            of, batch = [prompts[i] for i in some], _stacked([outputs[i] for i in some])
            found = score({name: reward}, batch, [p.text for p in of], [p.metadata for p in of])
            scores |= zip(some, found[:, 0].tolist())
    return [scores[i] for i in range(len(files))]


def _stacked(outputs: list[Any]) -> Any:
    import torch

    return outputs if isinstance(outputs[0], str) else torch.stack(outputs)


def _read(path: Path) -> torch.Tensor | str:
    """A picture [3,H,W] in [0, 1], a video [F,3,H,W], or a text."""
    import torch
    from PIL import Image, ImageSequence, UnidentifiedImageError

    from flowgrpo.rewards.pixels import tensor_of

    try:
        if path.suffix == ".txt":
            return path.read_text(encoding="utf-8")
        if path.is_dir():
            frames = [tensor_of(Image.open(file)) for file in sorted(path.iterdir())]
            return torch.stack(frames)
        picture = Image.open(path)
        frames = [tensor_of(frame) for frame in ImageSequence.Iterator(picture)]
        return torch.stack(frames) if len(frames) > 1 else frames[0]
    except FileNotFoundError:
        raise UserError(f"no file at {path}") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, UnicodeDecodeError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:120]}): expected a picture, a folder "
                        "of frames of one size, or a .txt file") from None
