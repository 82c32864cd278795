"""CLIP-I (DreamBooth, 2208.12242): does a picture show the subject of another one? Models of open_clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.clip_score import ClipScore
from flowgrpo.rewards.pixels import tensor_of
from flowgrpo.rewards.vision import batched


class SubjectClip(ClipScore):
    """The model; what is wrong with it is told of the reward that was asked for."""

    reward = "subject_score"


@dataclass(frozen=True)
class SubjectScore:
    """CLIP-I: the cosine of the embeddings of a picture and of the subject's picture that its prompt brings.

    The path of the latter stands in the metadata under `key`, relative to the working folder; None for a prompt without
    one. Under `image` stands the picture that a prompt brings to an editing pipeline; of recorded pairs `chosen` names
    the subject too. model, pretrained, device, batch, parts: as of `ClipScore`. UserError for a file that cannot
    be read, and where open_clip or the weights are missing.
    """

    key: str = "subject"
    model: str = "ViT-L-14-quickgelu"
    pretrained: str = "openai"
    device: str | None = None
    batch: int = 32
    parts: Any = field(default=None, repr=False)
    clip: ClipScore = field(init=False, repr=False)
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        clip = SubjectClip(self.model, self.pretrained, device=self.device, batch=self.batch, parts=self.parts)
        object.__setattr__(self, "clip", clip)

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        rows = [i for i, entry in enumerate(metadata) if self.key in entry]
        scores: list[float | None] = [None] * len(prompts)
        if rows:
            found = batched(self._cosines, images[rows], [metadata[i][self.key] for i in rows], self.batch)
            for i, cosine in zip(rows, found.tolist()):
                scores[i] = cosine
        return scores

    def _cosines(self, images: Tensor, paths: list[str]) -> Tensor:
        """The cosine of each picture [B,3,H,W] with that of its file: [B]."""
        subjects = {path: _read(path)[None] for path in paths}
        shown, wanted = self.clip.embedded(images), torch.cat([self.clip.embedded(each) for each in subjects.values()])
        return (shown * wanted[[list(subjects).index(path) for path in paths]]).sum(-1)


def _read(path: str) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as found:
            return tensor_of(found)
    except OSError as error:
        raise UserError(f"reward 'subject_score': {path} cannot be read as a picture ({error})") from None
