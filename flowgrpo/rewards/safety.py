"""Safety of a picture (safe for work), by an image classifier of transformers.

The default is Falconsai/nsfw_image_detection (Apache-2.0): a ViT-B/16 at 224 pixels with the two classes "normal" and
"nsfw", trained on photographs. It misses drawings and violence; it is a reward, not a guarantee. Classifiers under AGPL
(nudenet) or without a licence are not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import LocalModel, pretrained
from flowgrpo.rewards.preprocessing import eight_bit


@dataclass(frozen=True, eq=False)
class Safety(LocalModel):
    """Probability that an image is safe: 1 minus that of the classes `unsafe`.

    model: a folder or a hub id of an image classifier. revision: of a hub id. unsafe: names of classes.
    dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if the weights are unavailable, and for a classifier without these classes (names, in any case).
    """

    model: str = "Falconsai/nsfw_image_detection"
    revision: str | None = None
    unsafe: Sequence[str] = ("nsfw",)
    reward, parameters = "safety", 86e6
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

    def _loaded(self) -> tuple[Any, Any, list[int]]:
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        classifier = pretrained("safety", AutoModelForImageClassification, self.model, self.revision, "model")
        processor = pretrained("safety", AutoImageProcessor, self.model, self.revision, "model")
        labels, unsafe = classifier.config.id2label, {name.lower() for name in self.unsafe}
        rows = [row for row, label in labels.items() if label.lower() in unsafe]
        if len(rows) != len(unsafe):
            raise UserError(f"reward 'safety': unsafe is {', '.join(self.unsafe)}, but the classes of {self.model!r} "
                            f"are {', '.join(labels.values())}")
        return classifier, processor, rows

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.batched(self._safe, images, prompts)

    def _safe(self, images: Tensor, prompts: list[str]) -> Tensor:
        classifier, processor, rows = self.models
        inputs = processor(images=list(eight_bit(images)), return_tensors="pt", input_data_format="channels_last")
        logits = classifier(pixel_values=inputs.pixel_values.to(self.device, self.float_type)).logits.float()
        return 1 - logits.softmax(-1)[:, rows].sum(-1)
