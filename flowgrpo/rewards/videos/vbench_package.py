"""VBench (2311.17982) by its own package, for the dimensions that take videos of one's own prompts.

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

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.extras import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.images.vision import placed
from flowgrpo.rewards.pixels import eight_bit

# Dimensions that need no list of objects, colours or scenes; those out of 100 are divided by 100, as VBench's tables.
DIMENSIONS = ("subject_consistency", "background_consistency", "temporal_flickering", "motion_smoothness",
              "dynamic_degree", "aesthetic_quality", "imaging_quality", "human_action", "temporal_style",
              "overall_consistency")
PERCENT = ("imaging_quality",)
CHILD = Path(__file__).with_name("vbench_child.py")
INSTALL = "python -m venv vbench && vbench/bin/pip install vbench"


@dataclass(frozen=True)
class VBench:
    """One dimension of VBench for each clip, scored by VBench's own package in a process of its own.

    dimension: one of DIMENSIONS. python: the interpreter of an environment with the package; None for this one.
    fps: frames per second of the videos that are written. device: None for a GPU if present.
    seconds: time limit of a call; a longer one is a failure.
    Raises UserError for another dimension, for an interpreter without the package, and without OpenCV.
    """

    dimension: str = "motion_smoothness"
    python: str | None = None
    fps: int = 8
    device: str | None = None
    seconds: float = 3600
    about = About(modality="video", range=(0, 1), needs="video,vbench", licence="Apache-2.0, the models'")

    def __post_init__(self) -> None:
        if self.dimension not in DIMENSIONS:
            raise UserError(f"reward 'vbench': dimension is {self.dimension!r}, expected {', '.join(DIMENSIONS)}")
        needed("cv2", "video", "reward 'vbench'")
        object.__setattr__(self, "python", self.python or sys.executable)
        found = self._run(["-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vbench') is None)"])
        if found.returncode:
            raise UserError(f"reward 'vbench': {self.python} has no package vbench: {INSTALL}, and give args: "
                            "{python: vbench/bin/python}")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> list[float]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "videos").mkdir()
            files = [f"{row:06}.mp4" for row in range(len(prompts))]
            for file, clip in zip(files, eight_bit(videos)):
                write(folder / "videos" / file, clip, self.fps)
            (folder / "asked.json").write_text(json.dumps({
                "dimension": self.dimension, "prompts": dict(zip(files, prompts)), "device": placed(self.device)}))
            done = self._run([str(CHILD), str(folder)])
            answer = folder / "answer.json"
            if done.returncode or not answer.is_file():
                raise RuntimeError(f"vbench failed on {self.dimension}: {_last(done.stderr)}")
            scores = json.loads(answer.read_text())
        if set(scores) != set(files):
            raise RuntimeError(f"vbench scored {len(scores)} of {len(files)} videos")
        scale = 100 if self.dimension in PERCENT else 1
        return [float(scores[file]) / scale for file in files]

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        assert self.python is not None  # this interpreter, unless another one is named
        try:
            return subprocess.run([self.python, *arguments], capture_output=True, text=True, timeout=self.seconds)
        except OSError as error:
            raise UserError(f"reward 'vbench': {self.python} does not run ({error.strerror}): {INSTALL}, and give "
                            "args: {python: vbench/bin/python}") from None


def write(path: Path, clip: np.ndarray, fps: int) -> None:
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
