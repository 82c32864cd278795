"""CLIPScore (Hessel et al. 2021, 2104.08718): does a picture show what its prompt says? Models of open_clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.needs import needed
from flowgrpo.rewards.vision import Preparation, batched, loading, placed

SCORES = ("clipscore", "cosine")


@dataclass(frozen=True)
class ClipScore:
    """CLIPScore: 2.5 max(cos, 0) of a picture's and its prompt's embedding (section 3 of the paper), or the cosine.

    model, pretrained: a model of open_clip with its tag or a file of weights (OpenAI's want a `-quickgelu` model);
    score: `clipscore` or `cosine`; prefix: put before each prompt ("A photo depicts " in the paper, which scores
    captions of photographs; not every prompt asks for one); device: None for a GPU where there is one; batch: pictures
    at a time; parts: model and tokenizer, ready-made. UserError where open_clip or the weights are missing.
    """

    model: str = "ViT-L-14-quickgelu"
    pretrained: str = "openai"
    score: str = "clipscore"
    prefix: str = ""
    device: str | None = None
    batch: int = 32
    parts: Any = field(default=None, repr=False)
    prepare: Preparation = field(init=False, repr=False)
    reward = "clip_score"  # of which mistakes are told
    about = About(modality="image", range=(0, 2.5), needs="clip", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward {self.reward!r}: score is {self.score!r}, expected {' or '.join(SCORES)}")
        device = placed(self.device)
        model, tokenizer = self.parts or self._loaded()
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "parts", (model.eval().to(device), tokenizer))
        object.__setattr__(self, "prepare", wanted(model, self.reward))

    def _loaded(self) -> tuple[Any, Any]:
        open_clip = needed("open_clip", "clip", f"reward {self.reward!r}")
        with loading(f"reward {self.reward!r}: {self.model} with the weights {self.pretrained}",
                     "open_clip.list_pretrained() names them all; args: {pretrained: FILE} takes a file of yours"):
            model = open_clip.create_model(self.model, pretrained=self.pretrained, require_pretrained=True)
            return model, open_clip.get_tokenizer(self.model)

    def __call__(self, images: Any, prompts: Sequence[str]) -> Tensor:
        found = batched(self._cosines, images, [self.prefix + prompt for prompt in prompts], self.batch)
        return found if self.score == "cosine" else 2.5 * found.clamp(min=0)

    def features(self, images: Tensor) -> Tensor:
        """The embeddings of pictures [B, 3, H, W], of unit length -> [B, D] on the CPU."""
        return batched(lambda some, _: self.embedded(some), images, [""] * len(images), self.batch)

    def embedded(self, images: Tensor) -> Tensor:
        """The same on the model's device, all at once, with a gradient where one is wanted."""
        return self.parts[0].encode_image(self.prepare(images.to(self.device)), normalize=True)

    def _cosines(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.parts
        return cosines(model, tokenizer, self.prepare(images.to(self.device)), prompts)


def cosines(model: Any, tokenizer: Any, pictures: Tensor, prompts: list[str]) -> Tensor:
    """The cosine of each prepared picture [B, 3, H, W] with its prompt under a model of open_clip -> [B]."""
    shown = model.encode_image(pictures, normalize=True)
    return (shown * model.encode_text(tokenizer(prompts).to(pictures.device), normalize=True)).sum(-1)


def wanted(model: Any, reward: str) -> Preparation:
    """How a model of open_clip wants its pictures. UserError for one that does not want them bicubic or square."""
    told = getattr(model.visual, "preprocess_cfg", {})
    size = told.get("size", model.visual.image_size)
    sizes = {size} if isinstance(size, int) else set(size)
    if len(sizes) > 1 or told.get("interpolation", "bicubic") != "bicubic":
        raise UserError(f"reward {reward!r}: this model takes pictures of {size} pixels, scaled "
                        f"{told.get('interpolation')}: expected one that takes squares, scaled bicubic")
    known = {"mean": told.get("mean"), "deviation": told.get("std"), "fit": told.get("resize_mode")}
    return Preparation(sizes.pop(), **{key: value for key, value in known.items() if value is not None})
