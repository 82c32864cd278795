"""Processes that only sample beside those that train: the run of one process, its bytes, ends and resume."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.contrib.staleness.rollout_ranks import rollout_ranks
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.run import run
from tests.helpers import tiny, tiny_runs, tiny_text
from tests.helpers.processes import launch, together
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import lines

EPOCHS = 4
IMAGES = dict(method="mix_grpo", parts__plan__size=2, train__steps=4, train__epochs=EPOCHS, train__lr=1e-2,
              train__save_every=1, eval__prompts=1)
TEXTS = dict(train__epochs=EPOCHS, train__lr=1e-2, train__save_every=1, eval__prompts=1)
# Options of a run, and the processes that sample and that train.
CASES = {"one and one": (IMAGES | dict(train__staleness=1), 1, 1),
         "ahead by two": (IMAGES | dict(train__staleness=2, train__prompts=4), 2, 2),
         "a curriculum": (TEXTS | dict(train__staleness=1, parts__curriculum={"type": "VarianceSampling"}), 1, 1)}


def flow(folder: Path, name: str, case: str, reward=None, resume: bool = False, alone: bool = False, **more) -> dict:
    """The summary of a run of a case; alone: in this process."""
    options, samplers, _ = CASES[case]
    made, given = (tiny_text, tiny_text.short) if "parts__curriculum" in options else (tiny, tiny.red)
    options = options | ({} if alone else {"train__rollout_ranks": samplers}) | more
    settings = made.config(folder, name=name, model="tiny", reward="given", **options)
    pipe = tiny_text.model() if made is tiny_text else tiny.sd3()
    return run(settings, resume, pipe=pipe, functions={"given": reward or given},
               prompts=[Prompt(text) for text in made.PROMPTS])


def member(folder: Path, name: str, case: str) -> None:
    """One process of a run: it leaves the summary that it got."""
    summary = flow(folder, name, case)
    (folder / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(summary["after"]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case alone and with processes that only sample."""
    folder = tmp_path_factory.mktemp("ranks")
    for case, (_, samplers, trains) in CASES.items():
        together(member, samplers + trains, folder, case, case)
        flow(folder, f"{case}, alone", case, alone=True)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_rollout_ranks_is_that_of_one_process(case, folder):
    """Its weights, samples, ages, ratios and counts; every process gets its summary."""
    options, samplers, trains = CASES[case]
    ours, theirs = lines(folder / case), lines(folder / f"{case}, alone")
    assert [line["staleness/epochs"] for line in ours] == [min(k, options["train__staleness"]) for k in range(EPOCHS)]
    for one, other in zip(ours, theirs, strict=True):
        names = [name for name in other if name.startswith(("reward/", "staleness/", "ratio/")) or
                 name in ("grad_norm", "loss", "diversity", "log_ratio_max")]
        assert len(names) > 8
        exact = trains == 1
        assert {name: one[name] for name in names} == pytest.approx(
            {name: other[name] for name in names}, rel=0 if exact else 1e-3, abs=0 if exact else 1e-6, nan_ok=True)
    assert ours[-1]["evaluations"] == theirs[-1]["evaluations"] and theirs[-1]["staleness/weight"] != 1
    tiny_runs.assert_same_weights(weights(folder / case), weights(folder / f"{case}, alone"),
                                  **({} if trains == 1 else {"atol": 2e-5}))
    shown = [json.loads((folder / name / "report" / "last.json").read_text()) for name in (case, f"{case}, alone")]
    best = [[score for each in one["best"] for score in each["scores"].values()] for one in shown]
    assert best[0] == pytest.approx(best[1], rel=1e-3)
    found = [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(samplers + trains)]
    assert all(each == found[0] for each in found)


def test_bytes_of_weights_and_samples(folder):
    """Each update sends the LoRA in fp32 to every process that samples, the first epoch the first weights too. A sample
    is 3 latents of fp32 at least: two states before trained steps and what comes of them."""
    for case in ("one and one", "ahead by two"):
        options, samplers, _ = CASES[case]
        size = sum(value.numel() for value in weights(folder / case).values()) * 4 * samplers
        first, *later = lines(folder / case)
        assert first["rollout_ranks/weight_bytes"] == 2 * size
        assert {line["rollout_ranks/weight_bytes"] for line in later} == {size}
        samples, latent = options.get("train__prompts", 2) * 4, 4 * 4 * 8 * 8
        assert all(3 * samples * latent < line["rollout_ranks/sample_bytes"] < 10 * samples * latent
                   for line in [first, *later])


# --- ends ------------------------------------------------------------------------------------------------------------
def ended_by(folder: Path, name: str, case: str, rank: int, by: int, resume: bool = False) -> int:
    """One process of a run, to one of which a signal comes when the first checkpoint is there; its exit code."""
    def watch() -> None:
        while not (folder / name / "checkpoints" / "epoch-00001").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), by)
    if os.environ["RANK"] == str(rank):
        threading.Thread(target=watch, daemon=True).start()
    try:
        flow(folder, name, case, resume=resume, train__epochs=200)
    except UserError as error:
        (folder / f"{name}.{os.environ['RANK']}").write_text(str(error))
        return 2
    except Stopped:
        return 130
    return 0


@pytest.mark.parametrize("rank", range(4))
def test_a_process_that_is_killed_ends_the_others_in_a_line(rank, tmp_path):
    ended = launch(ended_by, 4, tmp_path, "killed", "ahead by two", rank, signal.SIGKILL, timeout=120)
    assert [code for code, _ in ended] == [-9 if place == rank else 2 for place in range(4)], ended
    for place in {*range(4)} - {rank}:
        file = tmp_path / f"killed.{place}"
        told = file.read_text() if file.exists() else ended[place][1].splitlines()[-1]
        assert f"process {rank} on " in told and "was killed" in told and told.endswith("from the last checkpoint")
        assert "\n" not in told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_either_side_saves_and_goes_on_to_the_same_bit(rank, tmp_path):
    ended = launch(ended_by, 2, tmp_path, "stopped", "one and one", rank, signal.SIGTERM, timeout=120)
    assert [code for code, _ in ended] == [130, 130], ended
    done = max(int(path.name[-5:]) for path in (tmp_path / "stopped" / "checkpoints").glob("epoch-*"))
    assert 1 <= done < 200
    together(resumed, 2, tmp_path, "stopped", "one and one", done + 3)
    flow(tmp_path, "whole", "one and one", alone=True, train__epochs=done + 3)
    tiny_runs.assert_same_weights(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    assert lines(tmp_path / "stopped")[-1]["evaluations"] == lines(tmp_path / "whole")[-1]["evaluations"]


def resumed(folder: Path, name: str, case: str, epochs: int) -> None:
    flow(folder, name, case, resume=True, train__epochs=epochs)


def refused(folder: Path, name: str, reward=None, **more) -> int:
    """One process of a run that ends with a line, which it leaves."""
    try:
        flow(folder, name, "one and one", reward, **more)
    except UserError as error:
        (folder / os.environ["RANK"]).write_text(str(error))
        return 2
    return 0


def failing(folder: Path) -> int:
    """One process of a run whose reward fails in the second epoch."""
    calls = []
    def broken(images, prompts):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) > 2:
            raise UserError("no answer")
        return tiny.red(images, prompts)
    return refused(folder, "failed", broken)


def test_a_reward_that_fails_ends_all_with_its_line(tmp_path):
    assert [code for code, _ in launch(failing, 2, tmp_path, timeout=120)] == [2, 2]
    assert (tmp_path / "1").read_text() == "no answer"
    told = (tmp_path / "0").read_text()
    assert told.startswith("process 1 on ") and told.endswith(": no answer")


def early(folder: Path) -> None:
    """One process of a run that its evaluations end before the last epoch, while further ones are drawn."""
    summary = flow(folder, "early", "one and one", lambda images, prompts: [0.5] * len(images), train__epochs=60,
                   eval__every=1, eval__best="given", eval__stop={"reward": "given", "patience": 2})
    (folder / f"early.{os.environ['RANK']}").write_text(str(summary["epochs"]))


def test_a_run_that_ends_early_ends_on_all(tmp_path):
    together(early, 2, tmp_path)
    epochs = [int((tmp_path / f"early.{rank}").read_text()) for rank in range(2)]
    assert epochs[0] == epochs[1] < 60


# --- what does not go ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, processes, told", [
    (dict(), 1, "train.rollout_ranks is 1, of 1 process: expected fewer"),
    (dict(train__rollout_ranks=4), 4, "train.rollout_ranks is 4, of 4 processes: expected fewer"),
    (dict(train__micro_batch="auto"), 2, "does not go with train.micro_batch or train.checkpointing: auto"),
    (dict(train__checkpointing="auto"), 2, "does not go with train.micro_batch or train.checkpointing: auto"),
    (dict(train__prompts=4, train__rollout_ranks=3), 4, "train.prompts is 4, which the 3 processes that only sample "
                                                        "cannot share in whole groups: use 6 prompts"),
    (dict(train__prompts=3), 3, "which the 2 processes that train cannot share in whole groups: use 4 prompts"),
    (dict(train__prompts=6, train__micro_batch=16), 3, "whose micro-batches of 16 take 4 groups together, which do not "
                                                       "divide the 3 groups")])
def test_numbers_that_do_not_go(options, processes, told):
    config = tiny.config(**dict(train__staleness=1, train__rollout_ranks=1) | options)
    assert told in message(rollout_ranks, config, processes)


def test_numbers_that_go():
    for options, processes in ((dict(train__prompts=6, train__micro_batch=12), 3), (dict(train__prompts=12), 4)):
        assert rollout_ranks(tiny.config(train__staleness=1, train__rollout_ranks=1, **options), processes) == 1
    assert rollout_ranks(tiny.config(train__staleness=1), 4) == 0


def sharded(folder: Path) -> int:
    return refused(folder, "shared", memory__shard=True)


def test_sharded_weights_are_refused_in_a_line(tmp_path):
    assert [code for code, _ in launch(sharded, 2, tmp_path, timeout=90)] == [2, 2]
    told = {(tmp_path / str(rank)).read_text() for rank in range(2)}
    assert told == {"train.staleness is 1, which does not go with memory.shard, whose processes hold shares of the "
                    "weights: leave one of them out"}
