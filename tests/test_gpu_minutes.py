"""Scripts for GPUs: launch scripts of nodes, and ten minutes on one."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import gpu_minutes
import gpu_sections
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from gpu_minutes import SECTIONS, Section
from torch.distributed.run import get_args_parser

from flowgrpo.config import load
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
def test_sections_and_wheels():
    questions = [each.question for each in SECTIONS]
    assert questions == sorted(questions) and {*questions} == {*gpu_minutes.QUESTIONS} == {*range(1, 8)}
    assert sum(each.seconds for each in SECTIONS) <= 60 * gpu_minutes.MINUTES - 60
    assert all(callable(getattr(gpu_sections, each.name)) for each in SECTIONS)
    command = gpu_minutes.download(Path("wheels"), (*gpu_minutes.LACKING, "nowhere"))
    text = (gpu_minutes.ROOT / "constraints.txt").read_text()
    *pinned, other = command[-4:]
    assert other == "nowhere" and [name.split("==")[0] for name in pinned] == ["diffusers", "peft", "torchao"]
    assert all(f"\n{each}\n" in text for each in pinned) and "--no-deps" in command


@pytest.mark.parametrize("recipe", gpu_sections.RECIPES)
def test_a_recipe_of_full_size_is_one_prompts_epoch_of_one_update(recipe):
    config = gpu_sections.config_of(recipe, "cpu", False)
    assert (config.train.updates, config.precision, config.eval.best) == (1, "bf16", None)
    assert config.train.prompts == (4 if recipe == "qwen3_0_6b" else 1)


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
    gpu_minutes.run(gpu_minutes.Results(file, {"commit": COMMIT}), [], tuple(sections), 100, {}, worker)
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


def test_pages_of_results():
    text = gpu_minutes.page(whole(sections=noted("sdxl", "failed: OutOfMemoryError: x")))
    assert "at commit `aaaaaaaa` on NVIDIA H100 in 400 s, with torch 2.11.0." in text and "Rehearsed" not in text
    assert "## 7. Other models" in text and "| what | seconds |\n|---|---|\n| epochs | 0.25 |\n" in text
    assert "`sdxl`, 1 s: failed: OutOfMemoryError: x" in text
    results = json.loads((gpu_minutes.ROOT / "scripts" / "gpu" / "results.json").read_text())
    assert results["rehearsed"] or gpu_minutes.PAGE.read_text() == gpu_minutes.page(results)
    assert gpu_minutes.FACTORS.is_file()
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


ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "scripts" / "launch"
RECIPE = "configs/wan21_1b.yaml"
# Programs of a cluster: the list of hosts, a node's start of a command, and launchers that print their arguments.
STUBS = {"scontrol": "echo node1; echo node2", "srun": 'shift; SLURM_NODEID=1 exec "$@"',
         "accelerate": 'printf "%s\\n" accelerate "$@"', "torchrun": 'printf "%s\\n" torchrun "$@"',
         "python": '[ "$2" = flowgrpo ] || shift 2; printf "%s\\n" "$@"', "nvidia-smi": "exit 1"}


def ran(script: list[str], folder: Path, **environment: str) -> list[str]:
    """Run a script on a cluster of stubs; return the launcher's command on the second of two nodes."""
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(script, env={"PATH": path} | environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def require(command: list[str], processes: int, output: Path) -> None:
    """Parse a launcher's command as it does itself, and the run's options as a configuration."""
    if command[0] == "accelerate":
        parsed = launch_command_parser().parse_args(command[2:])
        assert (parsed.num_processes, parsed.num_machines, parsed.machine_rank) == (processes, 2, 1)
        assert (parsed.main_process_ip, parsed.multi_gpu, command[1]) == ("node1", True, "launch")
        program = parsed.training_script
    else:
        parsed = get_args_parser().parse_args(command[1:])
        assert (int(parsed.nproc_per_node) * 2, parsed.nnodes, parsed.node_rank) == (processes, "2", 1)
        assert parsed.master_addr == "node1"
        program = parsed.training_script
    assert (program, parsed.module, parsed.training_script_args[:2]) == ("flowgrpo", True, ["train", RECIPE])
    options = [option for option in parsed.training_script_args[2:] if option != "--resume=auto"]
    assert len(options) == len(parsed.training_script_args[2:]) - 1
    config = load(ROOT / RECIPE, dict(option[2:].split("=", 1) for option in options))
    assert (config.output, config.name) == (str(output), "wan21_1b")


def job(folder: Path, *options: str, **environment: str) -> list[str]:
    """Lines of a job of Slurm on one node."""
    return ran([str(LAUNCH / "slurm.sh"), RECIPE, *options], folder, SLURM_JOB_NODELIST="node1", SLURM_JOB_ID="40123",
               OUTPUT="runs", **environment)


def test_slurm_and_skypilot(tmp_path):
    assert job(tmp_path, "--train.lr=1e-5", SLURM_GPUS_ON_NODE="1") == [
        "-m", "flowgrpo", "train", RECIPE, "--output=runs", "--name=wan21_1b", "--resume=auto", "--train.lr=1e-5"]
    said, *command = job(tmp_path)
    assert said.startswith("slurm.sh: no GPU: one process per node") and command[:2] == ["-m", "flowgrpo"]
    said, *command = job(tmp_path, SLURM_GPUS_ON_NODE="4", SLURM_CPUS_ON_NODE="1")
    assert said.startswith("slurm.sh: fewer CPUs (1) than processes (4) on a node") and command[0] == "accelerate"
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["envs"]["RECIPE"] == RECIPE and (ROOT / RECIPE).is_file() and list(task["file_mounts"]) == ["/runs"]
    command = ran(["bash", "-euo", "pipefail", "-c", task["run"]], tmp_path, RECIPE=RECIPE, SKYPILOT_NODE_RANK="1",
                  SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_IPS="node1\nnode2")
    require(command, 16, Path("/runs"))


@pytest.mark.parametrize("options, expected", [
    ([], ["--name=wan21_1b-seed2", "--seed=2"]), (["--name=mine"], ["--name=mine-seed2", "--seed=2"]),
    (["--seed=7"], ["--name=wan21_1b-seed2", "--seed=2", "--seed=7"])])
def test_an_array_of_slurm_runs_a_seed_per_task(options, expected, tmp_path):
    command = job(tmp_path, *options, SLURM_GPUS_ON_NODE="1", SLURM_ARRAY_TASK_ID="2")
    assert [word for word in command if word.startswith(("--name", "--seed"))] == expected


@pytest.mark.parametrize("launcher, option", [("accelerate", "--main_process_port"), ("torchrun", "--master_port")])
def test_jobs_of_slurm_have_ports_of_their_own(launcher, option, tmp_path):
    command = job(tmp_path, FLOWGRPO_LAUNCHER=launcher, SLURM_GPUS_ON_NODE="2")
    assert command[command.index(option) + 1] == "10123"


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_slurm(launcher, tmp_path):
    script, output = LAUNCH / "slurm.sh", tmp_path / "shared runs"
    command = ran([str(script), RECIPE, "--train.lr=1e-5", "--negative_prompt=two words"], tmp_path, OUTPUT=str(output),
                  FLOWGRPO_LAUNCHER=launcher, SLURM_NNODES="2", SLURM_GPUS_ON_NODE="4", SLURM_JOB_NODELIST="node[1-2]")
    assert command[0] == launcher and "--negative_prompt=two words" in command
    require(command, 8, output)


@pytest.mark.parametrize("file", ["one_machine", "several_machines"])
def test_configurations_of_accelerate(file):
    path = ROOT / "configs" / "accelerate" / f"{file}.yaml"
    known = {action.dest for action in launch_command_parser()._actions}
    keys = yaml.safe_load(path.read_text()).keys() - {"compute_environment", "distributed_type"}
    assert keys <= known, keys - known
