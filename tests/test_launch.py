"""Launch scripts: what they run on a node, with options that the launchers and the configuration have."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from flowgrpo.config import load

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


def test_slurm_without_launcher_gpu_or_cpus(tmp_path):
    assert job(tmp_path, "--train.lr=1e-5", SLURM_GPUS_ON_NODE="1") == [
        "-m", "flowgrpo", "train", RECIPE, "--output=runs", "--name=wan21_1b", "--resume=auto", "--train.lr=1e-5"]
    said, *command = job(tmp_path)
    assert said.startswith("slurm.sh: no GPU: one process per node") and command[:2] == ["-m", "flowgrpo"]
    said, *command = job(tmp_path, SLURM_GPUS_ON_NODE="4", SLURM_CPUS_ON_NODE="1")
    assert said.startswith("slurm.sh: fewer CPUs (1) than processes (4) on a node") and command[0] == "accelerate"


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


def test_skypilot(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["envs"]["RECIPE"] == RECIPE and (ROOT / RECIPE).is_file() and list(task["file_mounts"]) == ["/runs"]
    command = ran(["bash", "-euo", "pipefail", "-c", task["run"]], tmp_path, RECIPE=RECIPE, SKYPILOT_NODE_RANK="1",
                  SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_IPS="node1\nnode2")
    require(command, 16, Path("/runs"))


@pytest.mark.parametrize("file", ["one_machine", "several_machines"])
def test_configurations_of_accelerate(file):
    path = ROOT / "configs" / "accelerate" / f"{file}.yaml"
    known = {action.dest for action in launch_command_parser()._actions}
    keys = yaml.safe_load(path.read_text()).keys() - {"compute_environment", "distributed_type"}
    assert keys <= known, keys - known
