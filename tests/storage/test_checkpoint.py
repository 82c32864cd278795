"""Checkpoints: whole or not at all."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.storage import checkpoint


def save(folder, epoch, keep=2, value=1.0):
    return checkpoint.save(folder, epoch, {"a/b.c": torch.full((2, 3), value)}, {"epoch": epoch, "first": None}, keep)


def test_what_is_saved_is_loaded(tmp_path):
    tensors, state = checkpoint.load(save(tmp_path, 7, value=0.1))
    assert torch.equal(tensors["a/b.c"], torch.full((2, 3), 0.1)) and state == {"epoch": 7, "first": None}


def test_the_newest_are_kept(tmp_path):
    for epoch in (2, 9, 10, 100):
        save(tmp_path, epoch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-00010", "epoch-00100"]
    assert checkpoint.latest(tmp_path).name == "epoch-00100"


def test_an_epoch_that_is_saved_again_replaces_the_first(tmp_path):
    save(tmp_path, 3, value=1.0)
    assert checkpoint.load(save(tmp_path, 3, value=2.0))[0]["a/b.c"].unique().tolist() == [2.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_half_a_checkpoint_is_never_seen(tmp_path):
    """The tensors cannot be written to the end: what was there before stays the newest, and the next save works."""
    save(tmp_path, 3)
    with pytest.raises(TypeError):  # the state is written last
        checkpoint.save(tmp_path, 4, {"a": torch.ones(1)}, {"epoch": torch.ones(1)}, 2)
    assert (tmp_path / ".epoch-00004.tmp" / "state.safetensors").exists()
    assert checkpoint.latest(tmp_path).name == "epoch-00003"
    save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-00003", "epoch-00004"]


def test_where_there_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
def test_a_broken_one_is_told(tmp_path, file):
    path = save(tmp_path, 5)
    (path / file).write_bytes(b"{")
    with pytest.raises(UserError, match="epoch-00005 cannot be read.*: no earlier one is there, begin anew without"):
        checkpoint.load(path)
    save(tmp_path, 4)
    with pytest.raises(UserError, match="epoch-00005 cannot be read.*: remove it to go on from epoch-00004"):
        checkpoint.load(path)


def optimizer(seed: int, steps: int = 0) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    made = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = parameter.detach() ** 2
        made.step()
    return made


def test_an_optimiser_goes_on_where_it_was(tmp_path):
    first, second = optimizer(0, steps=3), optimizer(0)
    path = checkpoint.save(tmp_path, 1, checkpoint.optimizer_tensors(first), {}, 1)
    checkpoint.load_optimizer(second, checkpoint.load(path)[0])
    for parameter, other in zip(first.param_groups[0]["params"], second.param_groups[0]["params"]):
        other.data.copy_(parameter)
        parameter.grad = other.grad = torch.ones_like(parameter)
    first.step(), second.step()
    for parameter, other in zip(first.param_groups[0]["params"], second.param_groups[0]["params"]):
        assert torch.equal(parameter, other)


def test_an_optimiser_without_a_state_stays_so():
    made = optimizer(0)
    checkpoint.load_optimizer(made, checkpoint.optimizer_tensors(made))
    assert made.state_dict()["state"] == {}


def sharded(folder):
    """A checkpoint of a [5, 2] tensor in three shards, the last of which has no row, beside a whole one."""
    values = torch.arange(10.0).view(5, 2)
    checkpoint.begin(folder, 1)
    for index, rows in enumerate((values[:3], values[3:], values[5:])):
        checkpoint.save_shard(folder, 1, {"weights/a": rows}, index, 3)
    return values, checkpoint.save(folder, 1, {"step": torch.tensor(7.0)}, {}, 2, begun=True)


def test_shards_are_read_whole_or_by_rows(tmp_path):
    values, path = sharded(tmp_path)
    tensors, _ = checkpoint.load(path)
    assert torch.equal(tensors["weights/a"], values) and tensors["step"] == 7
    assert checkpoint.shapes(path) == {"weights/a": (5, 2), "step": ()}
    for low, high in ((0, 2), (2, 4), (4, 5), (5, 5)):
        tensors, _ = checkpoint.load(path, lambda key, rows=slice(low, high): rows if key == "weights/a" else None)
        assert torch.equal(tensors["weights/a"], values[low:high]) and tensors["step"] == 7
    assert [file.name for file in tmp_path.iterdir()] == ["epoch-00001"]


def test_a_shard_that_is_missing_is_told(tmp_path):
    _, path = sharded(tmp_path)
    (path / "shard-00001-of-00003.safetensors").unlink()
    for read in (checkpoint.load, checkpoint.shapes):
        with pytest.raises(UserError, match="epoch-00001 cannot be read .*one of 2 shards.*begin anew"):
            read(path)


def test_a_shard_that_another_disk_would_get_is_told(tmp_path):
    with pytest.raises(UserError, match="put `output` on a disk that all nodes share"):
        checkpoint.save_shard(tmp_path, 1, {"weights/a": torch.ones(1)}, 0, 2)
