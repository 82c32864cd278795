"""Networks of learned preference rewards: an image and its prompt to a score per aspect.

Both have the same three parts. `prepare` converts images of any size [B, 3, H, W] in [0, 1] to the network's input.
`rows` maps these and their B prompts to the features that training does not change, tensors by name with B rows each,
computed once per image. `forward` of these rows gives the scores [B, A] of A aspects.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowgrpo.errors import UserError
from flowgrpo.rewards.clip import ClipScore
from flowgrpo.rewards.local_model import loading
from flowgrpo.rewards.preprocessing import Preparation
from flowgrpo.starter import FOLDERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WIDTH, BLOCKS = 96, 3
TEXT, TOKENIZER = "text_encoder", "tokenizer"  # folders, named as in pipelines


class Film(nn.Module):
    """Small convolutional network whose blocks are scaled and shifted, per channel, by the prompt.

    This is FiLM (Perez et al. 2018, 1709.07871): patches of 4 by 4 pixels, convolutions down to an eighth of the side,
    then residual blocks that also see their position. Image and text encoder are trained together.

    text, tokenizer: a text encoder of transformers with its tokenizer. aspects: A. size: the images' side.
    """

    def __init__(self, text: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, aspects: int, size: int) -> None:
        from torchvision.ops import Conv2dNormActivation

        super().__init__()
        self.text, self.tokenizer, width = text, tokenizer, text.config.hidden_size
        self.prepare = Preparation(size, "longest", mean=(0, 0, 0), deviation=(1, 1, 1))
        layer = partial(Conv2dNormActivation, norm_layer=partial(nn.GroupNorm, 8))
        self.trunk = nn.Sequential(layer(3, 64, kernel_size=4, stride=4, padding=0), layer(64, 64),
                                   layer(64, WIDTH, stride=2))
        self.blocks = nn.ModuleList(Modulated(width) for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.Linear(2 * WIDTH + width, 128), nn.ReLU(), nn.Linear(128, aspects))

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt."""
        return min(self.tokenizer.model_max_length, getattr(self.text.config, "max_position_embeddings", 256))

    def rows(self, prepared: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Images uint8 [B, 3, S, S], ids and mask [B, L]."""
        tokens = self.tokenizer(list(prompts), padding="max_length", truncation=True, max_length=self.longest,
                                return_tensors="pt")
        return {"images": (prepared * 255).round().to(torch.uint8), "ids": tokens.input_ids.to(prepared.device),
                "mask": tokens.attention_mask.to(prepared.device)}

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return self.score_features(self.image_features(images), ids, mask)

    def image_features(self, images: Tensor) -> Tensor:
        """Prompt-independent features of images [B, 3, S, S], [B, WIDTH, S / 8, S / 8]."""
        return self.trunk(images.to(next(self.head.parameters()).dtype) / 127.5 - 1)

    def score_features(self, seen: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [B, A] of `image_features` with the prompts' ids and mask [B, L]."""
        text = self._encode_prompts(ids, mask)
        for block in self.blocks:
            seen = block(seen, text)
        return self.head(torch.cat([seen.mean((2, 3)), seen.amax((2, 3)), text], 1))

    def _encode_prompts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Mean of a prompt's states [B, width]; repeated prompts are encoded once."""
        both, places = torch.stack([ids, mask], 1).unique(dim=0, return_inverse=True)
        ids, mask = both.unbind(1)
        states = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
        return ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))[places]


class Modulated(nn.Module):
    """Residual block on [B, WIDTH, h, w] whose channels are scaled and shifted by a text [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(WIDTH + 2, WIDTH, 1)
        self.outer = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, WIDTH, affine=False)
        self.by_text = nn.Linear(width, 2 * WIDTH)

    def forward(self, seen: Tensor, text: Tensor) -> Tensor:
        y, x = (torch.linspace(-1, 1, side, device=seen.device, dtype=seen.dtype) for side in seen.shape[-2:])
        place = torch.stack(torch.meshgrid(y, x, indexing="ij")).expand(len(seen), -1, -1, -1)
        inner = torch.relu(self.inner(torch.cat([seen, place], 1)))
        scale, shift = self.by_text(text)[..., None, None].chunk(2, 1)
        return inner + torch.relu((1 + scale) * self.norm(self.outer(inner)) + shift)


class ClipHead(nn.Module):
    """Head on the embeddings of a frozen CLIP model: image, prompt, and their product, through one hidden layer, to
    scores of A aspects."""

    def __init__(self, clip: ClipScore, aspects: int) -> None:
        super().__init__()
        self.parts, self.prepare, self.device = clip.models, clip.prepare, clip.device  # a tuple: not registered
        self.float_type = clip.float_type
        width = self._encode_prompts(["a"]).shape[-1]
        self.head = nn.Sequential(nn.LayerNorm(3 * width), nn.Linear(3 * width, 256), nn.ReLU(),
                                  nn.Linear(256, aspects))

    @torch.no_grad()
    def rows(self, prepared: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Features [B, 3 W] of embeddings of width W."""
        images = prepared.to(self.device, self.float_type)
        text, seen = self._encode_prompts(prompts), self.parts[0].encode_image(images, normalize=True)
        scale = text.shape[-1] ** 0.5  # scales the numbers of a normalised embedding to around 1
        return {"features": torch.cat([seen * scale, text * scale, seen * text * scale**2], 1).float()}

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features)

    @torch.no_grad()
    def _encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        model, tokenizer = self.parts
        return model.encode_text(tokenizer(list(prompts)).to(self.device), normalize=True)


def with_text(source: str, aspects: int, size: int) -> Film:
    """Build a fresh Film network, by torch's global seed, with the text encoder of a starter, or of a pipeline's folder
    or hub id. Raises UserError if it is unavailable."""
    from transformers import AutoTokenizer

    place = str(FOLDERS.get(source, source))
    with loading(f"text encoder {source}", f"expected starter, or a folder or hub id with {TEXT} and {TOKENIZER}",
                 place):
        tokenizer = AutoTokenizer.from_pretrained(place, subfolder=TOKENIZER, trust_remote_code=False)
        kind, config = _text_class(place, subfolder=TEXT)
        text = kind.from_pretrained(place, subfolder=TEXT, config=config, dtype=torch.float32,
                                    attn_implementation="eager")  # the fused one has a slow backward on a CPU
    return Film(text, tokenizer, aspects, size)


def build_film(folder: Path, aspects: int, size: int) -> Film:
    """Build the Film network from a folder's text encoder configuration and tokenizer, without its weights."""
    from transformers import AutoTokenizer

    kind, config = _text_class(str(folder / TEXT))
    text = kind._from_config(config, attn_implementation="eager")
    return Film(text, AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False), aspects, size)


def _text_class(place: str, **where: str) -> tuple[Any, Any]:
    """Transformers class that a configuration names, and the configuration."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **where)
    [name] = config.architectures
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UserError(f"text encoder {place}: {name} is no model of transformers")
    return kind, config
