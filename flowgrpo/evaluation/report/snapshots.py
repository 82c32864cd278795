"""Snapshots that a run keeps for its report: small images and scores, as JSON files in the folder `report/`.

    machine.json                                hardware and versions
    ranges.json                                 lowest and highest score of each reward, where they are known
    before.json, epoch-00020.json, after.json   the same held-out prompts and seeds at these times: a stage each; the
                                                first has what the prompts bring, too
    choosing.json                               the base on the prompts of the epochs' stages, where these choose the
                                                weights: then the other two are of other prompts
    last.json                                   the best and worst samples of the last epoch, and the first-ratio check

Images are stored in them as data URLs, encoded once, so a report only reads these files.
"""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageSequence

from flowgrpo import domains
from flowgrpo.data.prompts import Prompt
from flowgrpo.escaped import base64_of
from flowgrpo.evaluation.pages import clips
from flowgrpo.evaluation.pages.clips import as_image, durations, moving, seconds_of, still
from flowgrpo.evaluation.pages.sources import Source, read_sources, within
from flowgrpo.packages import version
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_object

if TYPE_CHECKING:
    import torch

    from flowgrpo.evaluation.measured import Measured
    from flowgrpo.evaluation.trainer import Trainer

FOLDER = "report"
CHOOSING = "choosing"  # stage, file and samples of the base on the prompts of evaluations that choose the weights
FACTS = ("machine", "nouns", "last", "ranges")  # files that are no stages
VIDEO = f"data:{clips.TYPE};base64,"
SIDE = 320  # maximum longer side of a kept image, in pixels
LOSSLESS = 128  # maximum side in pixels of an image kept without loss
MEND = "restore it, or remove it: then the report leaves out what it said"
EXTREMES = 6  # best samples of an epoch, and as many worst ones
PACKAGES = ("flowgrpo", "torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Video:
    """Frames of a stored clip with its length in seconds, and the same as mp4 if it was encoded."""

    frames: list[Image.Image]
    seconds: float
    mp4: bytes | None

    def file(self) -> tuple[bytes, str]:
        """Clip as mp4, or without one as GIF, and the ending of its name."""
        return (self.mp4, "mp4") if self.mp4 else (self.gif(), "gif")

    def gif(self) -> bytes:
        file = io.BytesIO()
        self.frames[0].save(file, "GIF", save_all=True, append_images=self.frames[1:], loop=0,
                            duration=durations(self.seconds, len(self.frames), 10))
        return file.getvalue()


@dataclass
class Extremes:
    """Best and worst samples of an epoch, at most EXTREMES each and one per prompt, updated as samples come.

    names: the rewards. A sample is (total, prompt, scores [R], output). Prompts of one text with other files differ.
    """

    names: Sequence[str]
    best: list[tuple] = field(default_factory=list)
    worst: list[tuple] = field(default_factory=list)

    def add(self, prompts: Sequence[Prompt], outputs: torch.Tensor | Sequence[str], scores: torch.Tensor,
            totals: torch.Tensor) -> None:
        """Add b samples: their prompts and outputs, scores [b,R], and the totals [b] that order them.

        Skips a sample to which no reward applies, and one that lacks a score that others of its prompt have.
        """
        rows: dict[Any, list[int]] = {}
        for i, prompt in enumerate(prompts):
            rows.setdefault(_identity(prompt), []).append(i)
        sums, known = totals.tolist(), ~scores.isnan()
        for indices in rows.values():
            prompt = prompts[indices[0]]
            needed = known[indices].any(0)
            indices = [i for i in indices if needed.any() and (known[i] == needed).all()]
            if not indices:
                continue
            for kept, sign, at in ((self.best, 1, max(indices, key=sums.__getitem__)),
                                   (self.worst, -1, min(reversed(indices), key=sums.__getitem__))):
                _insert(kept, sign, (sums[at], prompt, scores[at].tolist(), outputs[at]))

    def as_json(self, fps: float | None = None) -> dict[str, list[dict[str, Any]]]:
        """Both lists for JSON, the most extreme sample first. fps: frames per second of clips."""
        def shown(prompt: Prompt, scores: list[float], output: torch.Tensor | str) -> dict[str, Any]:
            return {"prompt": prompt.text, "scores": finite(dict(zip(self.names, scores))),
                    **sample_as_json(output, fps), **sources_as_json(read_sources(prompt, output), fps)}

        return {side: [shown(*sample) for _, *sample in kept]
                for side, kept in (("best", self.best), ("worst", self.worst))}


def _insert(kept: list[tuple], sign: int, sample: tuple) -> None:
    """Keep the sample if it is among the most extreme, replacing a lesser one of the same prompt."""
    total, prompt, scores, output = sample
    same = (i for i, other in enumerate(kept) if _identity(other[1]) == _identity(prompt))
    place = next(same, EXTREMES - 1)  # of the one that it would replace, if there is one
    if any(sign * other[0] >= sign * total for other in kept[place:place + 1]):
        return
    copied = output if isinstance(output, str) else output.to("cpu", copy=True)  # a view would keep its whole batch
    kept[place:place + 1] = [(total, prompt, scores, copied)]
    kept.sort(key=lambda other: -sign * other[0])


def _identity(prompt: Prompt) -> tuple[str, Any]:
    return prompt.text, prompt.inputs


def sample_as_json(output: torch.Tensor | str, fps: float | None = None) -> dict[str, str]:
    """Sample for JSON: an image [3,H,W] or clip [F,3,H,W] as a data URL, of a clip also as an mp4 if there is an
    encoder, a text unchanged, with the image that a reward drew from it. fps: frames per second."""
    if isinstance(output, str):
        image = getattr(output, "image", None)
        return {"text": output} | ({} if image is None else {"picture": data_url(image)})
    shown = {"picture": data_url(output, fps)}
    if output.ndim == 4 and (video := clips.encode(_frames(output), seconds_of(len(output), fps))) is not None:
        shown["video"] = VIDEO + base64.b64encode(video).decode("ascii")
    return shown


def sources_as_json(sources: Sequence[Source], fps: float | None = None) -> dict[str, list[dict[str, str]]]:
    """Each as `sample_as_json` with its name; empty without any."""
    return {"sources": [{"name": name, **sample_as_json(image, fps)} for name, image in sources]} if sources else {}


def data_url(output: torch.Tensor, fps: float | None = None) -> str:
    """Encode an image [3,H,W] in [0, 1], or a clip [F,3,H,W], as a WebP data URL, at most SIDE pixels long."""
    frames = _frames(output)
    moved = dict(save_all=True, append_images=frames[1:], loop=0,
                 duration=durations(seconds_of(len(output), fps), len(frames))) if len(frames) > 1 else {}
    return "data:image/webp;base64," + base64_of(
        frames[0], "WEBP", lossless=max(frames[0].size) <= LOSSLESS, quality=85, **moved)


def _frames(output: torch.Tensor) -> list[Image.Image]:
    frames = [as_image(output)] if output.ndim == 3 else [as_image(still(output, at)) for at in moving([output])]
    return [within(frame, SIDE) for frame in frames]


def content(card: dict[str, Any]) -> Image.Image | Video | str:
    """Sample of a stored card: an image, a clip, or a text."""
    if "text" in card:
        return card["text"]
    image = Image.open(io.BytesIO(_bytes(card["picture"])))
    if getattr(image, "n_frames", 1) == 1:
        return image.convert("RGB")
    frames, milliseconds = [], 0
    for frame in ImageSequence.Iterator(image):
        frames.append(frame.convert("RGB"))  # which reads the frame, and then its duration is known
        milliseconds += frame.info["duration"]
    return Video(frames, milliseconds / 1000, _bytes(card["video"]) if "video" in card else None)


def _bytes(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def begin(run: Path, epoch: int, device: str | torch.device, processes: int, precision: str,
          sample: str = "image", unit: str = "denoiser evaluations") -> None:
    """Record the run's machine, and delete snapshots of an earlier run, or of this one after that epoch.

    sample: name of a sample; unit: what evaluations are.
    """
    if not epoch:
        shutil.rmtree(run / FOLDER, ignore_errors=True)
    for file in (run / FOLDER).glob("*.json"):
        if file.stem in ("after", "last") or read_object(file, MEND).get("epoch", 0) > epoch:
            file.unlink()
    write(run / FOLDER / "machine.json", machine(device, processes, precision))
    write(run / FOLDER / "nouns.json", {"sample": sample, "unit": unit})


def machine(device: str | torch.device, processes: int, precision: str) -> dict[str, str]:
    """Describe hardware, precision, versions, and the boundary of a model's code if a reward has one, in words."""
    from flowgrpo.device import describe

    used = [domain.boundary.function_if_imported for domain in domains.all() if domain.boundary]
    boundary = next((told() for told in used if told), None)  # of a model's code, if a reward runs it
    return {"device": describe(device), "precision": precision, "processes": str(processes),
            "cores": str(os.cpu_count()), "system": f"{platform.system()} {platform.machine()}",
            "Python": platform.python_version(),
            **({"code boundary": boundary} if boundary else {}),
            **{package: version(package) for package in PACKAGES}, **commit()}


def commit() -> dict[str, str]:
    """Commit of this package under `commit`, marked where files differ; empty outside its own repository."""
    root = Path(__file__).parents[3]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10,
                              check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return {}
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return {"commit": git("rev-parse", "HEAD") + changed}
    except (OSError, subprocess.SubprocessError):
        return {}


def stage(run: Path, name: str, epoch: int, measured: Measured) -> None:
    """Keep a measurement on the held-out prompts after so many epochs, as the stage of that name."""
    from flowgrpo.evaluation.pages.before_after import rows

    images = [{"prompt": row.caption, "scores": finite(row.scores[0]), **sample_as_json(row.images[0], measured.fps),
                 **(sources_as_json(row.sources, measured.fps) if not epoch else {})} for row in rows(measured)]
    write(run / FOLDER / f"{name}.json", {"name": name, "epoch": epoch, "scores": finite(measured.scores),
                                          "shuffled": finite(measured.shuffled), "cards": images,
                                          "looks": measured.looks.as_json()})


def last(run: Path, trainer: Trainer) -> None:
    """Keep the best and worst samples of the last epoch, and the result of the first-ratio check."""
    first = trainer.first_ratio
    write(run / FOLDER / "last.json", {
        "epoch": trainer.epoch,
        "first_ratio": {"found": first.max_log_ratio, "limit": first.limit, "rescored": first.rescore,
                        "clip": first.clip},
        **trainer.scoring.extremes.as_json(trainer.policy.fps)})


def write(path: Path, content: object) -> None:
    atomic.write_text(path, json.dumps(content, allow_nan=False))
