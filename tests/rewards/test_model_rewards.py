"""What the rewards with a model have in common: mistakes, half precision, weights."""

import copy
import logging
import sys

import pytest
import torch
from huggingface_hub import constants

from flowgrpo.errors import UserError
from flowgrpo.log import unlogged
from flowgrpo.rewards import clip, local_model
from flowgrpo.rewards.clip import Aesthetic, ClipScore, HpsV2, PickScore
from flowgrpo.rewards.find import find
from flowgrpo.rewards.score import score
from tests.helpers.tiny_scorers import PROMPTS, pictures


def test_nothing_but_tensors_is_unpickled(pick, tmp_path):
    torch.save({"weight": torch.nn.Linear(8, 1)}, tmp_path / "module.pth")
    with pytest.raises(UserError, match="module.pth cannot be loaded .*args: {head: FILE}"):
        Aesthetic(pick[2], head=str(tmp_path / "module.pth"), device="cpu")


def test_a_long_reason_is_cut_between_words():
    with pytest.raises(UserError, match=r"^weights cannot be loaded \(check your( \w+){29} \.\.\.\): fetch them$"), \
            local_model.loading("weights", "fetch them"):
        raise OSError("check your\n" + "link " * 40)


@pytest.mark.parametrize("name, arguments", [
    ("clip_score", {}), ("pickscore", {"model": "owner/name"}), ("safety", {"model": "owner/name"}),
    ("imagereward", {"checkpoint": "owner/name/file.pt"})])
def test_a_hub_that_does_not_answer_is_asked_once(name, arguments, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"not in the hub's cache, and no network \(http://127.0.0.1:9 does not ans"):
        find(name, arguments)
    assert constants.HF_HUB_OFFLINE
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]  # of open_clip


@pytest.mark.parametrize("name, arguments, line", [
    ("clip_score", {"pretrained": "/no/weights.pt"}, "fetch|open_clip.list_pretrained"),
    ("clip_score", {"score": "cos"}, "score is 'cos', expected clipscore or cosine"),
    ("hpsv2.1", {"checkpoint": "/no/HPS.pt"}, "/no/HPS.pt cannot be loaded .no such file.: fetch it and give its path"),
    ("pickscore", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder as args"),
    ("pickscore", {"model": "no/model"}, "no/model cannot be loaded .*: `hf download no/model` and "
     "`hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K` and give its folder"),
    ("pickscore", {"divide": 0}, "divide is 0, expected a number above 0"),
    ("aesthetic", {"head": "/no/head.pth"}, "/no/head.pth cannot be loaded .*: fetch it and give its path"),
    ("hpsv2.1", {"chekpoint": "x"}, "takes no argument 'chekpoint': did you mean 'checkpoint'?"),
])
def test_mistakes_are_told_in_one_line(name, arguments, line, caplog):
    with pytest.raises(UserError, match=line) as error:
        find(name, arguments)
    assert "\n" not in str(error.value) and name in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_errors_of_another_program_are_logged_while_a_model_is_loaded(caplog):
    with unlogged("open_clip"):
        logging.error("of another program")
    assert caplog.messages == ["of another program"]


@pytest.mark.parametrize("name", ["clip_score", "hpsv2.1"])
def test_a_missing_package_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(UserError, match=rf"reward '{name}' needs open_clip .*pip install 'flowgrpo\[clip\]'"):
        find(name)


def test_scores_in_bf16_are_near_those_in_fp32(tiny, pick, encoder):
    images, head = pictures(5, 40, 40), clip.perceptron(8)
    for kind, parts in ((ClipScore, tiny[:2]), (HpsV2, tiny[:2]), (PickScore, pick[:2]), (Aesthetic, (encoder, head))):
        half, full = (kind(dtype=dtype, device="cpu", parts=copy.deepcopy(parts))(images, PROMPTS)
                      for dtype in ("bf16", "fp32"))
        assert half.dtype == torch.float32 and 0 < (half - full).abs().max() < 0.02 * full.abs().max() + 0.02, kind


def test_they_are_rewards_like_others(tiny, pick):
    images, metadata = pictures(5, 40, 40), [{}] * 5
    both = {"clip_score": ClipScore(device="cpu", parts=tiny[:2]),
            "pickscore": PickScore(device="cpu", parts=pick[:2])}
    columns = score(both, images, PROMPTS, metadata)
    assert columns.shape == (5, 2) and not columns.isnan().any()
    assert torch.equal(columns[:, 1], both["pickscore"](images, PROMPTS))
