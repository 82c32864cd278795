"""VBench (2311.17982) by its own package, all 16 dimensions.

The package pins transformers 4.33 and numpy below 2, so that it seldom fits into flowgrpo's environment. It runs in a
process of its own, by the interpreter that `python` names, on videos in a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import placed, require_arguments
from flowgrpo.rewards.preprocessing import eight_bit

# Dimensions for any prompt, and those that judge facts of the prompt: its objects, colours, scene or style.
PLAIN = ("subject_consistency", "background_consistency", "temporal_flickering", "motion_smoothness", "dynamic_degree",
         "aesthetic_quality", "imaging_quality", "human_action", "temporal_style", "overall_consistency")
WITH_FACTS = ("object_class", "multiple_objects", "color", "spatial_relationship", "scene", "appearance_style")
PERCENT = ("imaging_quality",)  # out of 100 in the package, divided in VBench's tables
LONGEST = 150  # characters of a prompt in a file's name
USUAL = 8.0  # frames per second of videos whose rate is not known
CHILD = Path(__file__).with_name("vbench_child.py")
INSTALL = "python -m venv vbench && vbench/bin/pip install vbench"


@dataclass(frozen=True)
class VBench:
    """One dimension of VBench for each clip, scored by VBench's own package in a process of its own.

    None for a prompt without the facts that the dimension judges, in the metadata's `auxiliary_info` as VBench's own
    prompts have them, and for a video in which `color` finds no object.

    dimension: one of PLAIN or WITH_FACTS. python: the interpreter of an environment with the package; None for this
    one. fps: frames per second of the videos that are written; None: those that the model makes (8 where that is not
    known). device: None for a GPU if present.
    listed: score the prompts alone whose metadata's `category` names the dimension, as VBench's tables do.
    seconds: time limit of a call; a longer one is a failure.
    Raises UserError for another dimension, an absent device, an interpreter without the package, and without OpenCV.
    """

    dimension: str = "motion_smoothness"
    python: str | None = None
    fps: float | None = None
    device: str | None = None
    listed: bool = False
    seconds: float = 3600
    about = About(modality="video", range=(0, 1), needs="video,vbench", licence="Apache-2.0, the models'")

    def __post_init__(self) -> None:
        if self.dimension not in PLAIN + WITH_FACTS:
            raise UserError(f"reward 'vbench': dimension is {self.dimension!r}, expected "
                            f"{', '.join(PLAIN + WITH_FACTS)}")
        require_arguments("vbench", "fp32", self.device, 1)
        needed("cv2", "video", "reward 'vbench'")
        object.__setattr__(self, "python", self.python or sys.executable)
        found = self._run(["-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vbench') is None)"])
        if found.returncode:
            raise UserError(f"reward 'vbench': {self.python} has no package vbench: {INSTALL}, and give args: "
                            "{python: vbench/bin/python}")

    def __call__(self, videos: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]], fps: float | None = None) -> list[float | None]:
        facts = [entry.get("auxiliary_info") or {} for entry in metadata]
        rows = [row for row, known in enumerate(facts)
                if (self.dimension in PLAIN or self.dimension in known)
                and (not self.listed or self.dimension in (metadata[row].get("category") or ()))]
        scores: list[float | None] = [None] * len(prompts)
        if rows:
            # The package reads the action of a person from the file's name.
            names = {row: f"{prompts[row][:LONGEST].replace('/', ' ')}-{row:06}.mp4" for row in rows}
            asked = {names[row]: {"prompt": prompts[row], "facts": facts[row]} for row in rows}
            answer = self._asked([videos[row] for row in rows], asked, self.fps or fps or USUAL)
            scale = 100 if self.dimension in PERCENT else 1
            for row, name in names.items():
                scores[row] = answer[name] / scale if name in answer else None
            if None in [scores[row] for row in rows] and self.dimension != "color":
                raise RuntimeError(f"vbench scored {len(answer)} of {len(rows)} videos")
        return scores

    def _asked(self, clips: Sequence[Tensor], asked: dict[str, dict[str, Any]], fps: float) -> dict[str, float]:
        """Return the package's scores of clips [F, 3, H, W] by their names, the keys of `asked`."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "videos").mkdir()
            for file, clip in zip(asked, clips):
                write(folder / "videos" / file, eight_bit(clip), fps)
            (folder / "asked.json").write_text(json.dumps({
                "dimension": self.dimension, "videos": asked, "device": placed(self.device)}))
            done = self._run([str(CHILD), str(folder)])
            if done.returncode or not (folder / "answer.json").is_file():
                raise RuntimeError(f"vbench failed on {self.dimension}: {_last(done.stderr)}")
            return json.loads((folder / "answer.json").read_text())

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        assert self.python is not None  # this interpreter, unless another one is named
        try:
            return subprocess.run([self.python, *arguments], capture_output=True, text=True, timeout=self.seconds)
        except OSError as error:
            raise UserError(f"reward 'vbench': {self.python} does not run ({error.strerror}): {INSTALL}, and give "
                            "args: {python: vbench/bin/python}") from None


def write(path: Path, clip: np.ndarray, fps: float) -> None:
    """Write a clip, bytes [F, H, W, 3], as an MP4 file.
    Raises UserError if OpenCV cannot."""
    import cv2

    height, width = clip.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
    if not writer.isOpened():
        raise UserError(f"reward 'vbench': OpenCV cannot write {path.name}: install opencv-python-headless, which "
                        "brings FFmpeg")
    for frame in clip:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))  # blue, green, red
    writer.release()


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no message"
