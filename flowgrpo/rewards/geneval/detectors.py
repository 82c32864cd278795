"""Object detectors for GenEval's rules: boxes of the 80 COCO classes.

A detector is any function of pictures [B, 3, H, W] in [0, 1] that returns a list of `Detection`s for each. Its
attribute `labels`, if present, lists the classes that it knows. In a recipe it is a name: `mask2former`, GenEval's own,
or `mask2former:FOLDER`; one of torchvision's COCO models; `path/to/FastestDet.onnx`; `http://host:port/path`; or
`path/to/file.py:function`.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.geneval.detections import Detection, Detector, named
from flowgrpo.rewards.local_model import LocalModel
from flowgrpo.rewards.preprocessing import eight_bit

WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torchvision's switch against unpickling anything but tensors
OVERLAP = 0.35  # IoU threshold of FastestDet's own suppression
ADDRESSES = ("http://", "https://")


def in_process(name: str) -> bool:
    """Return True for the name of a detector that is a `LocalModel`."""
    return not (name.startswith(ADDRESSES) or ".py:" in name)


def detector(name: str, **arguments: Any) -> Detector:
    """Return the detector of that name. arguments: of `LocalModel`, for one that is `in_process`.

    Raises UserError for one that does not exist or lacks its package.
    """
    if name.startswith(ADDRESSES):
        return Remote(name)
    if ".py:" in name:
        from flowgrpo.user_code import load

        return load(name)
    kind, _, model = name.partition(":")
    if kind == "mask2former":
        from flowgrpo.rewards.geneval.mask2former import Mask2Former

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
            object.__setattr__(self, "categories", tuple(weights.meta["categories"]))
        super().__post_init__()

    def _loaded(self) -> tuple[Any]:
        from torchvision.models import get_model, get_model_weights

        if self.model is not None:
            return (self.model,)
        weights = get_model_weights(self.name).DEFAULT
        with _reading(self.name, weights.url):
            return (get_model(self.name, weights=weights),)

    @property
    def labels(self) -> tuple[str, ...]:
        """Classes that the model knows, by GenEval's names."""
        return tuple(named(category) for category in self.categories or () if category not in ("__background__", "N/A"))

    def __call__(self, images: Tensor) -> list[list[Detection]]:
        categories = self.categories
        assert categories is not None  # those of the weights, or given with the model
        return [[Detection(tuple(box), named(categories[label]), score) for box, label, score in
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
    bottom], "label": "dog", "score": 0.9}, ...], ...]}, one list per picture.
    """

    url: str
    timeout: float = 60.0

    def __call__(self, images: Tensor) -> list[list[Detection]]:
        body = json.dumps({"format": 1, "images": [_png(picture) for picture in eight_bit(images)]}).encode()
        try:
            status, _, answer = self._client.exchange("POST", self.url, body, self.timeout, self.timeout)
            if status != 200:
                raise ValueError(f"status {status}")
            detections = json.loads(answer)["detections"]
            if len(detections) != len(images):
                raise ValueError(f"{len(detections)} answers, expected {len(images)}")
            return [[_parsed(**entry) for entry in picture] for picture in detections]
        except (*self._client.faults, ValueError, TypeError, KeyError, RecursionError) as error:
            raise RuntimeError(f"the detector at {self.url} did not answer as it should: {error!r}") from None

    @cached_property
    def _client(self) -> Any:
        from flowgrpo.rewards.remote.http import Client

        return Client({"Content-Type": "application/json"}, connections=8)


def _parsed(box: list[float], label: str, score: float) -> Detection:
    left, top, right, bottom = map(float, box)
    return Detection((left, top, right, bottom), named(str(label)), float(score))


def _png(picture: np.ndarray) -> str:
    from PIL import Image

    kept = io.BytesIO()
    Image.fromarray(picture).save(kept, "PNG")
    return base64.b64encode(kept.getvalue()).decode()
