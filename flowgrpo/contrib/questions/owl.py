"""OWLv2 (2306.09683): detector of objects that are named in words, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.geneval.detectors import Detection, released
from flowgrpo.rewards.local_model import LocalModel


@dataclass(frozen=True)
class Owl(LocalModel):
    """Open-vocabulary detector: boxes of the objects whose names are given with each image.

    model, revision: an OWLv2 of transformers, a folder or hub id. least: minimum score of a returned detection.
    parts: model and processor, ready-made. dtype (fp32), device and batch_size (8): as in `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    model: str = "google/owlv2-base-patch16-ensemble"
    revision: str | None = None
    least: float = 0.1
    batch_size: int = field(default=8, kw_only=True)
    reward, parameters = "t2i_compbench", 155e6

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import Owlv2ForObjectDetection, Owlv2Processor

        return released(self, "owl", self.model, self.revision, Owlv2ForObjectDetection, Owlv2Processor)

    @torch.no_grad()
    def __call__(self, images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        """Return the detections in images [B, 3, H, W] in [0, 1] of each one's own names, highest score first."""
        listed = [list(dict.fromkeys(some)) for some in names]
        detections: list[list[Detection]] = [[] for _ in listed]
        for count in {len(some) for some in listed} - {0}:  # of equal number: padded names would be detected too
            rows = [row for row, some in enumerate(listed) if len(some) == count]
            for at in range(0, len(rows), self.batch_size):
                batch = rows[at:at + self.batch_size]
                for row, some in zip(batch, self._detections(images[batch], [listed[row] for row in batch])):
                    detections[row] = some
        return detections

    def _detections(self, images: Tensor, names: list[list[str]]) -> list[list[Detection]]:
        """Return the detections of images with equally many names."""
        model, processor = self.models
        pictures = (images.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu()
        inputs = processor(text=[[f"a photo of a {name}" for name in some] for some in names], images=list(pictures),
                           return_tensors="pt")
        outputs = model(**inputs.to(self.device, self.float_type))
        outputs.logits, outputs.pred_boxes = outputs.logits.float(), outputs.pred_boxes.float()
        seen = processor.image_processor.post_process_object_detection(
            outputs, threshold=self.least, target_sizes=[tuple(images.shape[-2:])] * len(names))
        return [_sorted(some, *(one[key].tolist() for key in ("boxes", "labels", "scores")))
                for some, one in zip(names, seen)]


def _sorted(names: list[str], boxes: list[list[float]], labels: list[int], scores: list[float]) -> list[Detection]:
    """Return detections, highest score first."""
    detections = [Detection((left, top, right, bottom), names[label], score)
                  for (left, top, right, bottom), label, score in zip(boxes, labels, scores)]
    return sorted(detections, key=lambda one: -one.score)
