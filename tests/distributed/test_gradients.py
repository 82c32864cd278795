"""Sums of gradients over two processes: in buckets as in one call, and once a step of sharded weights.

`one_of_two` is all that a process does in its launch; it leaves what it found in a folder.
"""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from flowgrpo.distributed import gradients
from flowgrpo.distributed.gradients import Buckets, GradientSum
from flowgrpo.distributed.processes import OutOfMemoryElsewhere, Processes
from flowgrpo.distributed.signals import Stopped
from tests.distributed.test_processes import SMALL, half_flat
from tests.distributed.test_sharding import close, whole
from tests.helpers import tiny
from tests.helpers.collectives import Collectives
from tests.helpers.processes import together

SMALLEST, LARGER = 256, 2**15  # bytes of a bucket
FULL = SMALL | dict(method="mix_grpo", adapter__rank=0, train__lr=1e-4, train__steps=4, parts__plan__size=2)
CASES = {"even": {}, "lopsided": dict(parts__selection={"type": "DropZeroVariance"}, train__updates=2),
         "sharded": dict(train__checkpointing=True)}  # each step has several micro-batches


class Net(torch.nn.Module):
    """Weights: one is used twice, one by the second process alone, and one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(5, 40), torch.nn.Linear(40, 3)
        self.shared = torch.nn.Linear(40, 40, bias=False)
        self.rare, self.unused = (torch.nn.Parameter(torch.ones(40)) for _ in range(2))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))
        return self.last(x * self.rare if rare else x).square().mean()


def summed(kind: str, processes: Processes, fault: type[BaseException] | None = None) -> tuple[list, int]:
    """Gradients of a step with three backwards on one process and two on the other, and the calls within them.
    A fault ends a step before that one."""
    model = Net()
    parameters = list(model.parameters())
    summing = Buckets(processes, parameters) if kind == "buckets" else GradientSum(processes, parameters)
    data = torch.randn(5, 4, 5, generator=torch.Generator().manual_seed(1))
    for broken in ([True, False] if fault else [False]):
        for parameter in parameters:
            parameter.grad = None
        own = data[:3] if processes.rank == 0 else data[3:]
        try:
            with processes.collective(), summing.step(), Collectives() as seen:
                for number, x in enumerate(own):
                    last = number == len(own) - 1
                    summing.before_backward(last)
                    if broken and last and processes.rank:
                        raise fault("a fault of the second process")
                    model(x, rare=processes.rank == 1).backward()
            summing.finish(print)
        except (fault or OutOfMemoryElsewhere, OutOfMemoryElsewhere, Stopped) as error:
            assert broken and isinstance(error, (OutOfMemoryElsewhere, Stopped)) == (processes.rank == 0), error
    return [parameter.grad for parameter in parameters], len(seen.sizes["allreduce"])


def late(processes: Processes) -> list:
    """Gradients of a weight with two backwards behind the one that was said to be the last, on one process."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    summing = Buckets(processes, weights)
    with processes.collective(), summing.step():
        summing.before_backward(last=True)
        sum(weight.sum() for weight in weights).backward()
        for _ in range(2 * processes.rank):
            (5 * weights[0].sum()).backward()
    summing.finish(print)
    return [weight.grad.tolist() for weight in weights]


def trained(case: str, shard: bool):
    """A trainer after two epochs, the sizes of its calls, and its lines."""
    reward = {"red": half_flat() if case == "lopsided" else tiny.red}
    trainer, lines = tiny.trainer(rewards=reward, memory__shard=shard, **FULL | CASES[case]), []
    trainer.log = lines.append
    with Collectives() as seen:
        for trainer.epoch in range(2):
            trainer.run_epoch()
    return trainer, seen.sizes, lines


def one_of_two(folder: Path) -> None:
    processes, found = Processes(Accelerator(cpu=True)), {}
    gradients.BUCKET = SMALLEST
    for kind in ("flat", "buckets"):
        with Collectives() as seen:
            values, within = summed(kind, processes)
        save_file({str(number): value for number, value in enumerate(values) if value is not None},
                  folder / f"{kind}{processes.rank}.safetensors")
        size = 4 * sum(parameter.numel() for parameter in Net().parameters())
        found[kind] = {"calls": seen.sizes["allreduce"], "within": within, "bytes": size}
    for fault in (torch.OutOfMemoryError, ValueError):
        again, _ = summed("buckets", processes, fault)
        found[fault.__name__] = all(before is now is None or torch.equal(before, now)
                                    for before, now in zip(values, again))
    found["late"] = late(processes)
    gradients.BUCKET = LARGER
    for case in CASES:
        trainer, sizes, lines = trained(case, case == "sharded")
        save_file(whole(trainer), folder / f"{case}{processes.rank}.safetensors")
        blocks = sum(isinstance(module, FSDPModule) for module in trainer.policy.denoisers["transformer"].modules())
        found[case] = {"calls": sizes, "lines": lines, "blocks": blocks, "updates": trainer.optimization.update}
    (folder / f"{processes.rank}.json").write_text(json.dumps(found))


# --- what the tests look at ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    together(one_of_two, 2, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_buckets_sum_as_one_call_does_in_less_memory(folder, found):
    """Weights without a gradient on one process, and on both, are there too."""
    for rank, each in enumerate(found):
        flat, buckets = (load_file(folder / f"{kind}{rank}.safetensors") for kind in ("flat", "buckets"))
        close(buckets, flat)
        assert len(flat) == len(list(Net().parameters())) - 1  # one has none anywhere
        size = each["buckets"]["bytes"]
        assert sorted(each["flat"]["calls"])[-1] > size and max(each["buckets"]["calls"]) == SMALLEST
        # Nearly all are full. Besides there are one call of flags, and one at the end of the backwards.
        assert 0 <= len(each["buckets"]["calls"]) - 2 - size / SMALLEST <= 4
        # Most are on their way before the last backward ends.
        assert each["flat"]["within"] == 0 and each["buckets"]["within"] > 0.8 * size / SMALLEST


@pytest.mark.parametrize("fault", ["OutOfMemoryError", "ValueError"])
def test_a_step_that_failed_on_one_process_is_left_by_both_and_repeated(found, fault):
    assert [each[fault] for each in found] == [True, True]


def test_gradients_behind_the_last_backward_are_summed_too(found):
    assert [each["late"] for each in found] == [[[12.0] * 3, [2.0] * 3]] * 2


@pytest.mark.parametrize("case", CASES)
def test_all_weights_are_trained_as_on_one_process(case, folder, found):
    alone, sizes, _ = trained(case, False)
    assert not sizes
    for rank in (0, 1):
        close(load_file(folder / f"{case}{rank}.safetensors"), whole(alone))
    for each in found:
        assert each[case]["updates"] == alone.optimization.update > 1
        if case != "sharded":
            assert LARGER / 2 < max(each[case]["calls"]["allreduce"]) <= LARGER


def test_sharded_gradients_are_reduced_once_per_step_from_the_second_on(found):
    batches = SMALL["train__prompts"] * SMALL["train__group"] * 2 // (2 * SMALL["train__micro_batch"])  # of two steps
    for each in found:
        blocks, calls = each["sharded"]["blocks"], each["sharded"]["calls"]["reduce_scatter_base"]
        assert each["sharded"]["updates"] == 2 and blocks == 3 and batches == 4
        assert len(calls) == blocks * batches + blocks  # before: 2 * blocks * batches
    [line] = found[0]["sharded"]["lines"]
    assert line.startswith("memory.shard: gradients are reduced once per step: whole ones take")
    assert not found[1]["sharded"]["lines"]
