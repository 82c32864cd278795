"""Weights that are not finite are neither saved nor read, and how far trained weights have changed."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo.cli import main
from flowgrpo.config.sections import Adapter
from flowgrpo.distributed.processes import Processes
from flowgrpo.files import tensors_of
from flowgrpo.policies import loading
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.change import Change
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import checkpoint, manifest
from flowgrpo.tools.check.report import report
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import message, refused

REWARD = "def red(images, prompts):\n    return images.nan_to_num().mean((1, 2, 3))\n"


@pytest.mark.parametrize("value, name", [(1.0, None), (3e38, None), (math.inf, "b"), (-math.inf, "b"), (math.nan, "b")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_the_first_tensor_that_is_not_finite_is_named(value, name, dtype):
    one = torch.zeros(2, 3).to(dtype)
    last = torch.full((2, 3), min(value, torch.finfo(dtype).max) if value == 3e38 else value).to(dtype)
    assert adapters.odd({"a": one, "whole": torch.ones(2, dtype=torch.int64), "b": last, "c": last}) == name


def test_nothing_is_finite_and_what_is_broken_on_another_process_is_not_saved():
    assert adapters.odd({}) is None and adapters.odd({"empty": torch.zeros(0), "ids": torch.ones(1).long()}) is None
    told = message(adapters.require_saved, {"a": torch.ones(1)}, 7, lambda flag: True)
    assert "not finite after epoch 7 (on another process)" in told


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A run of two epochs, each with its checkpoint, and the command that made it."""
    folder = tmp_path_factory.mktemp("whole")
    command = tiny_runs.command(model, folder, REWARD, train__save_every=1, train__steps=4, parts__plan__size=2)
    assert main(command) == 0
    return command, folder / "run"


def line(capsys, *arguments: object) -> str:
    """Run a command that has to end in one line, beside those of its epochs and libraries, and return it."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    others = "epoch ", "[transformers]"
    [said] = [text for text in capsys.readouterr().err.split("\n") if text and not text.startswith(others)
              and not text.endswith(" ...")]
    return said


@pytest.mark.fast
def test_a_run_whose_weights_break_keeps_its_good_checkpoints(trained, tmp_path, capsys):
    """The reward tolerates images of NaN."""
    command, run = trained
    shutil.copytree(run, tmp_path / "run")
    more = [*command, f"--output={tmp_path}", "--resume", "--train.epochs=5", "--train.lr=1e308"]
    assert "the trained weights are not finite after epoch 3 (such as transformer." in line(capsys, *more)
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["epoch-00001", "epoch-00002"]
    for name in ("epoch-00001", "epoch-00002"):
        assert adapters.odd(checkpoint.load(kept / name)[0]) is None and manifest.difference(kept / name) is None
    assert adapters.odd(load_file(tmp_path / "run" / LORA_FILE)) is None  # the result of the two epochs
    assert main([*command, f"--output={tmp_path}", "--resume", "--train.epochs=3"]) == 0


def test_weights_that_break_are_blamed_and_not_the_reward(trained, tmp_path, capsys):
    """A reward that fails on images of NaN does so before the first checkpoint."""
    command, _ = trained
    (tmp_path / "reward.py").write_text(REWARD.replace("return", "assert images.isfinite().all(), 'odd'\n    return"))
    said = line(capsys, *command, f"--output={tmp_path}", "--train.lr=1e308", "--train.save_every=9",
                f"--reward={tmp_path}/reward.py:red")
    assert "the trained weights are not finite after epoch 1 (such as " in said
    assert not any((tmp_path / "run").glob("checkpoints/epoch-*"))


def rewrite(file, change) -> None:
    """Change the tensors of a file of weights."""
    tensors, metadata = tensors_of(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file, metadata)


def broken(file) -> None:
    """Put one NaN into a file of weights."""
    rewrite(file, lambda tensors: next(value for key, value in tensors.items() if "lora_B" in key and
                                       not key.startswith("optimizer")).view(-1)[0].fill_(math.nan))


@pytest.mark.parametrize("command", [
    ["sample", "MODEL", "--prompt", "a", "--steps", "2", "--lora", "RUN"],
    ["sample", "MODEL", "--prompt", "a", "--steps", "2", "--lora", f"RUN/{LORA_FILE}"],
    ["compare", "grid", "RUN", "--count", "1", "--trust-run"], ["export", "RUN", "--output", "OUT/lora.safetensors"],
    ["export", "RUN", "--form", "merged", "--output", "OUT/merged"],
    ["train", "--trust", "RUN/config.yaml", "--name=next", "--output=OUT", "--adapter.init=RUN"],
], ids=["sample", "file", "grid", "export", "merged", "init"])
def test_a_lora_that_is_not_finite_is_not_read(command, model, trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained[1], run)
    broken(run / LORA_FILE)
    places = {"MODEL": str(model), "RUN": str(run), "OUT": str(tmp_path)}
    for name, place in places.items():
        command = [word.replace(name, place) for word in command]
    assert "holds NaN or an infinity, expected finite weights" in line(capsys, *command)


@pytest.mark.fast
def test_a_checkpoint_that_is_not_finite_is_not_read(model, trained, tmp_path, capsys):
    command, run = trained
    shutil.copytree(run, tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "epoch-00002"
    broken(last / "state.safetensors")
    manifest.write(last)
    said = line(capsys, *command, f"--output={tmp_path}", "--resume", "--train.epochs=3")
    assert "holds NaN or an infinity" in said and "remove it to go on from epoch-00001" in said
    assert json.loads((last / "state.json").read_text())["epoch"] == 2  # it is left as it was
    assert "holds NaN or an infinity" in line(capsys, "sample", model, "--prompt", "a", "--lora", last)


@pytest.fixture(scope="module", params=["starter", "starter_text", "starter_unified"])
def spoiled(request, tmp_path_factory):
    """A model whose weights are NaN, and its recipe."""
    place = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(FOLDERS[request.param], place)
    file = next((place / "transformer" if request.param == "starter" else place).glob("*.safetensors"))
    save_file({key: torch.full_like(tensor, math.nan) for key, tensor in load_file(file).items()}, file)
    return place, request.param


def test_a_model_that_is_not_finite_is_told_by_every_command(spoiled, tmp_path, capsys, monkeypatch):
    place, recipe = spoiled
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("1\n")
    steps, few = (["--steps=2"], ["--eval.steps=2", "--eval.prompts=2"]) if recipe == "starter" else ([], [])
    (tmp_path / "r.py").write_text("def one(samples, prompts):\n    return [1.0] * len(prompts)\n")
    for command in (["sample", place, "--prompt", "1", *steps],
                    ["eval", place, "--suite", "prompts.txt", "--rewards", "r.py:one", *steps],
                    ["train", recipe, f"--model={place}", "--tracker=none", "--precision=fp32", *few]):
        assert "weight holds NaN or an infinity: load whole weights" in line(capsys, *command)
    assert not [*tmp_path.rglob("*.png")]
    assert "weight holds NaN or an infinity: load whole weights" in str(report(str(place))["reason"])


def test_half_a_lora_is_told(model, trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained[1], run)
    file = run / LORA_FILE
    rewrite(file, lambda tensors: [tensors.pop(key) for key in [*tensors] if "lora_B" in key])
    for given in (run, file):
        said = line(capsys, "sample", model, "--prompt", "a", "--steps", "2", "--lora", given)
        assert "lora_A.weight, but without " in said and "expected both sides of every layer" in said


def test_a_damaged_file_is_told_before_the_model_is_loaded(trained, tmp_path):
    file = tmp_path / LORA_FILE
    shutil.copy(trained[1] / LORA_FILE, file)
    loading.require_weights(file)
    broken(file)
    assert "holds NaN or an infinity, expected finite weights" in message(loading.require_weights, file)
    file.write_bytes(file.read_bytes()[:100])
    assert "cannot be read" in message(loading.require_weights, file)


def test_a_run_of_images_is_no_lora_of_texts(trained, capsys):
    said = line(capsys, "sample", "starter_text", "--prompt", "1+2=", "--lora", trained[1])
    assert f"--lora {trained[1]}: a run of " in said and "a model of images, and 'starter_text' is none" in said


def test_a_quantised_weight_is_read_by_its_scales():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    module = torch.nn.Linear(32, 32).requires_grad_(False)
    quantize_(module, Int8WeightOnlyConfig(version=2))
    assert "Int8Tensor" in type(module.weight).__name__ and adapters.culprit({"transformer": module}) is None
    module.weight.scale[0] = math.nan
    assert adapters.culprit({"transformer": module}) == (
        "the model's own transformer.weight holds NaN or an infinity: load whole weights")


def changes(rank: int):
    pipe = tiny.sd3()
    weights = TrainableWeights(pipe, {"transformer": pipe.transformer}, Adapter(rank=rank))
    change = Change(weights)
    assert change(Processes()) == 0.0
    return change, weights


def test_a_lora_changes_by_the_product_of_its_sides():
    change, weights = changes(rank=2)
    with torch.no_grad():
        for number, (key, parameter) in enumerate(weights.named.items()):
            if "lora_B" in key:
                parameter.normal_(std=0.1 + number / 100)
    largest = max(layer.get_delta_weight("default").norm().item() / layer.out_features**0.5
                  for layer in weights.layers().values())  # |scale B A| / sqrt(outputs), from whole matrices
    assert change(Processes()) == pytest.approx(largest, rel=1e-5)
    with torch.no_grad():
        next(parameter for key, parameter in weights.named.items() if "lora_B" in key).fill_(1e30)
    assert 1e29 < change(Processes()) < 1e32
    with torch.no_grad():
        next(iter(weights.named.values())).fill_(torch.nan)
    assert change(Processes()) != change(Processes())  # NaN


@pytest.mark.parametrize("targets, told", [
    (["to_q", "to_kk"], r"adapter\.targets: 'to_kk' matches no module of the transformer: did you mean 'to_k'\?"),
    (["to_out.0", "attn.to_v", "nothing_like_it"], r"'nothing_like_it' matches no module of the transformer; ")])
def test_a_target_that_matches_nothing_is_refused(targets, told):
    pipe = tiny.sd3()
    refused(told, TrainableWeights, pipe, {"transformer": pipe.transformer}, Adapter(rank=2, targets=targets))
    assert not hasattr(pipe.transformer, "peft_config")
    right = Adapter(rank=2, targets=["to_out.0", "attn.to_v"])
    assert len(TrainableWeights(pipe, {"transformer": pipe.transformer}, right).layers()) == 4


def test_whole_weights_change_by_their_difference():
    change, weights = changes(rank=0)
    key, parameter = next((key, value) for key, value in weights.named.items() if value.ndim == 2)
    with torch.no_grad():
        parameter += 0.5
    assert change(Processes()) == pytest.approx(0.5 * parameter.shape[1] ** 0.5, rel=1e-5), key
