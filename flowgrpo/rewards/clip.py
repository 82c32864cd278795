"""CLIP (2103.00020) as a reward, by models of open_clip.

CLIPScore (Hessel et al. 2021, 2104.08718): similarity of a picture and its prompt. CLIP-I (DreamBooth, 2208.12242):
similarity of a picture and the subject of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.client_files import require_open
from flowgrpo.errors import UserError
from flowgrpo.log import unlogged
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import LocalModel, loading
from flowgrpo.rewards.preprocessing import Preparation, read_tensor, straight

SCORES = ("clipscore", "cosine")


@dataclass(frozen=True)
class ClipScore(LocalModel):
    """CLIPScore: 2.5 max(cos, 0) of an image's and its prompt's embedding, by the paper's model and prefix (section 3
    of 2104.08718). `clip_cosine` is the plain cosine by a larger model.

    model, pretrained: a model of open_clip with its tag or a file of weights (OpenAI's need a `-quickgelu` model).
    score: `clipscore` or `cosine`.
    prefix: put before each prompt. The paper scores captions of photographs; not every prompt asks for one.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if open_clip or the weights are missing.
    """

    model: str = "ViT-B-32-quickgelu"
    pretrained: str = "openai"
    score: str = "clipscore"
    prefix: str = "A photo depicts "
    reward, parameters = "clip_score", 151e6
    differentiable = True
    about = About(modality="image", range=(0, 2.5), needs="clip", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward {self.reward!r}: score is {self.score!r}, expected {' or '.join(SCORES)}")
        super().__post_init__()

    def _require(self, parts: tuple[Any, ...]) -> None:
        wanted(parts[0], self.reward)

    @cached_property
    def prepare(self) -> Preparation:
        """Preprocessing of the model's pictures."""
        return wanted(self.models[0], self.reward)

    def _loaded(self) -> tuple[Any, Any]:
        open_clip = needed("open_clip", "clip", f"reward {self.reward!r}")
        with unlogged("open_clip"), loading(
                f"reward {self.reward!r}: {self.model} with the weights {self.pretrained}",
                "open_clip.list_pretrained() names them all; args: {pretrained: FILE} takes a file of yours",
                self.pretrained):
            model = open_clip.create_model(self.model, pretrained=self.pretrained, require_pretrained=True)
            return model, open_clip.get_tokenizer(self.model)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        similarities = self.batched(self._cosines, images, [self.prefix + prompt for prompt in prompts])
        return similarities if self.score == "cosine" else 2.5 * similarities.clamp(min=0)

    def features(self, images: Tensor) -> Tensor:
        """Return the unit-length embeddings of pictures [B, 3, H, W] -> [B, D] on the CPU."""
        return self.batched(lambda some, _: self.embedded(some), images, [""] * len(images))

    def embedded(self, images: Tensor) -> Tensor:
        """Return the same on the model's device, in one batch, with a gradient if required."""
        return self.encoded(self.prepare(images.to(self.device)))

    def encoded(self, pictures: Tensor) -> Tensor:
        """Return the embeddings of prepared pictures on the model's device [B, 3, size, size] -> [B, D]."""
        return self.models[0].encode_image(pictures.to(self.float_type), normalize=True)

    def _cosines(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.models
        return cosines(model, tokenizer, self.prepare(images.to(self.device)).to(self.float_type), prompts)


@dataclass(frozen=True)
class ClipCosine(ClipScore):
    """Cosine of an image's and its prompt's embedding by CLIP ViT-L/14, without a prefix.

    Arguments: as in `ClipScore`.
    """

    model: str = "ViT-L-14-quickgelu"
    score: str = "cosine"
    prefix: str = ""
    reward, parameters = "clip_cosine", 428e6
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0, MIT weights")


def cosines(model: Any, tokenizer: Any, pictures: Tensor, prompts: list[str]) -> Tensor:
    """Return the cosine of each prepared picture [B, 3, H, W] with its prompt under a model of open_clip -> [B].

    Without a graph torch's attention has another kernel; its numbers count in both cases.
    """
    if pictures.requires_grad and torch.is_grad_enabled():
        with torch.no_grad():
            exact = cosines(model, tokenizer, pictures, prompts)
        return straight(exact, _cosines(model, tokenizer, pictures, prompts))
    return _cosines(model, tokenizer, pictures, prompts)


def _cosines(model: Any, tokenizer: Any, pictures: Tensor, prompts: list[str]) -> Tensor:
    shown = model.encode_image(pictures, normalize=True)
    said = model.encode_text(tokenizer(prompts).to(pictures.device), normalize=True)
    return (shown.float() * said.float()).sum(-1)


def wanted(model: Any, reward: str) -> Preparation:
    """Return the preprocessing of a model of open_clip.
    Raises UserError for one that is not bicubic or not square."""
    config = getattr(model.visual, "preprocess_cfg", {})
    size = config.get("size", model.visual.image_size)
    sizes = {size} if isinstance(size, int) else set(size)
    if len(sizes) > 1 or config.get("interpolation", "bicubic") != "bicubic":
        raise UserError(f"reward {reward!r}: this model takes images of {size} pixels, scaled "
                        f"{config.get('interpolation')}: expected one that takes squares, scaled bicubic")
    known = {"mean": config.get("mean"), "deviation": config.get("std"), "fit": config.get("resize_mode")}
    return Preparation(sizes.pop(), **{key: value for key, value in known.items() if value is not None})


class SubjectClip(ClipCosine):
    """CLIP model of `SubjectScore`, whose name its errors report."""

    reward = "subject_score"


@dataclass(frozen=True)
class SubjectScore(LocalModel):
    """CLIP-I: cosine of the embeddings of an image and of the subject's image that its prompt brings.

    key: metadata key of the subject's picture, a path relative to the working folder; None for a prompt without one.
    `image` is the picture that a prompt brings to an editing pipeline; in recorded pairs `chosen` is the subject too.
    model, pretrained and parts: as in `ClipScore`. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError for an unreadable file, and if open_clip or the weights are missing.
    """

    key: str = "subject"
    model: str = "ViT-L-14-quickgelu"
    pretrained: str = "openai"
    clip: ClipScore = field(init=False, repr=False)
    reward, parameters = "subject_score", 0  # those of `clip` count
    privileged = True  # reads files that metadata name
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        clip = SubjectClip(self.model, self.pretrained, dtype=self.dtype, device=self.device,
                           batch_size=self.batch_size, parts=self.parts)
        for name, value in (("clip", clip), ("device", clip.device)):
            object.__setattr__(self, name, value)

    @property
    def models(self) -> tuple[Any, ...]:
        return self.clip.models

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        rows = [i for i, entry in enumerate(metadata) if self.key in entry]
        scores: list[float | None] = [None] * len(prompts)
        if rows:
            similarities = self.batched(self._cosines, images[rows], [metadata[i][self.key] for i in rows])
            for i, cosine in zip(rows, similarities.tolist()):
                scores[i] = cosine
        return scores

    def _cosines(self, images: Tensor, paths: list[str]) -> Tensor:
        """Return the cosine of each picture [B,3,H,W] with that of its file: [B]."""
        subjects = {path: _read(path)[None] for path in paths}
        shown = self.clip.embedded(images)
        embeddings = torch.cat([self.clip.embedded(subject) for subject in subjects.values()])
        return (shown * embeddings[[list(subjects).index(path) for path in paths]]).sum(-1)


def _read(path: str) -> Tensor:
    require_open()
    try:
        return read_tensor(path)
    except UserError as error:
        raise UserError(f"reward 'subject_score': {error}") from None
