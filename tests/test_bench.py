"""Benches of scripts/: an epoch's overhead, pages, and the language model's runs."""

import json
import re
import shlex
import sys
from pathlib import Path

import bench_overhead
import bench_pages
import bench_results
import pytest
import train_recipes
import train_smollm2
from PIL import Image
from scipy.stats import binomtest

from flowgrpo.errors import UserError
from flowgrpo.tools.bench import collect
from flowgrpo.tools.bench.models import MODELS
from flowgrpo.tools.bench.plan import PUBLISHED, Plan, Request, Run, begin
from tests.helpers import tiny
from tests.helpers.commands import commands


@pytest.mark.fast
def test_calls_are_recorded_and_run_again():
    trainer = tiny.trainer(parts__plan__size=2, train__micro_batch=8)
    bench_overhead.epoch(trainer)  # looks at the first ratio
    before = trainer.policy.evaluations
    calls = bench_overhead.recorded(trainer)
    # 6 steps and the replay of a window of 2, in one batch each.
    assert [backward for *_, backward in calls] == [False] * 6 + [True] * 2
    spent = trainer.policy.evaluations - before
    bench_overhead.bare(trainer, calls)
    assert trainer.policy.evaluations - before == 2 * spent
    trainer = tiny.trainer(method="mix_grpo+texforce", parts__plan__size=2, train__micro_batch=8)
    bench_overhead.epoch(trainer)
    calls = bench_overhead.recorded(trainer)
    assert any(backward for *_, backward in calls)
    bench_overhead.bare(trainer, calls)


PROMPTS, BASE = 40, 10  # measured prompts, and those that the base gets right
STARTER = {"flow_grpo": 20, "mix_grpo+grpo_guard": 36, "draft": 20, "ddpo": 12}  # and those of every method
TEXT = {"grpo": 20, "rloo": 32}


def finish(run: Run, right: int, commit: str) -> None:
    """Write the files that a finished run leaves; the second half of its gain comes after the first measurement."""
    after, before = ([float(number < count) for number in range(PROMPTS)] for count in (right, BASE))
    reward, [watched] = MODELS[run.config.model].measured, MODELS[run.config.model].watched
    share, first = sum(after) / PROMPTS, sum(before) / PROMPTS
    measured = {"before": {reward: first, watched: 0.5}, "after": {reward: share, watched: 0.25}}
    spent = run.foretold or 40_000
    files = {
        "summary.json": measured | {"denoiser_evaluations": spent, "epochs": 9, "seconds": 10.0 * right, "unit": "rows",
                                    "tasks": {reward: {"before": {"hard": first}, "after": {"hard": share}}}},
        "before.json": {"scores": {reward: before}}, "report/after.json": {"scores": {reward: after}},
        "report/machine.json": {"flowgrpo": "0.1.0", "precision": "fp32 (auto)", "commit": commit},
        "result.json": {"kl": 1.5, "diversity": {"base": 2.0, "tuned": 1.0}}}
    (run.folder / "report").mkdir(parents=True)
    for name, content in files.items():
        (run.folder / name).write_text(json.dumps(content))
    lines = [{"epoch": epoch, "evaluations": spent * epoch // 2, f"held_out/{reward}": (first + share) / 2,
              f"reward/{reward}/zero_variance_groups": 0.5 * (epoch - 1)} for epoch in (1, 2)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.folder / "config.yaml").write_text(run.config.yaml())


def bench(output: Path, model: str, rates: dict[str, int], seeds: int = 2, best: dict | None = None) -> Path:
    """Write the folder of a bench whose runs got so many prompts right; best: factors of a sweep's best by label."""
    reference = MODELS[model].reference
    plan = Plan(Request([*rates], model, reference, 40_000, seeds, 2, PROMPTS, [*(best or {})], output))
    begin(plan.request)
    for entry in plan.entries if model == "starter_text" else []:
        plan.learn(entry, 1000, 1000)
    runs = plan.published_runs() + plan.tuned_runs(best or {})
    for run in runs:
        finish(run, rates[run.entry.label] + (run.column != PUBLISHED) * 4, "0123456789abcdef")
    collect.write(plan, runs, {})
    return output


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("benches")
    best = {"grpo": (3.0, 1 / 3), "rloo": (1 / 3, 1.0)}
    return [bench(folder / "a", "starter_text", TEXT, 1, best), bench(folder / "b", "starter", STARTER)]


@pytest.fixture
def docs(tmp_path) -> Path:
    """Folder of documents without results."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "benchmark.png").write_bytes(b"of an earlier page")
    return tmp_path


def test_folders_of_benches_become_pages_and_the_same_ones_change_nothing(folders, docs):
    changed = bench_pages.update(docs, folders)
    assert {file.name for file in changed} == {"bench_results.json", "benchmark.md"}
    assert {file.name for file in docs.glob("images/*.png")} == {"benchmark_starter.png", "benchmark_starter_text.png"}
    before = {file: file.read_bytes() for file in docs.rglob("*.*")}
    assert bench_pages.update(docs, folders) == bench_pages.update(docs, []) == []
    assert {file: file.read_bytes() for file in docs.rglob("*.*")} == before


def test_the_benchmark_says_what_the_benches_found(folders, docs):
    text = bench_pages.page(bench_results.merged([], [bench_results.collected(folder) for folder in folders]))
    starter, texts = re.split("^## ", text, flags=re.M)[1:]
    assert starter.startswith("starter\n") and "Commit" not in starter and "runs with" not in text
    assert re.findall(r"^\| \[?`([\w+]+)`", starter, re.M) == ["mix_grpo+grpo_guard", "flow_grpo", "draft", "ddpo"]
    assert "| base | 0.250 | | |" in starter.replace("  ", " ")
    assert re.search(r"\| `mix_grpo\+grpo_guard` \| 0\.900 \(0\.\d+, [01]\.\d+\) \| "
                     r"(0\.0\d+|< 0\.001) \| [\d,]+ \|", starter)
    assert re.search(r"\| \[`flow_grpo`\]\(methods/sde_steps\.md#flow_grpo\) \| 0\.500 .* \| the reference \|", starter)
    assert re.search(r"#ddpo\) \| 0\.300 .* \| not reached \|", starter)
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {5}
    assert "One seed:" in texts


def test_the_command_of_a_section_makes_the_same_bench_and_names_the_swept_methods(folders, tmp_path):
    """`--points` of the benches here is 2, `--prompts` 40."""
    for folder, rates in zip(folders, (TEXT, STARTER)):
        words = shlex.split(bench_pages.command(bench_results.collected(folder)))
        given = commands()["compare methods"].make_context("methods", words[3:]).params
        swept = rates is TEXT
        assert words[:3] == ["flowgrpo", "compare", "methods"] and set(given["methods"].split(",")) == rates.keys()
        assert given["model"] == ("starter_text" if swept else "starter") and given["sweep"] == ("all" if swept else "")
        assert [given[key] for key in ("evaluations", "seeds", "points", "prompts", "reference")] == [
            40_000, 1 if swept else 2, 2, PROMPTS, None]
    folder = bench(tmp_path / "some", "starter_text", TEXT, 1, {"rloo": (3.0, 1.0)})
    assert " --sweep rloo --methods " in bench_pages.command(bench_results.collected(folder))


def test_new_results_of_a_model_leave_the_others(folders, docs, tmp_path_factory):
    bench_pages.update(docs, folders)
    starter = (docs / "benchmark.md").read_text().split("## starter_text")[0]
    again = bench(tmp_path_factory.mktemp("again") / "bench", "starter_text", TEXT | {"rloo": 24})
    assert {file.name for file in bench_pages.update(docs, [again])} == {"bench_results.json", "benchmark.md"}
    first, second = (docs / "benchmark.md").read_text().split("## starter_text")
    assert first == starter and "| 0.600 (" in second and "0.800" not in second


def test_what_cannot_be_taken_is_said_before_anything_is_written(folders, docs, tmp_path):
    before = {file: file.read_bytes() for file in docs.rglob("*.*")}
    for given, message in (([tmp_path / "none"], "it has no results.json, expected the folder of a finished"),
                           ([folders[1], folders[1]], "two folders are benches of starter, expected one for each"),
                           ([], "bench_results.json is not there yet: give the folders of finished benches")):
        with pytest.raises(UserError, match=message):
            bench_pages.update(docs, given)
    assert {file: file.read_bytes() for file in docs.rglob("*.*")} == before


def test_kept_results_are_small_and_read_back_the_same(folders, docs):
    results = [bench_results.collected(folder) for folder in folders]
    (docs / "kept.json").write_text(bench_results.dumped(results))
    assert bench_results.load(docs / "kept.json") == results
    assert len((docs / "kept.json").read_text()) < 9000 and results[1]["settings"]["train.lr"] == 2.0e-3
    guard = results[1]["methods"][0]
    assert guard["finals"] == [[0, 0.9], [1, 0.9]] and guard["tasks"] == {"hard": 0.9} and guard["kl"] == 1.5
    assert guard["curve"][1][1] == pytest.approx(0.575) and guard["reached"][0] < guard["evaluations"] / 2
    assert bench_results.rounded({"a": [1 / 3, 2]}) == {"a": [0.333333, 2]}


def test_the_page_is_current():
    results = bench_results.load(bench_pages.DOCS / bench_pages.DATA)
    [(file, text)] = bench_pages.pages(bench_pages.DOCS, results).items()
    assert file.read_text(encoding="utf-8") == text, "run scripts/docs/bench_pages.py"
    assert all((bench_pages.DOCS / bench_pages.figure_of(model["model"])).is_file() for model in results)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """Train the recipe with seed 3 on a tiny model with random weights: two epochs, three held-out problems."""
    folder = tmp_path_factory.mktemp("smollm2")
    train_smollm2.train(train_recipes.tiny_language(folder / "model"), 3, folder / "runs", [
        "--train.epochs=2", "--train.prompts=2", "--train.group=2", "--eval.prompts=3", "--eval.grid=1"])
    return folder / "runs"


def test_the_table_the_curve_and_the_numbers_are_of_every_finished_run(output, tmp_path, monkeypatch, capsys):
    files = {kind: tmp_path / f"curve.{kind}" for kind in ("png", "json")}
    monkeypatch.setattr(sys, "argv", ["x", "model", f"--output={output}", "--table",
                                      *(f"--{kind}={file}" for kind, file in files.items())])
    train_smollm2.main()
    assert capsys.readouterr().out.splitlines()[2].startswith("| 3 | 3 | 0.000 [0.000, ")  # random weights
    row, = json.loads(files["json"].read_text())
    epochs = [json.loads(line) for line in (output / "seed3" / "metrics.jsonl").read_text().splitlines()]
    assert row["seed"] == 3 and len(row["before"]) == len(row["after"]) == 3
    assert row["rewards"] == [each["reward/numeric_match/mean"] for each in epochs if "seconds/rollout" in each]
    assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0 and Image.open(files["png"]).size == (900, 450)


def test_the_table_has_wilsons_intervals():
    line = train_smollm2.table([{"seed": 0, "before": [0, 0, 0, 1], "after": [0, 1, 1, 1]}]).splitlines()[2]
    seed, count, before, after, change = line.split(" | ")
    assert (seed, count) == ("| 0", "4") and change.startswith("+0.500 [")
    for right, said in ((1, before), (3, after)):
        low, high = binomtest(right, 4).proportion_ci(method="wilson")
        assert said == f"{right / 4:.3f} [{low:.3f}, {high:.3f}]"


def test_a_finished_seed_is_not_trained_again(output):
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    train_smollm2.train(output / "no model", 3, output, [])
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == before
