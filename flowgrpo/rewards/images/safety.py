"""Safety of a picture (safe for work), by an image classifier of transformers.

The default is Falconsai/nsfw_image_detection (Apache-2.0): a ViT-B/16 at 224 pixels with the two classes "normal" and
"nsfw", trained on photographs. It misses drawings and violence; it is a reward, not a guarantee. Classifiers under AGPL
(nudenet) or without a licence are not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.images.vision import placed
from flowgrpo.rewards.pixels import eight_bit

AT_ONCE = 32  # pictures


@dataclass(frozen=True, eq=False)
class Safety:
    """Probability that a picture is safe: 1 minus that of the classes `unsafe`.

    model: a folder or a hub id of an image classifier. revision: of a hub id. device: None for a GPU if present.
    Raises UserError if the weights are unavailable, and for a classifier without these classes (names, in any case).
    """

    model: str = "Falconsai/nsfw_image_detection"
    revision: str | None = None
    unsafe: Sequence[str] = ("nsfw",)
    device: str | None = None
    classifier: Any = field(init=False, repr=False)
    processor: Any = field(init=False, repr=False)
    rows: list[int] = field(init=False, repr=False)
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        try:
            processor = AutoImageProcessor.from_pretrained(self.model, revision=self.revision)
            classifier = AutoModelForImageClassification.from_pretrained(self.model, revision=self.revision)
        except (OSError, ValueError) as error:
            raise UserError(f"reward 'safety': the classifier {self.model!r} cannot be loaded "
                            f"({' '.join(str(error).split())[:160]}): give a folder, args: {{model: FOLDER}}") from None
        labels, unsafe = classifier.config.id2label, {name.lower() for name in self.unsafe}
        rows = [row for row, label in labels.items() if label.lower() in unsafe]
        if len(rows) != len(unsafe):
            raise UserError(f"reward 'safety': unsafe is {', '.join(self.unsafe)}, but the classes of {self.model!r} "
                            f"are {', '.join(labels.values())}")
        device = placed(self.device)
        for name, value in {"processor": processor, "classifier": classifier.eval().to(device), "rows": rows,
                            "device": device}.items():
            object.__setattr__(self, name, value)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pictures = list(eight_bit(images))
        return torch.cat([self._safe(pictures[at:at + AT_ONCE]) for at in range(0, len(pictures), AT_ONCE)])

    def _safe(self, pictures: list) -> Tensor:
        inputs = self.processor(images=pictures, return_tensors="pt", input_data_format="channels_last")
        logits = self.classifier(**inputs.to(self.device)).logits.float()
        return 1 - logits.softmax(-1)[:, self.rows].sum(-1).cpu()
