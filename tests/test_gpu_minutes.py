"""Ten minutes on a GPU: what is run, how failures are kept apart, what results say, and a rehearsal on the CPU."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import gpu_minutes
import gpu_sections
import pytest
import torch
from gpu_minutes import SECTIONS, Section

from flowgrpo.tools.dry_run import from_configs
from tests.helpers import tiny

COMMIT, FILES = "a" * 40, "b" * 64


def whole(**changes) -> dict:
    """Made-up results of a GPU without a fault."""
    sections = [{"name": each.name, "question": each.question, "lines": [{"what": each.name, "seconds": 0.25}],
                 "note": None, "seconds": 1.0} for each in SECTIONS]
    return {"commit": COMMIT, "sources": FILES, "rehearsed": False, "device": "NVIDIA H100", "card": "H100",
            "beside_gib": 0, "versions": {"torch": "2.11.0", "peft": None}, "seconds": 400.0,
            "sections": sections} | changes


def noted(name: str, note: str) -> list[dict]:
    return [entry | ({"note": note} if entry["name"] == name else {}) for entry in whole()["sections"]]


# --- what is run -----------------------------------------------------------------------------------------------------
def test_sections_answer_the_questions_in_their_order_and_fit_ten_minutes():
    questions = [each.question for each in SECTIONS]
    assert questions == sorted(questions) and {*questions} == {*gpu_minutes.QUESTIONS} == {*range(1, 8)}
    assert sum(each.seconds for each in SECTIONS) <= 60 * gpu_minutes.MINUTES - 60
    assert all(callable(getattr(gpu_sections, each.name)) for each in SECTIONS)


@pytest.mark.parametrize("recipe", gpu_sections.RECIPES)
def test_a_recipe_of_full_size_is_one_prompts_epoch_of_one_update(recipe):
    config = gpu_sections.config_of(recipe, "cpu", False)
    assert (config.train.updates, config.precision, config.eval.best) == (1, "bf16", None)
    assert config.train.prompts == (4 if recipe == "qwen3_0_6b" else 1)


def test_the_wheels_are_those_of_the_constraints():
    command = gpu_minutes.download(Path("wheels"), (*gpu_minutes.LACKING, "nowhere"))
    text = (gpu_minutes.ROOT / "constraints.txt").read_text()
    *pinned, other = command[-4:]
    assert other == "nowhere" and [name.split("==")[0] for name in pinned] == ["diffusers", "peft", "torchao"]
    assert all(f"\n{each}\n" in text for each in pinned) and "--no-deps" in command


def test_a_wheel_is_unpacked_without_a_network_beside_the_others(tmp_path):
    from zipfile import ZipFile
    with ZipFile(tmp_path / "lacking-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking.py", "here = True")
        wheel.writestr("lacking-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lacking\nVersion: 1.0\n")
        wheel.writestr("lacking-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("lacking-1.0.dist-info/RECORD", "lacking.py,,\nlacking-1.0.dist-info/METADATA,,\n"
                       "lacking-1.0.dist-info/WHEEL,,\nlacking-1.0.dist-info/RECORD,,\n")
    place = gpu_minutes.install(tmp_path)
    assert (place / "lacking.py").read_text() == "here = True" and (place / "lacking-1.0.dist-info").is_dir()


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True,
                   capture_output=True)


def test_files_are_bound_to_the_commit_that_has_them(tmp_path):
    for folder in gpu_minutes.FOLDERS:
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner" / "a.py").write_text(f"{folder} = 1\n")
    (tmp_path / "scripts" / "results.json").write_text("not counted")
    (tmp_path / "docs.md").write_text("not counted")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    commit = gpu_minutes.commit_of(root=tmp_path)
    assert len(commit) == 40 and gpu_minutes.sources(tmp_path) == gpu_minutes.sources_of(commit, tmp_path)
    (tmp_path / "scripts" / "results.json").write_text("other")
    assert gpu_minutes.sources(tmp_path) == gpu_minutes.sources_of(commit, tmp_path)
    (tmp_path / "scripts" / "inner" / "a.py").write_text("scripts = 2\n")
    changed = gpu_minutes.sources(tmp_path)
    assert changed != gpu_minutes.sources_of(commit, tmp_path)
    git(tmp_path, "commit", "-qam", "two")
    assert changed == gpu_minutes.sources_of("HEAD", tmp_path) != gpu_minutes.sources_of(commit, tmp_path)


# --- failures --------------------------------------------------------------------------------------------------------
WORKER = """
import json, os, sys, time
def say(section, **values):
    print(json.dumps({"section": section} | values), flush=True)
for name in sys.argv[1:]:
    say(name, begin=True)
    say(name, line={"of": name})
    if name == "dies":
        print("killed by a fault", file=sys.stderr, flush=True)
        os._exit(7)
    if name == "hangs":
        time.sleep(600)
    say(name, end=True, note="failed: ArithmeticError: x" if name == "fails" else None, seconds=0.1)
"""


def test_a_section_that_fails_dies_or_hangs_leaves_the_other_groups(tmp_path):
    worker, file = tmp_path / "worker.py", tmp_path / "out" / "results.json"
    worker.write_text(WORKER)
    sections = [Section(name, 1, group, seconds) for name, group, seconds in (
        ("fails", "one", 5), ("whole", "one", 5), ("dies", "two", 5), ("behind", "two", 5), ("hangs", "three", -9.5),
        ("last", "four", 5), ("long", "five", 500))]
    results = gpu_minutes.Results(file, {"commit": COMMIT})
    gpu_minutes.run(results, [], tuple(sections), 100, {}, worker)
    found = {entry["name"]: entry for entry in json.loads(file.read_text())["sections"]}
    assert {name: len(entry["lines"]) for name, entry in found.items()} == {
        "fails": 1, "whole": 1, "dies": 1, "behind": 0, "hangs": 1, "last": 1, "long": 0}
    assert found["fails"]["note"] == "failed: ArithmeticError: x"
    assert found["whole"]["note"] is found["last"]["note"] is None
    assert found["dies"]["note"] == found["behind"]["note"] == "not run: the process ended with 7: killed by a fault"
    assert found["hangs"]["note"].startswith("ended after ")
    assert found["long"]["note"].startswith("skipped: ") and found["long"]["note"].endswith("it may take 500 s")


def test_a_section_that_raises_says_so_behind_its_lines(capsys, monkeypatch):
    def fails():
        yield {"value": 1 / 3}
        raise ArithmeticError("of the\nGPU")
    monkeypatch.setattr(gpu_sections, "fails", fails, raising=False)
    gpu_sections.tell("fails")
    begun, line, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert begun["begin"] and line == {"section": "fails", "line": {"value": 0.33333}}
    assert end["note"] == "failed: ArithmeticError: of the GPU"


# --- results ---------------------------------------------------------------------------------------------------------
FAULTS = [
    (whole(), FILES, []),
    (whole(), None, [f"results are of commit {COMMIT}, which is not in this repository"]),
    (whole(), "c" * 64, ["the files that were run are not those of the commit: run them from a clean checkout"]),
    (whole(rehearsed=True), FILES, ["results are rehearsed, with tiny models on a CPU: no number is of a GPU"]),
    (whole(beside_gib=3.5), FILES, ["other programs held 3.5 GiB of the GPU at the beginning"]),
    (whole(sections=whole()["sections"][1:]), FILES, ["epochs: left out"]),
    (whole(sections=noted("sdxl", "failed: OutOfMemoryError: x")), FILES, ["sdxl: failed: OutOfMemoryError: x"])]


@pytest.mark.parametrize("results, files, lines", FAULTS)
def test_what_is_wrong_with_results_is_a_line_each(results, files, lines):
    assert [*gpu_minutes.complaints(results, files)] == lines


def test_pages_of_results_and_rehearsals():
    text = gpu_minutes.page(whole(sections=noted("sdxl", "failed: OutOfMemoryError: x")))
    assert "at commit `aaaaaaaa` on NVIDIA H100 in 400 s, with torch 2.11.0." in text and "Rehearsed" not in text
    assert "## 7. Other models" in text and "| what | seconds |\n|---|---|\n| epochs | 0.25 |\n" in text
    assert "`sdxl`, 1 s: failed: OutOfMemoryError: x" in text
    text = gpu_minutes.page(whole(rehearsed=True))
    assert text.startswith("# Measurements on a GPU

**This script has not run on a GPU yet.**")
    assert "- Variants: `variants`, `compiled`
" in text and "| what |" not in text
    results = json.loads((gpu_minutes.ROOT / "scripts" / "gpu" / "results.json").read_text())
    assert gpu_minutes.PAGE.read_text() == gpu_minutes.page(results)
    assert {entry["name"] for entry in results["sections"]} == {each.name for each in SECTIONS}


def test_factors_and_pipelines_without_values():
    lines = [{"epoch": 1, "rollout s": 9.0, "update s": 9.0}, {"epoch": 2, "rollout s": 1.5, "update s": 3.0},
             {"recipe": "sdxl", "pipeline": "StableDiffusionXLPipeline"}]
    text = [*lines[:2], {"recipe": "qwen3_0_6b", "pipeline": "Qwen3ForCausalLM"}]
    entries = [{"name": "sdxl", "lines": lines}, {"name": "qwen3_0_6b", "lines": text}, {"name": "clocks", "lines": []}]
    found = gpu_minutes.factors(whole(sections=entries), lambda about: {"rollout": 1.0, "update": 2.0, "encode": 5.0})
    assert found == {"StableDiffusionXLPipeline": {"rollout": 1.5, "update": 1.5, "commit": COMMIT, "torch": "2.11.0"}}
    real = tiny.flux()
    made = gpu_sections.filled(from_configs.like(real), torch.device("cpu"), torch.float32)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        ours, theirs = getattr(made, name).state_dict(), getattr(real, name).state_dict()
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
        assert not any(value.is_meta or not value.isfinite().all() for value in ours.values())
    assert made.scheduler is not None and type(made) is type(real)


# --- models ----------------------------------------------------------------------------------------------------------
def test_a_rehearsal_runs_every_section_on_the_cpu(tmp_path):
    file = tmp_path / "results.json"
    assert gpu_minutes.main(["run", str(file), "--rehearse", "--commit", COMMIT]) == 0
    results = json.loads(file.read_text())
    assert results["rehearsed"] and results["commit"] == COMMIT and results["versions"]["torch"] == version("torch")
    found = {entry["name"]: entry for entry in results["sections"]}
    assert {name: entry["note"] for name, entry in found.items()} == {each.name: None for each in SECTIONS}
    assert [line["epoch"] for line in found["epochs"]["lines"][:-1]] == [1, 2, 3]
    [ending] = found["killed"]["lines"]
    assert ending["epochs"] == 3 > ending["epochs before"] >= 1 and ending["exit code"] in (0, 3)
    for line in found["beside_cpu"]["lines"]:  # a CPU beside itself
        assert line["loss, CPU"] == line["loss, GPU"] and line["grad_norm, CPU"] == line["grad_norm, GPU"]
    [memory] = found["out_of_memory"]["lines"]
    assert memory["left"] == memory["micro-batch"] // 2
    assert gpu_minutes.page(results | {"rehearsed": False}).count("\n## ") == 7
