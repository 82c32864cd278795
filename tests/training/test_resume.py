"""A run that was killed goes on to the same weights to the last bit; large checkpoints are written by a thread."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo.cli import main
from flowgrpo.cores import SET_BY_USER
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import align
from flowgrpo.storage import atomic, checkpoint, paths
from flowgrpo.storage.places import checkpoints, lock_run, unfinished
from flowgrpo.training import progress, run_folder, state
from flowgrpo.training.endings import save_on_stop
from flowgrpo.training.run_folder import keep_lines
from tests.helpers import tiny, tiny_runs
from tests.helpers.forked import Forked
from tests.helpers.refusals import error_line, refused

REWARD = '''
import os
from pathlib import Path

calls, plan = 0, Path(__file__).with_name("plan")  # "<number of the call> <signal>"

def red(images, prompts):
    global calls
    calls += 1
    if plan.exists() and int(plan.read_text().split()[0]) == calls:
        number = int(plan.read_text().split()[1])
        plan.unlink()
        os.kill(os.getpid(), number)
    return images[:, 0].mean((1, 2))
'''
EPOCHS = 6


def arguments(model, folder, **options) -> list[str]:
    """A run with two micro-batches and two updates per epoch and a moving average, saved every second epoch."""
    return tiny_runs.command(model, folder, REWARD, train__epochs=EPOCHS, train__save_every=2, train__updates=2,
                             train__ema=0.9, eval__weights="ema", train__warmup=3, train__schedule="linear",
                             train__steps=4, parts__plan__size=2, train__lr=0.02, **options)


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(arguments(model, folder)) == 0
    return folder / "run"


def lines(run) -> list[dict]:
    """The metrics, under the reward's bare name."""
    text = re.sub(r'/[^"]*/reward.py:', "", (run / "metrics.jsonl").read_text())
    return [json.loads(line) for line in text.splitlines()]


def assert_same(run, uninterrupted) -> None:
    """The same LoRA, the same whole state, the same curves."""
    for file in (LORA_FILE, f"checkpoints/epoch-{EPOCHS:05d}/state.safetensors"):
        tiny_runs.assert_same_weights(load_file(run / file), load_file(uninterrupted / file))
    assert [line["epoch"] for line in lines(run)] == list(range(1, EPOCHS + 1))
    for found, expected in zip(lines(run), lines(uninterrupted)):
        told = {key for key in expected if "second" not in key and key not in ("evaluations", "memory/host")}
        assert {key: found[key] for key in told} == {key: expected[key] for key in told}
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, uninterrupted)]
    assert list(summaries[0]["after"].values()) == list(summaries[1]["after"].values())
    assert (summaries[0]["epochs"], summaries[0]["updates"]) == (EPOCHS, 2 * EPOCHS)
    assert summaries[0]["max_first_log_ratio"] == summaries[1]["max_first_log_ratio"]


@pytest.mark.fast
def test_after_a_kill(model, uninterrupted, tmp_path):
    """Call 1 is the trial, call 2 measures the base, then come two per epoch: call 13 is the first of the sixth."""
    command = arguments(model, tmp_path)
    (tmp_path / "plan").write_text(f"13 {int(signal.SIGKILL)}")
    killed = Forked(main, command)
    assert killed.wait() == -signal.SIGKILL, killed.streams()
    run = tmp_path / "run"
    assert [line["epoch"] for line in lines(run)] == [1, 2, 3, 4, 5]  # of which the fifth is run again
    assert checkpoint.latest(run / "checkpoints").name == "epoch-00004"
    assert not (run / "summary.json").exists() and not (run / LORA_FILE).exists()
    assert main([*command, "--resume"]) == 0
    assert_same(run, uninterrupted)
    assert [line["evaluations"] for line in lines(run)] == [line["evaluations"] for line in lines(uninterrupted)]


def test_a_repeated_epoch_has_the_threads_of_its_first_time(tmp_path, monkeypatch):
    options = dict(recipe="starter", tracker="none", precision="fp32", eval={"prompts": 2, "steps": 2}, name="run")
    train = {"prompts": 2, "group": 4, "micro_batch": 8, "lr": 0.001, "save_every": 1, "steps": 4}
    align(output=str(tmp_path), train=train | {"epochs": 1}, **options)
    run, before = tmp_path / "run", torch.get_num_threads()
    with (run / "metrics.jsonl").open("a") as file:  # as if it had been killed after the third
        file.write('{"epoch": 2, "threads": 2}\n{"epoch": 3, "threads": 1}\n')
    for name in SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    try:
        align(output=str(tmp_path), train=train | {"epochs": 3}, resume=True, **options)
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)
    assert [line["threads"] for line in lines(run)] == [before, 2, 1]


def test_one_command_begins_goes_on_and_ends(model, uninterrupted, tmp_path, capfd):
    """Call 4 is of the first epoch, before any checkpoint; call 13 of a run that begins is of the sixth."""
    command = [*arguments(model, tmp_path), "--resume=auto"]
    for call in (4, 13):
        (tmp_path / "plan").write_text(f"{call} {int(signal.SIGKILL)}")
        killed = Forked(main, command)
        assert killed.wait() == -signal.SIGKILL, killed.streams()
    run = tmp_path / "run"
    assert checkpoint.latest(run / "checkpoints").name == "epoch-00004"
    (tmp_path / "plan").unlink(missing_ok=True)
    assert main(command) == 0
    assert_same(run, uninterrupted)
    assert main(command) == 0  # nothing is left
    assert_same(run, uninterrupted)
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    capfd.readouterr()
    for path in (run / "checkpoints").iterdir():
        (path / "state.json").write_text("[]")
    assert main([*command[:-1], "--resume"]) == 2
    assert "--resume: no whole checkpoint in " in (said := capfd.readouterr().err)
    assert "(2 damaged): expected one that an earlier run left; --resume=auto, or the command without" in said
    assert main(command) == 0  # begins anew
    assert_same(run, uninterrupted)
    assert f"no whole checkpoint in {run / 'checkpoints'}, so the run begins" in (said := capfd.readouterr().out)
    assert f"{run} held an earlier run, which is now {run}.1" in said
    assert len([*(tmp_path / "run.1" / "checkpoints").glob("*.damaged")]) == 2


def test_after_a_kill_while_epochs_are_drawn_ahead(model, tmp_path):
    """Call 13 is that of the sixth epoch, which is drawn before the update of the fourth."""
    assert main(arguments(model, tmp_path / "whole", train__staleness=2)) == 0
    command = arguments(model, tmp_path / "killed", train__staleness=2)
    (tmp_path / "killed" / "plan").write_text(f"13 {int(signal.SIGKILL)}")
    killed = Forked(main, command)
    assert killed.wait() == -signal.SIGKILL, killed.streams()
    run = tmp_path / "killed" / "run"
    assert [line["epoch"] for line in lines(run)][:2] == [1, 2] and len(lines(run)) < EPOCHS
    assert main([*command, "--resume"]) == 0
    assert_same(run, tmp_path / "whole" / "run")
    assert [line["staleness/epochs"] for line in lines(run)] == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("least", [state.LARGE, 0], ids=["at once", "by a thread"])
def test_after_a_kind_request_the_last_whole_epoch_is_saved(least, model, uninterrupted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(state, "LARGE", least)
    command = arguments(model, tmp_path)
    (tmp_path / "plan").write_text(f"9 {int(signal.SIGTERM)}")  # in the fourth epoch
    before = signal.getsignal(signal.SIGTERM)
    assert main(command) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr().out.splitlines()[-1]
    done = [line["epoch"] for line in lines(tmp_path / "run")]
    assert done in ([1, 2, 3], [1, 2, 3, 4])
    assert said == f"stopped after epoch {done[-1]}, saved in {tmp_path / 'run'}; --resume goes on"
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == f"epoch-{done[-1]:05d}"
    assert main([*command, "--resume"]) == 0
    assert_same(tmp_path / "run", uninterrupted)


def test_a_request_in_the_last_epoch_ends_the_run_too(model, uninterrupted, tmp_path):
    command = arguments(model, tmp_path)
    (tmp_path / "plan").write_text(f"{2 * EPOCHS + 2} {int(signal.SIGINT)}")
    assert main(command) == 130
    assert not (tmp_path / "run" / "summary.json").exists()
    assert main([*command, "--resume"]) == 0
    assert_same(tmp_path / "run", uninterrupted)


@pytest.fixture
def finished(model, uninterrupted, tmp_path):
    """A copy of the finished run, with the command that made it."""
    command = arguments(model, tmp_path)
    shutil.copytree(uninterrupted, tmp_path / "run")
    return command, tmp_path / "run"


def test_a_finished_run_is_not_trained_further_and_what_was_changed_since_is_told(finished, uninterrupted, capsys):
    command, run = finished
    (run / LORA_FILE).unlink()
    assert main([*command, "--resume"]) == 0
    assert_same(run, uninterrupted)
    assert main([*command, "--resume", "--train.micro_batch=3", "--seed=4", "--eval.every=0"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with")]
    assert told[-2:] == ["resumed with seed: 4, was 0", "resumed with train.micro_batch: 3, was 4"]
    assert all(line.startswith(("resumed with reward:", "resumed with prompts:")) for line in told[:-2])  # moved files


def test_a_new_run_of_the_same_name_starts_anew_and_loses_nothing(finished, capsys):
    """Checkpoints of the earlier run, with higher numbers, are not gone on from; its folder has another name."""
    command, run = finished
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main([*command, "--train.epochs=3"]) == 0
    aside = run.with_name(f"{run.name}.1")
    assert f"{run} held an earlier run, which is now {aside}" in capsys.readouterr().out
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == files
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["epoch-00002", "epoch-00003"]
    assert [line["epoch"] for line in lines(run)] == [1, 2, 3]
    assert main([*command, "--train.epochs=1"]) == 0
    assert [(run.parent / f"{run.name}.{number}").is_dir() for number in (1, 2, 3)] == [True, True, False]


def test_a_folder_that_a_run_writes_to_is_not_taken(finished, capsys):
    command, run = finished
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with lock_run(run):
        for more in ([], ["--resume"]):
            assert f"another run is writing to {run}: give this one another name" in error_line(capsys, *command, *more)
        assert unfinished(run) == "the run is training: wait for its end, or name one of its checkpoints"
    assert unfinished(run) == "the run has not finished: --resume it"
    assert {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    assert main([*command, "--resume"]) == 0


def test_what_a_run_reads_is_not_moved_away_with_an_earlier_one(finished, capsys):
    command, run = finished
    (run / "prompts.txt").write_text("\n".join(tiny.PROMPTS))
    command.append(f"--prompts={run}/prompts.txt")
    assert f"prompts is {run}/prompts.txt, in the folder of an earlier run" in error_line(capsys, *command)
    assert main([*command, "--resume"]) == 0


def test_a_run_without_a_whole_epoch_is_not_set_aside(finished, capsys):
    command, run = finished
    (run / "summary.json").unlink()
    for path in (run / "checkpoints").glob("epoch-*"):
        shutil.rmtree(path)
    (run / "checkpoints" / "epoch-00000").mkdir()
    assert main([*command, "--train.epochs=1"]) == 0
    assert "earlier run" not in capsys.readouterr().out and not run.with_name(f"{run.name}.1").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["epoch-00001"]


def test_an_edited_reward_measures_the_base_again(finished, uninterrupted, capsys):
    command, run = finished
    [file] = run.parent.glob("*.py")
    for name in ("config.yaml", "before.json"):
        (run / name).write_text((run / name).read_text().replace(str(uninterrupted.parent), str(run.parent)))
    before = json.loads((run / "before.json").read_text())
    file.write_text(file.read_text() + "\n\nEDITED = True\n")
    assert main([*command, "--resume", f"--train.epochs={EPOCHS + 1}"]) == 0
    assert "has changed, so that the base is measured again" in capsys.readouterr().out
    assert [line["epoch"] for line in lines(run)] == list(range(1, EPOCHS + 2))
    after = json.loads((run / "before.json").read_text())
    assert after["code"] != before["code"] and after["scores"] == before["scores"]


def test_a_run_of_the_names_before_goes_on_and_keeps_its_base(finished, uninterrupted, capsys):
    command, run = finished
    for file, before, now in (("config.yaml", "\nimage:", "\npicture:"), ("before.json", '"image"', '"picture"'),
                              ("config.yaml", "  generates: text\n", ""), ("before.json", '"generates": "text", ', ""),
                              ("config.yaml", "eval_temperature: null", "eval_temperature: 0.0"),
                              ("before.json", '"eval_temperature": null', '"eval_temperature": 0.0')):
        text = (run / file).read_text()
        assert before in text
        moved = text.replace(str(uninterrupted.parent), str(run.parent))  # the reward's file, which the base depends on
        (run / file).write_text(moved.replace(before, now))
    os.utime(run / "before.json", (1, 1))
    assert main([*command, "--resume", f"--train.epochs={EPOCHS + 1}"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with")]
    assert not any("image" in line or "picture" in line for line in told)
    assert (run / "before.json").stat().st_mtime == 1 and "\nimage:" in (run / "config.yaml").read_text()


def test_another_evaluation_and_other_prompts_measure_the_base_again(finished):
    command, run = finished
    assert main([*command, "--resume", "--eval.prompts=1", "--eval.grid=1"]) == 0
    assert len(json.loads((run / "before.json").read_text())["scores"].popitem()[1]) == 1
    assert json.loads((run / "summary.json").read_text())["evaluation"]["prompts"] == 1
    before = json.loads((run / "before.json").read_text())
    (run.parent / "other.txt").write_text("\n".join(f"another {text}" for text in tiny.PROMPTS))
    assert main([*command, "--resume", f"--prompts={run.parent}/other.txt"]) == 0
    assert json.loads((run / "before.json").read_text())["scores"] != before["scores"]


@pytest.mark.parametrize("options, told", [
    (["--adapter.rank=3"], "--resume: adapter.rank is 3, but the run in "),
    (["--adapter.targets=[to_q]"], "--resume: adapter.targets is ['to_q'], but the run in "),
    (["--adapter.alpha=1"], "--resume: adapter.alpha is 1.0, but the run in "),
    (["--method=mix_grpo_flash"], "--resume: method is 'mix_grpo_flash', but the run in "),
    (["--train.epochs=2"], "--resume: train.epochs is 2, but 6 are done"),
    (["--name=other"], "--resume: no checkpoint in ")])
def test_what_does_not_fit_is_told(finished, options, told, capsys):
    command, run = finished
    kept = (run / "config.yaml").read_text()
    assert told in error_line(capsys, *command, "--resume", *options)
    assert (run / "config.yaml").read_text() == kept and len(lines(run)) == EPOCHS


@pytest.mark.fast
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on(finished, uninterrupted, capsys):
    command, run = finished
    (checkpoint.latest(run / "checkpoints") / "state.safetensors").write_bytes(b"half of it")
    assert main([*command, "--resume"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if " is damaged (" in line]
    assert "epoch-00006 is damaged (state.safetensors has 10 bytes, expected" in line
    assert line.endswith("it is now epoch-00006.damaged, and epoch-00004 is tried")
    assert_same(run, uninterrupted)


def test_where_all_checkpoints_are_damaged_nothing_is_lost(finished, capsys):
    command, run = finished
    (run / "summary.json").unlink()
    for path in (run / "checkpoints").iterdir():
        (path / "state.json").write_text("[]")
    assert "--resume: no whole checkpoint in " in error_line(capsys, *command, "--resume")
    assert main([*command, "--train.epochs=1"]) == 0
    assert sorted(path.name for path in (run.with_name("run.1") / "checkpoints").iterdir()) == [
        "epoch-00004.damaged", "epoch-00006.damaged"]


def test_a_state_that_does_not_fit_is_told_in_a_line(finished, capsys):
    """Without a manifest, and with a form that only restoring shows to be wrong."""
    command, run = finished
    last = checkpoint.latest(run / "checkpoints")
    (last / "manifest.json").unlink()
    tensors = load_file(last / "state.safetensors")
    key = next(key for key in tensors if key.startswith("optimizer/") and key.endswith("exp_avg"))
    save_file(tensors | {key: torch.ones(1)}, last / "state.safetensors")
    assert main([*command, "--resume"]) == 2
    said = capsys.readouterr()
    assert "epoch-00006 has no manifest.json, as it is of an older run" in said.out
    assert "epoch-00006 cannot be read (" in said.err and "remove it to go on from epoch-00004" in said.err


@pytest.mark.parametrize("damage", [lambda file: file.touch(), os.mkfifo], ids=["empty", "FIFO"])
def test_damaged_samples_of_the_base_are_measured_again(damage, finished, uninterrupted, capsys):
    command, run = finished
    assert main([*command, "--resume"]) == 0  # the folder was copied, and is measured anew
    kept = (run / "before" / "000.png").read_bytes()
    (run / "before" / "000.png").unlink()
    damage(run / "before" / "000.png")
    (run / LORA_FILE).unlink()
    assert main([*command, "--resume"]) == 0
    assert f"{run / 'before'} is damaged (" in capsys.readouterr().out
    assert (run / "before" / "000.png").read_bytes() == kept
    assert_same(run, uninterrupted)


def test_changed_code_prompts_and_packages_are_told(finished, capsys):
    command, run = finished
    assert main([*command, "--resume"]) == 0
    capsys.readouterr()
    known = json.loads((run / "inputs.json").read_text())
    (run / "inputs.json").write_text(json.dumps(known | {"packages": known["packages"] | {"torch": "1.0"}}))
    (run.parent / "reward.py").write_text(f"{REWARD}# the same\n")
    prompts = run.parent / "prompts.txt"
    prompts.write_text(prompts.read_text().replace("a cat", "a dog"))
    assert main([*command, "--resume"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with other")]
    assert lines[0] == f"resumed with other code in {run.parent / 'reward.py'}"
    assert [line for line in lines[1:] if "texts of the" not in line] == []
    assert main([*command, "--resume"]) == 0
    assert "resumed with other" not in capsys.readouterr().out


def test_what_is_compared_on_resuming(tmp_path):
    config = tiny.config(tmp_path)
    now = run_folder.hash_inputs(config, ([Prompt("red", metadata={"n": 1}), Prompt("blue")], [Prompt("old")]))
    assert run_folder.changes(tmp_path, now) == []  # an older run
    atomic.write_text(tmp_path / run_folder.FILE, json.dumps(now | {"packages": {**now["packages"], "torch": "1.0"}}))
    second = [Prompt("red", metadata={"n": 2}), Prompt("blue")], [Prompt("older")]
    changes = run_folder.changes(tmp_path, run_folder.hash_inputs(config, second))
    assert changes == [f"torch {now['packages']['torch']}, was 1.0", "other metadata of the training prompts",
                       "other texts of the held-out prompts"]
    (tmp_path / "inputs.json").write_text("{}")
    [line] = run_folder.changes(tmp_path, now)
    assert line.startswith("unknown inputs: ") and "it is written anew" in line


def test_lines_of_epochs_that_come_again_are_dropped_and_a_damaged_last_one_is_set_aside(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    keep_lines(path, 3)
    assert not path.exists()
    path.write_text("".join(f'{{"epoch": {epoch}}}\n' for epoch in range(1, 6)) + '{"epoch": 6, "lo')
    keep_lines(path, 5)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    keep_lines(path, 3)
    assert path.read_text() == '{"epoch": 1}\n{"epoch": 2}\n{"epoch": 3}\n'
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"epoch": 1}\n{"epo\n{"epoch": 3}\n')
    refused("metrics.jsonl, line 2: damaged .*: remove that line", keep_lines, path, 3)
    assert path.read_text() == '{"epoch": 1}\n{"epo\n{"epoch": 3}\n'
    for last in (b"\0\0\0\xff", b"[3]", b'{"epoch": "three"}'):
        path.write_bytes(b'{"epoch": 1}\n{"epoch": 2}\n' + last + b"\n")
        keep_lines(path, 5)
        assert path.read_text() == '{"epoch": 1}\n{"epoch": 2}\n'
    assert capsys.readouterr().out == f"{path}: the last line is damaged: it is now in metrics.jsonl.damaged\n" * 3
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == '\0\0\0\\xff\n[3]\n{"epoch": "three"}\n'


FSYNC = os.fsync


def in_the_thread() -> bool:
    return threading.current_thread().name == progress.NAME


@pytest.fixture
def large(monkeypatch):
    """Every checkpoint counts as a large one."""
    monkeypatch.setattr(state, "LARGE", 0)


@pytest.fixture
def held(monkeypatch):
    """Event for which the first fsync of the thread waits."""
    event = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda file: (in_the_thread() and event.wait(60), FSYNC(file))[1])
    yield event
    event.set()


def full(file: int) -> None:
    """fsync on a disk that is full, for the thread alone."""
    if in_the_thread():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    FSYNC(file)


def trained(tmp_path, **options):
    trainer = tiny.trainer(output=tmp_path, train__ema=0.9, train__epochs=9, **options)
    trainer.run_epoch()
    trainer.epoch, trainer.progress.saved_counters = 1, state.counters(trainer) | {"epoch": 1}
    return trainer


def content(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_files_are_those_of_the_moment_though_training_goes_on(large, held, tmp_path):
    trainer = trained(tmp_path)
    state.save(trainer, tmp_path / "at once")
    state.save_epoch(trainer, tmp_path / "later", last=False)
    trainer.run_epoch()
    trainer.progress.saved_counters["memory"]["kl"] = "changed"
    trainer.progress.saving.look()
    assert trainer.progress.saving.busy and checkpoints(tmp_path / "later" / "checkpoints") == {}
    held.set()
    trainer.progress.saving.look(wait=True)
    later, at_once = (content(tmp_path / name / "checkpoints" / "epoch-00001") for name in ("later", "at once"))
    assert later == at_once and checkpoint.damage(tmp_path / "later" / "checkpoints" / "epoch-00001") is None


def test_the_next_checkpoint_waits_for_the_one_before(large, held, tmp_path):
    trainer = trained(tmp_path)
    state.save_epoch(trainer, tmp_path, last=False)
    trainer.epoch, trainer.progress.saved_counters = 2, trainer.progress.saved_counters | {"epoch": 2}
    threading.Timer(0.2, held.set).start()
    state.save_epoch(trainer, tmp_path, last=True)
    assert [*checkpoints(tmp_path / "checkpoints")] == [1, 2] and not trainer.progress.saving.busy


@pytest.mark.parametrize("size, free, later", [(None, 2**40, False), (0, 2**40, True), (0, 1000, False)])
def test_small_ones_and_those_that_memory_has_no_room_for_are_written_at_once(size, free, later, tmp_path, monkeypatch):
    trainer = trained(tmp_path)
    monkeypatch.setattr(state, "available_memory", lambda: free)
    if size is not None:
        monkeypatch.setattr(state, "LARGE", size)
    names = []
    monkeypatch.setattr(os, "fsync", lambda file: (names.append(threading.current_thread().name), FSYNC(file))[1])
    state.save_epoch(trainer, tmp_path, last=False)
    trainer.progress.saving.look(wait=True)
    assert (progress.NAME in names) is later and [*checkpoints(tmp_path / "checkpoints")] == [1]


def test_a_write_that_fails_is_raised_at_the_next_look(large, tmp_path, monkeypatch):
    trainer = trained(tmp_path)
    state.save(trainer, tmp_path)
    before = content(tmp_path / "checkpoints" / "epoch-00001")
    trainer.epoch = 2
    monkeypatch.setattr(os, "fsync", full)
    state.save_epoch(trainer, tmp_path, last=False)
    while trainer.progress.saving.busy:
        time.sleep(0.01)
    with pytest.raises(OSError, match="No space left") as caught:
        trainer.progress.saving.look()
    assert paths.refusal(caught.value).startswith("a file cannot be written whole (No space left on device)")
    assert [*checkpoints(tmp_path / "checkpoints")] == [1] and content(
        tmp_path / "checkpoints" / "epoch-00001") == before
    trainer.progress.saving.look(wait=True)  # reported once


def test_an_error_of_the_run_waits_for_the_write(large, held, tmp_path, monkeypatch, capsys):
    trainer = trained(tmp_path)
    with pytest.raises(ZeroDivisionError), save_on_stop(trainer, tmp_path):
        state.save_epoch(trainer, tmp_path, last=False)
        threading.Timer(0.2, held.set).start()
        raise ZeroDivisionError
    assert [*checkpoints(tmp_path / "checkpoints")] == [1]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ZeroDivisionError), save_on_stop(trainer, tmp_path):
        state.save_epoch(trainer, tmp_path, last=False)
        raise ZeroDivisionError
    assert capsys.readouterr().out == (
        "a checkpoint could not be written: OSError: [Errno 28] No space left on device\n")


def test_a_second_signal_does_not_wait(large, held, tmp_path):
    trainer = trained(tmp_path)
    with pytest.raises(KeyboardInterrupt), save_on_stop(trainer, tmp_path):
        state.save_epoch(trainer, tmp_path, last=False)
        raise KeyboardInterrupt
    assert trainer.progress.saving.busy and checkpoints(tmp_path / "checkpoints") == {}
    held.set()
    trainer.progress.saving.look(wait=True)


def dying(command: list[str]) -> int:
    """A run whose process is killed while the thread writes its second checkpoint."""
    state.LARGE, calls = 0, []
    def fsync(file: int) -> None:
        if in_the_thread():
            calls.append(file)
            if ".epoch-00004.tmp" in os.readlink(f"/proc/self/fd/{file}"):
                os.kill(os.getpid(), signal.SIGKILL)
        FSYNC(file)
    os.fsync = fsync
    return main(command)


def test_a_kill_in_between_leaves_the_checkpoint_before(model, uninterrupted, tmp_path):
    command = arguments(model, tmp_path)
    killed = Forked(dying, command)
    assert killed.wait() == -signal.SIGKILL, killed.streams()
    place = tmp_path / "run" / "checkpoints"
    assert [*checkpoints(place)] == [2] and (place / ".epoch-00004.tmp").is_dir()
    assert main([*command, "--resume"]) == 0
    assert_same(tmp_path / "run", uninterrupted)


def test_a_full_disk_ends_a_run_in_one_line(large, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", full)
    assert main(arguments(model, tmp_path)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "a file cannot be written whole (No space left on device): make room for it" in line
    assert checkpoints(tmp_path / "run" / "checkpoints") == {}


# By what is kept in a checkpoint: kind of model, method, its parts, options of the run.
KEPT: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "weights/noise.": ("flow", "reinflow", {}, {"train__ema": 0.5}),
    "weights/text_encoder.": ("flow", "flow_grpo_fast+texforce", {}, {}),
    "old/": ("flow", "diffusion_nft", {"lag": {"start": 0.5, "slope": 0.1, "most": 0.9}}, {"train__lr": 0.02}),
    "critic/": ("flow", "expo", {}, {}),
    "data/": ("flow", "mix_grpo", {"data": {
        "type": "FlowMatching", "batch": 3, "source": {"right": 0.1, "mastered": True},
        "balance": {"type": "Convergence", "window": 1}}}, {})}


@pytest.mark.parametrize("kept", KEPT)
def test_what_a_method_keeps_is_resumed_bit_for_bit(kept, tmp_path):
    """All of the state after one more epoch."""
    kind, method, parts, options = KEPT[kept]
    whole, resumed = (tiny_runs.trainer(kind, tiny_runs.config(kind, method, parts, **options)) for _ in range(2))
    start = {key: value.clone() for key, value in state.contents(resumed)[0].items()}
    tiny_runs.next_epochs(whole, 2)
    tiny_runs.resume(whole, resumed, tmp_path)
    for each in (whole, resumed):
        tiny_runs.next_epochs(each, 1)
    (tensors, values), (found, others) = (state.contents(each) for each in (whole, resumed))
    assert tensors.keys() == found.keys() and all(torch.equal(found[key], value) for key, value in tensors.items())
    times = ("seconds", "reward_wait_seconds")
    assert {key: value for key, value in others.items() if key not in times} == {
        key: value for key, value in values.items() if key not in times}
    assert any(key.startswith(kept) and (key not in start or not torch.equal(value, start[key]))
               for key, value in tensors.items())
