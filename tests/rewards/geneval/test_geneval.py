"""GenEval's rules by hand tables, with detections that are given; colours against the named colours of the web; the
detectors' own arithmetic."""

import base64
import io
import math
import os

import numpy as np
import pytest
import torch
from build_suites import OBJECTS
from PIL import Image, ImageColor
from torchvision.models import get_model

from flowgrpo import rewards
from flowgrpo.rewards.geneval import colours, detectors
from flowgrpo.rewards.geneval.detectors import Detection
from flowgrpo.rewards.geneval.rules import GenEvalFast, by_pixels, relations
from tests.helpers.chat_endpoint import endpoint
from tests.helpers.pickles import Command
from tests.helpers.refusals import message, refused

PROMPT = "a photo"


def seen(label: str, score: float = 0.95, box=(0, 0, 10, 10)) -> Detection:
    return Detection(box, label, score)


def judged(found: list[Detection], wanted: dict, score: str = "strict", picture: torch.Tensor | None = None,
           **rules) -> float:
    picture = torch.zeros(3, 64, 64) if picture is None else picture
    reward = GenEvalFast(detector=lambda images: [found for _ in images], score=score, **rules)
    return rewards.score({"geneval": reward}, picture[None], [PROMPT], [wanted])[0, 0].item()


def painted(*boxes) -> torch.Tensor:
    """A grey image with boxes ((left, top, right, bottom), colour)."""
    picture = torch.full((3, 64, 64), 0.5)
    for (left, top, right, bottom), name in boxes:
        paint = torch.tensor(ImageColor.getrgb(name)) / 255
        picture[:, top:bottom, left:right] = paint[:, None, None]
    return picture


# --- counts ----------------------------------------------------------------------------------------------------------
ONE = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
TWO = {"tag": "two_object", "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}]}
THREE = {"tag": "counting", "include": [{"class": "dog", "count": 3}], "exclude": [{"class": "dog", "count": 4}]}
LEFT = {"tag": "position", "include": [{"class": "dog", "count": 1},
                                       {"class": "cat", "count": 1, "position": ["left of", 0]}]}


@pytest.mark.parametrize("wanted, found, strict, graded", [
    (ONE, [], 0, 0),
    (ONE, [seen("dog")], 1, 1),
    (ONE, [seen("dog"), seen("dog")], 1, 0),  # at least one is enough for GenEval; too many cost in the graded score
    (ONE, [seen("cat")], 0, 0),
    (ONE, [seen("dog", 0.31)], 1, 1),
    (ONE, [seen("dog", 0.3)], 0, 0),  # above the threshold, not at it
    (TWO, [seen("dog"), seen("cat")], 1, 1),
    (TWO, [seen("dog")], 0, 0.5),
    (THREE, [seen("dog")] * 3, 1, 1),
    (THREE, [seen("dog")] * 2, 0, 2 / 3),
    (THREE, [seen("dog")] * 4, 0, 2 / 3),
    (THREE, [seen("dog")] * 9, 0, 0),  # never below 0
    (THREE, [seen("dog")] * 3 + [seen("dog", 0.89)], 1, 1),  # counted from 0.9 on
    (THREE, [seen("dog")] * 2 + [seen("dog", 0.89)], 0, 2 / 3),
    (LEFT, [seen("dog", box=(40, 0, 50, 10)), seen("cat", box=(0, 0, 10, 10))], 1, 1),
    (LEFT, [seen("dog", box=(0, 0, 10, 10)), seen("cat", box=(40, 0, 50, 10))], 0, 2 / 3),
    (LEFT, [seen("cat", box=(0, 0, 10, 10))], 0, 1 / 3),  # no target: neither dog nor place
    (LEFT, [seen("dog", box=(40, 0, 50, 10))], 0, 1 / 3),
    # The surest cat is looked at: the right one here, the wrong one there.
    (LEFT, [seen("dog", box=(40, 0, 50, 10)), seen("cat", 0.6, (50, 0, 60, 10)), seen("cat", 0.9, (0, 0, 10, 10))],
     1, 1 / 3),
    (LEFT, [seen("dog", box=(40, 0, 50, 10)), seen("cat", 0.9, (50, 0, 60, 10)), seen("cat", 0.6, (0, 0, 10, 10))],
     0, 1 / 3)])
def test_counts_and_places(wanted, found, strict, graded):
    assert judged(found, wanted) == strict
    assert judged(found, wanted, "graded") == pytest.approx(graded, abs=1e-7)


def test_sizes_colours_and_counts_of_objects():
    many = {"tag": "counting", "include": [{"class": "dog", "count": 16}], "exclude": [{"class": "dog", "count": 17}]}
    assert judged([seen("dog")] * 20, many) == 1
    assert judged([seen("dog")] * 20, many, max_objects=17) == 0
    assert judged([seen("dog", 0.5)] * 3, THREE) == 0
    assert judged([seen("dog", 0.5)] * 3, THREE, counting_threshold=0.4) == 1
    assert judged([seen("dog", 0.5)], ONE, threshold=0.6) == 0
    # Shortened by 0.1 * (40 + 10) = 5: 3 / 8 = 0.375; by 0.1 * (10 + 10): 6 / 8.
    assert relations((-12, -5, 28, 5), (-5, -5, 5, 5)) == set()
    assert relations((3, -5, 13, 5), (-5, -5, 5, 5)) == {"right of"}
    assert relations((-12, -5, 28, 5), (-5, -5, 5, 5), threshold=0) == {"right of"}
    wanted = {"tag": "colors", "include": [{"class": "dog", "count": 2, "color": "red"}]}
    found = [seen("dog", box=HERE), seen("dog", box=THERE)]
    assert judged(found, wanted, picture=painted((HERE, "red"), (THERE, "red"))) == 1
    assert judged(found, wanted, picture=painted((HERE, "red"), (THERE, "blue"))) == 0


# --- places ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("centre, expected", [
    # Boxes of 10 by 10: each axis is shortened by 0.1 * (10 + 10) = 2.
    ((20, 0), {"right of"}), ((-20, 0), {"left of"}), ((0, -20), {"above"}), ((0, 20), {"below"}),
    ((20, 20), {"right of", "below"}),  # 18 / 28.3 = 0.64 on both
    ((20, 10), {"right of"}),  # 18 / 22.4 = 0.80, 8 / 22.4 = 0.36
    ((2, 0), set()), ((0, 0), set()), ((2, 2), set()),
    ((5, 0), {"right of"}),  # 3 / 5 = 0.6
    ((3.9, 0), set()),  # 1.9 / 3.9 = 0.49
    ((4.1, 0), {"right of"}),  # 2.1 / 4.1 = 0.51
])
def test_relations(centre, expected):
    x, y = centre
    assert relations((x - 5, y - 5, x + 5, y + 5), (-5, -5, 5, 5)) == expected


# --- colours ---------------------------------------------------------------------------------------------------------
RED_BLUE = {"tag": "color_attr", "include": [{"class": "dog", "count": 1, "color": "red"},
                                             {"class": "cat", "count": 1, "color": "blue"}]}
HERE, THERE = (0, 0, 20, 20), (40, 40, 60, 60)


@pytest.mark.parametrize("here, there, strict, graded", [
    ("red", "blue", 1, 1), ("blue", "red", 0, 0.5), ("red", "green", 0, 0.75), ("grey", "blue", 0, 0.75)])
def test_each_object_has_its_own_colour(here, there, strict, graded):
    picture, found = painted((HERE, here), (THERE, there)), [seen("dog", box=HERE), seen("cat", box=THERE)]
    assert judged(found, RED_BLUE, picture=picture) == strict
    assert judged(found, RED_BLUE, "graded", picture) == pytest.approx(graded, abs=1e-7)


@pytest.mark.parametrize("name, web", [
    ("red", "red crimson firebrick darkred #f03018"), ("orange", "orange darkorange"),
    ("yellow", "yellow gold khaki goldenrod"),
    ("green", "green lime forestgreen darkgreen seagreen limegreen"),
    ("blue", "blue navy royalblue dodgerblue steelblue skyblue"),
    ("purple", "purple indigo darkviolet rebeccapurple mediumpurple darkmagenta"),
    ("pink", "pink hotpink deeppink lightpink palevioletred"), ("brown", "saddlebrown sienna #5c4033 #8a5c5c"),
    ("black", "black #101010 #202020 #3c3a42 #40394a"), ("white", "white snow whitesmoke ivory"),
    ("", "grey silver dimgrey darkcyan")])
def test_named_colours_of_the_web(name, web):
    pixels = np.array([ImageColor.getrgb(paint) for paint in web.split()], dtype=np.uint8)
    assert dict(zip(web.split(), colours.pixel_colours(pixels))) == dict.fromkeys(web.split(), name)


def test_hues_of_pillow_at_the_middle_of_the_box():
    pixels = np.random.default_rng(0).integers(0, 256, (500, 3), dtype=np.uint8)
    pixels = pixels[np.ptp(pixels, axis=1) > 40]
    expected = np.array(Image.fromarray(pixels[None]).convert("HSV"))[0, :, 0] * (360.0 / 255)
    channels = pixels / 255
    found = colours._hue(channels, channels.max(-1), np.ptp(channels, -1))
    apart = np.abs(found - expected) % 360
    assert np.minimum(apart, 360 - apart).max() < 3  # Pillow has 256 steps
    picture = (painted(((8, 8, 24, 24), "red")).permute(1, 2, 0) * 255).byte().numpy()
    for box, name in (((8, 8, 24, 24), "red"), ((0, 0, 32, 32), "red"),  # grey around it, the middle half is red
                      ((16, 16, 64, 64), None), ((70, 70, 90, 90), None),  # grey, outside
                      ((12.2, 12.2, 12.4, 12.4), "red")):  # less than a pixel
        assert colours.colour(picture, box) == name
    assert colours.colour(picture[8:, 8:], (-16, -16, 16, 16)) == "red"  # of the middle, what is in the image


# --- the reward ------------------------------------------------------------------------------------------------------
def test_prompts_without_metadata_of_geneval_are_left_out():
    asked = []
    def detector(images):
        asked.append(len(images))
        return [[seen("dog")] for _ in images]
    found = rewards.score({"geneval": GenEvalFast(detector=detector)}, torch.zeros(3, 3, 8, 8), [PROMPT] * 3,
                          [ONE, {}, TWO])[:, 0].tolist()
    assert found[0] == 1 and math.isnan(found[1]) and found[2] == 0 and asked == [2]


@pytest.mark.parametrize("clause, told", [
    ({"class": "dog"}, "expected a class and a count of 1 or more"),
    ({"class": "dog", "count": 0}, "expected a class and a count of 1 or more"),
    ({"class": "dog", "count": 1, "color": "teal"}, "expected a colour of red, orange"),
    ({"class": "dog", "count": 1, "position": ["near", 0]}, "expected a place of left of, right of"),
    ({"class": "dog", "count": 1, "position": ["above", 0]}, "the number of an earlier clause")])
def test_metadata_of_another_format_is_refused(clause, told):
    refused(told, judged, [], {"include": [clause]})


def test_a_class_that_the_detector_does_not_know_is_refused():
    def dogs(images):
        return [[Detection((0, 0, 4, 4), "dog", 0.95)] for _ in images]
    def scored(*names: str) -> list:
        return GenEvalFast(detector=dogs)(torch.zeros(1, 3, 8, 8), [PROMPT], [{
            "include": [{"class": name, "count": 1} for name in names]}])
    assert scored("dog") == [1] and scored("unicorn") == [0]  # nothing is known of what it can find
    dogs.labels = OBJECTS
    assert scored("dog") == [1]
    refused(f"of the prompt '{PROMPT}' has the clause .*: the detector knows no class 'persn': did you mean 'person'",
            scored, "dog", "persn")
    model = torch.nn.Identity()
    assert detectors.Torchvision(model=model, categories=("N/A", "mouse")).labels == ("computer mouse",)


def test_detectors_rules_and_names(tmp_path):
    assert "score is 'loose', expected strict, graded" in message(rewards.find, "geneval_fast", {"score": "loose"})
    refused("no detector 'fasterrcnn': expected one of torchvision's", rewards.find, "geneval_fast",
            {"detector": "fasterrcnn"})
    (tmp_path / "mine.py").write_text("def dogs(images):\n    return [[((0, 0, 4, 4), 'dog', 0.95)] for _ in images]\n")
    reward = rewards.find("geneval_fast", {"detector": f"{tmp_path}/mine.py:dogs"})
    assert reward(torch.zeros(2, 3, 8, 8), [PROMPT] * 2, [ONE, TWO]) == [1, 0]
    mine = GenEvalFast(detector=len)
    assert (mine.threshold, mine.counting_threshold, mine.max_objects, mine.position_threshold) == (0.3, 0.9, 16, 0.1)
    assert mine.colours is by_pixels
    assert len(OBJECTS) == len(set(OBJECTS)) == 80 and OBJECTS[0] == "person" and OBJECTS[-1] == "toothbrush"
    assert {"computer mouse", "tv remote", "computer keyboard", "potted plant", "wine glass"} <= set(OBJECTS)


# --- detectors -------------------------------------------------------------------------------------------------------
LIGHT = "ssdlite320_mobilenet_v3_large"
LIGHT_FILE = "ssdlite320_mobilenet_v3_large_coco-a79551df.pth"


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """The folder of the cache in which weights lie."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


@pytest.mark.parametrize("name, file", [
    ("fasterrcnn_resnet50_fpn_v2", "fasterrcnn_resnet50_fpn_v2_coco-dd69338a.pth"), (LIGHT, LIGHT_FILE)])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_of_weights_runs_nothing(tmp_path, checkpoints, name, file, zipped):
    torch.save({"a": Command(f"touch {tmp_path}/ran")}, checkpoints / file, _use_new_zipfile_serialization=zipped)
    refused(f"detector '{name}': {checkpoints}/{file} holds no weights of it", detectors.detector, name)
    assert not (tmp_path / "ran").exists() and detectors.WEIGHTS_ONLY not in os.environ


def test_the_weights_in_the_cache_are_read_and_others_told_where_to_put(checkpoints, monkeypatch):
    for proxy in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    refused(f"its weights cannot be downloaded .*: put https://download.pytorch.org/models/{LIGHT_FILE} at "
            f"{checkpoints}/{LIGHT_FILE}", detectors.detector, LIGHT)
    state = get_model(LIGHT, weights=None, weights_backbone=None).state_dict()
    torch.save(state, checkpoints / LIGHT_FILE)
    found = detectors.detector(LIGHT).models[0].state_dict()
    assert all(torch.equal(value.cpu(), state[name]) for name, value in found.items())


def test_a_model_of_torchvision():
    torch.manual_seed(0)
    model = get_model(LIGHT, weights=None, weights_backbone=None, num_classes=4).eval()
    images, names = torch.rand(2, 3, 40, 60), ("background", "mouse", "dog", "cat")
    found = detectors.Torchvision(model=model, categories=names, device="cpu")(images)
    with torch.no_grad():
        for detections, image in zip(found, images):
            [expected] = model([image])
            assert len(detections) == len(expected["scores"]) > 0
            assert [one.score for one in detections] == expected["scores"].tolist()
            assert [one.box for one in detections] == [tuple(box) for box in expected["boxes"].tolist()]
            assert {one.label for one in detections} <= {"computer mouse", "dog", "cat"}


@pytest.fixture
def address():
    """Answers with one box per image, whose score is the image's mean."""
    def reply(body, number):
        pictures = [np.array(Image.open(io.BytesIO(base64.b64decode(image)))) for image in body["images"]]
        answers = [[{"box": [0, 1, 2, 3], "label": "mouse", "score": float(picture.mean()) / 255}]
                   for picture in pictures]
        path = server.seen[-1][0]
        found = b"<html>" if path == "/garbage" else {"detections": answers[:1] if path == "/short" else answers}
        return 500 if path == "/broken" else 200, {}, found
    with endpoint(reply) as server:
        yield server.url.removesuffix("/v1")


def test_a_remote_detector_and_one_that_fails(address):
    images = torch.tensor([0.2, 0.6])[:, None, None, None].expand(2, 3, 5, 7)
    found = detectors.detector(f"{address}/detect")(images)
    assert found == [[Detection((0, 1, 2, 3), "computer mouse", pytest.approx(value))] for value in (0.2, 0.6)]
    for path, told in (("short", "1 answers, expected 2"), ("broken", "500"), ("garbage", "JSON")):
        refused(f"the detector at {address}/{path} did not answer as it should: .*{told}",
                detectors.detector(f"{address}/{path}"), images, error=RuntimeError)
