"""The precision and the device that a machine suits: what is chosen and why, and that a run keeps it."""

import json

import pytest
import torch
from safetensors.torch import load_file

import flowgrpo
from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.device import bf16_speed, choose, drawing, pick_device
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.run import run
from tests.helpers import tiny, tiny_runs, tiny_text


@pytest.mark.parametrize("device, found, precision, reason", [
    ("cuda", ("NVIDIA H200", (9, 0)), "bf16", "NVIDIA H200 has compute capability 9.0"),
    ("cuda", ("NVIDIA A100", (8, 0)), "bf16", "NVIDIA A100 has compute capability 8.0"),
    ("cuda", ("Tesla T4", (7, 5)), "fp32", "Tesla T4 has compute capability 7.5, and bf16 begins at 8.0"),
    ("mps", True, "bf16", "MPS multiplies bf16 here"),
    ("mps", False, "fp32", "MPS does not multiply bf16 here"),
    ("cpu", 3.14, "bf16", "this CPU multiplies bf16 3.1 times as fast as fp32"),
    ("cpu", 1.2, "bf16", "this CPU multiplies bf16 1.2 times as fast as fp32"),
    ("cpu", 0.77, "fp32", "this CPU multiplies bf16 0.77 times as fast as fp32, and 1.2 times are expected of it"),
    ("cpu", 0.0268, "fp32", "this CPU multiplies bf16 0.027 times as fast as fp32, and 1.2 times are expected of it")])
def test_the_choice_and_its_reason(device, found, precision, reason, monkeypatch):
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: found[0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found[1])
    monkeypatch.setattr("flowgrpo.device._mps_multiplies", lambda _: found)
    monkeypatch.setattr("flowgrpo.device.bf16_speed", lambda: found)
    assert choose(device) == (precision, reason)


def test_the_timing_leaves_threads_and_random_numbers_alone():
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    bf16_speed.cache_clear()
    speed = bf16_speed()
    assert 0 < speed < float("inf") and f"{speed:.2g} times" in choose("cpu")[1]
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), before)


def test_what_is_stated_is_not_chosen():
    for precision in ("fp32", "bf16", "fp16"):
        config = tiny.config(precision=precision)
        assert resolve_precision(config, "cpu", begun="fp32") == (config, precision)
        assert drawing("auto", "cpu", precision) == precision


def test_a_loaded_model_keeps_its_own_precision():
    auto = tiny.config(precision="auto")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model, tokenizer = tiny_text.model()
        for loaded in (tiny.sd3().to(dtype), (model.to(dtype), tokenizer)):
            config, told = resolve_precision(auto, "cpu", loaded)
            assert (config.precision, told) == (name, f"{name} (auto: that of the loaded model)")


def test_a_gpu_draws_in_the_runs_precision_and_a_cpu_in_what_suits_it():
    suits = choose("cpu")[0]
    assert [drawing(each, "cuda:1") for each in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]
    assert [drawing(each, "cpu") for each in ("fp32", "bf16", "fp16", "auto")] == ["fp32", suits, suits, suits]


def test_auto_takes_a_device_that_works():
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert pick_device("auto") == expected and pick_device("cpu") == "cpu"


@pytest.fixture
def command(model, tmp_path):
    """The command of a run that leaves the precision to the machine."""
    reward = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    return tiny_runs.command(model, tmp_path, reward, train__epochs=1, precision="auto")


def test_a_run_says_what_it_chose_and_keeps_it(command, model, tmp_path, capsys):
    assert main(command) == 0
    folder, out = tmp_path / "run", capsys.readouterr().out.splitlines()
    chosen, reason = choose("cpu")
    assert out[0].startswith("flowgrpo ")
    assert out[0].endswith(f", run: {folder}; to watch it: flowgrpo report {folder} --live")
    assert out[1] == f"model: {model} (a folder here)" and out[2] == "method: mix_grpo"
    assert out[3].startswith("rewards: ") and out[4].startswith("prompts: ")
    assert out[5:7] == ["device: cpu, 1 process", f"precision: {chosen} (auto: {reason})"]
    assert out[7] == f"loading {model} ..."
    assert out[8].startswith("loaded in ") and "StableDiffusion3Pipeline, " in out[8]
    assert load(folder / "config.yaml").precision == chosen
    assert json.loads((folder / "report" / "machine.json").read_text())["precision"] == f"{chosen} (auto: {reason})"
    assert main(["compare", "grid", str(folder), "--output", str(folder / "grid.png")]) == 0
    assert main(["export", str(folder), "--form", "merged"]) == 0
    dtype = load_pipeline(str(folder / "merged"), chosen).transformer.dtype
    assert dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen]


@pytest.mark.parametrize("begun", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_in_the_precision_that_it_began_with(command, tmp_path, capsys, begun):
    chosen = choose("cpu")[0]
    assert main([*command, f"--precision={begun}"]) == 0
    assert f"precision: {begun}" in capsys.readouterr().out.splitlines()
    assert main([*command, "--resume", "--train.epochs=2"]) == 0
    out = capsys.readouterr().out
    assert f"precision: {begun} (auto: as the run began" in out and "resumed with precision" not in out
    assert (f"; a new run would take {chosen} here: " in out) == (chosen != begun)
    assert load(tmp_path / "run" / "config.yaml").precision == begun
    other = {"fp32": "bf16", "bf16": "fp32"}[begun]
    assert main([*command, "--resume", "--train.epochs=3", f"--precision={other}"]) == 0
    assert f"resumed with precision: {other}, was {begun}" in capsys.readouterr().out


def test_a_language_model_and_objects_from_python_take_it_too(tmp_path):
    loaded = tiny_text.model()
    run(tiny_text.files_of_a_run(tmp_path, loaded, precision="auto", train__epochs=1))
    assert load(tmp_path / "run" / "config.yaml").precision == choose("cpu")[0]
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    options = tiny_text.config(tmp_path, name="own", train__epochs=1).model_dump(
        exclude_unset=True, exclude={"reward", "method", "model", "prompts", "precision"})
    flowgrpo.align(loaded, tiny_text.short, tiny_text.PROMPTS, method="grpo", **options)
    assert load(tmp_path / "own" / "config.yaml").precision == "fp32"
