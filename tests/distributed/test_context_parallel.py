"""Processes that share the tokens of their rows train as one, by diffusers' context parallelism on gloo."""

import functools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from flowgrpo.config.geometry import teams
from flowgrpo.config.sections import Memory
from flowgrpo.distributed import shards
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import measure
from flowgrpo.policies.pipelines import attention
from flowgrpo.tools.check.tiny import make
from flowgrpo.training import state
from tests.distributed.test_processes import held
from tests.helpers import tiny
from tests.helpers.processes import together
from tests.helpers.refusals import refused

SMALL = dict(train__prompts=4, train__group=2, train__micro_batch=2, train__lr=1e-3, train__steps=3, train__epochs=2)
CASES = {
    "mix_grpo": dict(method="mix_grpo", parts__plan__size=2, train__updates=2, train__checkpointing=True),
    "diffusion_nft": dict(method="diffusion_nft")}
# The same with weights that the processes hold in shares: under a LoRA, and all of them, which are trained.
SHARDED = {
    "lora": CASES["mix_grpo"], "nft": CASES["diffusion_nft"],
    "full": CASES["mix_grpo"] | dict(adapter__rank=0, train__lr=1e-4)}


def bright(images, prompts):
    """The mean of a clip; a process counts its calls in `seen`."""
    bright.seen += 1
    return images.flatten(1).mean(1)


def trained(case: str, members: int = 1, shard: bool = False, epochs: int = 2):
    """A trainer of a tiny Wan after two epochs, and their metrics."""
    pipe, call = make("WanPipeline")
    settings = SMALL | (CASES | SHARDED)[case] | dict(memory__context_parallel=members, memory__shard=shard)
    bright.seen = 0
    torch.manual_seed(0)
    policy = tiny.policy(pipe, settings.get("adapter__rank", 2), call=call,
                         memory=Memory(context_parallel=members, shard=shard),
                         checkpointing=settings.get("train__checkpointing", False))
    trainer = tiny.trainer(policy, {"bright": bright}, reward={"bright": 1.0}, **settings)
    metrics = []
    for trainer.epoch in range(epochs):
        metrics.append({key: value for key, value in trainer.run_epoch().items() if "seconds" not in key})
    return trainer, metrics


def one_of_several(folder: Path, members: int) -> None:
    """Train every case in teams; each process leaves its weights, its metrics and its calls of the reward."""
    processes = Processes(Accelerator(cpu=True), members)
    place = f"{processes.rank}{processes.member}"
    with mock.patch("torch.accelerator.device_count", return_value=1):  # diffusers divides by it
        for case in CASES:
            trainer, metrics = trained(case, members)
            save_file(trainer.policy.weights.snapshot(), folder / f"{case}{place}.safetensors")
            measured = measure(trainer.policy, trainer.prompts[:3], {"bright": bright}, steps=2, guidance=1.0,
                               samples=1, micro_batch=2, processes=trainer.processes)
            found = {"metrics": metrics, "calls": bright.seen, "measured": measured.scores["bright"],
                     "first": trainer.processes.first, "any": trainer.processes.any(processes.member == 1),
                     "total": trainer.processes.total([1, processes.rank])}
            (folder / f"{case}{place}.json").write_text(json.dumps(found))


def whole(trainer) -> dict[str, torch.Tensor]:
    """All trained weights, gathered from the processes that hold them; every process calls it."""
    return {key: (value.full_tensor() if shards.is_shard(value) else value).detach().clone()
            for key, value in trainer.policy.weights.named.items()}


def one_of_sharded(folder: Path, members: int) -> None:
    """Train the sharded cases in teams, the first alone in two teams.

    Each process leaves its weights, its metrics, how much it holds, and whether a checkpoint has the same weights.
    """
    processes = Processes(Accelerator(cpu=True), members)
    place = f"{processes.rank}{processes.member}"
    with mock.patch("torch.accelerator.device_count", return_value=1):
        for case in SHARDED if processes.count == 1 else [*SHARDED][:1]:
            trainer, metrics = trained(case, members, shard=True)
            save_file(whole(trainer), folder / f"{case}{place}.safetensors")
            trainer.epoch = 2
            trainer.progress.saved_counters = state.counters(trainer)
            state.save(trainer, folder / case)
            again, _ = trained(case, members, shard=True, epochs=0)
            state.restore(again, folder / case / "checkpoints" / "epoch-00002")
            same = all(torch.equal(*pair) for pair in zip(whole(again).values(), whole(trainer).values(), strict=True))
            found = {"metrics": metrics, "held": held(trainer.policy), "same": same and again.epoch == 2}
            (folder / f"{case}{place}.json").write_text(json.dumps(found))


def same_metrics(one: list[dict], other: list[dict]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours["reward/bright/mean"] == pytest.approx(theirs["reward/bright/mean"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@functools.cache
def alone(case: str):
    """The trainer of a case in one process, and its metrics."""
    return trained(case)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """By the number of processes: what one team or two have left behind, with shares of the weights."""
    folders = {count: tmp_path_factory.mktemp(f"sharded{count}") for count in (2, 4)}
    for count, folder in folders.items():
        together(one_of_sharded, count, folder, 2)
    return folders


@pytest.mark.parametrize("case, count", [*((case, 2) for case in SHARDED), ("lora", 4)])
def test_a_team_that_shares_tokens_and_weights_trains_as_one_process(case, count, sharded):
    trainer, whole_metrics = alone(case)
    weights, files = whole(trainer), sorted(sharded[count].glob(f"{case}*.safetensors"))
    exact = 1e-4 if case == "nft" else 1e-6
    assert len(files) == count
    for file in files:
        found, share = load_file(file), json.loads(file.with_suffix(".json").read_text())
        torch.testing.assert_close(found, weights, rtol=0, atol=exact)
        assert share["same"] and share["held"] < 0.75 * held(trainer.policy)
        same_metrics(share["metrics"], whole_metrics)


@pytest.fixture(scope="module", params=[2, 4], ids=["one team", "two teams"])
def folder(request, tmp_path_factory):
    """What one team or two, of two processes each, have left behind."""
    folder = tmp_path_factory.mktemp("context")
    together(one_of_several, request.param, folder, 2)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_team_trains_as_one_process(case, folder):
    trainer, whole_metrics = alone(case)
    weights, (other, call) = trainer.policy.weights.snapshot(), make("WanPipeline")
    start = tiny.policy(other, call=call).weights.snapshot()
    assert max((weights[key] - start[key]).abs().max() for key in weights) > 1e-4
    exact = 1e-6 if case == "mix_grpo" else 1e-4  # Adam scales the rounding of a gradient that is near zero
    files = sorted(folder.glob(f"{case}*.safetensors"))
    assert len(files) in (2, 4)
    for file in files:
        torch.testing.assert_close(load_file(file), weights, rtol=0, atol=exact)
    found = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{case}*.json"))]
    measured = measure(trainer.policy, trainer.prompts[:3], {"bright": bright}, steps=2, guidance=1.0, samples=1,
                       micro_batch=2)
    for each in found:
        same_metrics(each["metrics"], whole_metrics)
        assert each["measured"] == pytest.approx(measured.scores["bright"], abs=1e-5)
        assert each["any"] and each["total"] == [len(found) // 2, len(found) // 2 - 1]
    assert [each["first"] for each in found] == [True] + [False] * (len(found) - 1)
    assert all((each["calls"] > 0) == (place % 2 == 0) for place, each in enumerate(found))  # the first member's scores


def test_teams_divide_the_processes():
    assert teams(1, 5) == 5 and teams(4, 8) == 2
    refused("memory.context_parallel is 3, which does not divide the 4 processes: use one of 1, 2, 4, or 6 processes",
            teams, 3, 4)


def no_plan(folder: Path) -> None:
    """Ask for what diffusers cannot split, in two processes."""
    processes, told = Processes(Accelerator(cpu=True)), []
    for pipe, members, size in [(tiny.sd3(), 2, 8), (make("WanPipeline")[0], 4, 8), (make("WanPipeline")[0], 2, 2)]:
        try:
            with mock.patch("torch.accelerator.device_count", return_value=1):
                attention.enable([pipe.transformer], members, torch.device("cpu"))
            pipe.transformer(torch.ones(1, 4, 1, size, size), torch.ones(1), torch.ones(1, 3, 16), return_dict=False)
        except UserError as error:
            told.append(str(error))
    (folder / "told").write_text("\n".join(told))
    processes.wait()  # the first one holds the others' store


def test_a_model_that_cannot_be_split_is_refused_in_one_line(tmp_path):
    together(no_plan, 4, tmp_path)
    plan, heads, tokens = (tmp_path / "told").read_text().splitlines()
    assert plan == "memory.context_parallel is 2, but diffusers has no plan to split SD3Transformer2DModel: use 1"
    assert tokens.startswith("memory.context_parallel is 2, which does not divide the tokens of WanTransformer3DModel")
    assert "WanTransformer3DModel has 2 attention heads, which 4 processes cannot share evenly" in heads
