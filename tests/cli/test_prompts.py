"""`flowgrpo list prompts` and `flowgrpo prompts`: write, mix and encode."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.config.sections import Memory
from flowgrpo.data.prompts import Prompt, load_prompts
from flowgrpo.data.sets import resolve
from flowgrpo.errors import UserError
from flowgrpo.evaluation import rates
from flowgrpo.policies import build
from flowgrpo.policies.loading import make_pipeline
from flowgrpo.policies.pipelines.conditioning import PromptCache
from flowgrpo.policies.pipelines.encoded_prompts import complete
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.run import run
from flowgrpo.storage import checkpoint
from flowgrpo.tools.check import tiny as pipelines
from tests.helpers import chat_endpoint, tiny, tiny_text
from tests.helpers.refusals import error_line, printed


def test_sets_are_listed_and_previews_are_spread(capsys):
    assert "CC-BY-4.0" in printed(capsys, "list", "prompts")
    shown = json.loads(printed(capsys, "list", "prompts", "t2i_compbench", "--count", "8", "--json"))
    assert shown["training"] == 5557 and shown["held out"] == 2400
    assert len({line["metadata"]["category"] for line in shown["prompts"]}) == 8
    assert "no such set: did you mean 'geneval'?" in error_line(capsys, "list", "prompts", "genevl")


def test_templates_become_a_prompt_file_once(tmp_path, capsys):
    (tmp_path / "t.yaml").write_text("templates: ['a {colour} owl']\nslots: {colour: [red, blue]}\n")
    command = ["prompts", "write", str(tmp_path / "t.yaml"), "--output", str(tmp_path / "p.jsonl")]
    assert main(command) == 0
    assert {prompt.text for prompt in load_prompts(tmp_path / "p.jsonl")} == {"a red owl", "a blue owl"}
    assert "2 prompts, all that there are of the 200" in capsys.readouterr().out
    assert "expected a .jsonl file that does not exist yet" in error_line(capsys, *command)
    assert main(["prompts", "write", "--output", str(tmp_path / "q.jsonl")]) == 2


def test_a_language_model_is_asked_until_there_are_enough(tmp_path):
    """The second answer repeats a prompt of the first."""
    output = tmp_path / "p.jsonl"
    with chat_endpoint.served(["1. a red hat\n2. two owls", "two owls\na bell"]) as url:
        assert main(["prompts", "write", "--about", "things", "--url", url, "--model", "m", "--count", "3",
                     "--output", str(output)]) == 0
    assert [prompt.text for prompt in load_prompts(output)] == ["a red hat", "two owls", "a bell"]


def test_a_caption_becomes_a_proxy_prompt(tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "describe", "metadata": {"caption": "A red sky."}}) + "\n")
    command = ["prompts", "proxy", "caption_error", str(tmp_path / "c.jsonl"), "--output", str(tmp_path / "p.jsonl")]
    assert main(command) == 0
    [prompt] = load_prompts(tmp_path / "p.jsonl")
    assert prompt.metadata["right"] == "red" and prompt.metadata["answer"] in prompt.text
    assert main(command) == 2
    assert main(["prompts", "proxy", "riddle", "c", "--output", "d"]) == 2
    assert "got 'riddle', expected caption_error, critique or inversion" in capsys.readouterr().err


HALF = ("def half(texts, prompts):\n"
        "    return [float(p == '1+2=' and i % 2 or p == '2+2=') for i, p in enumerate(prompts)]\n")


@pytest.fixture
def world(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text, "metadata": {"answer": answer}}) + "\n"
                                              for text, answer in (("1+2=", "3"), ("2+2=", "4"), ("7+8=", "15"))))
    (tmp_path / "half.py").write_text(HALF)
    for each in tiny_text.model():
        each.save_pretrained(tmp_path / "lm")
    return tmp_path


def mix(folder, *options: str) -> list[str]:
    output = folder / f"out{len(list(folder.glob('out*')))}.jsonl"
    assert main(["prompts", "mix", str(folder / "p.jsonl"), "--output", str(output), *options]) == 0
    return [prompt.text for prompt in load_prompts(output)]


def test_rates_are_measured_once_and_read_again(world, capsys):
    reward = f"{world}/half.py:half"
    output = world / "mid.jsonl"
    assert main(["prompts", "mix", str(world / "p.jsonl"), "--output", str(output), "--measure", str(world / "lm"),
                 "--reward", reward, "--samples", "4", "--low", "0.1", "--high", "0.9"]) == 0
    [kept] = load_prompts(output)
    assert kept.text == "1+2=" and kept.metadata["answer"] == "3"
    found = rates.load(world / "mid.rates" / "samples", [str(world / "mid.rates" / "prompts.jsonl")])
    assert found == {"1+2=": [0.5], "2+2=": [1.0], "7+8=": [0.0]}
    (world / "other.jsonl").write_text('{"prompt": "9-1="}\n')
    assert main(["prompts", "mix", str(world / "other.jsonl"), "--output", str(world / "x.jsonl"), "--rates",
                 str(world / "mid.rates" / "samples"), "--keep", "1"]) == 2
    assert "is an evaluation of other prompts" in capsys.readouterr().err


def test_rates_of_a_file_and_of_a_run(world):
    lines = [{"prompt": "1+2=", "rate": 0.1}, {"prompt": "1+2=", "rate": 0.9}, {"prompt": "7+8=", "rate": 0.4}]
    (world / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert mix(world, "--rates", str(world / "r.jsonl"), "--keep", "1") == ["7+8="]
    assert mix(world, "--rates", str(world / "r.jsonl"), "--keep", "1", "--by", "variance") == ["1+2="]
    memory = {"rates": {"2+2=": [0.3, 0.4]}}
    checkpoint.save(world / "run" / "checkpoints", 3, {"weights/a": torch.zeros(1)}, {"memory": memory}, 1)
    assert mix(world, "--rates", str(world / "run"), "--high", "0.4") == ["2+2="]
    checkpoint.save(world / "run" / "checkpoints", 4, {"weights/a": torch.zeros(1)},
                    {"memory": {"beliefs": {"7+8=": [1.0, 3.0], "2+2=": [3.0, 1.0]}}}, 1)
    assert mix(world, "--rates", str(world / "run"), "--high", "0.5") == ["7+8="]


def test_a_file_that_is_made_of_a_test_set_is_told(world, capsys):
    assert main(["prompts", "mix", "partiprompts", "--count", "5", "--output", str(world / "a.jsonl")]) == 0
    assert capsys.readouterr().err.startswith("note: partiprompts is a test set: evaluate on what is made of it")
    assert main(["prompts", "mix", "general", "--count", "5", "--output", str(world / "b.jsonl")]) == 0
    assert capsys.readouterr().err == ""


def test_the_least_likely_answers(world):
    policy = tiny_text.policy()
    prompts = load_prompts(world / "p.jsonl")
    found = rates.likelihoods(policy, prompts)
    likeliest = sorted(prompts, key=lambda prompt: found[prompt.key][0])
    assert mix(world, "--likelihood", str(world / "lm"), "--keep", "2") == [prompt.text for prompt in likeliest[:2]]
    tokenized = policy.encode(["1+2="])
    ids = torch.tensor([[*policy.tokenizer("3", add_special_tokens=False)["input_ids"], policy.ends[0]]])
    whole = torch.cat([tokenized.ids[0], ids[0]])[None]
    with torch.no_grad():
        logits = policy.model(whole).logits.log_softmax(-1)[0, len(tokenized.ids[0]) - 1:-1]
    assert found["1+2="][0] == pytest.approx(logits.gather(1, ids.T).mean().exp().item(), rel=1e-4)


def test_mixtures_and_duplicates(world, capsys):
    (world / "q.jsonl").write_text('{"prompt": "1+2= "}\n{"prompt": "9-1="}\n')
    output = world / "mix.jsonl"
    assert main(["prompts", "mix", f"{world}/p.jsonl=3", f"{world}/q.jsonl=1", "--dedupe", "--output",
                 str(output)]) == 0
    found = load_prompts(output)
    assert [prompt.text for prompt in found] == ["1+2=", "2+2=", "7+8=", "9-1="]
    assert [prompt.weight for prompt in found] == pytest.approx([1.0] * 4)
    (world / "tried.jsonl").write_text("".join(json.dumps({"weights": list(weights), "score": score}) + "\n"
                                               for weights, score in (((1, 0), 0.1), ((0, 1), 0.5), ((1, 1), 0.3))))
    assert main(["prompts", "mix", f"{world}/p.jsonl", f"{world}/q.jsonl", "--mixture", str(world / "tried.jsonl"),
                 "--output", str(world / "best.jsonl")]) == 0
    assert "weights: " in capsys.readouterr().out and len(load_prompts(world / "best.jsonl")) == 2


@pytest.mark.parametrize("options, told", [
    (["--keep", "3"], "expected one of --rates"), (["--rates", "nowhere"], "--rates: got nowhere"),
    (["--rates", "nowhere", "--measure", "lm"], "got --rates and --measure"),
    (["--measure", "lm"], "--measure: needs --reward")])
def test_what_does_not_go_together(world, capsys, options, told):
    assert told in error_line(capsys, "prompts", "mix", world / "p.jsonl", "--output", world / "o.jsonl", *options)


LINES = [{"prompt": text} for text in tiny.PROMPTS] + [{"prompt": "a red owl", "negative_prompt": "old"}]


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
    assert build.skips_text_encoders(config, prompts)
    assert not complete(config.model_copy(update={"precision": "bf16"}), prompts)


def test_how_prompts_of_different_lengths_are_padded_is_kept(tmp_path):
    pipe, call = pipelines.make("QwenImagePipeline")
    cache = PromptCache(PipelinePolicy(pipe, None, call=call), tmp_path)
    cache.fill([("red", ""), ("a red owl on a branch", "")])
    assert (cache.folder / "padding.json").is_file()


@pytest.mark.parametrize("options, told", [
    (["--model=starter"], "cache is not set: name the folder with --cache=FOLDER"),
    (["--model=starter_text", "--method=grpo", "--cache=HERE"], "got the language model starter_text"),
    (["--model=starter", "--cache=HERE", "--load.lora=[HERE]"], "load.lora may change text encoders")])
def test_what_is_not_encoded_ahead_is_told_in_one_line(options, told, tmp_path, capsys):
    given = [option.replace("HERE", str(tmp_path)) for option in options]
    assert told in error_line(capsys, "prompts", "encode", *given)


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
     "are trained (parts.adapted.encoders), which does not go with memory.encoders: ahead")])
def test_what_does_not_go_with_ahead_is_said_before_the_model_is_loaded(model, tmp_path, options, told):
    _, config = recipe(tmp_path, model, **{"memory__encoders": "ahead"} | options)
    with pytest.raises(UserError, match=re.escape(told)):
        run(config, functions={"red": tiny.red})


def test_beside_a_denoiser_without_room_the_encoders_encode_where_they_wait(model):
    """As `sample` and `eval` of a run with `memory.encoders: ahead`: the encoders never come."""
    stock, waits = (make_pipeline(str(model), "fp32", memory=Memory(encoders=way)) for way in ("cpu", "ahead"))
    asked = dict(prompt="a red owl", prompt_2=None, prompt_3=None, device=torch.device("cpu"))
    for one, other in zip(stock.encode_prompt(**asked), waits.encode_prompt(**asked)):
        assert torch.equal(one, other)
