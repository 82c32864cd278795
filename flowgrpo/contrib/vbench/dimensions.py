"""VBench (Huang et al. 2023, 2311.17982): three dimensions without its package, which need a formula and one network,
and all 16 by the package.

Consistency is the mean cosine, 0 at least, of a frame's features with those of the frame before it and of the first
one: of DINO ViT-B/16 for the subject, of CLIP ViT-B/32 for the background. All three reward clips that stand still:
train them beside a reward of motion.

The package pins transformers 4.33 and numpy below 2, so that it seldom fits into flowgrpo's environment. It runs in a
process of its own, by the interpreter that `python` names, on videos in a temporary folder.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize
from torchvision.transforms.functional import normalize as normalize_pixels

from flowgrpo import trust
from flowgrpo.device import default_device
from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.local_model import LocalModel, load_parts, require_arguments
from flowgrpo.rewards.preprocessing import Preparation, eight_bit

SIZE = 224  # pixels of the shorter side
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def eight_bit_levels(videos: Tensor, reward: str) -> Tensor:
    """Videos [B, F, 3, H, W] in [0, 1] as float32 levels 0 to 255.
    Raises UserError for clips of one frame."""
    if videos.ndim != 5 or videos.shape[1] < 2:
        raise UserError(f"reward {reward!r}: got videos of shape {list(videos.shape)}, expected [B, F, 3, H, W] with "
                        "at least two frames")
    return (videos.float() * 255).round().clamp(0, 255)


@built_in("temporal_flickering", "smooth steady jitter stable",
          About(modality="video", range=(0, 1), needs="", licence="Apache-2.0"))
def temporal_flickering(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """VBench's temporal flickering: 1 minus the mean absolute difference of neighbouring frames, 1 for a still clip."""
    levels = eight_bit_levels(videos, "temporal_flickering")
    return 1 - levels.diff(dim=1).abs().flatten(1).mean(1) / 255


def consistency(features: Tensor) -> Tensor:
    """Consistency [B] of frames with features [B, F, D], F of 2 or more."""
    features = normalize(features.float(), dim=-1)
    rest = features[:, 1:]
    before, first = ((rest * other).sum(-1).clamp(min=0) for other in (features[:, :-1], features[:, :1]))
    return ((before + first) / 2).mean(1)


@dataclass(frozen=True)
class _Consistency(LocalModel):
    """Consistency of a clip's frames by the features of one network.

    model, revision: of transformers, a folder or hub id.
    """

    model: str = ""
    revision: str | None = None
    network: ClassVar[str]  # its class in transformers
    about = About(modality="video", range=(0, 1), needs="", licence="Apache-2.0, the model's")

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, self.network, dtype=self.float_type)

    def _features(self, frames: Tensor) -> Tensor:
        """Features [N, D] of frames [N, 3, H, W], float32 levels 0 to 255 on the model's device."""
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        frames = eight_bit_levels(videos, self.reward).flatten(0, 1)
        features = torch.cat([self._features(some.to(self.device)).float().cpu()
                              for some in frames.split(self.batch_size)])
        return consistency(features.unflatten(0, videos.shape[:2]))


@built_in("subject_consistency", "identity character likeness steady")
class SubjectConsistency(_Consistency):
    """VBench's subject consistency: cosines of DINO ViT-B/16 features of a clip's frames, 1 for a still clip.

    Frames are scaled to 224 pixels on the shorter side and not cropped.
    Fields: as in `BackgroundConsistency`; the model is a ViT.
    Raises UserError for clips of one frame, and if the weights are unavailable.
    """

    model: str = "facebook/dino-vitb16"
    reward, parameters, network = "subject_consistency", 86.4e6, "ViTModel"

    def _features(self, frames: Tensor) -> Tensor:
        sides = Preparation(SIZE).sides(*frames.shape[-2:])
        frames = normalize_pixels(interpolate(frames, sides, mode="bilinear") / 255, *IMAGENET)
        states = self.models[0](pixel_values=frames.to(self.float_type), interpolate_pos_encoding=True)
        return states.last_hidden_state[:, 0]


@built_in("background_consistency", "steady stable")
class BackgroundConsistency(_Consistency):
    """VBench's background consistency: cosines of CLIP ViT-B/32 embeddings of a clip's frames, 1 for a still clip.

    model, revision: a CLIP of transformers, a folder or hub id.
    parts: the network alone, ready-made. dtype (fp32), device and batch_size (32 frames): as in `LocalModel`.
    Raises UserError for clips of one frame, and if the weights are unavailable.
    """

    model: str = "openai/clip-vit-base-patch32"
    reward, parameters, network = "background_consistency", 87.8e6, "CLIPVisionModelWithProjection"

    def _features(self, frames: Tensor) -> Tensor:
        frames = Preparation(SIZE, scaling="unfiltered")(frames / 255)
        return self.models[0](pixel_values=frames.to(self.float_type)).image_embeds


# Dimensions for any prompt, and those that judge facts of the prompt: its objects, colours, scene or style.
PLAIN = ("subject_consistency", "background_consistency", "temporal_flickering", "motion_smoothness", "dynamic_degree",
         "aesthetic_quality", "imaging_quality", "human_action", "temporal_style", "overall_consistency")
WITH_FACTS = ("object_class", "multiple_objects", "color", "spatial_relationship", "scene", "appearance_style")
PERCENT = ("imaging_quality",)  # out of 100 in the package, divided in VBench's tables
LONGEST = 150  # characters of a prompt in a file's name
USUAL = 8.0  # frames per second of videos whose rate is not known
CHILD = Path(__file__).with_name("vbench_child.py")
INSTALL = "python -m venv vbench && vbench/bin/pip install vbench, and give args: {python: vbench/bin/python}"


@built_in("vbench", "quality benchmark")
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
        import_optional("cv2", "video", "reward 'vbench'")
        if self.python is not None:
            trust.require(Path(self.python).resolve(), "reward 'vbench'", self.python)
        vars(self)["python"] = self.python or sys.executable
        found = self._run(["-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vbench') is None)"])
        if found.returncode:
            raise UserError(f"reward 'vbench': {self.python} has no package vbench: {INSTALL}")

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
            answer = self._package_scores([videos[row] for row in rows], asked, self.fps or fps or USUAL)
            scale = 100 if self.dimension in PERCENT else 1
            for row, name in names.items():
                scores[row] = answer[name] / scale if name in answer else None
            if None in [scores[row] for row in rows] and self.dimension != "color":
                raise RuntimeError(f"vbench scored {len(answer)} of {len(rows)} videos")
        return scores

    def _package_scores(self, clips: Sequence[Tensor], asked: dict[str, dict[str, Any]], fps: float
                        ) -> dict[str, float]:
        """Package's scores of clips [F, 3, H, W] by their names, the keys of `asked`."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "videos").mkdir()
            for file, clip in zip(asked, clips):
                write(folder / "videos" / file, eight_bit(clip), fps)
            (folder / "asked.json").write_text(json.dumps({
                "dimension": self.dimension, "videos": asked, "device": self.device or default_device()}))
            done = self._run([str(CHILD), str(folder)])
            if done.returncode or not (folder / "answer.json").is_file():
                last = next(reversed(done.stderr.strip().splitlines()), "no message")
                raise RuntimeError(f"vbench failed on {self.dimension}: {last[:300]}")
            return json.loads((folder / "answer.json").read_text())

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        assert self.python is not None  # this interpreter, unless another one is named
        try:
            return subprocess.run([self.python, *arguments], capture_output=True, text=True, timeout=self.seconds)
        except OSError as error:
            raise UserError(f"reward 'vbench': {self.python} does not run ({error.strerror}): {INSTALL}") from None


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
