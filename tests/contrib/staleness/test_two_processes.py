"""Two processes whose epochs are drawn ahead train as one."""

import json
from pathlib import Path

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.processes import together

EPOCHS = 4
SMALL = dict(train__group=4, train__lr=1e-2, train__steps=4, train__epochs=EPOCHS, train__prompts=2,
             train__micro_batch=4)
WINDOW = dict(method="mix_grpo", parts__plan__size=2)
# Whole groups on each process, shares that differ, halves of one group, and weights in shares.
CASES = {
    "whole": SMALL | WINDOW | dict(train__staleness=1),
    "lopsided": SMALL | dict(method="flow_grpo", train__staleness=2, parts__selection={"type": "DropZeroVariance"}),
    "halves": SMALL | WINDOW | dict(train__staleness=1, train__prompts=1, train__micro_batch=2),
    "shares": SMALL | WINDOW | dict(train__staleness=2, memory__shard=True),
    "texts": dict(train__staleness=2, train__epochs=EPOCHS, train__lr=1e-2)}


def flat(images, prompts):
    """The red of an image, and nothing of prompts with an odd number of letters."""
    return [0.5 if len(prompt) % 2 else red for prompt, red in zip(prompts, tiny.red(images, prompts).tolist())]


def trainer(case: str, rewards=None, **options):
    settings = CASES[case] | options
    if case == "texts":
        return tiny_text.trainer(rewards=rewards or {"short": tiny_text.short}, **settings)
    return tiny.trainer(rewards=rewards or {"red": flat if case == "lopsided" else tiny.red}, **settings)


def epochs(made, count: int = EPOCHS) -> list[dict]:
    """The metrics of the next epochs that do not tell of time or memory."""
    return [{key: value for key, value in line.items() if isinstance(value, (int, float)) and not
             key.startswith(("seconds", "memory", "mfu"))} for line in tiny_runs.next_epochs(made, count)]


def one_of_two(folder: Path) -> None:
    """Train every case; each process leaves its weights and metrics, and how it ends when a reward of one fails."""
    processes = Processes(Accelerator(cpu=True))
    for case in CASES:
        made = trainer(case)
        metrics = epochs(made)
        save_file(made.policy.weights.snapshot(), folder / f"{case}{processes.rank}.safetensors")
        found = {"metrics": metrics, "sampled": made.progress.sampled}
        (folder / f"{case}{processes.rank}.json").write_text(json.dumps(found))
    resumed(folder, processes)
    (folder / f"failed{processes.rank}").write_text(failed(processes))
    processes.wait()


def resumed(folder: Path, processes: Processes) -> None:
    """Go on from a checkpoint of two epochs: what was drawn ahead is drawn anew."""
    made, other = trainer("whole"), trainer("whole")
    epochs(made, 2)
    tiny_runs.resume(made, other, folder / "resumed")
    assert len(loop.extension(made, "Staleness").queue) == 1 and not loop.extension(other, "Staleness").queue
    ages = [found["staleness/epochs"] for found in epochs(other, 2)]
    (folder / f"ages{processes.rank}.json").write_text(json.dumps(ages))


def failed(processes: Processes) -> str:
    """How a process ends whose reward fails in the second epoch, and the other one."""
    calls = []
    def broken(images, prompts):
        calls.append(1)
        if processes.rank == 1 and len(calls) > 1:
            raise UserError("no answer")
        return tiny.red(images, prompts)
    made = trainer("whole", {"red": broken})
    try:
        epochs(made)
    except UserError as error:
        return f"error: {error}"
    except Stopped as error:
        return f"stopped: {error}"
    return "went on"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    together(one_of_two, 2, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case, folder):
    alone = trainer(case, memory__shard=False) if case == "shares" else trainer(case)
    start = alone.policy.weights.snapshot()
    metrics, weights = epochs(alone), alone.policy.weights.snapshot()
    assert max((weights[key] - start[key]).abs().max() for key in weights) > 1e-3
    bound = CASES[case]["train__staleness"]
    assert [each["staleness/epochs"] for each in metrics] == [min(epoch, bound) for epoch in range(EPOCHS)]
    assert metrics[-1]["staleness/weight"] != 1
    for rank in range(2):
        found = json.loads((folder / f"{case}{rank}.json").read_text())
        assert found["sampled"] == alone.progress.sampled
        for ours, theirs in zip(found["metrics"], metrics, strict=True):
            names = [name for name in theirs if name.startswith(("reward/", "staleness/")) or name == "grad_norm"]
            assert len(names) > 5
            assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names},
                                                                         rel=1e-3, abs=1e-5)
        tiny_runs.assert_same_weights(load_file(folder / f"{case}{rank}.safetensors"), weights, atol=2e-5)


def test_resumed_and_failed_runs_of_two(folder):
    for rank in range(2):
        assert json.loads((folder / f"ages{rank}.json").read_text()) == [0, 1]
    said = [(folder / f"failed{rank}").read_text() for rank in range(2)]
    assert said[0].startswith("stopped: another process failed") and said[1] == "error: no answer"
