"""HPSv3 (Ma et al. 2025, 2508.03789): human preference, by Qwen2-VL-7B with a head that was trained on rankings.

The model reads the picture and a long instruction with the prompt. A head of three layers maps the state at the mark
<|Reward|> to mean and spread of the score; the mean counts. As in the release, positions simply count up, also over the
picture's tokens: Qwen2-VL's own positions by row and column give other scores.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import Head, LocalModel, fill, loading, pretrained, tensors
from flowgrpo.rewards.preprocessing import resized

if TYPE_CHECKING:
    from transformers import Qwen2VLConfig, Qwen2VLModel

AREA = 256 * 28 * 28  # approximate pixels of every scaled picture: 448 by 448 for a square
MARK, IMAGE, PROMPT = "<|Reward|>", "<|image_pad|>", "{text_prompt}"
# The release's names (before and after transformers 4.52) and those of Qwen2VLModel.
NAMES = ((r"^model\.(?=visual\.|language_model\.)", ""), (r"^model\.", "language_model."), (r"^rm_head\.", "rm_head."),
         (r"^visual\.", "visual."))


@dataclass(frozen=True)
class HpsV3(LocalModel):
    """HPSv3: mean preference for a picture given its prompt, around -5 to 15.

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
        from transformers import Qwen2VLConfig, Qwen2VLProcessor

        state = renamed(tensors("hpsv3", self.checkpoint, self.revision, "checkpoint"))
        config = pretrained("hpsv3", Qwen2VLConfig, self.model, None, "model")
        processor = pretrained("hpsv3", Qwen2VLProcessor, self.model, None, "model")
        processor.tokenizer.padding_side = "right"
        processor.tokenizer.add_tokens([MARK], special_tokens=True)
        with loading(f"reward 'hpsv3': {self.checkpoint}", "give the checkpoint that was made for this reward"):
            return *assembled(config, state, self.float_type), processor

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.batched(self._scores, images, prompts)

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, head, processor = self.models
        pictures = resized(images.to(self.device), sides(*images.shape[-2:]))
        pictures = pictures if pictures.requires_grad else pictures.to(torch.uint8)
        seen = processor.image_processor(images=list(pictures), do_resize=False, return_tensors="pt").to(self.device)
        count = int(seen.image_grid_thw[0].prod()) // processor.image_processor.merge_size ** 2
        read = processor.tokenizer([self._message(prompt, count) for prompt in prompts], padding=True,
                                   return_tensors="pt").to(self.device)
        shown = model.visual(seen.pixel_values.to(model.dtype), grid_thw=seen.image_grid_thw).pooler_output
        words = model.get_input_embeddings()(read.input_ids)
        there = read.input_ids == processor.tokenizer.convert_tokens_to_ids(IMAGE)
        words = words.masked_scatter(there[..., None], shown.to(words))
        places = torch.arange(words.shape[1], device=words.device).expand(3, len(prompts), -1)
        hidden = model.language_model(inputs_embeds=words, attention_mask=read.attention_mask, position_ids=places)
        marked = read.input_ids == processor.tokenizer.convert_tokens_to_ids(MARK)
        return head(hidden.last_hidden_state[marked].float())[:, 0]

    def _message(self, prompt: str, count: int) -> str:
        """Return the whole conversation, with `count` placeholders for the picture. Chat marks in a prompt are removed.
        """
        *_, processor = self.models
        said = self.text.replace(PROMPT, re.sub(r"<\|\w+\|>", "", prompt))
        content = [{"type": "image"}, {"type": "text", "text": said}]
        chat = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                             add_generation_prompt=True)
        return chat.replace(IMAGE, IMAGE * count)


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


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the released tensors under the names of Qwen2VLModel, and `rm_head`; without the language head."""
    result = {}
    for key, value in state.items():
        name = next((re.sub(pattern, here, key) for pattern, here in NAMES if re.match(pattern, key)), None)
        if name is not None:
            result[name] = value
    return result


def assembled(config: Qwen2VLConfig, state: dict[str, Tensor], dtype: torch.dtype) -> tuple[Qwen2VLModel, nn.Module]:
    """Build Qwen2VLModel and the head with every tensor of `state`.
    Raises ValueError for a missing or an extra tensor."""
    from transformers import Qwen2VLModel

    rows, width = state["language_model.embed_tokens.weight"].shape
    config.text_config.vocab_size = rows  # the release has one row more than tokens, the base model many more
    head = Head(nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
    of_head = {key for key in state if key.startswith("rm_head.")}
    fill("hpsv3", head, {key.removeprefix("rm_head."): state[key].float() for key in of_head}, "the head")
    body = {key: value for key, value in state.items() if key not in of_head}
    loaded: Any = Qwen2VLModel.from_pretrained(None, config=config, state_dict=body, dtype=dtype,
                                               output_loading_info=True)
    model, info = loaded
    if wrong := {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}:
        raise ValueError(f"missing or unknown: {', '.join(map(str, sorted(wrong, key=str)[:3]))}")
    return model, head
