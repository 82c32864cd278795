"""Study of parts, and numbers of rewards on fixed images: statistics, tables, prompts and pages."""

import argparse
import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import study_candidates
import study_measures
import study_page
import study_parts
import study_rows
import study_settings
import study_statistics
import torch

from flowgrpo.data import pairs
from flowgrpo.data.prompts import Prompt
from flowgrpo.rewards import preprocessing
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.starter import scene
from flowgrpo.types import unwrap
from scripts.measure import reward_numbers


def scores(rate: float, seed: int, prompts: int = 200) -> np.ndarray:
    return (np.random.default_rng(seed).random((3, prompts)) < rate).astype(float)


def test_differences_are_found_and_corrected():
    better, same = study_statistics.compared(scores(0.3, 0), scores(0.7, 1)), scores(0.5, 2)
    assert better["difference"] > 0.3 and better["low"] > 0.2 and better["p"] < 0.01
    none = study_statistics.compared(same, same)
    assert none["difference"] == 0 and none["p"] > 0.9 and none["low"] < 0 < none["high"]
    assert better["with"] == pytest.approx(scores(0.7, 1).mean(1).tolist())
    row = {"without": [0.1], "with": [0.2], "quantity": "accuracy"}
    told = study_statistics.judged([row | {"p": 0.02}, row | {"p": 0.04}, row | {"p": 0.01}])
    assert [each["holm"] for each in told] == pytest.approx([0.04, 0.04, 0.03])
    assert [(each["better"], each["verdict"]) for each in told] == [(1, 1)] * 3


def test_welchs_test_and_later_rows():
    without, having = (np.repeat([[value] for value in side], 4, 1) for side in ([0.1, 0.2, 0.3], [0.5, 0.7, 0.9]))
    # t = 0.5 / sqrt(0.01 / 3 + 0.04 / 3) = 3.873 with 2.94 degrees of freedom
    assert study_statistics.compared(without, having)["welch"] == pytest.approx(0.0315, abs=5e-4)
    assert study_statistics.compared(without, without)["welch"] == 1
    assert study_statistics.compared(np.zeros((3, 4)), np.ones((3, 4)))["welch"] == 0
    tried = {row.key for row in study_candidates.CANDIDATES}
    assert all(row.key in tried for row in study_rows.ROWS if row.setting or row.pool == study_settings.SCENES)
    row = study_rows.chosen("SampledKL", "weight 0.5", study_settings.ALL, "as seen")
    assert (row.options["parts"]["kl"], row.seen) == ({"weight": 0.5}, "as seen")


@pytest.mark.parametrize("seeds, p, quantity, verdict", [
    ([0.3, 0.4, 0.5], 0.01, "accuracy", 1), ([0.1, 0.1, 0.1], 0.01, "accuracy", -1),
    ([0.3, 0.4, 0.5], 0.06, "accuracy", 0), ([0.3, 0.1, 0.9], 0.01, "accuracy", 0),
    ([0.1, 0.1, 0.1], 0.01, "kl", 1), ([0.3, 0.4, 0.5], 0.01, "kl", -1)])
def test_a_verdict_needs_significance_and_every_seed(seeds, p, quantity, verdict):
    result = {"without": [0.2, 0.2, 0.2], "with": seeds, "p": p, "quantity": quantity}
    assert study_statistics.verdict(result) == verdict


def test_the_table_shows_seeds_difference_and_verdict():
    told = {"name": "Hints", "setting": "", "pool": "five numbers", "quantity": "accuracy", "without": [0.2, 0.4],
            "with": [0.5, 0.7], "difference": 0.3, "low": 0.2, "high": 0.4, "better": 2, "p": 0.0002, "holm": 0.012,
            "welch": 0.2, "verdict": 1, "evaluations": 1.25}
    assert study_statistics.table([told])[-1] == (
        "| `Hints` | five numbers | accuracy, higher | 0.300 (0.200 to 0.400) | 0.600 (0.500 to 0.700) | "
        "+0.300 (+0.200 to +0.400) | 2/2 | < 0.001 | 0.012 | 0.200 | helps | x1.25 |")
    told |= {"name": "SampledKL", "setting": "weight 2", "quantity": "kl", "accuracy": [0.5, 0.25]}
    assert study_statistics.accuracies([told])[-1] == "| `SampledKL` (weight 2) | five numbers | 0.500 | 0.250 |"
    assert study_statistics.tried([told], [("SampledKL", "weight 2", "five numbers")])[-1] == (
        "| `SampledKL` (weight 2) | five numbers | kl | 0.30 | 0.60 | 0.500 | 0.250 | yes |")
    assert study_statistics.tried([told], [])[-1].endswith("| 0.250 |  |")
    assert study_statistics.accuracies([told | {"quantity": "accuracy"}]) == []


def test_rows_and_options_change_what_they_name():
    for rows in (study_rows.ROWS, study_candidates.CANDIDATES):
        assert len({row.key for row in rows}) == len(rows)
    for row in study_rows.ROWS + study_candidates.CANDIDATES:
        assert (row.options != row.without) == (row.rlg is None) and row.quantity in study_statistics.HIGHER
        assert (row.without == row.world) == (row.base is None)
        assert row.options["train.lr"] == row.world["train.lr"]
        assert row.options["model"] == ("starter" if row.pool == study_settings.SCENES else "starter_text")
    row = study_settings.Row("part", "", "accuracy", method="relift", parts={"data": {"batch": 2}},
                         reward={"step_match": 1.0}, more={"train.epochs": 3},
                         base={"train.group": 2, "parts": {"advantage": {"scale": "none"}}})
    assert row.without["train.group"] == 2 and row.without["method"] == "grpo"
    assert row.without["parts"] == {"kl": {"weight": 0.0}, "advantage": {"scale": "none"}}
    changed = {key for key, value in row.options.items() if row.without.get(key) != value}
    assert changed == {"method", "parts", "reward", "train.epochs"} and row.options["method"] == "grpo+relift"
    assert row.options["parts"] == row.without["parts"] | {"data": {"batch": 2}}


def test_sums_hints_and_prompts_of_the_study():
    sides = study_parts.fives()
    assert {side: len(problems) for side, problems in sides.items()} == {
        side: count for side, (_, count) in study_parts.SIDES.items()}
    assert len({problem for problems in sides.values() for problem in problems}) == sum(map(len, sides.values()))
    assert {problem.held_out for problem in sides["train"] + sides["validation"]} == {False}
    assert {problem.held_out for problem in sides["held_out"]} == {True}
    problem = study_parts.Problem((10, 20, 30, 40, 50))
    assert study_parts.line(problem) == {"prompt": "10+20+30+40+50=", "metadata": {
        "answer": "150", "solution": "30;60;100;150", "task": "5 numbers", "hints": ["30;60;"]}}
    lines = [{"prompt": f"{number}+10=", "metadata": {"answer": str(number + 10)}} for number in range(1600)]
    mixed = study_parts.mostly_known(lines)
    sources = [each["metadata"]["source"] for each in mixed]
    assert (sources.count("mastered"), sources.count("recipe")) == (study_parts.MASTERED, study_parts.MASTERED // 3)
    assert "source" not in lines[0]["metadata"] and "hints" not in mixed[0]["metadata"]


def test_right_images_are_those_of_the_prompts(tmp_path):
    study_parts.write_images(tmp_path, [Prompt("a red star"), Prompt("two blue circles")])
    lines = pairs.load_demonstrations(tmp_path / "scenes-images.jsonl")
    shown = torch.stack([preprocessing.read_tensor(unwrap(line.image)) for line in lines])
    assert [line.prompt for line in lines] == ["a red star", "two blue circles"]
    assert scene.scene(shown, ["a red star", "two blue circles"], [{}, {}]) == [1.0, 1.0]


SMALL = {"train.epochs": 1, "train.prompts": 2, "train.group": 2, "train.micro_batch": 4, "train.updates": 1}


def test_new_rows_replace_the_same_ones_and_are_those_that_the_data_of_the_page_lack(tmp_path, monkeypatch):
    def row(name: str, p: float) -> dict[str, Any]:
        return {"name": name, "setting": "", "pool": "all", "p": p, "quantity": "accuracy", "without": [0.1] * 3,
                "with": [0.2] * 3}
    known = study_statistics.judged([row("a", 0.01), row("b", 0.02)])
    rows = study_statistics.merged(known, [row("b", 0.04), row("c", 0.03)])
    assert [each["name"] for each in rows] == ["a", "b", "c"]
    assert [each["holm"] for each in rows] == pytest.approx([0.03, 0.06, 0.06]) and rows[1]["p"] == 0.04
    held = {"rows": [dict(zip(study_statistics.KEYS, row.key)) for row in study_rows.ROWS if row.name != "limit"]}
    (tmp_path / "studies.json").write_text(json.dumps(held))
    monkeypatch.setattr(study_parts, "DATA", tmp_path / "studies.json")
    args = argparse.Namespace(new=True, only=None, pool=[study_settings.SCENES])
    assert {row.name for row in study_rows.ROWS if row.key in study_parts.asked(args)} == {"limit"}


def finished(folder: Path, pool: str, options: dict[str, Any], rlg: float | None = None) -> dict[str, Any]:
    """Train and measure a tiny run; prompts are not written again."""
    args = argparse.Namespace(output=folder, side="validation", prompts=3)
    if not (folder / "prompts").is_dir():
        study_parts.write_prompts(folder / "prompts")
    return study_parts.finished(study_parts.configured(args, pool, "base", options, 0), args.prompts, rlg)


def test_a_run_of_images_is_measured_and_drawn_with_more_than_its_change(tmp_path, monkeypatch):
    monkeypatch.setattr(study_measures, "PICTURED", 2)
    options = study_settings.IMAGES | SMALL | {"train.steps": 4, "eval.steps": 2}
    run = finished(tmp_path, study_settings.SCENES, options)
    assert {key: len(run[key]) for key in ("accuracy", "diversity", "kl")} == {"accuracy": 3, "diversity": 2, "kl": 2}
    assert min(run["diversity"]) > 0 and min(run["kl"]) > 0
    drawn = finished(tmp_path, study_settings.SCENES, options, rlg=2.0)
    assert drawn["evaluations"] == run["evaluations"] and set(drawn) == {"evaluations", "commit", "accuracy"}
    assert len([*(tmp_path / "runs").iterdir()]) == 1, "RLG draws from the same run"


def test_a_run_of_texts_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(study_measures, "PROMPTS", 2)
    run = finished(tmp_path, study_settings.FIVE, study_settings.TEXTS | SMALL)
    assert {key: len(run[key]) for key in ("accuracy", "pass@8", "entropy", "kl")} == {
        "accuracy": 3, "pass@8": 2, "entropy": 2, "kl": 2}
    [folder] = (tmp_path / "runs").iterdir()
    (folder / "study.json").write_text('{"kept": true}')
    assert finished(tmp_path, study_settings.FIVE, study_settings.TEXTS | SMALL) == {"kept": True}


def test_the_page_is_current_and_short():
    results = json.loads(study_page.DATA.read_text(encoding="utf-8"))
    text = study_page.PAGE.read_text(encoding="utf-8")
    assert study_page.written(text, results) == text and study_page.page(results) in text, "run study_page.py"
    text = study_page.page(results)
    sure = [row for row in results["rows"] if row["verdict"] == 1 and row["holm"] < 0.05]
    assert len(text.splitlines()) <= 20 and len(sure) == 5
    assert all(study_page.linked(row) in " ".join(text.split()) for row in sure)


def test_the_details_tell_of_images_and_tried_settings_where_there_are_any(monkeypatch):
    results = json.loads(study_page.DATA.read_text(encoding="utf-8"))
    texts = [row for row in results["rows"] if row["pool"] != "scenes"]
    plain = study_page.details(results | {"rows": texts, "tried": []})
    assert "**Images.**" not in plain and "Settings that were tried" not in plain
    row = study_candidates.CANDIDATES[-1]
    drawn = texts[0] | dict(zip(("name", "setting", "pool"), row.key)) | {"verdict": 1, "commits": ["abc"]}
    monkeypatch.setattr(study_page, "ROWS", (*study_rows.ROWS, row))
    both = study_page.details(results | {"rows": [*texts, drawn], "tried": [drawn]})
    told = " ".join(both.split())
    assert "(1 of 1 on images)" in study_page.summary(results | {"rows": [*texts, drawn]})
    assert "**Images.** 16 epochs" in told
    assert both.count("`Sliding` (three of six steps)") == 4, "result, settings, note and tried setting"
    assert max(map(len, plain.splitlines()[:25])) <= 120


def test_rows_of_the_study_have_settings_and_what_was_seen():
    alone, drawn = {"parts.advantage": {"type": "NoBaseline"}}, {"train.prompts": 256, "train.group": 1}
    sides = {row.key: study_page.sides(row) for row in study_rows.ROWS}
    assert sides["Advantage", "", "all"] == ({}, {}, alone)
    assert sides["ValueTracker", "", "all"] == ({"parts.advantage": {"type": "ValueTracker"}}, drawn, alone)
    assert sides["rlg", "weight 1.5", "scenes"] == ({"--rlg": 1.5}, {}, {})
    results = json.loads(study_page.DATA.read_text(encoding="utf-8"))
    seen = {row.key: row.seen for row in study_rows.ROWS}
    assert results["side"] == "held_out"
    assert all(seen[row["name"], row["setting"], row["pool"]] for row in results["rows"])


@pytest.mark.parametrize("name, target", [
    ("chord", "methods/modifiers.md#chord"), ("step_match", "reward_catalogue.md#all-rewards"),
    ("SampledKL", "reference/parts.md#kl")])
def test_a_part_links_to_where_it_is_described(name, target):
    assert study_page.linked({"name": name, "setting": "weight 1"}) == f"[`{name}` (weight 1)]({target})"


# The bytes of the three images, rows of red, green and blue. With other ones, numbers of earlier files do not compare.
SHA256 = ["94bb8bd7b871588854b99d3e49a8b053b01dad1821d161ad6f48aefc77e4ac36",
          "3c4e1ea595031dd7543b428c3979f3ea6c0e4bd38997090a8f83d9ea2dc4c592",
          "63c7b37c0119dfc4e1ed08bcbeab36666cf0ae09f2cb30f2b69374c5fa161986"]


def test_numbers_and_images_of_scorers():
    assert [hashlib.sha256(image.tobytes()).hexdigest() for image in eight_bit(reward_numbers.images())] == SHA256
    clips = reward_numbers.clips()
    assert clips.shape == (3, 8, 3, 512, 512)
    assert (clips[0, 1, :, :, 4:] == clips[0, 0, :, :, :-4]).all()
    names = set(reward_numbers.scorers())
    assert {"pickscore", "hpsv2.0", "hpsv2.1", "hpsv3", "imagereward", "aesthetic", "clip_score", "vqascore", "geneval",
            "ocr", "deqa", "unified_reward", "videoalign"} <= names
    assert not {"gated", "scene", "http", "math_answer"} & names
    now = {"scores": {"a": [None, 1.0], "b": [2.0, 1.0]}}
    before = {"written": "then", "scores": {"a": [0.5, 1.0], "b": [2.0015, 1.0], "gone": [1.0]}}
    assert reward_numbers.different(now, before) == ["a: [None, 1.0], expected [0.5, 1.0] of then"]
    assert reward_numbers.different({"scores": {"b": [2.0, 1.0]}}, {"written": "x", "scores": {"b": [2.01, 1.0]}}) != []


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
