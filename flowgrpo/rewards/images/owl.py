"""OWLv2 (2306.09683): detector of objects that are named in words, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.images.detections import Detection
from flowgrpo.rewards.images.vision import loading, placed


@dataclass(frozen=True)
class Owl:
    """Open-vocabulary detector: boxes of the objects whose names are given with each picture.

    model, revision: an OWLv2 of transformers, a folder or hub id. least: minimum score of a returned detection.
    device: None for a GPU if present. parts: model and processor, ready-made.
    Raises UserError if the weights are unavailable.
    """

    model: str = "google/owlv2-base-patch16-ensemble"
    revision: str | None = None
    least: float = 0.1
    device: str | None = None
    parts: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        device = placed(self.device)
        model, processor = self.parts or self._loaded()
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "parts", (model.eval().to(device), processor))

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import Owlv2ForObjectDetection, Owlv2Processor

        with loading(f"detector owl: {self.model}", "fetch it and give its folder as args: {detector: 'owl:FOLDER'}"):
            options: dict[str, Any] = {"revision": self.revision, "trust_remote_code": False}
            return (Owlv2ForObjectDetection.from_pretrained(self.model, **options),
                    Owlv2Processor.from_pretrained(self.model, **options))

    @torch.no_grad()
    def __call__(self, images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        """Return the detections in pictures [B, 3, H, W] in [0, 1] of each one's own names, highest score first."""
        return [self._seen(image, list(dict.fromkeys(wanted))) for image, wanted in zip(images, names)]

    def _seen(self, image: Tensor, names: list[str]) -> list[Detection]:
        if not names:
            return []
        model, processor = self.parts
        picture = (image.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu()
        inputs = processor(text=[[f"a photo of a {name}" for name in names]], images=picture, return_tensors="pt")
        outputs = model(**inputs.to(self.device))
        [seen] = processor.image_processor.post_process_object_detection(
            outputs, threshold=self.least, target_sizes=[tuple(image.shape[-2:])])
        boxes, labels, scores = (seen[key].tolist() for key in ("boxes", "labels", "scores"))
        detections = [Detection(tuple(box), names[label], score) for box, label, score in zip(boxes, labels, scores)]
        return sorted(detections, key=lambda one: -one.score)
