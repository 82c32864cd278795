"""Two processes, each of which keeps the graphs of its own share, train as one that replays."""

from pathlib import Path

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from flowgrpo.distributed.processes import Processes
from tests.helpers import tiny, tiny_runs
from tests.helpers.processes import together

SMALL = dict(train__group=4, train__lr=1e-3, train__steps=4)
# Whole groups on each process, one of which may have none to train, and halves of one group.
CASES = {
    "whole": dict(method="mix_grpo", parts__plan__size=2, train__prompts=2, train__micro_batch=4),
    "lopsided": dict(method="flow_grpo", parts__selection={"type": "DropZeroVariance"}, train__prompts=4,
                     train__micro_batch=4),
    "halves": dict(method="mix_grpo", parts__plan__size=2, train__prompts=1, train__micro_batch=2)}


def trained(case: str, one_pass: bool):
    trainer = tiny.trainer(train__one_pass=one_pass, **SMALL | CASES[case])
    for trainer.epoch in range(2):
        found = trainer.run_epoch()
    return trainer, found


def one_of_two(folder: Path) -> None:
    """Train every case; each process leaves its weights."""
    rank = Processes(Accelerator(cpu=True)).rank
    for case in CASES:
        trainer, found = trained(case, one_pass=True)
        assert trainer.geometry.slices == (2 if case == "halves" else 1) and found["one_pass/states"] > 0
        save_file(trainer.policy.weights.snapshot(), folder / f"{case}{rank}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    together(one_of_two, 2, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_shares_on_two_processes_train_as_one_process_that_replays(case, folder):
    weights = trained(case, one_pass=False)[0].policy.weights.snapshot()
    first, second = (load_file(folder / f"{case}{rank}.safetensors") for rank in (0, 1))
    tiny_runs.assert_same_weights(first, second)
    tiny_runs.assert_same_weights(first, weights, atol=1e-5)
