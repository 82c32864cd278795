"""Sharded weights train as whole ones: all weights and a LoRA, over two processes and over two nodes of two.

`one_of_two` and `one_of_four` are all that a process does in its launch; they leave what they found in a folder.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file

from flowgrpo.cli import main
from flowgrpo.distributed import shards
from flowgrpo.policies.weights import sharding
from flowgrpo.storage import checkpoint
from flowgrpo.training import state
from tests.distributed.test_processes import REWARD, SMALL, arguments, half_flat, held, join_anew
from tests.helpers import tiny
from tests.helpers.processes import free_ports, together
from tests.helpers.refusals import refused
from tests.helpers.tiny_runs import assert_same_weights, command

# AdamW divides by gradients: those that are zero but for rounding move weights by the learning rate's share of it.
LORA = SMALL | dict(train__steps=4)
FULL = LORA | dict(adapter__rank=0, train__lr=1e-4)
CASES = {
    "full": FULL | dict(method="mix_grpo", parts__plan__size=2, train__inner_epochs=2, train__ema=0.9,
                        train__checkpointing=True),
    "full kl": FULL | dict(method="flow_grpo", parts__kl={"type": "GaussianKL", "weight": 0.1}, train__updates=2,
                           parts__selection={"type": "DropZeroVariance"}),
    "full lag": FULL | dict(method="diffusion_nft", train__updates=2),
    "lora": LORA | dict(method="mix_grpo", parts__plan__size=2, train__inner_epochs=2)}


# --- in every process ------------------------------------------------------------------------------------------------
def made(case: str, shard: bool | str, **options):
    """A trainer of a case before its first epoch."""
    return tiny.trainer(rewards={"red": half_flat() if case == "full kl" else tiny.red}, memory__shard=shard,
                        **CASES[case] | options)


def epochs(trainer, first: int, last: int) -> list[dict]:
    """The metrics of some epochs, the last of which is as good as saved."""
    metrics = []
    for trainer.epoch in range(first, last):
        metrics.append(trainer.run_epoch())
    trainer.epoch = last
    trainer.progress.saved_counters = state.counters(trainer)
    return metrics


def whole(trainer) -> dict[str, torch.Tensor]:
    """All weights of the denoiser and their average, gathered; every process calls it."""
    weights = sharding.state_dict(trainer.policy.denoisers["transformer"], keep=True)
    for key, parameter in (trainer.policy.weights.named if trainer.optimization.ema else {}).items():
        average = trainer.optimization.ema[key]
        average = shards.like(average, parameter).full_tensor() if shards.is_shard(parameter) else average
        weights[f"ema.{key}"] = average
    return {key: tensor.detach().clone() for key, tensor in weights.items()}


def leave(folder: Path, name: str, trainer, metrics: list[dict]) -> None:
    """Leave weights and metrics of a trainer, and how much this process holds of it."""
    rank = trainer.processes.rank
    save_file(whole(trainer), folder / f"{name}{rank}.safetensors")
    optimizer = checkpoint.optimizer_tensors(trainer.optimization.optimizer).values()
    moments = sum(shards.local(tensor).numel() for tensor in optimizer)
    found = {"metrics": metrics, "held": held(trainer.policy), "moments": moments}
    (folder / f"{name}{rank}.json").write_text(json.dumps(found))


def resumed(folder: Path, name: str, source: Path, shard: bool | str) -> None:
    """Restore the checkpoint of a case's first epoch and run the second."""
    trainer = made("full", shard)
    state.restore(trainer, source / "checkpoints" / "epoch-00001")
    leave(folder, name, trainer, epochs(trainer, 1, 2))


def one_of_two(folder: Path) -> None:
    Accelerator(cpu=True)  # first, as in a run: weights are sharded over the processes that it joins
    for case in ("full", "full kl", "full lag"):
        trainer = made(case, True)
        metrics = epochs(trainer, 0, 1)
        if case == "full":
            state.save(trainer, folder / "of two")
            state.LARGE = 0  # from here on, checkpoints are written by threads
            state.save_epoch(trainer, folder / "by threads", last=False)
        metrics += epochs(trainer, 1, 2)
        trainer.progress.saving.look(wait=True)
        leave(folder, case, trainer, metrics)
        if case == "full":
            said = trainer.policy.weights.save(folder / "saved")
            assert said == f"saved all weights of transformer to {folder / 'saved'}"
    resumed(folder, "two by two", folder / "of two", True)
    resumed(folder, "one by two", folder / "of one", True)
    join_anew(json.loads((folder / "ports").read_text())[1])
    (folder / f"code{trainer.processes.rank}").write_text(str(main(arguments(folder, "run"))))


def one_of_four(folder: Path) -> None:
    Accelerator(cpu=True)
    for case in ("lora", "full"):
        trainer = made(case, "nodes")
        leave(folder, f"nodes {case}", trainer, epochs(trainer, 0, 2))
    state.save(trainer, folder / "of four")
    resumed(folder, "two by four", folder / "of two", "nodes")
    join_anew(json.loads((folder / "ports").read_text())[3])
    code = main([*arguments(folder, "run"), "--resume", "--memory.shard=nodes"])
    (folder / f"code{trainer.processes.rank}").write_text(str(code))


# --- what the tests look at ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """What one, two and four processes have left behind; of a run of all weights, sharded, the second process asks to
    stop in the second epoch."""
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "stop").touch()
    command(model, folder, REWARD, train__epochs=3, train__ema=0.9, parts__plan__size=2, eval__every=3,
            eval__weights="ema", memory__shard=True, **FULL)
    ports = free_ports(4)
    (folder / "ports").write_text(json.dumps(ports))
    trainer = made("full", False)
    epochs(trainer, 0, 1)
    state.save(trainer, folder / "of one")
    together(one_of_two, 2, folder, timeout=500, MASTER_PORT=ports[0])
    assert [(folder / f"code{rank}").read_text() for rank in range(2)] == ["130", "130"]
    shutil.copytree(folder / "run", folder / "stopped")
    together(one_of_four, 4, folder, timeout=500, node=2, MASTER_PORT=ports[2])
    assert [(folder / f"code{rank}").read_text() for rank in range(4)] == ["0"] * 4
    return folder


@pytest.fixture(scope="module")
def alone():
    """Weights and metrics of the cases on one process, each trained once."""
    known = {}
    def trained(case: str):
        if case not in known:
            trainer = made(case, False)
            start, metrics = whole(trainer), epochs(trainer, 0, 2)
            known[case] = start, whole(trainer), metrics
        return known[case]
    return trained


def close(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "full kl", "full lag", "nodes lora", "nodes full"])
def test_sharded_weights_train_as_whole_ones(name, folder, alone):
    start, weights, metrics = alone(name.removeprefix("nodes "))
    found = [load_file(folder / f"{name}{rank}.safetensors") for rank in range(4 if "nodes" in name else 2)]
    assert max((weights[key] - start[key]).abs().max() for key in start) > (1e-3 if "lora" in name else 1e-4)
    for each in found:
        close(each, weights)
    told = json.loads((folder / f"{name}0.json").read_text())["metrics"]
    for epoch, expected in zip(told, json.loads(json.dumps(metrics)), strict=True):
        assert epoch == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["two by two", "one by two", "two by four"])
def test_a_checkpoint_is_resumed_by_any_number_of_processes(name, folder, alone):
    _, weights, metrics = alone("full")
    found = load_file(folder / f"{name}1.safetensors")
    close(found, weights)
    [told] = json.loads((folder / f"{name}1.json").read_text())["metrics"]
    assert told == pytest.approx(json.loads(json.dumps(metrics[1])), rel=1e-4, abs=1e-5)
    if name == "two by two":  # the very same numbers
        assert_same_weights(load_file(folder / "full1.safetensors"), found)


@pytest.mark.parametrize("source", ["of two", "of four"])
def test_one_process_resumes_what_several_saved(source, folder, alone):
    trainer, [path] = made("full", False), (folder / source / "checkpoints").iterdir()
    state.restore(trainer, path)
    if source == "of two":
        epochs(trainer, 1, 2)
    close(whole(trainer), alone("full")[1])


def test_each_process_holds_and_writes_its_shard(folder):
    trainer = made("full", False)
    everything = held(trainer.policy)
    for name, count, parts in (("full", 2, 2), ("nodes full", 4, 2)):
        found = [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(count)]
        assert sum(each["held"] for each in found) == everything * count // parts
        assert max(each["held"] for each in found) < 0.55 * everything
        assert max(each["moments"] for each in found) < 2 * 0.55 * everything
    for source in ("of two", "of four"):
        [path] = (folder / source / "checkpoints").iterdir()
        assert sorted(file.name for file in path.iterdir()) == [
            "manifest.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors", "state.json",
            "state.safetensors"]
        assert all(key.endswith(".step") for key in load_file(path / "state.safetensors"))
        sizes = [file.stat().st_size for file in path.glob("shard-*")]
        assert max(sizes) < 0.55 * sum(sizes)


def test_shards_written_by_threads_are_those_written_at_once(folder):
    """The weights have changed in the meantime."""
    places = [folder / name / "checkpoints" / "epoch-00001" for name in ("by threads", "of two")]
    threads, at_once = ({file.name: file.read_bytes() for file in place.iterdir()} for place in places)
    assert threads == at_once


def test_gathered_weights_load_into_stock_diffusers(folder, alone):
    saved = SD3Transformer2DModel.from_pretrained(folder / "saved" / "transformer").state_dict()
    expected = {key: value for key, value in alone("full")[1].items() if not key.startswith("ema.")}
    close(saved, expected)
    config = json.loads((folder / "saved" / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "SD3Transformer2DModel"


def test_a_stopped_run_of_two_is_finished_by_two_nodes_of_two(folder):
    done = [path.name for path in (folder / "stopped" / "run" / "checkpoints").iterdir()]
    assert done in (["epoch-00001"], ["epoch-00002"]) and not (folder / "stop").exists()
    assert main([*arguments(folder, "one"), "--memory.shard=false"]) == 0
    one, four = (folder / name / "run" for name in ("one", "run"))
    weights = [load_file(run / "transformer" / "diffusion_pytorch_model.safetensors") for run in (one, four)]
    close(*weights)
    states = [checkpoint.load(run / "checkpoints" / "epoch-00003")[0] for run in (one, four)]
    assert states[0].keys() == states[1].keys()
    close(*({key: value for key, value in each.items() if not key.startswith("optimizer/")} for each in states))
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, four)]
    for when in ("before", "after"):
        assert [*summaries[0][when].values()] == pytest.approx([*summaries[1][when].values()], abs=1e-5)


# --- alone -----------------------------------------------------------------------------------------------------------
def test_a_run_of_one_process_cannot_be_sharded(folder, capsys):
    assert main([*arguments(folder, "refused")]) == 2
    assert "memory.shard is true, but the run has one process: launch several" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1", "3"])
def test_nodes_of_other_sizes_are_refused_in_one_line(size):
    assert sharding.of_node(4, {"LOCAL_WORLD_SIZE": "2"}) == 2
    told = f"memory.shard is nodes, but of 4 processes this node has {size}"
    refused(told, sharding.of_node, 4, {"LOCAL_WORLD_SIZE": size})


def test_scalars_and_weights_of_another_precision_than_most_stay_whole():
    """Older FSDP2 collects weights of one precision together, and diffusers keeps norms in fp32 beside bf16."""
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).bfloat16()
    block[1].float()
    block.scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    lora = block.lora = torch.nn.Parameter(torch.ones(2))
    whole = sharding._apart(block, {lora})
    assert {name for name, parameter in block.named_parameters() if parameter in whole} == {
        "1.weight", "1.bias", "scale"}
    assert sharding._apart(torch.nn.GELU(), set()) == set()

