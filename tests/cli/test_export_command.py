"""`flowgrpo export` of a run as `flowgrpo train` leaves it: each form is written where it is said, and told."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import run
from tests.helpers import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    settings = tiny.config(folder, model=str(tiny.save(tiny.sd3(), folder / "model")), train__epochs=1, train__lr=0.05)
    run(settings, functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    return settings.folder


def exported(capsys, *arguments: str) -> Path:
    """The path that the command tells, alone in its last line."""
    capsys.readouterr()
    assert main(["export", *arguments]) == 0
    return Path(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("asked", [(), ("--form", "kohya"), ("--form=kohya", "--output", "mine/lora.safetensors")])
def test_kohya(finished, tmp_path, capsys, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    file = exported(capsys, str(finished), *asked)
    assert file == (Path("mine/lora.safetensors") if "--output" in asked else finished / "kohya.safetensors")
    layers, own = load_file(file), load_file(finished / LORA_FILE)
    [name] = [key for key in own if key.endswith("lora_A.weight")][:1]
    layer = "lora_transformer_" + name.removeprefix("transformer.").removesuffix(".lora_A.weight").replace(".", "_")
    assert torch.equal(layers[f"{layer}.lora_down.weight"], own[name]) and len(layers) == 3 * len(own) / 2


def test_merged(finished, tmp_path, capsys):
    folder = exported(capsys, str(finished), "--form", "merged", "--output", str(tmp_path / "whole"))
    assert folder == tmp_path / "whole"
    base, merged = (load_pipeline(str(each)).transformer.state_dict() for each in (finished.parent / "model", folder))
    assert base.keys() == merged.keys() and any(not torch.equal(base[key], merged[key]) for key in base)


def test_card(finished, capsys):
    file = exported(capsys, str(finished), "--form", "card")
    assert file == finished / "README.md" and "`red`" in file.read_text()


@pytest.mark.parametrize("asked", [(), ("--form", "kohya")])
def test_what_is_asked_for_is_made_before_the_upload(finished, tmp_path, capsys, monkeypatch, asked):
    """The upload itself fails, in one line: the hub's library is told that there is no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("README.md", "kohya.safetensors"):
        (run / name).unlink(missing_ok=True)
    assert main(["export", str(run), *asked, "--push-to-hub", "me/mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("flowgrpo: error: the upload to me/mine failed: ") and said.count("\n") == 1
    assert (run / "README.md").is_file() and (run / "kohya.safetensors").is_file() == bool(asked)


@pytest.mark.parametrize("arguments, told", [
    (("--push-to-hub", "me/mine", "--form", "merged"), "`hf upload me/mine PATH`"),
    (("--push-to-hub", "me/mine", "--output", "lora.safetensors"), "without --push-to-hub"),
    (("--form", "card", "--output", "card.md"), "leave out --output")])
def test_what_would_be_dropped_is_refused(finished, capsys, arguments, told):
    assert main(["export", str(finished), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("flowgrpo: error: --") and said.count("\n") == 1 and told in said


@pytest.mark.parametrize("arguments, told", [
    (("--form", "onnx"), "'onnx' is not one of 'kohya'"), ((), "is not a run: it has no config.yaml"),
])
def test_mistakes_are_told(tmp_path, capsys, arguments, told):
    assert main(["export", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("flowgrpo: error: ") and said.count("\n") == 1 and told in said
