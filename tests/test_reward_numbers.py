"""Numbers of rewards on fixed images: what scripts/measure/reward_numbers.py draws, writes and compares."""

import hashlib
import json
from datetime import datetime, timezone

from flowgrpo.rewards.preprocessing import eight_bit
from scripts.measure import reward_numbers

# The bytes of the three images, rows of red, green and blue. With other ones, numbers of earlier files do not compare.
SHA256 = ["94bb8bd7b871588854b99d3e49a8b053b01dad1821d161ad6f48aefc77e4ac36",
          "3c4e1ea595031dd7543b428c3979f3ea6c0e4bd38997090a8f83d9ea2dc4c592",
          "63c7b37c0119dfc4e1ed08bcbeab36666cf0ae09f2cb30f2b69374c5fa161986"]


def test_images_and_scorers_of_the_numbers():
    assert [hashlib.sha256(image.tobytes()).hexdigest() for image in eight_bit(reward_numbers.images())] == SHA256
    clips = reward_numbers.clips()
    assert clips.shape == (3, 8, 3, 512, 512)
    assert (clips[0, 1, :, :, 4:] == clips[0, 0, :, :, :-4]).all()
    names = set(reward_numbers.scorers())
    assert {"pickscore", "hpsv2.0", "hpsv2.1", "hpsv3", "imagereward", "aesthetic", "clip_score", "vqascore", "geneval",
            "ocr", "deqa", "unified_reward", "videoalign"} <= names
    assert not {"gated", "scene", "http", "math_answer"} & names


def test_the_file_says_what_it_is_and_why_a_number_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "numbers.json"
    names = ["ocr", "jpeg_incompressibility", "temporal_consistency", "videoalign", "edit_judge", "no_such_reward"]
    assert reward_numbers.main([*names, "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert abs((datetime.now(timezone.utc) - datetime.fromisoformat(found["written"])).total_seconds()) < 3600
    assert found["images"] == SHA256 and found["device"] and found["libraries"].keys() >= {"torch", "pillow"}
    assert found["scores"]["ocr"] == [None, 1.0, None]  # the sign says HELLO
    flat, sign, clouds = found["scores"]["jpeg_incompressibility"]
    assert 0 < flat < clouds and 0 < sign < clouds
    assert all(0.99 < value < 1 for value in found["scores"]["temporal_consistency"])  # shifted by four pixels
    assert list(found["not_scored"]) == ["videoalign", "edit_judge", "no_such_reward"]
    assert "flowgrpo reward fetch videoalign" in found["not_scored"]["videoalign"]
    assert found["not_scored"]["edit_judge"] == "reward 'edit_judge' applies to none of the three images"
    assert not any("\n" in reason for reason in found["not_scored"].values())
    assert "3 rewards, 3 without a number" in capsys.readouterr().out


def test_numbers_of_two_files_are_compared(tmp_path, capsys):
    file = tmp_path / "before.json"
    options = ["sharpness", "--output", str(file)]
    assert reward_numbers.main(options) == 0
    assert reward_numbers.main([*options, "--against", str(file)]) == 0
    before = json.loads(file.read_text())
    before["scores"]["sharpness"][1] += 0.1
    file.write_text(json.dumps(before))
    assert reward_numbers.main(["sharpness", "--output", str(tmp_path / "now.json"), "--against", str(file)]) == 1
    assert f"expected {before['scores']['sharpness']} of {before['written']}" in capsys.readouterr().out


def test_a_number_for_none_differs():
    now = {"scores": {"a": [None, 1.0], "b": [2.0, 1.0]}}
    before = {"written": "then", "scores": {"a": [0.5, 1.0], "b": [2.0015, 1.0], "gone": [1.0]}}
    assert reward_numbers.different(now, before) == ["a: [None, 1.0], expected [0.5, 1.0] of then"]
    assert reward_numbers.different({"scores": {"b": [2.0, 1.0]}}, {"written": "x", "scores": {"b": [2.01, 1.0]}}) != []
