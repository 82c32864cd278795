"""Arguments of rewards that are refused, and packages that are missing: one line, before anything is scored."""

import logging
import re
import sys

import pytest

from flowgrpo.rewards import find
from tests.helpers.refusals import message, refused
from tests.rewards.test_combine import GREEN, RED


@pytest.mark.parametrize("name, arguments, told", [
    ("checklist", {"rewards": ["sharpness", "flow_amount"]}, "expected rewards that judge the same: images, videos"),
    ("tiered", {"rewards": []}, r"rewards is \[\], expected a list of rewards"),
    ("tiered", {"rewards": "ocr"}, "rewards is 'ocr', expected a list of rewards"),
    ("tiered", {"rewards": [RED, GREEN]}, r"thresholds is \(\), expected a list of 1, one per reward but the last"),
    ("tiered", {"rewards": [RED], "weights": [1, 2]}, r"weights is \[1, 2\], expected 1, one per reward"),
    ("gated", {"rewards": [RED], "thresholds": [1]}, r"thresholds is \[1\], expected a list of 0, one per reward but"),
    ("ternary", {"rewards": [RED, GREEN]}, "expected one reward"),
    ("ternary", {"rewards": [RED], "right": 0.5, "wrong": 0.5}, "wrong is 0.5, expected less than right, which is 0.5"),
    ("checklist", {"rewards": [RED], "thresholds": []}, r"thresholds is \[\], expected 1, one per reward"),
    ("harmonic", {"rewards": [RED]}, "expected two rewards"),
    ("harmonic", {"rewards": [RED, GREEN], "share": 1.5}, "share is 1.5, expected a number from 0 to 1"),
    ("corrected", {"rewards": [RED], "false_positive": 1}, "false_positive is 1, expected a rate from 0 to below 1"),
    ("corrected", {"rewards": [RED], "false_positive": 0.5, "false_negative": 0.5},
     "false_positive is 0.5, expected less than 1 - false_negative, 0.5: such a verdict says nothing"),
    ("gated", {"rewards": ["sharpnes"]}, "unknown reward 'sharpnes'"),
    ("gated", {"rewards": ["diversity"]}, "expected rewards that score one sample at a time, not whole groups"),
    ("gated", {"rewards": [{"use": "ocr", "weight": 2}]}, r"gated\[0\]: weight: got 2, extra inputs are not permitted"),
    ("clip_score", {"pretrained": "/no/weights.pt"}, "fetch|open_clip.list_pretrained"),
    ("clip_score", {"score": "cos"}, "score is 'cos', expected clipscore or cosine"),
    ("hpsv2.1", {"checkpoint": "/no/HPS.pt"}, "/no/HPS.pt cannot be loaded .no such file.: fetch it and give its path"),
    ("pickscore", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder as args"),
    ("pickscore", {"model": "no/model"}, "no/model cannot be loaded .*: `hf download no/model` and "
     "`hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K` and give its folder"),
    ("pickscore", {"divide": 0}, "divide is 0, expected a number above 0"),
    ("aesthetic", {"head": "/no/head.pth"}, "/no/head.pth cannot be loaded .*: fetch it and give its path"),
    ("hpsv2.1", {"chekpoint": "x"}, "takes no argument 'chekpoint': did you mean 'checkpoint'?"),
    ("imagereward", {"checkpoint": "/no/ImageReward.pt"}, "/no/ImageReward.pt cannot be loaded .*: fetch it and give"),
    ("vqascore", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder as args"),
    ("vqascore", {"question": "Is it so?"}, "question is 'Is it so.', expected one with {} for the prompt"),
    ("geneval_fast", {"detector": "http://127.0.0.1:1/", "device": "cpu", "batch_size": 2},
     "reward 'geneval_fast': got device, batch_size, which the detector 'http://127.0.0.1:1/' does not take: leave"),
    ("geneval_fast", {"dtype": "bf16"},
     "detector 'fasterrcnn_resnet50_fpn_v2': dtype is 'bf16', expected fp32: leave it out"),
    ("geneval", {"detector": len, "colours": "hue"}, "colours is 'hue' and clip {}, expected pixels or clip"),
    ("geneval", {"detector": len, "colours": "pixels", "clip": {"model": "x"}},
     "arguments in clip only for the latter"),
    *(("palette", {"colours": wrong}, f"got the colour {said}, expected colours such as '#ff8800'") for wrong, said in (
        (["red"], "'red'"), ([5], "5"), (["#ff880"], "'#ff880'"), ("#ff8800", "'#'"), ([], "''"))),
    ("palette", {"colours": ["#000000"], "tolerance": 0}, "tolerance is 0, expected above 0"),
    ("ocr", {"score": "exat"}, "reward 'ocr': score is 'exat', expected edit, exact, partial"),
    ("frames", {"reward": RED, "frames": "max"}, "frames is 'max' and every 1, expected mean or min and 1 or more"),
    *(("frames", {"reward": name}, f"'{name}' is no reward of single images: choose one that is")
      for name in ("flow_amount", "diversity")),
    ("frames", {"reward": "sharpnes"}, "unknown reward 'sharpnes': did you mean 'sharpness'"),
    ("safety", {"model": "/no/folder"}, "^reward 'safety': .* cannot be loaded .*: fetch it and give")])
def test_arguments_are_refused_in_one_line(name, arguments, told, caplog):
    said = message(find, name, arguments)
    assert re.search(told, said) and any(word in said for word in (name, "unknown reward", "detector"))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]  # of open_clip


@pytest.mark.parametrize("name, module, extra", [
    ("clip_score", "open_clip", "clip"), ("hpsv2.1", "open_clip", "clip"), ("flow_amount", "cv2", "video"),
    ("ocr", "rapidocr", "ocr"), ("ocr", "onnxruntime", "ocr")])
def test_a_missing_package_is_named_with_its_extra(name, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    refused(rf"^reward '{name}' needs {module} .*pip install 'flowgrpo\[{extra}\]'$", find, name)
