"""VideoReward (VideoAlign, Liu et al. 2025, 2501.13918): visual quality, motion quality and text alignment of a video.

Qwen2-VL-2B reads the frames and a long instruction with the prompt. A linear head maps the states at the marks
<|VQ_reward|>, <|MQ_reward|> and <|TA_reward|> to the three scores, which are shifted and divided by the release's
constants. 2 frames per second are seen, at most 448 by 448 pixels each. The weights are read as tensors alone: nothing
is unpickled. Their LoRA is merged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.errors import UserError
from flowgrpo.rewards import qwen2_vl
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import Head, LocalModel, from_hub, loading, tensors
from flowgrpo.rewards.preprocessing import resized
from flowgrpo.rewards.qwen2_vl import PROMPT
from flowgrpo.rewards.released_text import strings, texts

AXES = ("VQ", "MQ", "TA")
MARKS = tuple(f"<|{axis}_reward|>" for axis in AXES)
LEAST, MOST = 128 * 28 * 28, 448 * 448  # pixels of a scaled frame
FEWEST, LONGEST = 4, 768  # frames
USUAL = 16.0  # frames per second of clips whose rate is not known
CONSTANTS = {"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105,
             "TA_std": 2.5121}
FIX = "give the folder of KwaiVGI/VideoReward as args: {model: FOLDER}"


@dataclass(frozen=True)
class VideoReward(LocalModel):
    """VideoReward: weighted sum of a video's visual quality, motion quality and text alignment, each around -3 to 3.

    The weights were trained on one instruction, DETAILED_PROMPT_WITH_SPECIAL_TOKEN of the release's prompt_template.py
    (MIT, KwaiVGI/VideoAlign). `flowgrpo reward fetch videoalign` copies it, word for word.

    instruction: None for the fetched one; that file, which is read and never run; or a text file with {text_prompt}
    and the three marks.
    axes: weights of VQ, MQ and TA; an axis that is not named has none.
    model: the release, a folder or hub id, with model_config.json and checkpoint-*/model.safetensors or model.pth.
    base: configuration and processor of Qwen2-VL-2B, a folder or hub id.
    fps: frames per second of the clips; None: those that the model makes (16 where that is not known).
    dtype (bf16; fp32 of the head), device and batch_size (2 clips): as in `LocalModel`.
    Raises UserError if the weights, the instruction or one of its marks are missing.
    """

    instruction: str | None = None
    axes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 1.0))
    model: str = "KwaiVGI/VideoReward"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    fps: float | None = None
    dtype: str = field(default="bf16", kw_only=True)
    batch_size: int = field(default=2, kw_only=True)
    text: str = field(init=False, repr=False)
    reward, parameters = "videoalign", 2.21e9
    about = About(modality="video", range=(None, None), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if not self.axes or not set(self.axes) <= set(AXES) or not (self.fps is None or self.fps > 0):
            raise UserError(f"reward 'videoalign': axes is {self.axes} and fps {self.fps}, expected weights of "
                            f"{', '.join(AXES)} and a number above 0, or None")
        object.__setattr__(self, "text", instruction(self.instruction))
        super().__post_init__()

    def _loaded(self) -> tuple[Any, nn.Module, Any, dict[str, float]]:
        with loading(f"reward 'videoalign': {self.model}", FIX, self.model):
            file, weights = files(self.model)
            released = json.loads(file.read_text(encoding="utf-8"))
        config, processor = qwen2_vl.base("videoalign", self.base, "base", MARKS)
        state = tensors("videoalign", str(weights), None, "model")
        with loading(f"reward 'videoalign': {weights}", FIX):
            state = qwen2_vl.renamed(merged(state, released["peft_lora_config"]))
            head = linear_head(state)
            model = qwen2_vl.assembled(config, state, self.float_type)
        return model, head, processor, CONSTANTS | (released.get("inference_config") or {})

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float | None = None) -> Tensor:
        return self.batched(partial(self._scores, fps=fps), videos, prompts)

    def _scores(self, videos: Tensor, prompts: list[str], fps: float | None) -> Tensor:
        constants = self.models[-1]
        raw = self.scores(videos, prompts, fps)
        return sum((weight * (raw[:, AXES.index(axis)] - constants[f"{axis}_mean"]) / constants[f"{axis}_std"]
                    for axis, weight in self.axes.items()), torch.zeros(len(raw), device=raw.device))

    @torch.no_grad()
    def scores(self, videos: Tensor, prompts: list[str], fps: float | None = None) -> Tensor:
        """Return the head's values [B, 3] of clips [B, F, 3, H, W] in [0, 1], before the constants. fps: of the clips.
        Raises UserError for clips of one frame."""
        model, head, processor, _ = self.models
        seen = self._seen(videos, fps)
        shown = model.visual(seen.pixel_values_videos.to(model.dtype), grid_thw=seen.video_grid_thw).pooler_output
        messages = [qwen2_vl.message(processor, "video", self.text, prompt, len(shown) // len(prompts))
                    for prompt in prompts]
        hidden = qwen2_vl.states(model, processor, "video", messages, shown, MARKS)
        values = head(hidden.float()).unflatten(0, (len(prompts), len(AXES)))
        return values.diagonal(dim1=1, dim2=2) if values.shape[-1] == len(AXES) else values[..., 0]

    def _seen(self, videos: Tensor, fps: float | None = None) -> Any:
        """Return Qwen2-VL's patches of clips."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        frames = videos[:, looked_at(videos.shape[1], self.fps or fps or USUAL)]
        height, width = videos.shape[-2:]
        sides = smart_resize(height, width, factor=28, min_pixels=LEAST, max_pixels=MOST)
        pictures = resized(frames.to(self.device).flatten(0, 1), sides, "bytes")
        pictures = pictures.to(torch.uint8).unflatten(0, frames.shape[:2])
        process = self.models[2].video_processor
        return process(videos=list(pictures), do_resize=False, do_sample_frames=False, return_tensors="pt"
                       ).to(self.device)


def looked_at(count: int, fps: float) -> list[int]:
    """Return the frames of a clip of `count` frames that are seen: 2 a second, evenly spread, an even number.
    Raises UserError for fewer than two frames."""
    if count < 2:
        raise UserError("reward 'videoalign': got clips of one frame, expected at least two")
    most = min(LONGEST, count) // 2 * 2
    number = 2 * round(min(max(2 * count / fps, FEWEST), most) / 2)
    return torch.linspace(0, count - 1, number).round().long().tolist()


def files(model: str) -> tuple[Path, Path]:
    """Return the configuration and the weights of the release in a folder, else on the hub.
    Raises FileNotFoundError for a folder without them."""
    folder = Path(model)
    if not folder.is_dir():
        return from_hub(f"{model}/model_config.json", None), from_hub(f"{model}/checkpoint-11352/model.pth", None)
    for name in ("model.safetensors", "model.pth"):
        if weights := sorted(folder.glob(f"checkpoint-*/{name}")):
            return folder / "model_config.json", weights[-1]
    raise FileNotFoundError("no checkpoint-*/model.safetensors or model.pth")


def merged(state: dict[str, Tensor], lora: dict[str, Any]) -> dict[str, Tensor]:
    """Return a checkpoint of PEFT with its LoRA added to the weights, under the names without PEFT's parts.

    lora: its configuration, with `lora_r` and `lora_alpha`.
    """
    rank, alpha = lora["lora_r"], lora["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)
    plain = {key.removeprefix("base_model.model."): value for key, value in state.items()}
    result = {key.replace(".base_layer.", "."): value for key, value in plain.items() if ".lora_" not in key}
    for key, down in plain.items():
        if ".lora_A." in key:
            up, name = plain[key.replace(".lora_A.", ".lora_B.")], key.partition(".lora_A.")[0] + ".weight"
            result[name] = (result[name].float() + scale * up.float() @ down.float()).to(result[name].dtype)
    return result


def linear_head(state: dict[str, Tensor]) -> nn.Module:
    """Return the head of a checkpoint, whose tensor is taken out of `state`."""
    weight = state.pop("rm_head.weight").float()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return Head(linear)


def instruction(file: str | None) -> str:
    """Return the fetched instruction, or that in a file: a text, or the release's source, which is read and not run.
    """
    if file is None:
        return texts("videoalign", "instruction")["video"]
    with loading(f"reward 'videoalign': {file}", "give prompt_template.py of KwaiVGI/VideoAlign or a text file"):
        text = Path(file).read_text(encoding="utf-8")
        if file.endswith(".py"):
            [text] = [said for said in strings(text) if PROMPT in said and all(mark in said for mark in MARKS)]
    if [mark for mark in re.findall(r"<\|\w+_reward\|>", text)] != list(MARKS) or PROMPT not in text:
        raise UserError(f"reward 'videoalign': {file} has not {PROMPT} and {', '.join(MARKS)} once each, in "
                        "this order")
    return text
