"""Sharded processes with equal shares agree once per part; with other shares, on every call."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.shards import LOOK, MEET, TRAIN, Lockstep
from flowgrpo.distributed.signals import Stopped
from tests.distributed.test_processes import SMALL, half_flat
from tests.helpers import tiny
from tests.helpers.processes import together

SMALL = SMALL | dict(train__steps=4)
CASES = {
    "equal": dict(method="flow_grpo", parts__kl={"type": "GaussianKL", "weight": 0.1}, train__inner_epochs=2),
    "finals": dict(method="diffusion_nft", train__inner_epochs=2),
    "unequal": dict(method="flow_grpo", parts__selection={"type": "DropZeroVariance"}, train__updates=2)}


def trained(case: str, shard: bool):
    """A trainer of a case after two epochs."""
    reward = half_flat() if case == "unequal" else tiny.red
    trainer = tiny.trainer(rewards={"red": reward}, memory__shard=shard, **SMALL | CASES[case])
    for trainer.epoch in range(2):
        trainer.run_epoch()
    return trainer


class Counting(Lockstep):
    """Lockstep that counts its collectives by kind, and the calls that are made in it."""

    def __init__(self, *given):
        super().__init__(*given)
        self.announced: list[int] = []
        self.made: list[int] = []

    def join(self, kind: int, step: int = 0) -> None:
        self.made.append(kind)
        super().join(kind, step)

    def _exchange_calls(self, kind: int, step: int) -> list[tuple[int, int]]:
        self.announced.append(kind)
        return super()._exchange_calls(kind, step)


def one_of_two(folder: Path) -> None:
    """Train every case; each process leaves its weights, its calls, and what it agreed on with the other."""
    processes = Processes(Accelerator(cpu=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flowgrpo.distributed.shards.Lockstep", Counting)
        for case in CASES:
            trainer = trained(case, True)
            place, turns = f"{case}{processes.rank}", trainer.policy.turns
            save_file(trainer.policy.weights.snapshot(), folder / f"{place}.safetensors")
            (folder / f"{place}.json").write_text(json.dumps({"made": turns.made, "announced": turns.announced}))
    failed(processes, folder)


def failed(processes: Processes, folder: Path) -> None:
    """Leave before the second part on the first process, then fail within a part on both; the other one is told."""
    turns = processes.lockstep = Lockstep(torch.device("cpu"), lambda kind, step: torch.zeros(1))
    told, begun = [], []
    def stop_if_asked() -> None:
        if processes.rank == 0 and begun:
            raise Stopped("asked")
    try:
        with processes.collective():
            for part in processes.in_step([0, 1], lambda *_: 1, before=stop_if_asked):
                begun.append(part)
    except Stopped as error:
        told.append(str(error))
    told.append(turns.left or turns.alike)
    try:
        with processes.collective():
            for _ in processes.in_step([0], lambda *_: 1):
                turns.join(TRAIN, 3)  # without a word
                raise ZeroDivisionError("alone")
    except ZeroDivisionError as error:
        told.append(str(error))
    told.append(turns.left or turns.alike)
    with processes.collective():
        for _ in processes.in_step([0], lambda *_: processes.rank):  # of unequal shares nothing is said here
            told.append(turns.alike)
    (folder / f"told{processes.rank}.json").write_text(json.dumps(told))
    processes.lockstep = None
    processes.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lockstep")
    together(one_of_two, 2, folder)
    return folder


def found(folder: Path, case: str, rank: int) -> dict[str, list[int]]:
    return json.loads((folder / f"{case}{rank}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_sharded_processes_train_as_one(case, folder):
    weights = trained(case, False).policy.weights.snapshot()
    for rank in range(2):
        torch.testing.assert_close(load_file(folder / f"{case}{rank}.safetensors"), weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", ["equal", "finals"])
def test_equal_shares_agree_once_per_part_and_not_on_its_calls(case, folder):
    for rank in range(2):
        each = found(folder, case, rank)
        training = [kind for kind in each["made"] if kind in (TRAIN, LOOK)]
        agreed = [kind for kind in each["announced"] if kind == MEET]
        # The first-ratio check of the first epoch agrees on its calls.
        announced = [kind for kind in each["announced"] if kind in (TRAIN, LOOK)]
        assert len(training) >= 2 * len(agreed) and len(announced) <= len(training) // 4, (training, each["announced"])


def test_unequal_shares_agree_on_every_call(folder):
    """The second process has nothing to train in the first epoch, and as much as the other in one step of the second.
    """
    shares = [found(folder, "unequal", rank) for rank in range(2)]
    first, second = ([kind for kind in each["made"] if kind in (TRAIN, LOOK)] for each in shares)
    announced = [kind for kind in shares[0]["announced"] if kind in (TRAIN, LOOK)]
    assert len(announced) == len(first) - len(second) > len(second) > 0


def test_a_process_that_leaves_between_parts_takes_the_others_along_and_one_that_fails_in_one_leaves_alone(folder):
    told = [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == ["asked", False, "alone", False, False]
    assert told[1] == ["another process failed or was asked to stop", False, "alone", False, False]
