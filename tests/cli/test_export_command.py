"""`flowgrpo export` of a run as `flowgrpo train` leaves it: each form is written where it is said, and told."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import run
from tests.helpers import tiny
from tests.helpers.refusals import error_line, printed


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    settings = tiny.config(folder, model=str(tiny.save(tiny.sd3(), folder / "model")), train__epochs=1, train__lr=0.05)
    run(settings, functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    return settings.folder


def exported(capsys, *arguments: str) -> Path:
    """The path that the command tells, alone in its last line."""
    return Path(printed(capsys, "export", *arguments).splitlines()[-1])


@pytest.mark.parametrize("asked", [(), ("--form", "comfyui"), ("--form=comfyui", "--output", "mine/lora.safetensors")])
def test_comfyui(finished, here, capsys, asked):
    file = exported(capsys, str(finished), *asked)
    assert file == (Path("mine/lora.safetensors") if "--output" in asked else
                    finished / "comfyui" / f"{load(finished / 'config.yaml').name}.safetensors")
    layers, own = load_file(file), load_file(finished / LORA_FILE)
    [name] = [key for key in own if key.endswith("lora_A.weight")][:1]
    layer = "lora_transformer_" + name.removeprefix("transformer.").removesuffix(".lora_A.weight").replace(".", "_")
    assert torch.equal(layers[f"{layer}.lora_down.weight"], own[name]) and len(layers) == 3 * len(own) / 2


@pytest.mark.fast
def test_a_checkpoint_is_exported_as_the_result_is(finished, tmp_path, capsys):
    """The last checkpoint holds the result's weights."""
    result = load_file(exported(capsys, str(finished), "--output", str(tmp_path / "result.safetensors")))
    file = exported(capsys, str(finished), "--epoch", "1")
    layers = load_file(file)
    name = load(finished / "config.yaml").name
    assert file == finished / "comfyui" / f"{name}-epoch-00001.safetensors" and layers.keys() == result.keys()
    assert all(torch.equal(value, result[key]) for key, value in layers.items())
    checkpoint = finished / "checkpoints" / "epoch-00001"
    folder = exported(capsys, str(checkpoint), "--form=merged")
    whole = exported(capsys, str(finished), "--form=merged", "--output", str(tmp_path / "whole"))
    weights, expected = (load_pipeline(str(each)).transformer.state_dict() for each in (folder, whole))
    assert folder == finished / "merged-epoch-00001"
    assert all(torch.equal(value, expected[key]) for key, value in weights.items())
    assert main(["export", str(checkpoint), "--form=card"]) == 2
    assert f"--form card: got the checkpoint {checkpoint}, expected a finished run" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stands_for_its_model_and_weights_in_every_command(precision, finished, here, capsys):
    """A LoRA is trained in fp32, and drawn with in the precision of its model."""
    checkpoint, pictures = finished / "checkpoints" / "epoch-00001", []
    for source in ([str(finished)], [str(finished), "--epoch=1"], [str(checkpoint)],
                   [str(finished.parent / "model"), "--lora", str(checkpoint)]):
        assert main(["sample", *source, "--prompt=red", "--steps=2", f"--precision={precision}"]) == 0
        pictures.append(Image.open(capsys.readouterr().out.splitlines()[-1]).tobytes())
    assert len(set(pictures)) == 1
    assert main(["sample", str(finished.parent / "model"), "--prompt=red", "--steps=2",
                 f"--precision={precision}"]) == 0
    assert Image.open(capsys.readouterr().out.splitlines()[-1]).tobytes() not in pictures
    assert printed(capsys, "report", str(checkpoint)).splitlines()[-1] == str(finished / "report.html")


@pytest.mark.parametrize("arguments, line", [
    (["compare", "grid", "{run}", "--epoch=7"], "--epoch 7: {run} has no such checkpoint; there are: 1 (train.keep"),
    (["eval", "{run}/checkpoints/epoch-00001", "--epoch=1", "--suite=starter", "--output=x"], "is a checkpoint"),
    (["sample", "starter", "--epoch=1", "--prompt=x"], "--epoch 1: goes with a run, and starter is none"),
    (["sample", "{run}", "--lora={run}", "--prompt=x"], "{run} is a run, which brings its weights: leave out --lora"),
    (["report", "{run}/pytorch_lora_weights.safetensorss"], "no run at {run}/pytorch_lora_weights.safetensorss"),
    (["compare", "grid", "{run}/../lora.safetensors"],
     "lora.safetensors is in no run's folder: expected a run or its")])
def test_a_place_that_is_of_no_run_or_epoch_is_refused(finished, capsys, arguments, line):
    (finished.parent / "lora.safetensors").write_bytes(b"")
    assert main([argument.format(run=finished) for argument in arguments]) == 2
    message = capsys.readouterr().err
    assert line.format(run=finished) in message and message.count("\n") == 1


def test_merged_and_card(finished, tmp_path, capsys):
    folder = exported(capsys, str(finished), "--form", "merged", "--output", str(tmp_path / "whole"))
    assert folder == tmp_path / "whole"
    base, merged = (load_pipeline(str(each)).transformer.state_dict() for each in (finished.parent / "model", folder))
    assert base.keys() == merged.keys() and any(not torch.equal(base[key], merged[key]) for key in base)
    file = exported(capsys, str(finished), "--form", "card")
    assert file == finished / "README.md" and "`red`" in file.read_text()


@pytest.mark.parametrize("arguments, told", [
    (["{run}", "--form", "card", "--output", "card.md"], "leave out --output"),
    (["{empty}", "--form", "onnx"], "'onnx' is not one of 'comfyui'"),
    (["{empty}"], "is not a run: it has no config.yaml")])
def test_mistakes_are_told(finished, tmp_path, capsys, arguments, told):
    assert told in error_line(capsys, "export", *(each.format(run=finished, empty=tmp_path) for each in arguments))
