"""Detected objects, and the names of the 80 COCO classes as GenEval has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from flowgrpo.rewards.local_model import LocalModel, loading

OBJECTS = tuple("""person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,
parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,
frisbee,skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,
wine glass,cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,
potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,computer keyboard,cell phone,microwave,oven,
toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush""".replace("\n", "").split(","))
ALIASES = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "motorbike": "motorcycle",
           "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant", "diningtable": "dining table",
           "tvmonitor": "tv", "hair dryer": "hair drier", "racket": "tennis racket"}


class Detection(NamedTuple):
    """Detected object: box (left, top, right, bottom) in pixels, label, score in [0, 1], and the mask, bool [H, W], of
    a detector that gives one."""

    box: tuple[float, float, float, float]
    label: str
    score: float
    mask: np.ndarray | None = None


Detector = Callable[[Tensor], list[list[Detection]]]


def named(label: str) -> str:
    """Return GenEval's name of an object that a detector calls by another one."""
    return ALIASES.get(label, label)


def released(detector: LocalModel, name: str, model: str, revision: str | None, network: Any, processor: Any
             ) -> tuple[Any, Any]:
    """Load a detector's network, in its dtype, and its processor: classes of transformers, without code from the hub.

    name: of the detector in a recipe. model: a folder or hub id.
    Raises UserError if they are unavailable.
    """
    with loading(f"detector {name}: {model}", f"fetch it and give its folder as args: {{detector: '{name}:FOLDER'}}",
                 model):
        options = {"revision": revision, "trust_remote_code": False}
        return (network.from_pretrained(model, dtype=detector.float_type, **options),
                processor.from_pretrained(model, **options))
