"""A process that is lost ends the others, with its reason; the run goes on from its checkpoint on any number."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stopped
from flowgrpo.distributed.watch import Watch
from flowgrpo.errors import UserError
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.storage import checkpoint
from tests.helpers import tiny_runs
from tests.helpers.processes import launch

REWARD = '''
import os
import signal
from pathlib import Path

def red(images, prompts):
    """Kill the second process in the rollout of the second epoch, when the checkpoint of the first is there."""
    plan = Path(__file__).with_name("die")
    saved = plan.with_name("two") / "run" / "checkpoints" / "epoch-00001"
    if os.environ.get("RANK") == "1" and plan.exists() and saved.exists():
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return images[:, 0].mean((1, 2))
'''


def waits(folder: Path, end: str) -> int:
    """Wait for ever, as in a collective, while the second of three processes ends in one of several ways."""
    processes = Processes(Accelerator(cpu=True))
    try:
        with Watch(processes, grace=0.5):
            if processes.rank != 1:
                if end in ("done", "stopped"):
                    return 0
                time.sleep(100)
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "stopped":
                raise Stopped
            if end == "interrupted":
                raise KeyboardInterrupt
            if end != "done":
                raise UserError("no\nspace") if end == "refused" else ValueError("out of reach")
    except (KeyboardInterrupt, UserError, ValueError):
        return 3
    return 0


@pytest.mark.parametrize("end, codes, told", [
    ("killed", [2, -9, 2], "was killed, or its machine is gone"),
    ("failed", [2, 3, 2], "failed (ValueError: out of reach)"),
    ("refused", [2, 3, 2], ": no space"),
    ("interrupted", [2, 3, 2], "was ended by a second signal"),
    ("stopped", [0, 3, 0], None),
    ("done", [0, 0, 0], None)])
def test_the_others_end_with_the_reason_of_a_lost_process(end, codes, told, tmp_path):
    ended = launch(waits, 3, tmp_path, end, timeout=90)
    assert [code for code, _ in ended] == codes, ended
    for rank in (0, 2):
        lines = [line for line in ended[rank][1].splitlines() if "flowgrpo: error: process 1 on " in line]
        assert len(lines) == (told is not None) and (told is None or told in lines[0])
        assert all(line.endswith("--resume goes on from the last checkpoint") == (end != "refused") for line in lines)


def test_an_end_before_the_first_checkpoint_promises_none(tmp_path):
    watch = Watch(Processes(), tmp_path)
    watch._lose("process 1 on node1", "")
    assert watch.lost == "process 1 on node1 was killed, or its machine is gone; no checkpoint was saved"


def collective(folder: Path) -> int:
    """Meet in a collective that the second process never reaches."""
    processes = Processes(Accelerator(cpu=True))
    try:
        with Watch(processes):
            if processes.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            processes.wait()
    except UserError as error:
        (folder / "told").write_text(str(error))
    return 0


def test_an_error_of_a_collective_names_the_lost_process(tmp_path):
    assert [code for code, _ in launch(collective, 2, tmp_path, timeout=90)] == [0, -9]
    told = (tmp_path / "told").read_text()
    assert told.startswith("process 1 on ") and told.endswith("--resume goes on from the last checkpoint")


# --- a run -----------------------------------------------------------------------------------------------------------
def run(folder: Path, output: str, *further: str) -> int:
    return main(["train", "--trust", str(folder / "recipe.yaml"), f"--output={folder / output}", *further])


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A run of one process, one of two of which the second is killed, and what these have said: three epochs of one
    prompt, whose samples go through the denoiser one by one."""
    folder = tmp_path_factory.mktemp("watch")
    tiny_runs.command(model, folder, REWARD, method="flow_grpo", train__epochs=3, train__save_every=1, train__steps=3,
                      train__prompts=1, train__group=4, train__micro_batch=1, train__lr=1e-3, eval__prompts=1)
    assert run(folder, "one") == 0
    (folder / "die").touch()
    ended = launch(run, 2, folder, "two", timeout=120)
    assert [code for code, _ in ended] == [2, -9] and not (folder / "die").exists(), ended
    (folder / "said").write_text(ended[0][1])
    return folder


def test_a_killed_process_ends_the_run_in_one_line_with_a_whole_checkpoint(folder):
    lines = [line for line in (folder / "said").read_text().splitlines() if "flowgrpo: error:" in line]
    assert len(lines) == 1 and "process 1 on " in lines[0] and "was killed" in lines[0]
    _, state = checkpoint.load(checkpoint.latest(folder / "two" / "run" / "checkpoints"))
    assert state["epoch"] == 1


@pytest.mark.parametrize("count", [1, 4])
def test_it_goes_on_with_another_number_of_processes_as_if_nothing_had_been(count, folder):
    name = f"resumed on {count}"
    shutil.copytree(folder / "two", folder / name)
    codes = [code for code, _ in launch(run, count, folder, name, "--resume")] if count > 1 else \
        [run(folder, name, "--resume")]
    assert codes == [0] * count
    expected, weights = (load_file(folder / each / "run" / LORA_FILE) for each in ("one", name))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
