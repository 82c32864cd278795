"""Two processes in seconds: their collectives, and a method that trains as on one. `test_processes` has the rest."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stopped
from tests.distributed.test_processes import assert_same_as_alone, trained
from tests.helpers.processes import together

pytestmark = pytest.mark.fast


def collectives(processes: Processes) -> dict:
    """What the processes tell each other, with values that differ between them."""
    rank, found = processes.rank, {}
    found["rows"] = processes.gather(torch.full((rank, 2), 7.0 + rank)).tolist()
    found["places"] = processes.gather(torch.arange(3) + 10 * rank).tolist()
    found["nothing"] = list(processes.gather(torch.empty(0, 4)).shape)
    found["total"], found["own"] = processes.total([1, rank]), processes.own(list(range(5)))
    found["any"] = [processes.any(rank == 1), processes.any(False)]
    parameters = [torch.nn.Parameter(torch.full((2,), float(rank))) for _ in range(3)]
    processes.require_equal(parameters[:1])
    parameters[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    parameters[1].grad = torch.ones(2) if rank else None
    processes.add_gradients(parameters)
    found["agreed"] = parameters[0].tolist() + parameters[1].tolist()
    found["gradients"] = [None if p.grad is None else p.grad.tolist() for p in parameters]
    try:
        with processes.collective():
            if rank:
                raise ValueError("out of reach")
    except (ValueError, Stopped) as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    return found


def one_of_two(folder: Path) -> None:
    """Leave the weights and what was found of one process."""
    processes = Processes(Accelerator(cpu=True))
    found = {"collectives": collectives(processes)}
    trainer, found["mix_grpo"] = trained("mix_grpo")
    save_file(trainer.policy.weights.snapshot(), folder / f"{processes.rank}.safetensors")
    (folder / f"{processes.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    together(one_of_two, 2, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_what_processes_tell_each_other(found):
    first, second = (each["collectives"] for each in found)
    for each in (first, second):
        assert each["rows"] == [[8.0, 8.0]] and each["places"] == [0, 1, 2, 10, 11, 12] and each["nothing"] == [0, 4]
        assert each["total"] == [2, 1] and each["any"] == [True, False]
        assert each["gradients"] == [[3.0, 6.0], [1.0, 1.0], None]
    assert (first["own"], second["own"]) == ([0, 1], [2, 3, 4])
    assert (first["agreed"], second["agreed"]) == ([0, 0, 0, 0], [0, 0, 1, 1])
    assert first["raised"] == "Stopped: another process failed or was asked to stop"
    assert second["raised"] == "ValueError: out of reach"


def test_two_processes_train_as_one(folder, found):
    both = [load_file(folder / f"{rank}.safetensors") for rank in (0, 1)]
    assert_same_as_alone("mix_grpo", both, [each["mix_grpo"] for each in found])
