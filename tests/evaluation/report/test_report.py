"""The report says what the run's files say, shows foreign text as text, and needs nothing beside itself."""

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.config import validate
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.held_out import compare_rewards
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.report import report, snapshots, verdict
from flowgrpo.evaluation.report.report import server
from flowgrpo.storage.json_files import finite
from tests.helpers import tiny
from tests.helpers.refusals import error_line, refused

EVIL = "</script><script>alert(1)</script><!-- & <img src=x onerror=alert(2)> http://evil.example/ \u2028 '\""
KEYS = ("reward/scene/mean", "reward/scene/std", "reward/scene/zero_variance_groups", "reward/scene/failed", "loss",
        "grad_norm", "log_ratio_max", "clip_fraction", "ratio/step_2", "ratio/step_10", "clip_fraction/step_2",
        "seconds/rollout", "seconds/update", "kl", "something_new")


def measured(*scores: float, watched: float = 0.5) -> Measured:
    """Held-out scores of as many prompts; two images are kept."""
    prompts = [Prompt(EVIL), *(Prompt(f"prompt {i}") for i in range(1, len(scores)))]
    return Measured(prompts, {"scene": list(scores), "piqe": [watched] * len(scores)}, torch.full((2, 3, 8, 8), 0.2))


def make_run(folder, epochs: int = 4, every: int = 2, finished: bool = True):
    folder.mkdir(exist_ok=True)
    config = validate({"name": "<b>mine", "reward": {"scene": 2.0}, "eval": {"rewards": ["piqe"]},
                       "train": {"epochs": epochs}})
    (folder / "config.yaml").write_text(config.yaml())
    snapshots.begin(folder, 0, "cpu", 1, "fp32")
    snapshots.stage(folder, "before", 0, measured(0.0, 0.25, math.nan))
    lines = []
    for epoch in range(1, epochs + 1):
        line = {"epoch": epoch, **{key: 0.1 * epoch + place / 3 for place, key in enumerate(KEYS)},
                "evaluations": 10 * epoch, "seconds": 1.5 * epoch}
        if epoch % 2:
            line["kl"] = None
            del line["ratio/step_2"]
        if epoch % every == 0:
            snapshots.stage(folder, f"epoch-{epoch:05d}", epoch, measured(0.5, 0.5, math.nan))
            line |= {"held_out/scene": 0.5, "held_out/piqe": 0.5}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    if finished:
        snapshots.stage(folder, "after", epochs, measured(1.0, 0.75, 1.0, watched=0.25))
    return folder


def read(text: str) -> dict:
    """The data in a report's HTML."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_metrics_in_the_file_a_line_that_waits_and_a_slider_of_every_measurement_in_order(tmp_path):
    run = make_run(tmp_path / "run")
    found = read(report.write(run).read_text())["metrics"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(found) == {key for line in lines for key in line}
    for key, values in found.items():
        assert values == [line.get(key) for line in lines]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "lo')
    assert report.data(run)["metrics"]["epoch"] == [1, 2, 3, 4]
    assert [stage["label"] for stage in report.data(run)["stages"]] == [
        "before training", "epoch 2", "epoch 4", "after training"]
    (run / "report" / "after.json").unlink()
    assert [stage["label"] for stage in report.data(run)["stages"]] == ["before training", "epoch 2", "epoch 4"]


@pytest.mark.parametrize("file, text, told", [
    ("metrics.jsonl", '{"epoch": 1, "lo\n', "metrics.jsonl, line 1: damaged (Unterminated string"),
    ("metrics.jsonl", '{"epoch": 1}\n', "line 1: damaged (expected an object with numbers under epoch, "),
    ("metrics.jsonl", "[3]\n", "metrics.jsonl, line 1: damaged (expected an object"),
    ("metrics.jsonl", b"\xff\xfe\n", "metrics.jsonl, line 1: damaged ('utf-8' codec"),
    ("report/last.json", "{", "last.json is damaged (Expecting property name"),
    ("report/last.json", "3", "last.json is damaged (expected an object, got 3)"),
    ("report/after.json", '{"name": "after"}', "after.json is damaged (it has None under 'epoch')"),
    ("report/machine.json", "", "machine.json is damaged (Expecting value"),
    ("summary.json", b"\xff\xfe", "summary.json is damaged ('utf-8'")])
def test_a_damaged_file_is_told_in_one_line(tmp_path, capsys, file, text, told):
    run = make_run(tmp_path / "run")
    (run / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = error_line(capsys, "report", str(run))
    assert told in said and "remove " in said
    if file != "metrics.jsonl":
        (run / file).unlink()
        assert main(["report", str(run)]) == 0


def test_foreign_text_is_no_markup_and_nothing_is_loaded(tmp_path):
    text = report.write(make_run(tmp_path / "run")).read_text()
    assert text.count("<script") == text.count("</script") == 2 and "<!--" not in text
    assert "<img" not in text and "<b>mine" not in text and "&lt;b&gt;mine" in text
    assert not re.search(r"https?://", text, re.I) and "innerHTML" not in text
    found = read(text)
    assert found["title"] == "<b>mine" and found["stages"][0]["cards"][0]["prompt"] == EVIL
    assert re.search(r'Content-Security-Policy" content="default-src \'none\'; img-src data:;', text)
    assert "connect-src" not in text and "<html lang=\"en\">" in text
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(|src=\"", text)


@pytest.mark.parametrize("count", [1, 2, 39, 40, 41, 100])
def test_a_slider_of_many_measurements_keeps_both_ends(count):
    stages = [{"name": f"epoch-{i:05d}", "epoch": i, "cards": []} for i in range(count)]
    labels = [stage["label"] for stage in report.thin(stages)]
    assert len(set(labels)) == len(labels) == min(count, 40)
    assert labels[0] == "epoch 0" and labels[-1] == f"epoch {count - 1}"


def test_every_metric_in_one_chart_or_named(tmp_path):
    run = make_run(tmp_path / "run")
    charts = report.data(run)["charts"]
    drawn = [series.get(end) for chart in charts for series in chart["series"] for end in ("key", "band")]
    assert sorted(filter(None, drawn)) == sorted(KEYS)
    by_title = {chart["title"]: chart["series"] for chart in charts}
    assert [series["label"] for series in by_title["Mean ratio per step"]] == ["step_2", "step_10"]
    assert by_title["scene"][1] == {"label": "held-out prompts", "x": [0, 2, 4], "y": [0.125, 0.5, 0.5]}
    assert by_title["piqe"] == [{"label": "held-out prompts", "x": [0, 2, 4], "y": [0.5, 0.5, 0.5]}]
    lines = [json.loads(line) | {"clip_fraction": 0.0, "reward/scene/zero_variance_groups": 0}
             for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = report.data(run)
    assert found["zeros"] == ["Clip fraction", "Zero-variance groups"]
    assert not {"Clip fraction", "Zero-variance groups"} & {chart["title"] for chart in found["charts"]}


@pytest.mark.parametrize("most, unit, size", [(0, "B", 1), (999, "B", 1), (1000, "kB", 1e3), (1.43e9, "GB", 1e9),
                                              (80e9, "GB", 1e9), (9.9e11, "GB", 1e9), (3e12, "TB", 1e12)])
def test_memory_is_shown_in_its_unit(most, unit, size):
    lines = [{"epoch": 1, "memory/allocated": most / 2, "memory/reserved": most}, {"epoch": 2, "memory/reserved": None}]
    [chart] = report.charts(validate({}), lines, [], {})
    assert chart == {"title": "Peak memory", "note": f"of this process in {unit}", "kind": "lines", "series": [
        {"label": "allocated", "key": "memory/allocated", "size": size},
        {"label": "reserved", "key": "memory/reserved", "size": size}]}


def test_charts_have_their_range_and_end(tmp_path):
    """Known from the reward itself, or from all held-out scores."""
    run = make_run(tmp_path / "run")
    ranges = {chart["title"]: chart.get("range") for chart in report.data(run)["charts"]}
    assert ranges["scene"] == ranges["piqe"] == [0, 1] and ranges["Loss"] is None
    snapshots.write(run / "report" / "ranges.json", {"scene": [0, None], "piqe": None})
    snapshots.stage(run, "after", 4, measured(1.0, 0.75, 1.0, watched=40.0))
    ranges = {chart["title"]: chart.get("range") for chart in report.data(run)["charts"]}
    assert ranges["scene"] == [0, None] and ranges["piqe"] is None
    charts = {chart["title"]: chart["series"] for chart in report.data(make_run(tmp_path / "run", epochs=5))["charts"]}
    assert charts["scene"][1] == {"label": "held-out prompts", "x": [0, 2, 4, 5], "y": [0.125, 0.5, 0.5, 2.75 / 3]}


def test_tables_of_tasks_and_phases(tmp_path):
    run, scores = make_run(tmp_path / "run"), ([0.0] * 4, [0.0071, 0.0062] * 2)
    prompts = [Prompt(f"p{i}", metadata={"task": "ab"[i % 2]}) for i in range(4)]
    before, after = (Measured(prompts, {"scene": values}, torch.empty(0)) for values in scores)
    (run / "summary.json").write_text(json.dumps(finite({"compared": compare_rewards(before, after, 1)})))
    [rows] = report.data(run)["tasks"].values()
    assert [row[0] for row in rows] == ["a", "b", "all prompts"]
    assert rows[0][1:] == ["0.00000 [0.00000, 0.00000]", "0.00710 [0.00710, 0.00710]", "+0.00710 [+0.00710, +0.00710]"]
    lines = [{"seconds/update": 1.0, "seconds/rollout": 2.0, "seconds": 9.0}, {"seconds/rollout": 0.5}]
    assert list(report.phases(lines).items()) == [("rollout", 2.5), ("update", 1.0)]


# --- in words --------------------------------------------------------------------------------------------------------
def judged(was: dict, now: dict, rewards: dict, samples: int = 1, **given: str):
    """The changes of held-out scores, and what the report of a finished run says, with its tone."""
    config = validate({"reward": rewards, "eval": {"samples": samples}})
    found = verdict.changes(config, [{"scores": was}, {"scores": now}])
    told = verdict.sentences(config, [{"epoch": 1, "evaluations": 5, "seconds": 3.0}], found, {}, True, **given)
    return found, {each["text"]: each["tone"] for each in told}


def test_changes_and_test_sets_are_told():
    [change], _ = judged({"a": [0.0, 0.0, 1.0, None, 0.5]}, {"a": [1.0, 0.5, 1.0, 0.3, None]}, {"a": 1.0})
    assert (change.before.mean, change.count, change.weight) == (pytest.approx(1 / 3), 3, 1.0)
    assert change.now.mean == pytest.approx(2.5 / 3) and change.change.mean == pytest.approx(0.5)
    assert change.change.low < 0 and change.change.high > 1  # of 1, 0.5, 0
    assert change.way == 0 and change.few
    # With the option, in the second sentence; without it nowhere.
    for declared in (False, True):
        config = validate({"reward": {"a": 1.0}, "prompts": "partiprompts", "train_on_test_set": declared})
        told = [(each["tone"], each["text"]) for each in verdict.sentences(config, [], [], {}, True)]
        assert (("warn", "Trained on partiprompts, a test set (train_on_test_set): no score on it, held-out prompts "
                 "included, can be compared with that of a model that was not.") in told) is declared


@pytest.mark.parametrize("now, digits", [(0.0, 3), (1.5, 3), (0.12, 3), (0.0034, 5), (-0.0001, 6), (1e-9, 6)])
def test_a_small_change_is_shown_with_more_decimals(now, digits):
    [change], _ = judged({"a": [0.0]}, {"a": [now]}, {"a": 1.0})
    assert change.digits == digits


def test_cards_have_intervals_and_few_prompts_no_verdict():
    [change], _ = judged({"a": [0.25, 0.75] * 12}, {"a": [0.5] * 24}, {"a": 1.0})
    before, now, moved = change.as_json()["lines"]
    assert before[:2] == ["before", "0.500"] and now == ["now", "0.500", "[0.500, 0.500]"]
    assert before[2] == "[0.386, 0.614]" and moved == ["change", "0.000", "[-0.114, +0.114]"]
    assert change.as_json()["way"] == 0
    [change], _ = judged({"a": [0.0] * 6}, {"a": [1.0, 1.0, 0.0, 0.0, 0.5, None]}, {"a": 1.0}, samples=2)
    assert change.change.prompts == 3 and change.count == 5 and change.change.mean == pytest.approx(0.5)
    [few], told = judged({"a": [0.1] * 19}, {"a": [0.8] * 19}, {"a": 1.0})
    [enough], _ = judged({"a": [0.1] * 20}, {"a": [0.8] * 20}, {"a": 1.0})
    assert (few.way, enough.way) == (0, 1)
    assert [*told][1].endswith("(+0.700, 95 %: +0.700 to +0.700): too few prompts to tell (at least 20).")


LOW, HIGH = [0.1, 0.2, 0.3] * 8, [0.5, 0.7, 0.8] * 8
UP, DOWN, SAME = (LOW, HIGH), (HIGH, LOW), ([0.1, 0.2] * 12, [0.2, 0.1] * 12)


@pytest.mark.parametrize("trained, weight, watched, hinted", [
    (UP, 1.0, DOWN, True), (DOWN, -1.0, DOWN, True), (UP, 1.0, UP, False), (DOWN, 1.0, DOWN, False),
    (UP, 1.0, SAME, False), (UP, -1.0, DOWN, False)])
def test_reward_hacking_is_hinted_at(trained, weight, watched, hinted):
    (was, now), (held, after) = trained, watched
    _, texts = judged({"a": was, "b": held}, {"a": now, "b": after}, {"a": weight})
    assert any("Possible reward hacking: a got better, while b" in text for text in texts) == hinted
    assert not any("No reward was eval-only" in text for text in texts)


def test_a_reward_of_weight_0_is_eval_only():
    _, told = judged({"a": LOW, "b": HIGH}, {"a": HIGH, "b": LOW}, {"a": 1.0, "b": 0.0})
    assert " was trained on a with " in [*told][0]
    assert any(text.startswith("b, eval-only, fell ") for text in told)
    assert any(text.startswith("Possible reward hacking: a got better, while b, which was eval-only") for text in told)


def test_of_several_rewards_those_are_named_that_holm_leaves():
    """Each of six falls is beyond its 95 % interval, at p = 0.02; among six it may be chance, and among one not."""
    steps = np.sin(np.arange(24))
    fall = (steps - steps.mean()) / steps.std() - 0.54
    for count in (1, 6):
        names = [f"held {i}" for i in range(count)]
        was = {"a": LOW} | dict.fromkeys(names, [0.0] * 24)
        found, told = judged(was, {"a": HIGH} | dict.fromkeys(names, fall.tolist()), {"a": 1.0})
        assert all(0.01 < each.change.p < 0.05 and each.change.high < 0 for each in found[1:])
        assert any(text.startswith("Possible reward hacking") for text in told) == (count == 1)
        ends = "-0.540, 95 %: " if count == 1 else "which may be chance among 6 eval-only rewards."
        assert sum(ends in text for text in told) == count


@pytest.mark.parametrize("sample, other", [("image", "over_saturation"), ("completion", "completion_length")])
def test_a_run_without_an_eval_only_reward_says_how_to_add_one(sample, other):
    _, told = judged({"a": LOW}, {"a": HIGH}, {"a": 1.0}, sample=sample)
    assert told["No reward was eval-only, that is measured and not trained on, so reward hacking, in which a score "
                f"rises and the {sample}s get worse, would not show in these numbers: add one to the next run's "
                f"eval.rewards, such as {other}, and look at the {sample}s."] == "plain"
    assert validate({"reward": "a", "eval": {"rewards": [other]}}).extra_rewards.keys() == {other}


def test_the_summary_in_words(tmp_path):
    run = make_run(tmp_path / "run")
    snapshots.stage(run, "before", 0, measured(*[0.0, 0.25] * 12, math.nan))
    snapshots.stage(run, "after", 4, measured(*[1.0, 0.75] * 12, 1.0, watched=0.25))
    last = {"epoch": 4, "best": [], "worst": [], "first_ratio": {"found": 2e-8, "limit": 1e-6, "rescored": False}}
    snapshots.write(run / "report" / "last.json", last)
    told = [each["text"] for each in report.data(run)["sentences"]]
    assert told[0] == ("starter was trained on scene (weight 2) with mix_grpo: 4 of 4 epochs, 40 denoiser evaluations, "
                       "6 s of training.")
    assert told[1] == ("scene, trained on, rose from 0.125 to 0.875 on 24 held-out images (+0.750, 95 %: +0.636 to "
                       "+0.864).")
    assert told[2] == ("piqe, eval-only, fell from 0.500 to 0.250 on 25 held-out images (-0.250, 95 %: -0.250 to "
                       "-0.250).")
    assert told[3].startswith("Possible reward hacking")
    assert "was 2.0e-08 (at most 1.0e-06 is right)" in told[4]


def test_a_report_of_texts_speaks_of_completions_and_tokens(tmp_path):
    run = make_run(tmp_path / "run")
    snapshots.begin(run, 4, "cpu", 1, "fp32", "completion", "tokens")
    found = report.data(run)
    told = [each["text"] for each in found["sentences"]]
    assert " 40 tokens, " in told[0] and found["sample"] == "completion"
    assert any("held-out completions" in text for text in told) and not any("picture" in text for text in told)


def test_a_report_needs_no_torch(tmp_path):
    (tmp_path / "config.yaml").write_text(validate({}).yaml())
    code = f"import sys, flowgrpo.cli as c; sys.exit(c.main(['report', {str(tmp_path)!r}]) or ('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_measurement_and_a_run_that_has_just_begun(tmp_path):
    run = make_run(tmp_path / "run")
    for file in (run / "report").glob("*.json"):
        if file.stem not in ("before", "machine", "nouns"):
            file.unlink()
    found = report.data(run)
    assert found["changes"] == [] and len(found["sentences"]) == 1 and len(found["stages"]) == 1
    (tmp_path / "config.yaml").write_text(validate({}).yaml())
    found = read(report.write(tmp_path).read_text())
    assert found["stages"] == found["changes"] == found["charts"] == [] and len(found["sentences"]) == 1
    assert "is being trained" in found["sentences"][0]["text"]


# --- what is kept ----------------------------------------------------------------------------------------------------
def decoded(url: str) -> Image.Image:
    assert url.startswith("data:image/webp;base64,")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_small_images_are_kept_and_large_ones_made_smaller():
    pixels = torch.randint(0, 256, (3, 16, 24), generator=torch.Generator().manual_seed(0))
    found = torch.tensor(list(decoded(snapshots.data_url(pixels / 255)).convert("RGB").tobytes()))
    assert torch.equal(found.view(16, 24, 3).permute(2, 0, 1), pixels)
    assert decoded(snapshots.data_url(torch.rand(3, 320, 640))).size == (320, 160)
    clip = decoded(snapshots.data_url(torch.linspace(0, 1, 5)[:, None, None, None].expand(5, 3, 8, 8)))
    assert clip.n_frames == 5 and clip.size == (8, 8)


def test_extremes_by_hand():
    found = snapshots.Extremes(["a", "b"])
    pictures = torch.arange(8.0)[:, None, None, None].expand(8, 3, 2, 2) / 8
    scores = torch.tensor([[0.1, 1], [0.9, 1], [0.5, 1], [0.5, 1], [math.nan, math.nan], [0.3, math.nan], [0, 0],
                           [1, 1]])
    totals = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 0.3, -1.0, 2.0])
    for part in (slice(0, 2), slice(2, 6), slice(6, 8)):
        found.add([*map(Prompt, "ppqqrrpq")][part], pictures[part], scores[part], totals[part])
    assert [(total, prompt.text) for total, prompt, *_ in found.best] == [
        (2.0, "q"), (pytest.approx(0.9), "p"), (pytest.approx(0.3), "r")]
    assert [(total, prompt.text) for total, prompt, *_ in found.worst] == [
        (-1.0, "p"), (pytest.approx(0.3), "r"), (0.5, "q")]
    assert [float(picture[0, 0, 0] * 8) for *_, picture in found.worst] == [6, 5, 3]  # of equal ones another than best
    listed = found.as_json()
    assert listed["worst"][1]["scores"] == {"a": pytest.approx(0.3), "b": None}
    assert decoded(listed["best"][0]["picture"]).getpixel((0, 0)) == (round(255 * 7 / 8),) * 3


def test_only_the_most_extreme_scored_samples_are_kept():
    """Of p the third and of q both lack what the others have; r has the first reward alone."""
    found, nan = snapshots.Extremes(["a", "b"]), math.nan
    scores = torch.tensor([[0.5, 1], [0.2, 1], [0.9, nan], [nan, 1], [0.1, nan], [0.4, nan], [0.3, nan], [nan, nan]])
    found.add([*map(Prompt, "pppqqrrr")], ["text"] * 8, scores, torch.arange(8.0))
    assert [(total, prompt.text) for total, prompt, *_ in found.best] == [(6, "r"), (1, "p")]
    assert [(total, prompt.text) for total, prompt, *_ in found.worst] == [(0, "p"), (5, "r")]
    found = snapshots.Extremes(["a"])
    totals = torch.tensor([3.0, 9, 1, 7, 5, 0, 8, 2, 6, 4])
    for i in range(10):
        found.add([Prompt(str(i))], ["text"], totals[i:i + 1, None], totals[i:i + 1])
    assert [sample[0] for sample in found.best] == [9, 8, 7, 6, 5, 4]
    assert [sample[0] for sample in found.worst] == [0, 1, 2, 3, 4, 5]
    assert found.as_json()["best"][0] == {"prompt": "1", "scores": {"a": 9.0}, "text": "text"}


def test_what_an_earlier_run_has_kept_is_dropped(tmp_path):
    run = make_run(tmp_path / "run")
    snapshots.begin(run, 2, "cpu", 1, "fp32")
    assert sorted(file.name for file in (run / "report").iterdir()) == [
        "before.json", "epoch-00002.json", "machine.json", "nouns.json"]
    snapshots.begin(run, 0, "cpu", 2, "fp32")
    assert sorted(file.name for file in (run / "report").iterdir()) == ["machine.json", "nouns.json"]
    assert report.data(run)["machine"]["processes"] == "2"


def test_training_keeps_its_images_and_writes_the_report(tmp_path):
    trainer = tiny.trainer(output=tmp_path, eval__every=1)
    trainer.held_out = [Prompt("held out"), Prompt(EVIL)]
    run = trainer.config.folder
    run.mkdir()
    (run / "config.yaml").write_text(trainer.config.yaml())
    trainer.train(run, {"red": tiny.red})
    found = read((run / "report.html").read_text())
    assert [stage["label"] for stage in found["stages"]] == ["epoch 1", "epoch 2"]
    assert found["metrics"]["epoch"] == [1, 2] and found["extremes"]["epoch"] == 2
    best, worst = found["extremes"]["best"], found["extremes"]["worst"]
    assert len({each["prompt"] for each in best}) == len(best) == len(worst) == 2
    assert best[0]["scores"]["red"] >= best[1]["scores"]["red"] > worst[0]["scores"]["red"]
    for sample in best + worst + found["stages"][1]["cards"]:  # each score is that of the image beside it
        assert torch.tensor(list(decoded(sample["picture"]).convert("RGB").tobytes()[::3])).float().mean() / 255 == \
            pytest.approx(sample["scores"]["red"], abs=3e-3)


# --- served ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def served(tmp_path):
    run = make_run(tmp_path / "run", finished=False)
    with server(run, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield run, serving.server_address
        serving.shutdown()
        thread.join()


def ask(address, path: str, **headers: str):
    """The status and the text of an answer."""
    connection = HTTPConnection(*address, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_live_it_follows_the_run(served):
    run, address = served
    assert address[0] == "127.0.0.1"
    status, text = ask(address, "/")
    assert status == 200 and "<html lang=\"en\" data-live>" in text and "connect-src 'self'" in text
    version = read(text)["version"]
    assert ask(address, "/data.json", **{"If-None-Match": version}) == (304, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "evaluations": 50, "seconds": 7.5}\n')
    status, text = ask(address, "/data.json", **{"If-None-Match": version})
    assert status == 200 and json.loads(text)["metrics"]["epoch"] == [1, 2, 3, 4, 5]


def test_live_it_gives_nothing_else_answers_no_other_host_and_tells_of_a_taken_port(served):
    for path in ("/config.yaml", "/../config.yaml", "//etc/passwd", "/report/before.json", "/?x"):
        assert ask(served[1], path)[0] in (400, 404), path
    others = "evil.example:80", "localhost@evil.example", "127.0.0.1.evil.example", "[localhost", "localhost:x", ""
    for host in others:
        assert ask(served[1], "/", Host=host)[0] == 403, host
    assert ask(served[1], "/", Host=f"localhost:{served[1][1]}")[0] == 200
    refused(f"port {served[1][1]} cannot be used .*--port", server, served[0], served[1][1])


@pytest.mark.parametrize("line, notice", [
    ("{\"epoch\": 5, ", "metrics.jsonl, line 5: damaged"), ("\0\0", "metrics.jsonl, line 5: damaged"),
    ("[" * 100_000, "Not up to date"), ('{"epoch": NaN, "evaluations": 1, "seconds": 1}', "Not up to date"),
    ('{"epoch": 5, "evaluations": 50, "seconds": 7.5, "seconds/rollout": "x"}', "Not up to date")])
def test_live_a_damaged_line_is_shown_and_the_server_goes_on(served, line, notice):
    run, address = served
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + line + "\n")
    status, text = ask(address, "/data.json")
    content = json.loads(text)
    assert status == 200 and notice in content["notice"] and "\n" not in content["notice"]
    assert content["metrics"]["epoch"] == [1, 2, 3, 4]
    assert notice in read(ask(address, "/")[1])["notice"]
    (run / "metrics.jsonl").write_text(whole)
    assert json.loads(ask(address, "/data.json")[1])["notice"] is None


def test_live_a_deleted_folder_is_shown_and_the_server_goes_on(served):
    run, address = served
    version = json.loads(ask(address, "/data.json")[1])["version"]
    run.rename(run.with_name("away"))
    status, text = ask(address, "/data.json", **{"If-None-Match": version})
    assert status == 200 and "no run at" in json.loads(text)["notice"]
    assert ask(address, "/")[0] == 200
    run.with_name("away").rename(run)
    status, text = ask(address, "/data.json", **{"If-None-Match": json.loads(text)["version"]})
    assert status == 200 and json.loads(text)["notice"] is None


def test_live_a_file_replaced_at_the_same_size_and_time_or_written_after_the_clock_went_back_is_seen(served):
    run, address = served
    version = json.loads(ask(address, "/data.json")[1])["version"]
    before = (run / "metrics.jsonl").stat()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "evaluations": 50, "seconds": 7.5}\n')
    os.utime(run / "metrics.jsonl", (before.st_atime - 3600, before.st_mtime - 3600))
    status, text = ask(address, "/data.json", **{"If-None-Match": version})
    assert status == 200 and json.loads(text)["metrics"]["epoch"] == [1, 2, 3, 4, 5]
    version, size = json.loads(text)["version"], (run / "metrics.jsonl").stat().st_size
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("7.5", "8.5"))
    os.utime(run / "metrics.jsonl", (before.st_atime - 7200, before.st_mtime - 7200))
    assert (run / "metrics.jsonl").stat().st_size == size
    assert ask(address, "/data.json", **{"If-None-Match": version})[0] == 200
    version, file = json.loads(ask(address, "/data.json")[1])["version"], run / "metrics.jsonl"
    before, other = file.stat(), run / "other"
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert ask(address, "/data.json", **{"If-None-Match": version})[0] == 200


def test_live_a_fault_of_one_request_is_answered(served, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: 1 / 0)
    assert ask(served[1], "/data.json") == (500, "internal error (ZeroDivisionError)")
    monkeypatch.undo()
    assert ask(served[1], "/data.json")[0] == 200


# --- the command -----------------------------------------------------------------------------------------------------
def test_the_command_writes_the_file(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html") and (run / "report.html").is_file()


@pytest.mark.parametrize("options", [[], ["--live"]])
def test_what_is_no_run_is_told(tmp_path, capsys, options):
    for folder, line in (("none", "no run at"), (".", "is not a run: it has no config.yaml")):
        assert line in error_line(capsys, "report", str(tmp_path / folder), *options)
