"""A library of experience: its edits, which groups are compared, and a model whose weights stay."""

import json
import math

from flowgrpo.__main__ import main
from flowgrpo.tools.experience import Library, Settings, learn, request
from tests.helpers import tiny_text
from tests.rewards.vlm_judge.test_judge import endpoint, said


def test_edits_of_a_library():
    library = Library(["one", "two", "three"])
    answer = 'Well: [{"delete": 1}, {"change": 2, "to": " better  two "}, {"delete": 9}, {"add": ""}, {"add": "four"}]'
    assert library.edit(answer, 5) == 3 and library.entries == ["better two", "three", "four"]
    assert library.edit('[{"add": "four"}, {"add": "five"}, {"add": "six"}]', 1) == 1  # the first is there already
    assert library.entries[-1] == "five" and library.edit("no idea", 2) == 0
    small = Library(["a", "b"], longest=2)
    small.edit('[{"add": "c"}]', 1)
    assert small.entries == ["b", "c"] and small.before("Q") == "Lessons from earlier tasks:\n1. b\n2. c\n\nQ"
    assert Library().before("Q") == "Q"


def test_a_group_is_shown_from_the_best_to_the_worst():
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
    lines = learn(library, lambda epoch: ["a", "b", "c"], sample, ask, Settings(epochs=2), lambda line: None)
    assert [question.count("Request: b") for question in asked] == [1, 1]
    assert seen[0] == ["a", "b", "c"] and seen[1][0] == "Lessons from earlier tasks:\n1. be brief\n\na"
    assert [line["compared"] for line in lines] == [1, 1] and [line["edits"] for line in lines] == [1, 0]
    assert [line["reward"] for line in lines] == [3.5 / 5, 4.5 / 5] and library.entries == ["be brief"]


def test_the_command_learns_from_a_models_samples(tmp_path, capsys):
    model, tokenizer = tiny_text.model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    before = {file: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    (tmp_path / "prompts.txt").write_text("\n".join(tiny_text.PROMPTS), encoding="utf-8")
    (tmp_path / "r.py").write_text("def mine(texts, prompts): return [float(i) for i in range(len(texts))]\n")
    with endpoint(lambda body, number: said(json.dumps([{"add": f"7+{number}"}]))) as server:
        code = main(["contrib", "lessons", "--output", str(tmp_path / "lessons.txt"), f"--model={tmp_path / 'model'}",
                     f"--reward={tmp_path / 'r.py'}:mine", f"--prompts={tmp_path / 'prompts.txt'}", "--held_out=0.3",
                     "--train.prompts=2", "--train.group=2", "--text.max_tokens=4", "--device=cpu",
                     "--precision=fp32", "--epochs", "1", "--url", server.url, "--served", "m"])
    assert code == 0, capsys.readouterr().err
    lessons = (tmp_path / "lessons.txt").read_text().splitlines()
    assert len(lessons) == 2 and lessons[0].startswith("1. 7+") and "2 lessons" in capsys.readouterr().out
    assert all(file.read_bytes() == content for file, content in before.items())
