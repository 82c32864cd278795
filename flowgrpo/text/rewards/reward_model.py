"""Reward model of transformers: a model with a scalar head that reads a prompt and its completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import LocalModel, pretrained
from flowgrpo.rewards.vlm_judge.judge import filled
from flowgrpo.text.rewards.answer_keys import LICENCE, spoken

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, eq=False)
class RewardModel(LocalModel):
    """Score that a sequence classification model of transformers gives a prompt with its completion.

    model: its folder or name on the hub, with safetensors and one label. revision: of the hub.
    system: a message before the prompt.
    template: a text with {prompt} and {completion}, in place of the tokenizer's chat template.
    thoughts: show the <think> part.
    longest: tokens; a longer text loses its beginning, since the score is read at its end.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (8): as in `LocalModel`.
    Code from a hub is never run.
    Raises UserError for any other model, and for a tokenizer without a chat template.
    """

    model: str = ""
    revision: str | None = None
    system: str | None = None
    template: str | None = None
    thoughts: bool = False
    longest: int = 4096
    batch_size: int = field(default=8, kw_only=True)
    reward = "reward_model"
    about = About(modality="text", range=(None, None), needs="", licence=f"{LICENCE}, the model's")

    def __post_init__(self) -> None:
        if self.longest < 1 or not (self.model or self.parts):
            raise UserError(f"reward 'reward_model': got model {self.model!r}, longest {self.longest}, expected args: "
                            "{model: FOLDER}, and longest from 1")
        super().__post_init__()

    def _require(self, parts: tuple[Any, ...]) -> None:
        network, tokenizer = parts
        if network.config.num_labels != 1:
            raise UserError(f"reward 'reward_model': {self.model} has {network.config.num_labels} labels, expected 1, "
                            "the reward")
        if self.template is None and getattr(tokenizer, "chat_template", None) is None:
            raise UserError(f"reward 'reward_model': the tokenizer of {self.model} has no chat template: set template, "
                            "such as \"{prompt}\\n{completion}\"")

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        network = pretrained("reward_model", AutoModelForSequenceClassification, self.model, self.revision, "model",
                             dtype=self.float_type, use_safetensors=True)
        return network, pretrained("reward_model", AutoTokenizer, self.model, self.revision, "model")

    @torch.no_grad()
    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> list[float | None]:
        """Return B scores; None for a text without any token, which a template may produce."""
        rows = [self._tokens(prompt, completion) for prompt, completion in zip(prompts, completions)]
        order = sorted((row for row in range(len(rows)) if rows[row]), key=lambda row: len(rows[row]))
        scores: dict[int, float] = {}
        for start in range(0, len(order), self.batch_size):  # sorted by length: little padding
            some = order[start:start + self.batch_size]
            scores |= zip(some, self._scores([rows[row] for row in some]).tolist())
        return [scores.get(row) for row in range(len(rows))]

    def _tokens(self, prompt: str, completion: str) -> list[int]:
        """Return a prompt with its completion as tokens, the last `longest` of them."""
        _, tokenizer = self.models
        completion = completion if self.thoughts else spoken(completion)
        if self.template is not None:
            return tokenizer(filled(self.template, prompt=prompt, completion=completion))["input_ids"][-self.longest:]
        turns = [{"role": "system", "content": self.system}] if self.system else []
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)  # includes the special tokens already
        return tokenizer(text, add_special_tokens=False)["input_ids"][-self.longest:]

    def _scores(self, rows: Sequence[list[int]]) -> Tensor:
        """Score token rows, padded at their ends -> [B] float32."""
        network, _ = self.models
        config, length = network.config.get_text_config(), max(map(len, rows))
        padding, before = unused(rows, config), config.pad_token_id
        ids = torch.tensor([row + [padding] * (length - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=self.device)
        config.pad_token_id = padding
        try:
            return network(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
        finally:
            config.pad_token_id = before


def unused(rows: Sequence[list[int]], config: PretrainedConfig) -> int:
    """Return a padding token: the model's own, or, if one of the rows holds that, the lowest that none holds.

    Models read the score at the last token that differs from the padding token. In many chat models that is also the
    token that ends a turn, so the score would be read at the one before it.
    """
    held = {token for row in rows for token in row}
    preferred = [config.pad_token_id] if config.pad_token_id is not None else []
    return next(token for token in (*preferred, *range(config.vocab_size)) if token not in held)
