"""GenEval's published set-up: Mask2Former's detections and CLIP's colours on tiny random models, against computations
of their own; verdicts of all six tasks by a table worked by hand."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import interpolate

from flowgrpo import rewards
from flowgrpo.rewards.geneval import colours, detectors
from flowgrpo.rewards.geneval.colours import ClipColours, cut
from flowgrpo.rewards.geneval.detectors import Detection, Mask2Former
from flowgrpo.rewards.geneval.rules import GenEval
from tests.helpers import tiny_scorers
from tests.helpers.refusals import refused


# --- the detector ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def parts():
    """Mask2Former with five queries and three classes, and a processor."""
    torch.manual_seed(3)
    backbone = transformers.SwinConfig(
        embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2, image_size=64,
        out_features=["stage1", "stage2", "stage3", "stage4"])
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, num_queries=5, hidden_dim=32, feature_size=32, mask_feature_size=32,
        encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
        id2label={0: "dog", 1: "mouse", 2: "cat"}, label2id={"dog": 0, "mouse": 1, "cat": 2})
    model = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    size = {"shortest_edge": 48, "longest_edge": 80}
    return model, transformers.Mask2FormerImageProcessor(size=size, size_divisor=32)


IMAGES = (torch.rand(3, 3, 24, 36, generator=torch.Generator().manual_seed(1)) * 255).round() / 255


def test_detections_of_mask2former_are_those_of_its_outputs(parts):
    model, processor = parts
    found = Mask2Former(parts=parts, least=0.05, device="cpu", batch_size=2)(IMAGES)
    names = ["dog", "computer mouse", "cat"]
    for picture, detections in zip(IMAGES, found):
        inputs = processor(images=[(picture * 255).round().byte()], return_tensors="pt")
        assert inputs["pixel_values"].shape[-2:] == (64, 96)  # 48 by 72, scaled up to multiples of 32
        with torch.no_grad():
            outputs = model(**inputs)
        maps = interpolate(outputs.masks_queries_logits, (64, 96), mode="bilinear")
        maps = interpolate(maps, (24, 36), mode="bilinear")[0]
        expected = []
        for query, logits in enumerate(outputs.class_queries_logits[0]):
            mask = maps[query] > 0
            if not mask.any():
                continue
            inside = maps[query].sigmoid()[mask].mean()
            rows, columns = np.nonzero(mask.any(1).numpy())[0], np.nonzero(mask.any(0).numpy())[0]
            box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            expected += [((logits.softmax(0)[label] * inside).item(), names[label], box, mask) for label in range(3)]
        expected = sorted((one for one in expected if one[0] > 0.05), key=lambda one: -one[0])
        detections = sorted(detections, key=lambda one: -one.score)
        assert len(detections) == len(expected) > 0
        for one, (score, name, box, mask) in zip(detections, expected):
            assert one.score == pytest.approx(score, rel=1e-4) and (one.label, one.box) == (name, box)
            assert (one.mask == mask.numpy()).all()


def test_scores_and_boxes_of_masks_by_hand(parts):
    """Two queries: a dog in the left half, surely; a cat in the row below, less so; no other pair reaches 0.1."""
    maps = torch.full((2, 4, 4), -5.0)
    maps[0, :, :2], maps[1, 3] = 4.0, 1.0
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    dog, cat = Mask2Former(parts=parts, device="cpu")._objects(logits, maps, torch.Size([4, 4]))
    # exp(5) / (exp(5) + 3) times sigmoid(4); 1 / (2 + 2 / e) times sigmoid(1); the cat's other classes 0.134 * 0.731.
    assert (dog.label, dog.box, dog.score) == ("dog", (0, 0, 2, 4), pytest.approx(0.980183 * 0.982014, abs=1e-5))
    assert (cat.label, cat.box, cat.score) == ("cat", (0, 3, 4, 4), pytest.approx(0.365529 * 0.731059, abs=1e-5))
    assert dog.mask[:, :2].all() and not dog.mask[:, 2:].any() and cat.mask.sum() == 4


def test_names_and_common_arguments_of_mask2former(parts, tmp_path):
    for part in parts:
        part.save_pretrained(tmp_path)
    detector = detectors.detector(f"mask2former:{tmp_path}")
    assert detector.labels == ("dog", "computer mouse", "cat") and len(detector(IMAGES)) == 3
    refused(r"detector mask2former: .*/gone cannot be loaded .*: fetch it and give its folder as args: \{detector: "
            r"'mask2former:FOLDER'\}", detectors.detector, f"mask2former:{tmp_path}/gone")
    options = {"clip": {"parts": (ByHand(), Same), "batch_size": 1}, "colours": "clip", "dtype": "bf16",
               "device": "cpu:0", "batch_size": 2}
    reward = GenEval(detector=f"mask2former:{tmp_path}", **options)
    one, two = reward.detector, reward.colours
    assert [(model.dtype, model.device, model.batch_size) for model in (one, two)] == [
        ("bf16", "cpu:0", 2), ("bf16", "cpu:0", 1)]
    assert next(one.models[0].parameters()).dtype == torch.bfloat16
    assert rewards.find("geneval", {"detector": "http://127.0.0.1:1/", **options}).colours.dtype == "bf16"


# --- colours ---------------------------------------------------------------------------------------------------------
class ByHand(torch.nn.Module):
    """An image's embedding is its mean colour; a text's that of the colour which it names, longer or shorter."""

    visual = torch.nn.Identity()
    visual.image_size = 8
    visual.preprocess_cfg = {"size": 8, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    PAINT = {"red": (1.0, 0, 0), "green": (0, 1.0, 0), "blue": (0, 0, 1.0), "white": (1.0, 1, 1)}

    def encode_image(self, pictures, normalize):
        return torch.nn.functional.normalize(pictures.mean((2, 3)), dim=-1)

    def encode_text(self, texts, normalize):
        rows = [self.PAINT.get(next(name for name in colours.NAMES if f" {name}" in text), (-1.0, -1, -1))
                for text in texts]
        return torch.nn.functional.normalize(torch.tensor(rows), dim=-1)


class Same(list):
    """Texts in place of tokens."""

    def to(self, device):
        return self


def painted(*boxes) -> torch.Tensor:
    picture = torch.full((3, 64, 64), 0.5)
    for (left, top, right, bottom), paint in boxes:
        picture[:, top:bottom, left:right] = torch.tensor(ByHand.PAINT[paint])[:, None, None]
    return picture


def test_an_object_is_cut_out_and_its_surroundings_are_grey():
    picture = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    mask = np.zeros((6, 8), bool)
    mask[2, 3:6] = True
    shown = cut(picture, Detection((2.4, 1.6, 6.0, 4.0), "dog", 1.0, mask))
    expected = picture.copy()
    expected[~mask] = 0x99
    assert (shown[0] * 255).round().byte().permute(1, 2, 0).tolist() == expected[2:4, 2:6].tolist()
    plain = cut(picture, Detection((2, 2, 2, 2), "dog", 1.0))  # nothing in it: one pixel
    assert (plain * 255).round().byte().flatten().tolist() == picture[2, 2].tolist()


def test_a_colour_is_the_nearest_mean_of_three_texts():
    import open_clip
    from open_clip.model import CLIP
    torch.manual_seed(0)
    model = CLIP(**tiny_scorers.TINY).eval()
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    picture = (IMAGES[0] * 255).round().byte().permute(1, 2, 0).numpy()
    some = [Detection((0, 0, 20, 20), "dog", 0.9), Detection((10, 4, 36, 24), "dog", 0.8)]
    found = ClipColours(parts=(model, tokenizer), device="cpu")(picture, some, "dog")
    texts = ["a photo of a {} dog", "a photo of a {}-colored dog", "a photo of a {} object"]
    with torch.no_grad():
        rows = []
        for name in colours.NAMES:
            row = model.encode_text(tokenizer([text.format(name) for text in texts]))
            row = (row / row.norm(dim=-1, keepdim=True)).mean(0)
            rows.append(row / row.norm())
        for one, name in zip(some, found):
            left, top, right, bottom = one.box
            shown = model.encode_image(tiny_scorers.by_pil(IMAGES[0][:, top:bottom, left:right], 32)[None])[0]
            likeness = torch.stack(rows) @ (shown / shown.norm())
            assert likeness[colours.NAMES.index(name)] > likeness.max() - 1e-4


# --- verdicts --------------------------------------------------------------------------------------------------------
A, B, C = (4, 4, 24, 24), (40, 4, 60, 24), (40, 40, 60, 60)


def seen(label: str, box, score: float = 0.95) -> Detection:
    mask = np.zeros((64, 64), bool)
    mask[box[1]:box[3], box[0]:box[2]] = True
    return Detection(box, label, score, mask)


def clause(name: str, count: int = 1, **more) -> dict:
    return {"class": name, "count": count, **more}


SINGLE = {"tag": "single_object", "include": [clause("dog")]}
PAIR = {"tag": "two_object", "include": [clause("dog"), clause("cat")]}
COUNT = {"tag": "counting", "include": [clause("dog", 2)], "exclude": [clause("dog", 3)]}
RED = {"tag": "colors", "include": [clause("dog", color="red")]}
ABOVE = {"tag": "position", "include": [clause("dog"), clause("cat", position=["above", 0])]}
BOTH = {"tag": "color_attr", "include": [clause("dog", color="red"), clause("cat", color="blue")]}
PAINTED = painted((A, "red"), (B, "blue"), (C, "green"))  # red at the left above, blue at the right, green below it


@pytest.mark.parametrize("wanted, objects, right", [
    (SINGLE, [seen("dog", A, 0.31)], 1), (SINGLE, [seen("dog", A, 0.29)], 0), (SINGLE, [seen("cat", A)], 0),
    (PAIR, [seen("dog", A, 0.5), seen("cat", B, 0.5)], 1), (PAIR, [seen("dog", A)], 0),
    (COUNT, [seen("dog", A), seen("dog", B), seen("dog", C, 0.89)], 1), (COUNT, [seen("dog", A)], 0),
    (COUNT, [seen("dog", A), seen("dog", B), seen("dog", C, 0.91)], 0),
    (COUNT, [seen("dog", A), seen("dog", A)], 1),  # overlaps are not suppressed
    (RED, [seen("dog", A)], 1), (RED, [seen("dog", B)], 0), (RED, [seen("dog", B, 0.9), seen("dog", A, 0.8)], 0),
    (ABOVE, [seen("dog", C), seen("cat", B)], 1), (ABOVE, [seen("dog", B), seen("cat", C)], 0),
    (ABOVE, [seen("dog", B), seen("cat", A)], 0),
    # 10 pixels above: 10 - 0.1 * (20 + 20) = 6 of 10 are left. 7 pixels: 3 of 7.
    (ABOVE, [seen("dog", (40, 14, 60, 34)), seen("cat", B)], 1),
    (ABOVE, [seen("dog", (40, 11, 60, 31)), seen("cat", B)], 0),
    (BOTH, [seen("dog", A), seen("cat", B)], 1), (BOTH, [seen("dog", B), seen("cat", A)], 0),
    (BOTH, [seen("dog", A), seen("cat", C)], 0)])
def test_verdicts_of_the_six_tasks(wanted, objects, right):
    assert judged(objects, wanted, colours="clip", clip={"parts": (ByHand(), Same), "device": "cpu"}) == right


def judged(objects: list[Detection], wanted: dict, **options) -> float:
    reward = GenEval(detector=lambda images: [objects for _ in images], **options)
    return rewards.score({"geneval": reward}, PAINTED[None], ["a photo"], [wanted])[0, 0].item()


def test_published_defaults_and_other_colours():
    given = {entry.name: entry.default for entry in dataclasses.fields(GenEval)}
    assert (given["detector"], given["colours"], given["score"]) == ("mask2former", "clip", "strict")
    assert isinstance(rewards.find("geneval", {"clip": {"parts": (ByHand(), Same), "device": "cpu"}, "detector":
                                               "http://127.0.0.1:1/"}).colours, ClipColours)


THREE_RED = {"tag": "colors", "include": [clause("dog", 3, color="red")]}


@pytest.mark.parametrize("wanted, objects, score", [
    (SINGLE, [seen("dog", A)], 1), (SINGLE, [], 0),
    (SINGLE, [seen("dog", A)] * 5, -3),  # too many have no floor
    (COUNT, [seen("dog", A)], 0.5), (COUNT, [seen("dog", A)] * 7, 1 - 5 / 2),
    # 1 of 3 red: (1 + 1 / 3) / 2; 2 of 3: (1 + 2 / 3) / 2. A wrong number: its credit and one 0.
    (THREE_RED, [seen("dog", A), seen("dog", B), seen("dog", B)], 2 / 3),
    (THREE_RED, [seen("dog", A), seen("dog", A), seen("dog", B)], 5 / 6),
    (RED, [], 0), (RED, [seen("dog", A)] * 2, 0),
    # Two numbers, and the position: 1, or a 0 and a 1, or without its target one 0.
    (ABOVE, [seen("dog", C), seen("cat", B)], 1), (ABOVE, [seen("dog", B), seen("cat", C)], 3 / 4),
    (ABOVE, [seen("dog", C)], 1 / 3), (ABOVE, [seen("cat", C)], 1 / 3)])
def test_the_training_reward_of_flow_grpo_by_hand(wanted, objects, score):
    found = judged(objects, wanted, score="flow_grpo", clip={"parts": (ByHand(), Same), "device": "cpu"})
    assert found == pytest.approx(score, abs=1e-6)


def test_the_training_reward_of_flow_grpo_is_that_of_the_released_code():
    """80 random scenes with the scores of `evaluate_reward` of reward_server/gen_eval.py in yifan123/reward-server at
    92ac29f (MIT), run on the same objects and colours, with its thresholds."""
    lines = Path(__file__).with_name("flow_grpo_scores.jsonl").read_text(encoding="utf-8").splitlines()
    for case in map(json.loads, lines):
        colour = {tuple(box): name for box, _, _, name in case["objects"]}
        objects = [Detection(tuple(box), label, score) for box, label, score, _ in case["objects"]]
        found = judged(objects, case["metadata"], score="flow_grpo",
                       colours=lambda picture, those, name: [colour[each.box] for each in those])
        assert found == pytest.approx(case["score"], abs=1e-6), case
    assert len(lines) == 80


def test_the_mask_decides_the_colour():
    """A thin dog: most of its box is the blue wall, which is painted grey."""
    picture = painted(((0, 0, 64, 64), "blue"), ((20, 0, 24, 64), "red"))
    mask = np.zeros((64, 64), bool)
    mask[:, 20:24] = True
    named = ClipColours(parts=(ByHand(), Same), device="cpu")
    picture = (picture * 255).byte().permute(1, 2, 0).numpy()
    assert named(picture, [Detection((10, 0, 40, 64), "dog", 1.0)], "dog") == ["blue"]
    assert named(picture, [Detection((20, 0, 24, 64), "dog", 1.0, mask)], "dog") == ["red"]
    assert colours.GREY == 0x99


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mask2former_in_half_precision_is_near_fp32(parts, dtype):
    half, full = (Mask2Former(parts=copy.deepcopy(parts), least=0.0, device="cpu", dtype=name)(IMAGES)
                  for name in (dtype, "fp32"))
    for one, other in zip(half, full):
        scores, expected = (sorted(each.score for each in some) for some in (one, other))
        assert scores == pytest.approx(expected, abs=0.05)
