"""Language model that reads images, as a policy: `causal_lm` with an optional image per prompt.

The processor makes tokens and pixels of a prompt through its chat template. Prompts with and without an image may be in
one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from flowgrpo.config.sections import Adapter, Text
from flowgrpo.data.images import read_image
from flowgrpo.errors import UserError
from flowgrpo.text.policies.causal_lm import TARGETS, CausalLM
from flowgrpo.text.samplers.language_model import TokenizedPrompts

# Configuration keys of the placeholder tokens of an image, a video or a sound.
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


@dataclass(frozen=True, eq=False)
class Shown(TokenizedPrompts):
    """Prompts with their images, by the processor's names of the model's inputs.

    by_token: values [S,...] of each token.
    images: the others, with a first dimension of any length; empty for a prompt without an image.
    """

    by_token: list[dict[str, Tensor]]
    images: list[dict[str, Tensor]]

    def rows(self, index: Tensor) -> "Shown":
        return Shown(*([values[i] for i in index.tolist()] for values in
                       (self.prompts, self.ids, self.by_token, self.images)))


class VisionLM(CausalLM):
    """Transformers model from images and text to text, with trainable weights; its arguments are those of `CausalLM`.

    processor: in place of a tokenizer. Unless `adapter.targets` names others, a LoRA trains only the language model's
    layers, not those that read images. No completion holds an image placeholder token: it is barred in the rollout and
    in the replay.
    """

    classes = "AutoModelForImageTextToText", "AutoProcessor"

    def __init__(self, model: Any, processor: Any, adapter: Adapter | None, text: Text, **options: Any):
        from transformers import GenerationMixin

        if not issubclass(type(model), GenerationMixin):
            raise UserError(f"{type(model).__name__} cannot be sampled: it is no GenerationMixin of transformers, "
                            "expected a model that reads images and answers in text")
        if adapter and adapter.targets == Adapter().targets:
            adapter = adapter.model_copy(update={"targets": language_layers(model)})
        super().__init__(model, processor.tokenizer, adapter, text, **options)
        self.processor = processor
        if self.weights:
            self.weights.pipe = processor
        self.placeholders = sorted({token for name in PLACEHOLDERS
                                    if isinstance(token := getattr(model.config, name, None), int)})
        # Of a call, not of the model, which may also draw images, whose tokens have the same numbers.
        self.generating = {"suppress_tokens": self.placeholders or None}
        self._tried = False  # `_reason_apart` has seen an image

    # --- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompts: list[str], negatives: Sequence[str] = (), images: Sequence[Any] = ()) -> Shown:
        """The tokens of the prompts and the model's image inputs; images: an image or its file each, or None."""
        rows = [self._read(*row) for row in zip(prompts, images or [None] * len(prompts), strict=True)]
        return Shown(list(prompts), *map(list, zip(*rows)))

    def _read(self, prompt: str, image: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """A prompt's ids [S], its values by token, and those of its image."""
        if not self._by_processor:
            if image is not None:
                raise UserError("a prompt brings an image, which needs the processor's chat template: leave "
                                "text.template out, or take a processor that has one")
            return self._tokens(prompt), {}, {}
        inputs = template_inputs(self.processor, self.text, prompt, image)
        ids = inputs.pop("input_ids")[0]
        by_token = {name: value[0] for name, value in inputs.items() if value.shape[:2] == (1, len(ids))}
        return ids, by_token, {name: value for name, value in inputs.items() if name not in by_token}

    @property
    def _by_processor(self) -> bool:
        return self.text.template is not False and bool(self.processor.chat_template)

    def written(self, prompt: str) -> str:
        if not self._by_processor:
            return super().written(prompt)
        return str(self.processor.apply_chat_template(_turns(self.text, prompt), add_generation_prompt=True,
                                                      tokenize=False))

    def _beside(self, tokenized: TokenizedPrompts, length: int, before: bool = False) -> dict[str, Tensor]:
        assert isinstance(tokenized, Shown), type(tokenized)
        inputs = {}
        # The values of tokens [B,length,...], padded with 0 as the tokens are; 0 too for completions.
        for name, like in {name: value for row in tokenized.by_token for name, value in row.items()}.items():
            rows = [values.get(name, like.new_zeros(len(ids), *like.shape[1:]))
                    for ids, values in zip(tokenized.ids, tokenized.by_token)]
            joined = pad_sequence(rows, True, padding_side="left" if before else "right")
            inputs[name] = pad(joined, (0, 0) * (like.ndim - 1) + (0, length - joined.shape[1])).to(self.device)
        # Those of images, concatenated; further dimensions are padded with 0, as processors do it.
        for name in sorted({name for row in tokenized.images for name in row}):
            given = [row[name] for row in tokenized.images if name in row]
            most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in given))]
            joined = torch.cat([pad(value, [size for at in range(value.ndim - 1, 0, -1)
                                            for size in (0, most[at - 1] - value.shape[at])]) for value in given])
            inputs[name] = joined.to(self.device, self.dtype if joined.is_floating_point() else None)
        return inputs

    # --- replay ------------------------------------------------------------------------------------------------------

    def permitted(self, logits: Tensor) -> Tensor:
        barred = torch.tensor(self.placeholders, dtype=torch.int64, device=self.device)
        return logits.index_fill(-1, barred, -torch.inf)

    def _positions(self, tokenized: TokenizedPrompts, inputs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [3,P,S] for a family whose image tokens have rows and columns (M-RoPE, 2409.12191)."""
        index = getattr(self.model.base_model, "get_rope_index", None)
        if index is None:
            return super()._positions(tokenized, inputs, mask)
        positions, offset = index(inputs, attention_mask=mask, **self._beside(tokenized, inputs.shape[1], before=True))
        return positions, mask.sum(1, keepdim=True) + offset

    @torch.no_grad()
    def _reason_apart(self, tokenized: TokenizedPrompts) -> str:
        """As in `CausalLM`; tried with the longest prompt, and once more with the first image, which may not be
        shareable."""
        assert isinstance(tokenized, Shown), type(tokenized)
        seen = any(tokenized.images)
        if self._apart is None or seen and not self._tried:
            hardest = max(range(len(tokenized.ids)), key=lambda i: (bool(tokenized.images[i]), len(tokenized.ids[i])))
            row = tokenized.rows(torch.tensor([hardest]))
            self._tried = seen
            self._apart = self._try_prefixes(row, self.probe(row))
        return self._apart

    def probe(self, tokenized: TokenizedPrompts) -> Tensor:
        ids = tokenized.ids[0]
        return ids[~torch.isin(ids, torch.tensor(self.placeholders, dtype=torch.int64))][:3]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"apart": self._apart, "tried": self._tried}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        super().load_state(tensors, values)
        self._tried = values.get("tried", False) and self._apart is not None


def template_inputs(processor: Any, text: Text, prompt: str, image: Any = None, **asked: Any) -> dict[str, Tensor]:
    """A processor's tensors of a prompt, and of an image before it, in its chat template.
    asked: further arguments of the processor.
    Raises UserError if it cannot read them."""
    turns = _turns(text, prompt, image)
    try:
        inputs = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True,
                                               return_tensors="pt", processor_kwargs=asked)
    except Exception as error:  # a template or a processor can raise anything
        raise UserError(f"{type(processor).__name__} cannot read the prompt {prompt!r} "
                        f"({' '.join(str(error).split())[:200]})") from error
    return {name: value for name, value in inputs.items() if torch.is_tensor(value) and name != "attention_mask"}


def _turns(text: Text, prompt: str, image: Any = None) -> list[dict[str, Any]]:
    """The turns of a conversation; each content is a list, since not every template takes a text."""
    if isinstance(image, (str, Path)):
        image = read_image(image)
    said = [{"type": "image", "image": image}] if image is not None else []
    system = [{"role": "system", "content": [{"type": "text", "text": text.system}]}] if text.system else []
    return [*system, {"role": "user", "content": [*said, {"type": "text", "text": prompt}]}]


def language_layers(model: Any) -> list[str]:
    """The names of the language model's layers that get an adapter.
    If it is not a separate module, these are their last names alone."""
    decoder = model.get_decoder()
    root = next(name for name, module in model.named_modules() if module is decoder)
    layers = [f"{root}.{name}" for name, module in decoder.named_modules()
              if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in TARGETS]
    return layers if root and decoder is not model.base_model else TARGETS
