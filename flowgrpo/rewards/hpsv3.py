"""HPSv3 (Ma et al. 2025, 2508.03789): human preference, by Qwen2-VL-7B with a head that was trained on rankings.

The model reads the picture and a long instruction with the prompt. A head of three layers maps the state at the mark
<|Reward|> to mean and spread of the score; the mean counts.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.errors import UserError
from flowgrpo.rewards import qwen2_vl
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import Head, LocalModel, fill, loading, tensors
from flowgrpo.rewards.preprocessing import resized
from flowgrpo.rewards.qwen2_vl import PROMPT

AREA = 256 * 28 * 28  # approximate pixels of every scaled picture: 448 by 448 for a square
MARK = "<|Reward|>"


@dataclass(frozen=True)
class HpsV3(LocalModel):
    """HPSv3: mean preference for an image given its prompt, around -5 to 15.

    The weights were trained on one instruction. It is read from the source of the package hpsv3, which is never run
    (`pip install --no-deps hpsv3`: its requirements are old), or from a text file.

    instruction: that file, with {text_prompt} for the prompt and one <|Reward|>.
    checkpoint: a file, or `owner/name/file` on the hub. revision: of the hub.
    model: configuration and processor of Qwen2-VL-7B, a folder or hub id.
    dtype (bf16; fp32 of the head), device and batch_size (4): as in `LocalModel`.
    Raises UserError if the weights, the instruction or one of its marks are missing.
    """

    checkpoint: str = "MizzenAI/HPSv3/HPSv3.safetensors"
    revision: str | None = None
    model: str = "Qwen/Qwen2-VL-7B-Instruct"
    instruction: str | None = None
    dtype: str = field(default="bf16", kw_only=True)
    batch_size: int = field(default=4, kw_only=True)
    text: str = field(init=False, repr=False)
    reward, parameters = "hpsv3", 8.29e9
    differentiable = True
    about = About(modality="image", range=(None, None), needs="hpsv3", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", instruction(self.instruction))
        super().__post_init__()

    def _loaded(self) -> tuple[Any, nn.Module, Any]:
        state = qwen2_vl.renamed(tensors("hpsv3", self.checkpoint, self.revision, "checkpoint"))
        config, processor = qwen2_vl.base("hpsv3", self.model, "model", [MARK])
        with loading(f"reward 'hpsv3': {self.checkpoint}", "give the checkpoint that was made for this reward"):
            head = ranking_head(state)
            return qwen2_vl.assembled(config, state, self.float_type), head, processor

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.batched(self._scores, images, prompts)

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, head, processor = self.models
        pictures = resized(images.to(self.device), sides(*images.shape[-2:]))
        pictures = pictures if pictures.requires_grad else pictures.to(torch.uint8)
        seen = processor.image_processor(images=list(pictures), do_resize=False, return_tensors="pt").to(self.device)
        shown = model.visual(seen.pixel_values.to(model.dtype), grid_thw=seen.image_grid_thw).pooler_output
        messages = [qwen2_vl.message(processor, "image", self.text, prompt, len(shown) // len(prompts))
                    for prompt in prompts]
        return head(qwen2_vl.states(model, processor, "image", messages, shown, [MARK]).float())[:, 0]


def sides(height: int, width: int) -> tuple[int, int]:
    """Return height and width near AREA, in steps of two patches, as Qwen2-VL's resizing does."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    return smart_resize(height, width, factor=28, min_pixels=AREA, max_pixels=AREA)


def instruction(file: str | None) -> str:
    """Return the instruction in a file; None: the one in the source of the package hpsv3, which is read and not run."""
    if file is None:
        spec = importlib.util.find_spec("hpsv3")
        if spec is None:
            raise UserError("reward 'hpsv3' needs the instruction of its weights: pip install --no-deps hpsv3, or "
                            "give it as args: {instruction: FILE}")
        assert spec.submodule_search_locations is not None  # hpsv3 is a package
        source = Path(spec.submodule_search_locations[0], "dataset", "data_collator_qwen.py")
        with loading(f"reward 'hpsv3': the instruction in {source}", "give it as args: {instruction: FILE}"):
            said = {node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]  # plain names
                    for node in ast.parse(source.read_text(encoding="utf-8")).body
                    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)}
            return said["INSTRUCTION"] + said["prompt_with_special_token"]
    with loading(f"reward 'hpsv3': {file}", "give a text file as args: {instruction: FILE}"):
        text = Path(file).read_text(encoding="utf-8")
    if text.count(MARK) != 1 or PROMPT not in text:
        raise UserError(f"reward 'hpsv3': {file} has {text.count(MARK)} times {MARK} and {text.count(PROMPT)} times "
                        f"{PROMPT}, expected one and at least one")
    return text


def ranking_head(state: dict[str, Tensor]) -> nn.Module:
    """Return the head of a checkpoint, whose tensors are taken out of `state`."""
    width = state["language_model.embed_tokens.weight"].shape[1]
    head = Head(nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
    of_head = [key for key in state if key.startswith("rm_head.")]
    fill("hpsv3", head, {key.removeprefix("rm_head."): state.pop(key).float() for key in of_head}, "the head")
    return head
