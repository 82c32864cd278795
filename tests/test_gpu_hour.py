"""The GPU hour: its manifest, its jobs on tiny models, and the validator, by made-up results."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.contrib.one_pass.extension import OnePass
from flowgrpo.dry_run import from_configs
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import build
from flowgrpo.training import extensions
from tests.helpers import tiny

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import gpu_hour  # noqa: E402
import gpu_jobs  # noqa: E402
import gpu_results  # noqa: E402

JOBS = gpu_results.manifest()
COMMIT, FILES, DEVICE = "a" * 40, "b" * 64, "A GPU (80 GB)"
VALUES = {"first_ratio": {"found": 2e-7, "limit": 1e-5, "rescored": 0},
          "peak": {"measured_gib": 21.0, "predicted_gib": 20.0}, "memory": {"measured_gib": 9.0, "seconds": 3.0},
          "epoch": {"seconds": 10.8, "bare_seconds": 10.0}, "one_pass": {"ratios": [1.3, 1.5, 1.4]}}


def whole() -> dict:
    """Made-up results without a fault."""
    bound = {"commit": COMMIT, "sources": FILES, "device": DEVICE}
    return bound | {"device_type": "cuda", "jobs": [
        {"job": job.name, "digest": job.digest, "seconds": 100.0, **bound,
         "measures": copy.deepcopy({name: VALUES[name] for name in job.measures})} for job in JOBS]}


def said(results: dict) -> list[str]:
    return list(gpu_results.complaints(JOBS, results, COMMIT, FILES))


# --- the validator ---------------------------------------------------------------------------------------------------

def test_whole_results_have_no_complaint():
    assert said(whole()) == []


@pytest.mark.parametrize("job", [job.name for job in JOBS])
def test_a_job_that_is_left_out_is_named(job):
    results = whole()
    results["jobs"] = [entry for entry in results["jobs"] if entry["job"] != job]
    assert said(results) == [f"{job}: left out"]


def faulty(job: str = "sdxl_24gb", **changes) -> dict:
    results = whole()
    [entry] = [entry for entry in results["jobs"] if entry["job"] == job]
    entry.update(changes)
    return results


def measuring(name: str, values: dict | None, job: str = "sdxl_24gb") -> dict:
    """Results in which a measure of a job is another, or None for left out."""
    results = whole()
    [entry] = [entry for entry in results["jobs"] if entry["job"] == job]
    entry["measures"].pop(name, None)
    entry["measures"] |= {} if values is None else {name: values}
    return results


FAULTS = [
    (whole() | {"commit": "c" * 40}, f"results are of commit {'c' * 40}, expected {COMMIT}: run the jobs at that "
                                     "commit"),
    (whole() | {"sources": "d" * 64}, "the files that were run are not those of the commit: run the jobs from a clean "
                                      "checkout"),
    (whole() | {"device_type": "cpu", "device": "cpu"}, "results are of cpu, expected a GPU"),
    (whole() | {"jobs": whole()["jobs"] + whole()["jobs"][:1]}, "sdxl_24gb: it has 2 results, expected one"),
    (whole() | {"jobs": [*whole()["jobs"], {"job": "other"}]}, "other: the manifest has no such job"),
    (faulty(digest="0"), "sdxl_24gb: its result is of another job of that name: run it again"),
    (faulty(commit="e" * 40), f"sdxl_24gb: its commit is {'e' * 40}, and that of the results {COMMIT}"),
    (faulty(device="another"), f"sdxl_24gb: its device is another, and that of the results {DEVICE}"),
    (faulty(error="it took more than 420 s"), "sdxl_24gb: failed: it took more than 420 s"),
    (faulty(measures={}), "sdxl_24gb: first_ratio was not measured"),
    (measuring("one_pass", None), "sdxl_24gb: one_pass was not measured"),
    (measuring("memory", VALUES["memory"]), "sdxl_24gb: memory is not a measure of this job"),
    (measuring("peak", {"error": "OutOfMemoryError: of 79 GiB"}), "sdxl_24gb: peak: failed: OutOfMemoryError: of 79 "
                                                                  "GiB"),
    (measuring("epoch", {"seconds": 1.0}), "sdxl_24gb: epoch: bare_seconds is None, expected a number of at least 0"),
    (measuring("epoch", {"seconds": math.nan, "bare_seconds": 1.0}), "sdxl_24gb: epoch: seconds is nan, expected a "
                                                                     "number of at least 0"),
    (measuring("first_ratio", VALUES["first_ratio"] | {"found": -1.0}),
     "sdxl_24gb: first_ratio: found is -1.0, expected a number of at least 0"),
    (measuring("one_pass", {"ratios": [1.0, 2.0]}), "sdxl_24gb: one_pass: 2 repetitions, expected 3"),
    (measuring("one_pass", {"ratios": None}), "sdxl_24gb: one_pass: ratios is None, expected numbers of at least 0")]


@pytest.mark.parametrize("results, line", FAULTS)
def test_a_planted_fault_is_named_in_a_line(results, line):
    assert line in said(results)


def test_results_without_anything_miss_every_job():
    assert [line for line in said({}) if line.endswith("left out")] == [f"{job.name}: left out" for job in JOBS]


# --- what binds results to files -------------------------------------------------------------------------------------

def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True,
                   capture_output=True)


def test_files_are_bound_to_the_commit_that_has_them(tmp_path):
    for folder in gpu_results.FOLDERS:
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner" / "a.py").write_text(f"{folder} = 1\n")
    (tmp_path / "flowgrpo" / "link").symlink_to("inner")
    (tmp_path / "flowgrpo" / "__pycache__").mkdir()
    (tmp_path / "flowgrpo" / "__pycache__" / "a.pyc").write_bytes(b"not counted")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    (tmp_path / "docs.md").write_text("not counted")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    commit = gpu_results.commit_of(root=tmp_path)
    assert len(commit) == 40 and gpu_results.sources(tmp_path) == gpu_results.sources_of(commit, tmp_path)
    (tmp_path / "docs.md").write_text("other")
    assert gpu_results.sources(tmp_path) == gpu_results.sources_of(commit, tmp_path)
    (tmp_path / "scripts" / "inner" / "a.py").write_text("scripts = 2\n")
    changed = gpu_results.sources(tmp_path)
    assert changed != gpu_results.sources_of(commit, tmp_path)
    git(tmp_path, "commit", "-qam", "two")
    assert changed == gpu_results.sources_of("HEAD", tmp_path) != gpu_results.sources_of(commit, tmp_path)


def test_the_command_refuses_results_without_a_job_and_prints_the_tables_of_whole_ones(tmp_path, capsys):
    commit = gpu_results.commit_of()
    bound = {"commit": commit, "sources": gpu_results.sources_of(commit)}
    results = whole() | bound
    results["jobs"] = [entry | bound for entry in results["jobs"]]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    assert gpu_hour.main(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{len(JOBS)} jobs, none left out\n"
    assert gpu_hour.main(["page", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"| `flux_dev_24gb` | {DEVICE}, {commit[:8]} |" in out
    assert "| sdxl_24gb | sdxl_24gb | 2e-07 | 1e-05 | True | 21 | 20 | 1.05 | 1.08 | 1.4 |" in out
    file.write_text(json.dumps(results | {"jobs": results["jobs"][1:]}))
    assert gpu_hour.main(["check", str(file)]) == 1
    assert capsys.readouterr().err == "sdxl_24gb: left out\n"


def test_a_recipe_whose_first_ratio_does_not_hold_is_not_verified():
    results = measuring("first_ratio", {"found": 1e-3, "limit": 1e-5, "rescored": 0})
    assert {*gpu_results.verified(JOBS, results)} == {job.recipe for job in JOBS} - {"sdxl_24gb"}
    again = measuring("first_ratio", {"found": 1e-3, "limit": 1e-5, "rescored": 1})
    assert "sdxl_24gb" in gpu_results.verified(JOBS, again)


# --- the manifest and its jobs ---------------------------------------------------------------------------------------

def test_the_manifest_has_the_models_that_it_is_to_have_and_fits_its_hour():
    assert [job.recipe for job in JOBS] == ["sdxl_24gb", "sd35_medium", "flux_dev_24gb", "qwen_image_80gb",
                                            "wan21_1b_24gb", "qwen3_0_6b"]
    assert len({job.digest for job in JOBS}) == len(JOBS) and sum(job.seconds for job in JOBS) <= 3600


@pytest.mark.parametrize("text, told", [
    ("{minutes: 60, jobs: [{name: a, recipe: a, seconds: 1, measures: [other]}]}", "a measures ['other']: expected"),
    ("{minutes: 60, jobs: [{name: a, recipe: a, seconds: 1, measures: []}]}", "a measures nothing: expected"),
    ("{minutes: 1, jobs: [{name: a, recipe: a, seconds: 61, measures: [peak]}]}", "may take 61 s, more than 1 minutes"),
    ("{minutes: 60, jobs: [{name: a, recipe: a, seconds: 1, measures: [peak]}, {name: a, recipe: b, seconds: 1, "
     "measures: [peak]}]}", "two jobs are called a")])
def test_a_manifest_that_cannot_be_run_is_refused(tmp_path, text, told):
    (tmp_path / "hour.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        gpu_results.manifest(tmp_path / "hour.yaml")
    assert told in str(error.value)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_is_a_run_and_measures_one_pass_where_it_can_have_it(job):
    config = gpu_jobs.config_of(job, "cpu")
    kind = build.kind(config)
    setup = Setup(config, kind, resolve(config, build.process(kind)))
    assert ("one_pass" in job.measures) is not any(extensions.obstacles(OnePass, setup))
    assert ("peak" in job.measures) is not setup.method.for_tokens  # a dry run does not cover language models


def test_a_pipeline_without_values_is_filled_with_some_of_the_same_shapes():
    real = tiny.flux()
    made = gpu_jobs.filled(from_configs.like(real), torch.device("cpu"), torch.float32)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        ours, theirs = getattr(made, name).state_dict(), getattr(real, name).state_dict()
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
        assert not any(value.is_meta or not value.isfinite().all() for value in ours.values())
    assert made.scheduler is not None and type(made) is type(real)


def test_a_job_that_takes_too_long_is_an_error_of_its_own():
    job = replace(JOBS[-1], seconds=0.01)
    assert gpu_hour._result(job, "cpu", tiny=True) == {"error": "it took more than 0 s"}


@pytest.mark.parametrize("name", ["flux_dev_nf4", "qwen3_0_6b"])
def test_a_job_of_a_tiny_model_measures_all_but_what_a_dry_run_predicts(name):
    [job] = [job for job in JOBS if job.name == name]
    found = gpu_jobs.measured(job, "cpu", small=True)
    assert {*found} == {*job.measures} - {"peak"} and not any("error" in values for values in found.values())
    assert found["first_ratio"]["found"] <= found["first_ratio"]["limit"]
    results = faulty(name, measures={"peak": VALUES["peak"]} | found if "peak" in job.measures else found)
    assert said(results) == []
