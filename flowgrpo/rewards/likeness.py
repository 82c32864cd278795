"""Likeness to images of your own."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowgrpo.data.open_image import require_open
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.local_model import ImageModel, load_parts, require_arguments
from flowgrpo.rewards.preprocessing import Preparation, read_tensor

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
SCALED, CROPPED = 256, 224  # pixels: the shortest side, and the square of its centre, as DINOv2's processor has them


@built_in("likeness", "style subject person face character dreambooth example reference similar")
class Likeness(ImageModel):
    """Likeness to images of your own, a subject or a style: the mean cosine of DINOv2's embeddings (2304.07193) to the
    images of a folder. The measure is DINO-I of DreamBooth (2208.12242), which had the first DINO.

    images: the folder, of .png, .jpg and .webp files.
    model, revision: a DINOv2 of transformers, a folder or hub id.
    parts: the model, ready-made, in a tuple. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError for a folder without images and if the weights are unavailable.
    """

    images: str = ""
    model: str = "facebook/dinov2-base"
    revision: str | None = None
    reward, parameters = "likeness", 86.6e6
    differentiable = True
    about = About(modality="image", range=(-1, 1), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        require_arguments(self.reward, self.dtype, self.device, self.batch_size)
        if not self._files():
            raise UserError(f"reward 'likeness': images is {self.images!r}, expected a folder with "
                            f"{', '.join(ENDINGS)} files: args: {{images: FOLDER}}")
        super().__post_init__()

    def _files(self) -> list[Path]:
        folder = Path(self.images).expanduser()
        return sorted(file for file in folder.glob("*") if file.suffix.lower() in ENDINGS) if self.images else []

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, "Dinov2Model")

    @cached_property
    def mean_embedding(self) -> Tensor:
        """Mean of the folder's unit embeddings [D]; a cosine with it is the mean of the cosines."""
        require_open()
        return torch.stack([self.embed(read_tensor(file)[None])[0] for file in self._files()]).mean(0)

    def embed(self, images: Tensor) -> Tensor:
        """Embed images [B, 3, H, W] by the class token, at unit length -> [B, D], with a gradient if required."""
        prepare = Preparation(SCALED, mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225))  # ImageNet's
        edge = (SCALED - CROPPED) // 2
        pixels = prepare(images.to(self.device))[..., edge:edge + CROPPED, edge:edge + CROPPED]
        [network] = self.models
        return normalize(network(pixel_values=pixels.to(self.float_type)).pooler_output.float(), dim=-1)

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.embed(images) @ self.mean_embedding
