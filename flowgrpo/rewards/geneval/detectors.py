"""Object detectors for GenEval's rules: boxes of the 80 COCO classes, by torchvision, by Mask2Former (2112.01527), the
detector of the published evaluation, or by a server.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from flowgrpo.errors import UserError
from flowgrpo.escaped import base64_of
from flowgrpo.rewards.local_model import LocalModel, loading
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.remote.exchange import announce, is_address
from flowgrpo.user_code import load

ALIASES = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "motorbike": "motorcycle",
           "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant", "diningtable": "dining table",
           "tvmonitor": "tv", "hair dryer": "hair drier", "racket": "tennis racket"}
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torchvision's switch against unpickling anything but tensors
OVERLAP = 0.35  # IoU threshold of FastestDet's own suppression
MOST = 100  # detections of an image


class Detection(NamedTuple):
    """Detected object: box (left, top, right, bottom) in pixels, label, score in [0, 1], and the mask, bool [H, W], of
    a detector that gives one."""

    box: tuple[float, float, float, float]
    label: str
    score: float
    mask: np.ndarray | None = None


Detector = Callable[[Tensor], list[list[Detection]]]


def canonical_label(label: str) -> str:
    """GenEval's name of an object that a detector calls by another one."""
    return ALIASES.get(label, label)


def load_detector(it: Any, name: str, network: str, processor: str) -> tuple[Any, Any]:
    """Load a detector's network, in its dtype, and its processor: classes of transformers, without code from the hub.
    it: the detector, with `model`, a folder or hub id, and `revision`. name: its own in a recipe.
    Raises UserError if they are unavailable."""
    import transformers

    with loading(f"detector {name}: {it.model}", f"fetch it and give its folder as args: {{detector: '{name}:FOLDER'}}",
                 it.model):
        options = {"revision": it.revision, "trust_remote_code": False}
        return (getattr(transformers, network).from_pretrained(it.model, dtype=it.float_type, **options),
                getattr(transformers, processor).from_pretrained(it.model, **options))


def in_process(name: str) -> bool:
    """True for the name of a detector that is a `LocalModel`."""
    return not (is_address(name) or ".py:" in name)


def detector(name: str, **arguments: Any) -> Detector:
    """Detector of that name. arguments: of `LocalModel`, which only one that is `in_process` takes.

    Raises UserError for one that does not exist or lacks its package.
    """
    if is_address(name):
        return Remote(name)
    if ".py:" in name:
        return load(name)
    kind, _, model = name.partition(":")
    if kind == "mask2former":
        return Mask2Former(**arguments | ({"model": model} if model else {}))
    return Torchvision(name, **arguments)


@dataclass(frozen=True)
class Torchvision(LocalModel):
    """Detection model of torchvision with its COCO weights (BSD-3-Clause), downloaded on first use.

    model: given with `categories` (names by class number), replaces the one of that `name`.
    dtype (fp32 alone: torchvision's operators take no other), device and batch_size (8): as in `LocalModel`.
    """

    name: str = "fasterrcnn_resnet50_fpn_v2"
    model: Any = None
    categories: tuple[str, ...] | None = None
    batch_size: int = field(default=8, kw_only=True)
    reward, parameters = "geneval", 43.7e6

    def __post_init__(self) -> None:
        from torchvision.models import detection, get_model_weights, list_models

        if self.dtype != "fp32":
            raise UserError(f"detector {self.name!r}: dtype is {self.dtype!r}, expected fp32: leave it out, as "
                            "torchvision's detectors take no other")
        if self.model is None:
            if self.name not in list_models(detection):
                raise UserError(f"no detector {self.name!r}: expected one of torchvision's ("
                                f"{', '.join(list_models(detection))}), mask2former, a .onnx file, an http "
                                "address or path/to/file.py:function")
            weights = get_model_weights(self.name).DEFAULT
            vars(self)["categories"] = tuple(weights.meta["categories"])
        super().__post_init__()

    def _load(self) -> tuple[Any]:
        from torchvision.models import get_model, get_model_weights

        if self.model is not None:
            return (self.model,)
        weights = get_model_weights(self.name).DEFAULT
        with _reading(self.name, weights.url):
            return (get_model(self.name, weights=weights),)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(canonical_label(category) for category in self.categories or ()
                     if category not in ("__background__", "N/A"))

    def __call__(self, images: Tensor) -> list[list[Detection]]:
        categories = self.categories
        assert categories is not None  # those of the weights, or given with the model
        return [[Detection(tuple(box), canonical_label(categories[label]), score) for box, label, score in
                 zip(*(output[key].tolist() for key in ("boxes", "labels", "scores")))]
                for some in images.float().split(self.batch_size)
                for output in self.models[0](list(some.to(self.device)))]


@contextmanager
def _reading(name: str, url: str) -> Iterator[None]:
    """Context manager: while torchvision fetches and reads weights, unpickle only tensors. By itself torchvision would
    execute pickled code, from the cache too, and checks only the hash of a downloaded file."""
    file, before = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name, os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    try:
        yield
    except OSError as error:
        raise UserError(f"detector {name!r}: its weights cannot be downloaded ({error}): put {url} at {file}") from None
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise UserError(f"detector {name!r}: {file} holds no weights of it ({type(error).__name__}): delete it, and it "
                        f"is downloaded anew from {url}") from None
    finally:
        os.environ.pop(WEIGHTS_ONLY)
        os.environ.update({WEIGHTS_ONLY: before} if before is not None else {})


@dataclass(frozen=True)
class Remote:
    """Detector behind an address.

    Sends JSON {"format": 1, "images": [PNG in base64, ...]} and expects {"detections": [[{"box": [left, top, right,
    bottom], "label": "dog", "score": 0.9}, ...], ...]}, one list per image.
    """

    url: str
    timeout: float = 60.0

    def __post_init__(self) -> None:
        announce("a detector", ["images"], [self.url])

    def __call__(self, images: Tensor) -> list[list[Detection]]:
        shown = [base64_of(Image.fromarray(image)) for image in eight_bit(images)]
        body = json.dumps({"format": 1, "images": shown}).encode()
        try:
            status, _, answer = self._client.exchange("POST", self.url, body, self.timeout, self.timeout)
            if status != 200:
                raise ValueError(f"status {status}")
            detections = json.loads(answer)["detections"]
            if len(detections) != len(images):
                raise ValueError(f"{len(detections)} answers, expected {len(images)}")

            def read(box: list[float], label: str, score: float) -> Detection:
                left, top, right, bottom = map(float, box)
                return Detection((left, top, right, bottom), canonical_label(str(label)), float(score))

            return [[read(**entry) for entry in image] for image in detections]
        except (*self._client.faults, ValueError, TypeError, KeyError, RecursionError) as error:
            raise RuntimeError(f"the detector at {self.url} did not answer as it should: {error!r}") from None

    @cached_property
    def _client(self) -> Any:
        from flowgrpo.rewards.remote.http import Client

        return Client({"Content-Type": "application/json"}, connections=8)


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

    def _load(self) -> tuple[Any, Any]:
        return load_detector(self, "mask2former", "Mask2FormerForUniversalSegmentation", "AutoImageProcessor")

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(canonical_label(name) for name in self.models[0].config.id2label.values())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        return [detections for some in images.float().split(self.batch_size) for detections in self._detections(some)]

    def _detections(self, images: Tensor) -> list[list[Detection]]:
        model, processor = self.models
        pictures = (images * 255).round().clamp(0, 255).to(torch.uint8)
        inputs = processor(images=list(pictures), return_tensors="pt").to(self.device, self.float_type)
        outputs = model(**inputs)
        maps = interpolate(outputs.masks_queries_logits.float(), inputs["pixel_values"].shape[-2:], mode="bilinear")
        there = inputs["pixel_mask"]  # 0 where the image was padded
        return [self._objects(logits.float(), one[:, :int(part.any(1).sum()), :int(part.any(0).sum())],
                              images.shape[-2:])
                for logits, one, part in zip(outputs.class_queries_logits, maps, there)]

    def _objects(self, logits: Tensor, maps: Tensor, size: torch.Size) -> list[Detection]:
        """Detections of an image of `size` (H, W).

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
        found = []
        for mask, name, score in zip(masks, names, scores):
            if score > self.least:  # so that the mask has a pixel
                rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
                box = float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
                found.append(Detection(box, name, score, mask.cpu().numpy()))
        return found
