"""T2I-CompBench (Huang et al. 2023, 2307.06350): attributes, places, numbers and actions of a prompt's objects.

The dimension of a prompt is its metadata's `category`. Colour, shape and texture: BLIP-VQA is asked for each noun
phrase ("a red book?"); the score is the product of the probabilities of "yes". Spatial: boxes of both objects.
Numeracy: boxes of each counted object. Non-spatial: the cosine of CLIP ViT-B/32. Complex: the mean of attributes with
places, or with actions, or with both. BLIP-VQA (2201.12086) is asked as in the release. Boxes are OWLv2's (2306.09683),
which detects objects that are named in words, or another detector's: not comparable with the release's UniDet.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.contrib.questions.phrases import Phrases, count_objects, find_relation, relation
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.clip import ClipScore
from flowgrpo.rewards.geneval.detectors import Detection, Detector, detector, load_detector
from flowgrpo.rewards.local_model import ImageModel, LocalModel, load_parts, model_arguments
from flowgrpo.rewards.preprocessing import Preparation

LONGEST = 35  # tokens of a question


@dataclass(frozen=True)
class BlipVqa(ImageModel):
    """Probability of "yes" against "no" as the answer to a question about an image.

    model, revision: a BLIP of transformers for questions, a folder or hub id. size: pixels of a side, to which images
    are squeezed; positions are interpolated.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (16 questions): as in `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    model: str = "Salesforce/blip-vqa-capfilt-large"
    revision: str | None = None
    size: int = 480
    batch_size: int = field(default=16, kw_only=True)
    reward, parameters = "t2i_compbench", 361e6

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, "BlipForQuestionAnswering", "AutoTokenizer", within="vqa", dtype=self.float_type)

    def _scores(self, images: Tensor, questions: list[str]) -> Tensor:
        model, tokenizer = self.models
        pictures = Preparation(self.size, "squash")(images.to(self.device)).to(model.dtype)
        seen = model.vision_model(pixel_values=pictures, interpolate_pos_encoding=True).last_hidden_state
        read = tokenizer([plain(question) for question in questions], padding=True, truncation=True,
                         max_length=LONGEST, return_tensors="pt").to(self.device)
        read.input_ids[:, 0] = model.config.text_config.vocab_size - 1  # the mark of the encoder, as in training
        states = model.text_encoder(input_ids=read.input_ids, attention_mask=read.attention_mask,
                                    encoder_hidden_states=seen).last_hidden_state
        start = torch.full((len(questions), 1), model.decoder_start_token_id, device=states.device)
        logits = model.text_decoder(input_ids=start, encoder_hidden_states=states,
                                    encoder_attention_mask=read.attention_mask).logits[:, 0]
        return logits[:, tokenizer.convert_tokens_to_ids(["yes", "no"])].float().softmax(-1)[:, 0]


def plain(question: str) -> str:
    """Question as BLIP was trained on it: lower case, without punctuation but the question mark."""
    return re.sub(r'[.!"()*#:;~]', "", question.lower()).rstrip()


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

    def _load(self) -> tuple[Any, Any]:
        return load_detector(self, "owl", "Owlv2ForObjectDetection", "Owlv2Processor")

    @torch.no_grad()
    def __call__(self, images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        """Detections in images [B, 3, H, W] in [0, 1] of each one's own names, highest score first."""
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
        """Detections of images with equally many names."""
        model, processor = self.models
        pictures = (images.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu()
        inputs = processor(text=[[f"a photo of a {name}" for name in some] for some in names], images=list(pictures),
                           return_tensors="pt")
        outputs = model(**inputs.to(self.device, self.float_type))
        outputs.logits, outputs.pred_boxes = outputs.logits.float(), outputs.pred_boxes.float()
        seen = processor.image_processor.post_process_object_detection(
            outputs, threshold=self.least, target_sizes=[tuple(images.shape[-2:])] * len(names))
        found = []
        for some, one in zip(names, seen):
            boxes, labels, scores = (one[key].tolist() for key in ("boxes", "labels", "scores"))
            detections = [Detection((left, top, right, bottom), some[label], score)
                          for (left, top, right, bottom), label, score in zip(boxes, labels, scores)]
            found.append(sorted(detections, key=lambda each: -each.score))
        return found


# The judgement of each dimension but "complex", and the model of each judgement.
JUDGEMENTS = dict.fromkeys(("color", "shape", "texture"), "attributes") | {
    "spatial": "spatial", "numeracy": "numeracy", "non_spatial": "actions"}
MODELS = {"attributes": "vqa", "spatial": "detector", "numeracy": "detector", "actions": "clip"}
MOST = 8  # noun phrases that get a question
PEOPLE = dict.fromkeys(("girl", "boy", "man", "woman"), "person")
KNOWN_AS = PEOPLE | {"ship": "boat", "television": "tv", "sofa": "couch"}  # by a detector of fixed classes
BESIDE = ("on side of", "next to", "near")
DIRECTIONS = {"on the right of": (-1, 0), "on the left of": (1, 0), "on the bottom of": (0, -1),
              "on the top of": (0, 1), "on top of": (0, 1)}  # from the first box to the second: right, down
OVERLAP, NEAR = 0.1, 150 / 480  # IoU that costs nothing; distance, in longer sides, that still is near
SAME, HALF = 0.9, 0.5  # overlap of one object seen twice; score below which two objects in place get 0


@dataclass(frozen=True)
class CompBenchClip(ClipScore):
    """CLIP model of `T2ICompBench`; its errors name the reward."""

    model: str = "ViT-B-32-quickgelu"
    score: str = "cosine"
    prefix: str = ""
    reward, parameters = "t2i_compbench", 151e6


@built_in("t2i_compbench", "count counting color texture shape composition spatial alignment prompt following",
          eq=False, kw_only=True)
class T2ICompBench:
    """T2I-CompBench's score of the dimension that a prompt's metadata names; None for another one, such as 3d_spatial.

    dimension: one for all prompts, in place of the metadata's. key: metadata key of the dimension.
    detector: `owl` or `owl:FOLDER`, a detector of named objects; or one of fixed classes (geneval/detectors.py).
    threshold: minimum score of a detection. spacy: the model that finds noun phrases, where metadata bring none.
    vqa, clip: arguments of `BlipVqa` and of `ClipScore`. With a dimension, only its models are loaded.
    dtype, device, batch_size: as in `LocalModel`, of all models in this process; `vqa` and `clip` override them. By
    default fp32; 16 questions for BLIP-VQA, 8 images for OWLv2, 32 for CLIP.
    Raises UserError for another dimension, and for models and packages that are missing.
    """

    dimension: str | None = None
    key: str = "category"
    detector: str | Owl | Detector = "owl"
    threshold: float = 0.2
    spacy: str = "en_core_web_sm"
    vqa: dict[str, Any] = field(default_factory=dict)
    clip: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    batch_size: int | None = None
    phrases: Phrases = field(init=False, repr=False)
    _models: dict[str, Any] = field(init=False, repr=False)
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0, the models'")

    def __post_init__(self) -> None:
        if self.dimension not in (None, *JUDGEMENTS, "complex"):
            raise UserError(f"reward 't2i_compbench': dimension is {self.dimension!r}, expected "
                            f"{', '.join(JUDGEMENTS)}, complex")
        given = model_arguments("t2i_compbench", self.dtype, self.device, self.batch_size)
        needed = {MODELS[JUDGEMENTS[self.dimension]]} if self.dimension in JUDGEMENTS else {*MODELS.values()}
        models: dict[str, Any] = {}
        if "vqa" in needed:
            models["vqa"] = BlipVqa(**given | self.vqa)
        if "detector" in needed:
            kind, _, folder = str(self.detector).partition(":")
            if not isinstance(self.detector, str):
                models["detector"] = self.detector
            elif kind == "owl":
                models["detector"] = Owl(**given | ({"model": folder} if folder else {}))
            else:
                models["detector"] = detector(self.detector, **given)
        if "clip" in needed:
            models["clip"] = CompBenchClip(**given | self.clip)
        vars(self).update(phrases=Phrases(self.spacy), _models=models)

    @property
    def made_of(self) -> list[Detector]:
        return [self._models["detector"]] if "detector" in self._models and ".py:" in str(self.detector) else []

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        judged: list[list[str]] = []  # of each prompt, the judgements of which its score is the mean
        for prompt, entry in zip(prompts, metadata):
            dimension = self._dimension(entry)
            if dimension != "complex":
                judged.append([JUDGEMENTS[dimension]] if dimension in JUDGEMENTS else [])
            elif relation(prompt) is None:  # it names no place, and so an action
                judged.append(["attributes", "actions"])
            else:
                judged.append(["attributes", "spatial"] + ["actions"] * bool(entry.get("action")))
        values: list[list[float]] = [[] for _ in prompts]
        for name, judge in (("attributes", self._attributes), ("spatial", self._places), ("numeracy", self._numbers),
                            ("actions", self._actions)):
            if rows := [row for row, names in enumerate(judged) if name in names]:
                some = judge(images[rows], [prompts[row] for row in rows], [metadata[row] for row in rows])
                for row, value in zip(rows, some):
                    values[row].append(value)
        return [sum(some) / len(some) if some else None for some in values]

    def _dimension(self, entry: dict[str, Any]) -> Any:
        return self.dimension or entry.get(self.key)

    def _attributes(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        phrases = [self.phrases.noun_phrases(prompt, entry)[:MOST] for prompt, entry in zip(prompts, metadata)]
        rows = [row for row, some in enumerate(phrases) for _ in some]
        if not rows:
            return [1.0] * len(prompts)
        questions = [f"{phrase}?" for some in phrases for phrase in some]
        yes = iter(self._models["vqa"](images[rows], questions).tolist())
        return [math.prod(next(yes) for _ in some) for some in phrases]

    def _places(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        claims = [find_relation(prompt, self.phrases.noun_phrases(prompt, entry)
                                if self._dimension(entry) == "complex" else None)
                  for prompt, entry in zip(prompts, metadata)]
        found = self._detect(images, [claim[1:] if claim else () for claim in claims])
        return [in_place(seen, self._detector_labels(claim[1:]), claim[0], max(images.shape[-2:])) if claim else 0.0
                for claim, seen in zip(claims, found)]

    def _numbers(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        claims = [count_objects(self.phrases.noun_phrases(prompt, entry)) for prompt, entry in zip(prompts, metadata)]
        seen = self._detect(images, [[name for name, _ in claim] for claim in claims])
        return [in_number(some, list(zip(self._detector_labels([name for name, _ in claim]),
                                         (count for _, count in claim))))
                for some, claim in zip(seen, claims)]

    def _actions(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        texts = [self.phrases.without_adjectives(prompt, entry) if self._dimension(entry) == "complex" else prompt
                 for prompt, entry in zip(prompts, metadata)]
        return self._models["clip"](images, texts).tolist()

    def _detect(self, images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        detect = self._models["detector"]
        seen = detect(images, list(map(self._detector_labels, names))) if isinstance(detect, Owl) else detect(images)
        kept = [[one for one in (Detection(*each) for each in some) if one.score > self.threshold] for some in seen]
        return [sorted(some, key=lambda one: -one.score) for some in kept]

    def _detector_labels(self, names: Sequence[str]) -> list[str]:
        table = PEOPLE if isinstance(self._models["detector"], Owl) else KNOWN_AS
        return [table.get(name, name) for name in names]


def in_place(seen: Sequence[Detection], names: Sequence[str], words: str, side: int) -> float:
    """Score of two objects and their relation: a quarter of each one's detection score and half of the relation's
    credit; 0 if that is below a half. side: the longer one of the image, in pixels."""
    first, second = (next((each for each in seen if each.label == name), None) for name in names)
    score = sum(0.25 * each.score for each in (first, second) if each is not None)
    if first is not None and second is not None:
        score += relation_score(first.box, second.box, words, side) / 2
    return score if score >= HALF else 0.0


def relation_score(box: Sequence[float], other: Sequence[float], words: str, side: int) -> float:
    """Credit in [0, 1] of a relation between two boxes (left, top, right, bottom)."""
    x, y = ((other[i] + other[i + 2] - box[i] - box[i + 2]) / 2 for i in (0, 1))
    if words in BESIDE:
        near = NEAR * side
        return 1.0 if min(abs(x), abs(y)) < near else near / max(abs(x), abs(y))
    right, down = DIRECTIONS[words]
    along, across = (x * right, y) if right else (y * down, x)
    if along <= abs(across):
        return 0.0
    overlap = _overlap(box, other) / max(_area(box) + _area(other) - _overlap(box, other), 1e-9)
    return 1.0 if overlap < OVERLAP else OVERLAP / overlap


def in_number(seen: Sequence[Detection], claims: Sequence[tuple[str, int]]) -> float:
    """Mean over the claimed objects of 1/2 if it is there and 1/2 more if its number is right."""
    def twice(*pair: Detection) -> bool:
        """True for two boxes of one object, most of either in the other, their last pixels included."""
        box, other = ((left - 0.5, top - 0.5, right + 0.5, bottom + 0.5)
                      for left, top, right, bottom in (each.box for each in pair))
        return _overlap(box, other) > SAME * min(_area(box), _area(other))

    kept: list[Detection] = []
    for one in seen:
        if not any(one.label == other.label and twice(one, other) for other in kept):
            kept.append(one)
    counts = [(sum(one.label == name for one in kept), number) for name, number in claims]
    return sum((count > 0) / 2 + (count == number) / 2 for count, number in counts) / max(len(claims), 1)


def _overlap(box: Sequence[float], other: Sequence[float]) -> float:
    width, height = (max(0.0, min(box[i + 2], other[i + 2]) - max(box[i], other[i])) for i in (0, 1))
    return width * height


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
