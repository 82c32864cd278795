"""Evolution of singular values, and a library of experience."""

import json
import math

import numpy as np
import pytest
import torch

from flowgrpo.__main__ import main
from flowgrpo.tools.evolve import SeparableCMA, SingularValues, evolve, factors
from flowgrpo.tools.experience import Library, learn, request
from tests.helpers import tiny, tiny_text
from tests.helpers.chat_endpoint import endpoint, said
from tests.helpers.refusals import message
from tests.helpers.tiny_text import save


def products(weights) -> list[torch.Tensor]:
    return [layer.lora_B["default"].weight.detach().flatten(1) @ layer.lora_A["default"].weight.detach().flatten(1)
            for layer in weights.layers().values()]


def test_the_factors_are_the_decomposition_of_the_product():
    generator = torch.Generator().manual_seed(0)
    b, a = torch.randn(7, 3, generator=generator), torch.randn(3, 5, generator=generator)
    left, values, right = factors(b, a)
    torch.testing.assert_close(left * values.float() @ right, b @ a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.float(), torch.linalg.svdvals(b @ a)[:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left.T @ left, torch.eye(3), rtol=0, atol=1e-5)


def test_the_search_finds_the_top_of_a_hill():
    top, scales = np.arange(6) / 3, np.array([1, 2, 4, 8, 16, 32.0])
    search = SeparableCMA(np.zeros(6), 0.5, 10)
    for _ in range(150):
        search.learn([-(scales * (point - top) ** 2).sum() for point in search.points()])
    assert np.abs(search.mean - top).max() < 1e-3 and search.step < 0.05
    one = SeparableCMA(np.zeros(2), 1.0, 4)
    points = one.points()
    one.learn([0.0, 3.0, 1.0, 2.0])  # the better half: the second, and the fourth
    weights = np.array([np.log(2.5), np.log(2.5 / 2)]) / np.log(2.5 ** 2 / 2)
    assert one.mean == pytest.approx(weights @ points[[1, 3]])


@pytest.mark.parametrize("make", [lambda: tiny.policy(rank=3), lambda: tiny_text.policy(rank=3)])
def test_the_search_is_over_rank_times_layers_numbers(make):
    policy = make()
    assert "its singular values are 0: expected a trained one" in message(SingularValues, policy.weights)
    (tiny if policy.modality == "image" else tiny_text).stir(policy)
    before = products(policy.weights)
    space = SingularValues(policy.weights)
    assert len(space.first) == 3 * len(policy.weights.layers())
    space.place(np.zeros(len(space.first)))
    for after, product in zip(products(policy.weights), before):
        torch.testing.assert_close(after, product, rtol=1e-4, atol=1e-6)
    space.place(-space.first / space.scale)
    assert max(product.abs().max() for product in products(policy.weights)) < 1e-6


def test_a_reward_without_a_gradient_rises():
    policy = tiny_text.stir(tiny_text.policy(rank=2))
    frozen = {key: value.clone() for key, value in policy.model.state_dict().items() if "lora" not in key}
    @torch.no_grad()
    def value(generation: int) -> float:
        size = sum(float(product.square().sum()) for product in products(policy.weights)) ** 0.5
        return -float(round(50 * abs(size - 0.5)))  # a step function
    lines = evolve(policy.weights, value, lambda line: None, generations=25, population=8, spread=0.3)
    assert lines[-1]["mean"] > lines[0]["mean"] and value(0) >= lines[0]["best"]
    assert all(parameter.grad is None for parameter in policy.weights.parameters())
    assert all(torch.equal(policy.model.state_dict()[key], kept) for key, kept in frozen.items())


def small(place, loaded) -> list[str]:
    """Save a model and its prompts, and return the options of a short command on them."""
    save(place / "model", loaded)
    (place / "prompts.txt").write_text("\n".join(tiny_text.PROMPTS), encoding="utf-8")
    return [f"--model={place / 'model'}", f"--prompts={place / 'prompts.txt'}", "--held_out=0.3", "--train.prompts=2",
            "--train.group=2", "--text.max_tokens=4", "--device=cpu", "--precision=fp32"]


def test_the_command_writes_a_lora_and_its_generations(tmp_path, capsys):
    loaded = tiny_text.model()
    given = ["contrib", "evolve", "--output", str(tmp_path / "out"), *small(tmp_path, loaded), "--method=grpo",
             "--reward=distinct", "--adapter.rank=2", "--generations", "2", "--population", "4"]
    tiny_text.stir(tiny_text.policy(loaded, rank=2)).weights.save(tmp_path / "lora")
    assert main(given) == 2 and "adapter.init is not set" in capsys.readouterr().err
    assert main([*given, f"--adapter.init={tmp_path / 'lora'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "evolution.jsonl").read_text().splitlines()]
    assert [line["generation"] for line in lines] == [0, 1] and lines[0]["step"] > 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_edits_and_order_of_a_library():
    library = Library(["one", "two", "three"])
    answer = 'Well: [{"delete": 1}, {"change": 2, "to": " better  two "}, {"delete": 9}, {"add": ""}, {"add": "four"}]'
    assert library.edit(answer, 5) == 3 and library.entries == ["better two", "three", "four"]
    assert library.edit('[{"add": "four"}, {"add": "five"}, {"add": "six"}]', 1) == 1  # the first is there already
    assert library.entries[-1] == "five" and library.edit("no idea", 2) == 0
    small = Library(["a", "b"], longest=2)
    small.edit('[{"add": "c"}]', 1)
    assert small.entries == ["b", "c"] and small.before("Q") == "Lessons from earlier tasks:\n1. b\n2. c\n\nQ"
    assert Library().before("Q") == "Q"
    told = request("How many?", ["bad", "good"], [0.0, 1.0], Library(["count twice"]), 2)
    assert told.index("reward 1:\ngood") < told.index("reward 0:\nbad")
    assert "1. count twice" in told and "Request: How many?" in told and '[{"add": "a lesson' in told


def test_only_groups_whose_rewards_differ_edit_the_library():
    asked, seen = [], []
    def sample(shown, epoch):
        seen.append(list(shown))
        better = any("be brief" in text for text in shown)
        return [["x", "y"]] * 3, [[1.0, 1.0], [0.0, 1.0 + better], [math.nan, 0.5]]
    def ask(question):
        asked.append(question)
        return '[{"add": "be brief"}]'
    library = Library()
    lines = learn(library, lambda epoch: ["a", "b", "c"], sample, ask, epochs=2, most=2, log=lambda line: None)
    assert [question.count("Request: b") for question in asked] == [1, 1]
    assert seen[0] == ["a", "b", "c"] and seen[1][0] == "Lessons from earlier tasks:\n1. be brief\n\na"
    assert [line["compared"] for line in lines] == [1, 1] and [line["edits"] for line in lines] == [1, 0]
    assert [line["reward"] for line in lines] == [3.5 / 5, 4.5 / 5] and library.entries == ["be brief"]


def test_the_command_learns_from_a_models_samples(tmp_path, capsys):
    options = small(tmp_path, tiny_text.model())
    before = {file: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    (tmp_path / "r.py").write_text("def mine(texts, prompts): return [float(i) for i in range(len(texts))]\n")
    with endpoint(lambda body, number: said(json.dumps([{"add": f"7+{number}"}]))) as server:
        code = main(["contrib", "lessons", "--output", str(tmp_path / "lessons.txt"), *options, "--epochs", "1",
                     f"--reward={tmp_path / 'r.py'}:mine", "--url", server.url, "--served", "m"])
    assert code == 0, capsys.readouterr().err
    lessons = (tmp_path / "lessons.txt").read_text().splitlines()
    assert len(lessons) == 2 and lessons[0].startswith("1. 7+") and "2 lessons" in capsys.readouterr().out
    assert all(file.read_bytes() == content for file, content in before.items())
