"""Checkpoints: whole or not at all, and the newest whole one is used."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.errors import UserError
from flowgrpo.storage import checkpoint, manifest
from flowgrpo.storage.checkpoint import newest_whole
from flowgrpo.storage.places import checkpoints, foreign
from flowgrpo.training import state
from tests.helpers.refusals import message, refused


def save(folder, epoch, keep=2, value=1.0):
    return checkpoint.save(folder, epoch, {"a/b.c": torch.full((2, 3), value)}, {"epoch": epoch, "first": None}, keep)


def test_what_is_saved_is_loaded_and_the_newest_are_kept(tmp_path):
    tensors, state = checkpoint.load(save(tmp_path, 7, value=0.1))
    assert torch.equal(tensors["a/b.c"], torch.full((2, 3), 0.1)) and state == {"epoch": 7, "first": None}
    assert checkpoint.load(save(tmp_path, 7, value=2.0))[0]["a/b.c"].unique().tolist() == [2.0]  # in place of the first
    assert len(list(tmp_path.iterdir())) == 1
    for epoch in (2, 9, 10, 100):
        save(tmp_path, epoch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-00010", "epoch-00100"]
    assert checkpoint.latest(tmp_path).name == "epoch-00100"
    assert checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.parametrize("skipped, kept", [
    ((), [5, 6]), ((5,), [4, 6]), ((6,), [4, 5, 6]), ((5, 6), [3, 4, 6]), ((4, 6), [3, 5, 6]), ((4, 5, 6), [2, 3, 6]),
    ((2, 3, 4, 5, 6), [1, 6]), ((1, 2, 3, 4, 5, 6), [5, 6])])
def test_a_checkpoint_after_a_skipped_update_takes_the_place_of_no_good_one(skipped, kept, tmp_path):
    for epoch in range(1, 7):
        checkpoint.save(tmp_path, epoch, {"a/b": torch.ones(1)}, {"epoch": epoch, "unsteady": epoch in skipped}, 2)
    assert [*checkpoints(tmp_path)] == kept


def test_half_a_checkpoint_is_never_seen(tmp_path):
    """The tensors cannot be written to the end: what was there before stays the newest, and the next save works."""
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 3)
    with pytest.raises(TypeError):  # the state is written last
        checkpoint.save(tmp_path, 4, {"a": torch.ones(1)}, {"epoch": torch.ones(1)}, 2)
    assert (tmp_path / ".epoch-00004.tmp" / "state.safetensors").exists()
    assert checkpoint.latest(tmp_path).name == "epoch-00003"
    save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-00003", "epoch-00004"]


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
def test_a_broken_one_is_told(tmp_path, file):
    path = save(tmp_path, 5)
    (path / file).write_bytes(b"{")
    refused("epoch-00005 cannot be read.*: no earlier one is there, begin anew without", checkpoint.load, path)
    save(tmp_path, 4)
    refused("epoch-00005 cannot be read.*: remove it to go on from epoch-00004", checkpoint.load, path)


def optimizer(seed: int, steps: int = 0) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    made = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = parameter.detach() ** 2
        made.step()
    return made


def test_an_optimizer_goes_on_where_it_was(tmp_path):
    first, second = optimizer(0, steps=3), optimizer(0)
    path = checkpoint.save(tmp_path, 1, checkpoint.optimizer_tensors(first), {}, 1)
    checkpoint.load_optimizer(second, checkpoint.load(path)[0])
    for parameter, other in zip(first.param_groups[0]["params"], second.param_groups[0]["params"]):
        other.data.copy_(parameter)
        parameter.grad = other.grad = torch.ones_like(parameter)
    first.step(), second.step()
    for parameter, other in zip(first.param_groups[0]["params"], second.param_groups[0]["params"]):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("change, why", [
    ({"0.exp_avg": None}, "lacks 0.exp_avg"), ({"1.exp_avg_sq": torch.zeros(7)}, "1.exp_avg_sq of [7] in torch.float"),
    ({"0.exp_avg": torch.zeros(3, dtype=torch.bool)}, "0.exp_avg of [3] in torch.bool"),
    ({"9.step": torch.tensor(1.0)}, "is of 10 parameters, expected 2")])
def test_a_state_that_does_not_fit_its_optimizer_is_refused(change, why):
    tensors = checkpoint.optimizer_tensors(optimizer(0, steps=1)) | change
    with pytest.raises(ValueError, match=re.escape(why)):
        checkpoint.load_optimizer(optimizer(0), {key: tensor for key, tensor in tensors.items() if tensor is not None})


def test_an_optimizer_without_a_state_stays_so():
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


def test_shards_and_manifests_are_read(tmp_path):
    values, path = sharded(tmp_path)
    tensors, _ = checkpoint.load(path)
    assert torch.equal(tensors["weights/a"], values) and tensors["step"] == 7
    assert checkpoint.shapes(path) == {"weights/a": (5, 2), "step": ()}
    for low, high in ((0, 2), (2, 4), (4, 5), (5, 5)):
        tensors, _ = checkpoint.load(path, lambda key, rows=slice(low, high): rows if key == "weights/a" else None)
        assert torch.equal(tensors["weights/a"], values[low:high]) and tensors["step"] == 7
    assert [file.name for file in tmp_path.iterdir()] == ["epoch-00001"]
    path = saved(tmp_path, 1)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["state.json", "state.safetensors"]
    assert listed["state.json"] == {"bytes": (path / "state.json").stat().st_size,
                                    "sha256": manifest.sha256(path / "state.json")}


def test_a_shard_that_is_missing_is_told(tmp_path):
    _, path = sharded(tmp_path)
    (path / "shard-00001-of-00003.safetensors").unlink()
    for read in (checkpoint.load, checkpoint.shapes):
        refused("epoch-00001 cannot be read .*shard.*begin anew", read, path)


def test_a_shard_that_another_disk_would_get_is_told(tmp_path):
    with pytest.raises(UserError, match="put `output` on a disk that all nodes share"):
        checkpoint.save_shard(tmp_path, 1, {"weights/a": torch.ones(1)}, 0, 2)


def test_epochs_are_numbers(tmp_path):
    for epoch in (99_999, 100_000, 100_001):
        save(tmp_path, epoch)
    assert [path.name for path in checkpoints(tmp_path).values()] == ["epoch-100000", "epoch-100001"]
    assert checkpoint.latest(tmp_path).name == "epoch-100001"


def flip(file, place: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def without_optimizer(path) -> None:
    save_file({"weights/a": torch.ones(2, 3)}, path / "state.safetensors")


DAMAGE = {
    "flipped bit of a tensor": (lambda path: flip(path / "state.safetensors"), "SHA-256 of state.safetensors differs"),
    "flipped bit of a value": (lambda path: flip(path / "state.json", 20), "SHA-256 of state.json differs"),
    "flipped bit of the manifest": (lambda path: flip(path / "manifest.json", -40), "differs"),
    "empty manifest": (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json cannot be read"),
    "empty tensors": (lambda path: (path / "state.safetensors").write_bytes(b""), "has 0 bytes, expected"),
    "absent tensors": (lambda path: (path / "state.safetensors").unlink(), "state.safetensors is missing"),
    "no optimizer": (without_optimizer, "state.safetensors has"),
    "other shape": (lambda path: save_file({"weights/a": torch.ones(3, 3)}, path / "state.safetensors"), "has"),
    "missing key": (lambda path: (path / "state.json").write_text("{}"), "state.json has 2 bytes"),
    "list": (lambda path: (path / "state.json").write_text("[]"), "state.json has 2 bytes")}
UNSIGNED = {  # of an older run, without a manifest: what the form of the files shows
    "empty tensors": "", "absent tensors": "No such file", "no optimizer": "the optimizer's state is missing",
    "missing key": "state.json has None under 'epoch'", "list": "state.json holds a list, expected an object"}


TENSORS = {"weights/a": torch.ones(2, 3), "optimizer/0.exp_avg": torch.zeros(2, 3)}


def saved(folder, epoch):
    return checkpoint.save(folder, epoch, TENSORS, {"epoch": epoch, "update": epoch}, 3)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(tmp_path, kind):
    harm, why = DAMAGE[kind]
    earlier, path, lines = saved(tmp_path, 1), saved(tmp_path, 2), []
    harm(path)
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    assert newest_whole(tmp_path, lines.append, {"epoch": int}) == earlier
    [line] = lines
    assert line.startswith(f"the checkpoint {path} is damaged (") and why in line
    assert line.endswith("it is now epoch-00002.damaged, and epoch-00001 is tried")
    assert {file.name: file.read_bytes() for file in (tmp_path / "epoch-00002.damaged").iterdir()} == content
    saved(tmp_path, 2)
    harm(path)
    assert newest_whole(tmp_path, lines.append, {"epoch": int}) == earlier
    assert (tmp_path / "epoch-00002.damaged.2").is_dir() and foreign(tmp_path) == []


VALUES = {"update": 2, "memory": {}, "reward_failures": {}, "evaluations": 0, "rescore": False,
          "rollout_evaluations": 0, "saved_evaluations": 0}


@pytest.mark.parametrize("values, tensors, why", [
    *((changed, {}, f"state.json has {why}") for changed, why in (
        ({"epoch": -3}, "-3 under 'epoch'"), ({"epoch": "one"}, "one under 'epoch'"),
        ({"epoch": True}, "True under 'epoch'"), ({"epoch": 1}, "1 under 'epoch'"),
        ({"update": "five"}, "five under 'update'"), ({"seconds": float("nan")}, "nan under 'seconds'"),
        ({"memory": []}, "[] under 'memory'"), ({"micro_batch": 4}, "4 under 'micro_batch'"))),
    ({}, {"weights/a": torch.ones(2, 3, dtype=torch.int64)}, "weights/a is of I64"),
    ({}, {"optimizer/1.step": torch.ones(1)}, "the optimizer's state lacks 0.step")])
def test_what_a_user_edited_is_damage_also_under_a_manifest_that_was_written_anew(tmp_path, values, tensors, why):
    for epoch, *changed in ((1, {}, {}), (2, values, tensors)):
        checkpoint.save(tmp_path, epoch, TENSORS | changed[1], {"epoch": epoch} | VALUES | changed[0], 3)
    lines = []
    assert newest_whole(tmp_path, lines.append, state.REQUIRED) == tmp_path / "epoch-00001"
    assert why in lines[0] and len(lines) == 1


@pytest.mark.parametrize("kind", UNSIGNED)
def test_without_checksums_the_form_is_checked(tmp_path, kind):
    earlier, path, lines = saved(tmp_path, 1), saved(tmp_path, 2), []
    for each in (earlier, path):
        (each / "manifest.json").unlink()
    DAMAGE[kind][0](path)
    assert newest_whole(tmp_path, lines.append, {"epoch": int}) == earlier
    assert "epoch-00002 is damaged (" in lines[0] and UNSIGNED[kind] in lines[0]
    assert lines[1:] == [f"{earlier} has no manifest.json, as it is of an older run: its checksums cannot be verified"]


def test_where_all_are_damaged_there_is_none(tmp_path):
    lines = []
    flip(saved(tmp_path, 1) / "state.json")
    assert newest_whole(tmp_path, lines.append, {}) is None
    assert lines[0].endswith("it is now epoch-00001.damaged, and there is no earlier one")


def test_a_folder_of_another_name_is_ignored(tmp_path):
    path, lines = saved(tmp_path, 1), []
    (tmp_path / "epoch-copy").mkdir()
    assert newest_whole(tmp_path, lines.append, {}) == path
    assert lines == [f"ignored {tmp_path / 'epoch-copy'}: it is no checkpoint, expected a name such as epoch-00042"]
    saved(tmp_path, 2), saved(tmp_path, 3), saved(tmp_path, 4)
    assert (tmp_path / "epoch-copy").is_dir()


def test_a_checkpoint_that_was_being_replaced_has_its_name_again(tmp_path):
    path = saved(tmp_path, 1)
    path.rename(tmp_path / ".epoch-00001.replaced")
    assert newest_whole(tmp_path, print, {}) == path and checkpoint.damage(path) is None


def test_a_reader_names_the_damage_and_changes_nothing(tmp_path):
    path = saved(tmp_path, 1)
    flip(path / "state.safetensors")
    assert "epoch-00001 cannot be read (the SHA-256 of state.safetensors differs" in message(checkpoint.load, path)
    assert path.is_dir()
