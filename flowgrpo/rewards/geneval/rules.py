"""GenEval (Ghosh et al. 2023, 2310.11513): presence, number, colours and positions of objects.

Metadata in GenEval's own format, one JSON object per prompt:

    {"tag": "position", "include": [{"class": "dog", "count": 1},
                                    {"class": "cat", "count": 1, "color": "red", "position": ["left of", 0]}],
     "exclude": [{"class": "dog", "count": 2}], "prompt": ...}

The rules are those of its published evaluation. Detections above 0.3 count (0.9 if the tag is "counting"), at most the
16 highest of a class, without suppressing overlaps. Every clause of `include` must hold and none of `exclude`. Colours
and positions are checked only for the `count` highest detections of the class. `geneval` has the published detector,
Mask2Former, and the published colours, by CLIP (evaluation/evaluate_images.py of its repository). `geneval_fast` has a
detector of torchvision's, and measures colours (`colours.py`): its numbers are not GenEval's.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError, nearest
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.geneval.colours import NAMES, ClipColours, colour
from flowgrpo.rewards.geneval.detectors import Detection, Detector, detector, in_process
from flowgrpo.rewards.local_model import model_arguments
from flowgrpo.rewards.preprocessing import eight_bit

RELATIONS = ("left of", "right of", "above", "below")
SCORES, COLOURS = ("strict", "graded", "flow_grpo"), ("pixels", "clip")
Namer = Callable[[np.ndarray, Sequence[Detection], str], "list[str | None]"]


def relations(box: Sequence[float], other: Sequence[float], threshold: float = 0.1) -> set[str]:
    """Directions of a box from another: none, one or two of `RELATIONS`. The offset of the centres is shortened on each
    axis by `threshold` of both boxes' sizes; a direction holds if the rest exceeds half of the whole offset."""
    a, b = np.reshape(box, (2, 2)), np.reshape(other, (2, 2))
    offset = a.mean(0) - b.mean(0)
    left = np.maximum(np.abs(offset) - threshold * np.abs(np.diff(a, axis=0) + np.diff(b, axis=0))[0], 0)
    if (left < 1e-3).all():
        return set()
    x, y = left * np.sign(offset) / np.linalg.norm(offset)
    return {name for name, holds in zip(RELATIONS, (x < -0.5, x > 0.5, y < -0.5, y > 0.5)) if holds}


def by_pixels(image: np.ndarray, objects: Sequence[Detection], label: str) -> list[str | None]:
    """Colours of detections in an image, bytes [H, W, 3], measured in the middle of their boxes."""
    return [colour(image, one.box) for one in objects]


@built_in("geneval", "count counting color composition spatial position alignment prompt following")
class GenEval:
    """GenEval: 1 if an image has the objects of its prompt's metadata in number, colour and position, else 0.

    None if the metadata has no `include`.
    detector: a function or a name (detectors.py; torchvision's are under BSD-3-Clause, as are their weights). GenEval's
    own is `mask2former`.
    colours: `pixels`, measured; `clip`, GenEval's own: classified by CLIP; or a function such as `by_pixels`.
    clip: arguments of `colours.ClipColours`.
    score: `strict`; `graded`, which gives credit for parts; or `flow_grpo`, the reward that Flow-GRPO trained on.
    dtype, device, batch_size: as in `LocalModel`, of the detector and of CLIP; `clip` overrides them. By default fp32;
    8 images for torchvision's detectors, which take fp32 alone; 4 for Mask2Former; 32 objects for CLIP.
    threshold, counting_threshold: minimum detection scores; of a detector weaker than GenEval's the latter is lower.
    max_objects: of a class. position_threshold: share of both boxes that the offset of two positions must exceed.
    Raises UserError for a clause that cannot be judged, and for common arguments that no model here takes.
    """

    detector: str | Detector = "mask2former"
    score: str = "strict"
    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    position_threshold: float = 0.1
    colours: str | Namer = "clip"
    clip: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    batch_size: int | None = None
    reward: ClassVar[str] = "geneval"
    about = About(modality="image", range=(None, 1), needs="clip", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward {self.reward!r}: score is {self.score!r}, expected {', '.join(SCORES)}")
        given = model_arguments(self.reward, self.dtype, self.device, self.batch_size)
        local = isinstance(self.detector, str) and in_process(self.detector)
        if given and not local and self.colours != "clip":
            raise UserError(f"reward {self.reward!r}: got {', '.join(given)}, which the detector {self.detector!r} "
                            "does not take: leave them out, or name mask2former or one of torchvision's")
        if isinstance(self.colours, str):
            if self.colours not in COLOURS or self.clip and self.colours != "clip":
                raise UserError(f"reward {self.reward!r}: colours is {self.colours!r} and clip {self.clip}, expected "
                                f"{' or '.join(COLOURS)}, and arguments in clip only for the latter")
            namer: Namer = by_pixels if self.colours == "pixels" else ClipColours(**given | self.clip)
            vars(self)["colours"] = namer
        if isinstance(self.detector, str):
            vars(self)["detector"] = detector(self.detector, **given)

    @property
    def made_of(self) -> list[str | Detector]:
        return [self.detector]

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        rows = [i for i, entry in enumerate(metadata) if entry.get("include")]
        if not rows:
            return [None] * len(prompts)
        for i in rows:
            require_judgeable(metadata[i], prompts[i], getattr(self.detector, "labels", None))
        assert callable(self.detector)  # found by its name at the start
        judge = getattr(self, self.score)
        detected = [[Detection(*one) for one in image] for image in self.detector(images[rows])]
        scores = {i: judge(image, self.objects(detections, metadata[i].get("tag")), metadata[i])
                  for i, image, detections in zip(rows, eight_bit(images[rows]), detected)}
        return [scores.get(i) for i in range(len(prompts))]

    def objects(self, detections: Sequence[Detection], tag: str | None) -> dict[str, list[Detection]]:
        """Detections that count, by class, highest score first."""
        least = self.counting_threshold if tag == "counting" else self.threshold
        kept: dict[str, list[Detection]] = defaultdict(list)
        for detection in sorted(detections, key=lambda detection: -detection.score):
            if detection.score > least and len(kept[detection.label]) < self.max_objects:
                kept[detection.label].append(detection)
        return kept

    def strict(self, image: np.ndarray, objects: dict[str, list[Detection]], metadata: dict[str, Any]) -> float:
        """1 if an image, bytes [H, W, 3], with these `objects` meets every clause of its metadata, else 0."""
        matched: list[list[Detection] | None] = []
        for clause in metadata["include"]:
            those = objects[clause["class"]][:clause["count"]]
            holds = len(those) == clause["count"] and all(self._attributes(image, those, clause, matched))
            matched.append(those if holds else None)
        excluded = any(len(objects[clause["class"]]) >= clause["count"] for clause in metadata.get("exclude", ()))
        return float(not excluded and None not in matched)

    def graded(self, image: np.ndarray, objects: dict[str, list[Detection]], metadata: dict[str, Any]) -> float:
        """Mean over the demands of the `include` clauses. A class's count gives 1 - |found - wanted| / wanted, at least
        0. Its colour and its position give 1 if they and the count are right, else 0.

        Too many cost as much as too few; `exclude` is ignored. Flow-GRPO's own reward is `flow_grpo`.
        """
        matched: list[list[Detection] | None] = []
        credits: list[float] = []
        for clause in metadata["include"]:
            those, count = objects[clause["class"]], clause["count"]
            credits.append(max(0.0, 1 - abs(len(those) - count) / count))
            demands = sum(key in clause for key in ("color", "position"))
            right = self._attributes(image, those, clause, matched) if len(those) == count else [False] * demands
            credits += map(float, right)
            matched.append(those if len(those) == count and all(right) else None)
        return sum(credits) / len(credits)

    def flow_grpo(self, image: np.ndarray, objects: dict[str, list[Detection]], metadata: dict[str, Any]) -> float:
        """Flow-GRPO's training reward (2505.05470; reward_server/gen_eval.py of its reward server).

        The mean of these credits of the `include` clauses. Number: 1 - |found - wanted| / wanted, which can be below 0;
        if it is wrong, one 0 for colour and position together. Colour: the same of the objects that have it. Position,
        judged if the colours are right: 0 without a target; 1 where it holds; a 0 and a 1 where it does not.
        """
        matched: list[list[Detection] | None] = []
        credits: list[float] = []
        for clause in metadata["include"]:
            those, count = objects[clause["class"]], clause["count"]
            credits.append(1 - abs(len(those) - count) / count)
            right = len(those) == count
            if not right and {"color", "position"} & set(clause):
                credits.append(0.0)
            if right and "color" in clause:
                named = self._names(image, those, clause).count(clause["color"])
                credits.append(1 - abs(named - count) / count)
                right = named == count
            if right and "position" in clause:
                right = self._stands(those, clause, matched)
                credits += [1.0] if right else [0.0] if matched[clause["position"][1]] is None else [0.0, 1.0]
            matched.append(those if right else None)
        return sum(credits) / len(credits)

    def _stands(self, those: list[Detection], clause: dict[str, Any], matched: list[list[Detection] | None]) -> bool:
        relation, target = clause["position"]
        others = matched[target]
        return others is not None and all(relation in relations(one.box, other.box, self.position_threshold)
                                          for one in those for other in others)

    def _attributes(self, image: np.ndarray, those: list[Detection], clause: dict[str, Any],
                    matched: list[list[Detection] | None]) -> list[bool]:
        """For the colour and the position that a clause demands, whether the objects have them."""
        right = []
        if "color" in clause:
            names = self._names(image, those, clause)
            right.append(all(name == clause["color"] for name in names))
        if "position" in clause:
            right.append(self._stands(those, clause, matched))
        return right

    def _names(self, image: np.ndarray, those: list[Detection], clause: dict[str, Any]) -> list[str | None]:
        assert callable(self.colours)  # found by its name at the start
        return self.colours(image, those, clause["class"])


@built_in("geneval_fast", "count counting color composition spatial alignment prompt following")
class GenEvalFast(GenEval):
    """GenEval's rules with a fast detector and measured colours: near its numbers, not comparable with them.

    Arguments: as in `GenEval`.
    """

    detector: str | Detector = "fasterrcnn_resnet50_fpn_v2"
    colours: str | Namer = "pixels"
    reward = "geneval_fast"
    about = About(modality="image", range=(None, 1), needs="", licence="Apache-2.0, the detector's")


def require_judgeable(metadata: dict[str, Any], prompt: str, labels: Sequence[str] | None = None) -> None:
    """Raise UserError for metadata not in GenEval's format, and for a class that the detector does not know."""
    for place, clause in enumerate(metadata["include"] + list(metadata.get("exclude", ()))):
        message = f"the metadata of the prompt {prompt!r} has the clause {clause}"
        if not {"class", "count"} <= set(clause) or clause["count"] < 1:
            raise UserError(f"{message}: expected a class and a count of 1 or more")
        if labels is not None and clause["class"] not in labels:
            raise UserError(f"{message}: the detector knows no class {clause['class']!r}"
                            f"{nearest(clause['class'], list(labels))}")
        if clause.get("color", NAMES[0]) not in NAMES:
            raise UserError(f"{message}: expected a colour of {', '.join(NAMES)}")
        relation, target = clause.get("position", (RELATIONS[0], 0))
        if relation not in RELATIONS or "position" in clause and not 0 <= target < place:
            raise UserError(f"{message}: expected a place of {', '.join(RELATIONS)} and the number of an earlier "
                            "clause")
