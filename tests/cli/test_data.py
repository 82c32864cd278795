"""`flowgrpo prompts mix`: files of prompts by rates of an evaluation, a run or a file, and by likelihoods."""

import json

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.data.prompts import load_prompts
from flowgrpo.evaluation import rates
from flowgrpo.storage import checkpoint
from tests.helpers import tiny_text

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


def run(folder, *options: str) -> list[str]:
    output = folder / f"out{len(list(folder.glob('out*')))}.jsonl"
    assert main(["prompts", "mix", str(folder / "p.jsonl"), "--output", str(output), *options]) == 0
    return [prompt.text for prompt in load_prompts(output)]


def test_rates_are_measured_once_and_read_again(world, capsys):
    reward = f"{world}/half.py:half"
    output = world / "mid.jsonl"
    assert main(["prompts", "mix", str(world / "p.jsonl"), "--output", str(output), "--measure", str(world / "lm"),
                 "--reward",
                 reward, "--samples", "4", "--low", "0.1", "--high", "0.9"]) == 0
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
    assert run(world, "--rates", str(world / "r.jsonl"), "--keep", "1") == ["7+8="]
    assert run(world, "--rates", str(world / "r.jsonl"), "--keep", "1", "--by", "variance") == ["1+2="]
    memory = {"rates": {"2+2=": [0.3, 0.4]}}
    checkpoint.save(world / "run" / "checkpoints", 3, {"weights/a": torch.zeros(1)}, {"memory": memory}, 1)
    assert run(world, "--rates", str(world / "run"), "--high", "0.4") == ["2+2="]
    checkpoint.save(world / "run" / "checkpoints", 4, {"weights/a": torch.zeros(1)},
                    {"memory": {"beliefs": {"7+8=": [1.0, 3.0], "2+2=": [3.0, 1.0]}}}, 1)
    assert run(world, "--rates", str(world / "run"), "--high", "0.5") == ["7+8="]


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
    assert run(world, "--likelihood", str(world / "lm"), "--keep", "2") == [prompt.text for prompt in likeliest[:2]]
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
                 "--output",
                 str(world / "best.jsonl")]) == 0
    assert "weights: " in capsys.readouterr().out and len(load_prompts(world / "best.jsonl")) == 2


@pytest.mark.parametrize("options, told", [
    (["--keep", "3"], "expected one of --rates"), (["--rates", "nowhere"], "--rates: got nowhere"),
    (["--rates", "nowhere", "--measure", "lm"], "got --rates and --measure"),
    (["--measure", "lm"], "--measure: needs --reward")])
def test_what_does_not_go_together(world, capsys, options, told):
    assert main(["prompts", "mix", str(world / "p.jsonl"), "--output", str(world / "o.jsonl"), *options]) == 2
    assert told in capsys.readouterr().err
