"""Mask2Former (2112.01527), the detector of GenEval's published evaluation, by its port in transformers.

GenEval runs the Swin-S instance model of MMDetection. Detections are made from the network's outputs as there: the 100
most probable pairs of a query and a class; the score is the class's probability times the mean probability of the
pixels in the mask; the box is that of the mask. Boxes are not suppressed. transformers' own post-processing differs: it
works on maps of 384 by 384 pixels in which a later object covers an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flowgrpo.rewards.geneval.detections import Detection, named, released
from flowgrpo.rewards.local_model import LocalModel

MOST = 100  # detections of a picture


@dataclass(frozen=True)
class Mask2Former(LocalModel):
    """Instance segmentation by Mask2Former of transformers: boxes, scores and masks of the 80 COCO classes.

    model, revision: a Mask2Former trained for instances, a folder or hub id. least: minimum score of a returned
    detection.
    parts: model and image processor, ready-made. dtype (fp32), device and batch_size (4): as in `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    model: str = "facebook/mask2former-swin-small-coco-instance"
    revision: str | None = None
    least: float = 0.1
    batch_size: int = field(default=4, kw_only=True)
    reward, parameters = "geneval", 68.7e6

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

        return released(self, "mask2former", self.model, self.revision, Mask2FormerForUniversalSegmentation,
                        AutoImageProcessor)

    @property
    def labels(self) -> tuple[str, ...]:
        """Classes that the model knows, by GenEval's names."""
        return tuple(named(name) for name in self.models[0].config.id2label.values())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        return [detections for some in images.float().split(self.batch_size) for detections in self._detections(some)]

    def _detections(self, images: Tensor) -> list[list[Detection]]:
        model, processor = self.models
        pictures = (images * 255).round().clamp(0, 255).to(torch.uint8)
        inputs = processor(images=list(pictures), return_tensors="pt").to(self.device, self.float_type)
        outputs = model(**inputs)
        maps = interpolate(outputs.masks_queries_logits.float(), inputs["pixel_values"].shape[-2:], mode="bilinear")
        there = inputs["pixel_mask"]  # 0 where the picture was padded
        return [self._objects(logits.float(), one[:, :int(part.any(1).sum()), :int(part.any(0).sum())],
                              images.shape[-2:])
                for logits, one, part in zip(outputs.class_queries_logits, maps, there)]

    def _objects(self, logits: Tensor, maps: Tensor, size: torch.Size) -> list[Detection]:
        """Return the detections of a picture of `size` (H, W).

        logits: [Q, classes + 1] of the queries' classes, the last one for none. maps: [Q, h, w] of their masks.
        """
        classes = logits.shape[1] - 1
        probabilities, pairs = logits.softmax(-1)[:, :-1].flatten().topk(min(MOST, len(logits) * classes))
        likely = probabilities > self.least  # a score is at most this probability
        probabilities, pairs = probabilities[likely], pairs[likely]
        maps = interpolate(maps[None], size, mode="bilinear")[0, pairs // classes]
        masks = maps > 0
        inside = (maps.sigmoid() * masks).flatten(1).sum(1) / (masks.flatten(1).sum(1) + 1e-6)
        scores = (probabilities * inside).tolist()
        names = [self.labels[label] for label in (pairs % classes).tolist()]
        return [Detection(_box(mask), name, score, mask.cpu().numpy())
                for mask, name, score in zip(masks, names, scores) if score > self.least]


def _box(mask: Tensor) -> tuple[float, float, float, float]:
    """Return the box (left, top, right, bottom) of a mask [H, W] with at least one pixel."""
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
