"""`flowgrpo prompts encode`: prompts are encoded ahead of a run, which then loads no text encoder."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.sets import resolve
from flowgrpo.errors import UserError
from flowgrpo.policies import build
from flowgrpo.policies.pipelines.conditioning import PromptCache
from flowgrpo.policies.pipelines.encoded_prompts import complete
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.run import run
from flowgrpo.tools.check import tiny as pipelines
from tests.helpers import tiny

LINES = [{"prompt": text} for text in tiny.PROMPTS] + [{"prompt": "a red owl", "negative_prompt": "old"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("encode") / "model")


def recipe(folder, model, **options):
    """A recipe on disk, and its configuration."""
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    config = tiny.config(folder, **{"model": str(model), "prompts": str(folder / "p.jsonl"),
                                    "negative_prompt": "blue", "cache": str(folder / "cache"),
                                    "train__epochs": 1} | options)
    (folder / "r.yaml").write_text(config.yaml())
    return str(folder / "r.yaml"), config


def test_it_reads_text_encoders_alone_and_a_run_then_loads_none(model, tmp_path, capsys, monkeypatch):
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    shutil.copytree(model, ahead / "model")
    for part in ("transformer", "vae"):
        for file in (ahead / "model" / part).glob("*.safetensors"):
            file.unlink()
    path, config = recipe(ahead, ahead / "model")
    assert main(["prompts", "encode", "--trust", "--recipe", path]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    [folder] = [place for place in (ahead / "cache").iterdir() if place.is_dir()]
    files = list(folder.glob("*.safetensors"))
    assert len(files) == len(LINES) and said == (
        f"{folder}: 7 prompts (5 to train on, 2 held out), 7 new, "
        f"{sum(file.stat().st_size for file in files) / 2**20:.1f} MiB")
    assert main(["prompts", "encode", "--trust", path]) == 0 and ", 0 new," in capsys.readouterr().out
    results = []
    for name, cache in (("plain", None), ("cached", str(ahead / "cache"))):
        (tmp_path / name).mkdir()
        _, config = recipe(tmp_path / name, model, cache=cache)
        if cache:
            monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
        run(config, functions={"red": tiny.red})
        results.append(load_file(config.folder / "pytorch_lora_weights.safetensors"))
    assert f"text encoders are not loaded: all prompts are encoded in {ahead / 'cache'}" in capsys.readouterr().out
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_a_prompt_that_is_new_brings_the_text_encoders_back(model, tmp_path):
    path, config = recipe(tmp_path, model)
    assert main(["prompts", "encode", "--trust", path]) == 0
    prompts = [prompt for side in resolve(config) for prompt in side]
    assert complete(config, prompts) and not complete(config, [*prompts, Prompt("new")])
    assert not complete(config.model_copy(update={"negative_prompt": "other"}), prompts)
    assert build.encoded(config, prompts)
    other = config.model_copy(update={"precision": "bf16"})
    assert not complete(other, prompts)


def test_how_prompts_of_different_lengths_are_padded_is_kept(tmp_path):
    pipe, call = pipelines.make("QwenImagePipeline")
    policy = PipelinePolicy(pipe, None, call=call)
    cache = PromptCache(policy, tmp_path)
    cache.fill([("red", ""), ("a red owl on a branch", "")])
    assert (cache.folder / "padding.json").is_file()


@pytest.mark.parametrize("options, told", [
    (["--model=starter"], "cache is not set: name the folder with --cache=FOLDER"),
    (["--model=starter_text", "--method=grpo", "--cache=HERE"], "got the language model starter_text"),
    (["--model=starter", "--cache=HERE", "--load.lora=[HERE]"], "load.lora may change text encoders")])
def test_what_is_not_encoded_ahead_is_told_in_one_line(options, told, tmp_path, capsys):
    assert main(["prompts", "encode", *(option.replace("HERE", str(tmp_path)) for option in options)]) == 2
    assert told in capsys.readouterr().err


def test_ahead_a_run_encodes_all_prompts_before_the_denoiser_is_loaded(model, tmp_path, capsys, monkeypatch):
    """The weights are those of a run that encodes as it goes, and a second run finds all prompts in the cache."""
    loads, load = [], build.load
    monkeypatch.setattr(build, "load", lambda config, encoders=True: loads.append(encoders) or load(config, encoders))
    results = []
    for name, options in (("plain", {"cache": None}), ("ahead", {"memory__encoders": "ahead"}),
                          ("again", {"memory__encoders": "ahead"})):
        (tmp_path / name).mkdir()
        _, config = recipe(tmp_path / name, model, **{"cache": str(tmp_path / "cache")} | options)
        run(config, functions={"red": tiny.red})
        results.append(load_file(config.folder / "pytorch_lora_weights.safetensors"))
    said = capsys.readouterr().out
    assert loads == [True, False, False] and said.count("encoded 7 of 7 prompts in") == 1
    assert said.count("text encoders are not loaded") == 2
    assert all(torch.equal(results[0][key], other[key]) for other in results[1:] for key in other)


@pytest.mark.parametrize("options, told", [
    ({"cache": None}, "prompts are not encoded ahead: cache is not set"),
    ({"memory__denoiser": "cpu"}, "memory.encoders is ahead, which does not go with memory.denoiser: cpu"),
    ({"parts": {"adapted": {"encoders": True, "denoisers": False}}},
     "are trained (parts.adapted.encoders), which does not go with memory.encoders: ahead"),
    ])
def test_what_does_not_go_with_ahead_is_said_before_the_model_is_loaded(model, tmp_path, options, told):
    _, config = recipe(tmp_path, model, **{"memory__encoders": "ahead"} | options)
    with pytest.raises(UserError, match=re.escape(told)):
        run(config, functions={"red": tiny.red})


def test_beside_a_denoiser_without_room_the_encoders_encode_where_they_wait(model):
    """As `sample` and `eval` of a run with `memory.encoders: ahead`: the encoders never come."""
    from flowgrpo.config.sections import Memory
    from flowgrpo.policies.loading import make_pipeline
    stock, waits = (make_pipeline(str(model), "fp32", memory=Memory(encoders=way)) for way in ("cpu", "ahead"))
    asked = dict(prompt="a red owl", prompt_2=None, prompt_3=None, device=torch.device("cpu"))
    for one, other in zip(stock.encode_prompt(**asked), waits.encode_prompt(**asked)):
        assert torch.equal(one, other)
