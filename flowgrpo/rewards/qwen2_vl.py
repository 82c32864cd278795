"""Qwen2-VL as a reward model: it reads one image or video and an instruction, and a head reads its states at marks.

HPSv3 and VideoAlign are made so. As in both releases, positions simply count up, also over the tokens of what is shown:
Qwen2-VL's own positions by row and column give other scores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.rewards.local_model import pretrained

PROMPT = "{text_prompt}"  # in an instruction
# The releases' names (before and after transformers 4.52) and those of Qwen2VLModel.
NAMES = ((r"^model\.(?=visual\.|language_model\.)", ""), (r"^model\.", "language_model."), (r"^rm_head\.", "rm_head."),
         (r"^visual\.", "visual."))


def base(reward: str, name: str, option: str, marks: Sequence[str]) -> tuple[Any, Any]:
    """Load the configuration and the processor of Qwen2-VL, and add the marks to its tokens.

    name: a folder or hub id. option: the reward's argument that names it.
    Raises UserError, which names `option`, if they are unavailable.
    """
    from transformers import Qwen2VLConfig, Qwen2VLProcessor

    config = pretrained(reward, Qwen2VLConfig, name, None, option)
    processor = pretrained(reward, Qwen2VLProcessor, name, None, option)
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.add_tokens([*marks], special_tokens=True)
    return config, processor


def states(model: Any, processor: Any, kind: str, messages: Sequence[str], shown: Tensor, marks: Sequence[str]
           ) -> Tensor:
    """Return the last states at the marks in B messages: [B * len(marks), D], in the order in which they stand.

    kind: image or video. messages: as `message` returns. shown: [B * N, D], the visual network's outputs.
    """
    tokens = processor.tokenizer
    read = tokens([*messages], padding=True, return_tensors="pt").to(shown.device)
    words = model.get_input_embeddings()(read.input_ids)
    there = read.input_ids == tokens.convert_tokens_to_ids(placeholder(kind))
    words = words.masked_scatter(there[..., None], shown.to(words))
    places = torch.arange(words.shape[1], device=words.device).expand(3, len(messages), -1)
    hidden = model.language_model(inputs_embeds=words, attention_mask=read.attention_mask, position_ids=places)
    marked = torch.isin(read.input_ids, torch.tensor(tokens.convert_tokens_to_ids([*marks]), device=words.device))
    return hidden.last_hidden_state[marked]


def message(processor: Any, kind: str, instruction: str, prompt: str, count: int) -> str:
    """Return the whole conversation, with `count` placeholders for the image or video. Chat marks in a prompt are
    removed."""
    said = instruction.replace(PROMPT, re.sub(r"<\|\w+\|>", "", prompt))
    content = [{"type": kind}, {"type": "text", "text": said}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                         add_generation_prompt=True)
    return chat.replace(placeholder(kind), placeholder(kind) * count)


def placeholder(kind: str) -> str:
    """Return the token that stands for a part of an image or a video."""
    return f"<|{kind}_pad|>"


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the released tensors under the names of Qwen2VLModel, and `rm_head`; without the language head."""
    result = {}
    for key, value in state.items():
        name = next((re.sub(pattern, here, key) for pattern, here in NAMES if re.match(pattern, key)), None)
        if name is not None:
            result[name] = value
    return result


def assembled(config: Any, state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build Qwen2VLModel with every tensor of `state`.
    Raises ValueError for a missing or an extra tensor."""
    from transformers import Qwen2VLModel

    # A release has rows for its marks; the base model has more, for no token.
    config.text_config.vocab_size = len(state["language_model.embed_tokens.weight"])
    loaded: Any = Qwen2VLModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype,
                                               output_loading_info=True)
    model, info = loaded
    if wrong := {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}:
        raise ValueError(f"missing or unknown: {', '.join(map(str, sorted(wrong, key=str)[:3]))}")
    return model
