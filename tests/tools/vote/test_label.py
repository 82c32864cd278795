"""`flowgrpo reward label`: samples that become pairs, verdicts and margins of aspects, and a command that resumes."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.data.pairs import load_pairs
from flowgrpo.tools.vote.labels import Choice
from tests.helpers.chat_endpoint import endpoint, level_of, parts, said
from tests.helpers.refusals import error_line
from tests.policies.pipelines.test_image_latents import saved

REWARDS = '''
from pathlib import Path

def asked(texts):
    with (Path(__file__).parent / "asked.txt").open("a") as file:
        file.write("".join(text + "|" for text in texts))

def right(completions, prompts, metadata):
    asked(completions)
    return [float(text == entry["answer"]) for text, entry in zip(completions, metadata)]

def length(completions, prompts):
    return [None if text == "?" else float(len(text)) for text in completions]

def bright(images, prompts):
    return images.mean((1, 2, 3))

def fails(completions, prompts):
    raise ValueError("no")

def wins(first, second, prompts):
    return [float(len(one) > len(two)) for one, two in zip(first, second)]
wins.pairwise = True
'''
SAMPLES = {"1+1=": ("2", "2", ["2", "3", "222", "2"]), "2+2=": ("4", "4", ["4", "4444"]), "3=": ("3", "3", ["1"])}


@pytest.fixture
def place(here) -> Path:
    """A folder with rewards and a folder of texts, which is the present one."""
    (here / "mine.py").write_text(REWARDS)
    write(here / "texts", SAMPLES)
    (here / "aspects.yaml").write_text("right: {use: 'mine.py:right', weight: 4}\n"
                                       "brief: {use: 'mine.py:length', weight: -1}\n")
    return here


def write(folder: Path, samples: dict, key: str = "base_text") -> None:
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(
        json.dumps({"prompt": prompt, "metadata": {"answer": answer, key: text}}) + "\n"
        for prompt, (answer, _, texts) in samples.items() for text in texts))


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_best_and_the_worst_with_verdicts_of_aspects_and_a_judge_of_pairs_of_whole_groups(place, capsys):
    assert main(["reward", "label", "texts", "--rewards", "aspects.yaml", "--output", "out/pairs.jsonl"]) == 0
    assert rows(place / "out/pairs.jsonl") == [
        # Totals 4 * right - length: "2" 3, "3" -1, "222" -3; "4" 3, "4444" -4.
        {"prompt": "1+1=", "chosen": "2", "rejected": "222", "aspects": {"right": "chosen", "brief": "chosen"},
         "margins": {"overall": 6, "right": 1, "brief": 2}},
        {"prompt": "2+2=", "chosen": "4", "rejected": "4444", "aspects": {"right": "chosen", "brief": "chosen"},
         "margins": {"overall": 7, "right": 1, "brief": 3}}]
    [first, _] = load_pairs(place / "out/pairs.jsonl", text=True)
    assert first.verdicts == {"overall": 1, "right": 1, "brief": 1} and first.margins["overall"] == 6
    assert "2 pairs of 2 prompts, 0 of which have none" in capsys.readouterr().out
    assert main(["reward", "label", "texts", "--rewards", "mine.py:wins"]) == 0
    assert [(row["chosen"], row["rejected"], row["margins"]) for row in rows(place / "pairs.jsonl")] == [
        ("222", "3", {"overall": 1}), ("4444", "4", {"overall": 1})]


def test_pairs_by_margins_and_single_rewards(place):
    assert main(["reward", "label", "texts", "--rewards", "aspects.yaml", "--all", "--least", "2", "--tie", "1"]) == 0
    found = [(row["chosen"], row["rejected"], row["aspects"]) for row in rows(place / "pairs.jsonl")]
    assert found == [("2", "3", {"right": "tie", "brief": "tie"}), ("2", "222", {"right": "tie", "brief": "chosen"}),
                     ("4", "4444", {"right": "tie", "brief": "chosen"})]  # "3" and "222" differ by 2
    write(place / "more", {"1+1=": ("2", "", ["?", "22"])}, "text")
    assert main(["reward", "label", "more", "--key", "text", "--rewards", "mine.py:length"]) == 2  # "?" has no score
    write(place / "third", {"1+1=": ("2", "", ["333"])})
    assert main(["reward", "label", "texts", "third", "--rewards", "mine.py:length", "--output", "b.jsonl"]) == 0
    assert rows(place / "b.jsonl")[0] == {"prompt": "1+1=", "chosen": "222", "rejected": "3", "margins": {"overall": 2}}


def test_the_same_command_goes_on_and_scores_nothing_twice(place):
    command = ["reward", "label", "texts", "--rewards", "mine.py:right"]
    assert main(command) == 0
    asked, pairs = (place / "asked.txt").read_text(), (place / "pairs.jsonl").read_text()
    assert asked == "2|3|222|4|4444|"
    (place / "pairs.jsonl").unlink()
    kept = place / "pairs.scores.jsonl"
    kept.write_bytes(kept.read_bytes()[:-20])  # as a kill leaves it
    assert main(command) == 0 and (place / "pairs.jsonl").read_text() == pairs
    assert (place / "asked.txt").read_text() == asked + "4|4444|"
    assert main(command) == 0 and (place / "asked.txt").read_text() == asked + "4|4444|"
    (place / "heavier.yaml").write_text("other: {use: 'mine.py:right', weight: 3}")
    assert main(["reward", "label", "texts", "--rewards", "heavier.yaml"]) == 0  # the same scores under another weight
    assert (place / "asked.txt").read_text() == asked + "4|4444|"
    assert rows(place / "pairs.jsonl")[0]["margins"] == {"overall": 3}


def test_a_failed_group_is_reported_and_not_kept(place, capsys):
    (place / "a.yaml").write_text("length: {use: 'mine.py:length'}\nbad: {use: 'mine.py:fails', on_error: skip}\n")
    assert main(["reward", "label", "texts", "--rewards", "a.yaml"]) == 0
    assert "left out: 5 samples that 'bad' failed on" in capsys.readouterr().err
    assert rows(place / "pairs.jsonl")[0]["margins"] == {"overall": 2, "length": 2}
    assert len(rows(place / "pairs.scores.jsonl")) == 2


def test_images_of_two_folders_by_their_prompts(place):
    for folder, seed in (("a", 1), ("b", 2)):
        (place / folder).mkdir()
        for name in ("one", "two"):
            saved(place / folder / f"{name}.png", seed=seed + 2 * (name == "two"))
            (place / folder / f"{name}.txt").write_text(f"a {name}")
    assert main(["reward", "label", "a", "b", "--rewards", "mine.py:bright", "--output", "out/pairs.jsonl"]) == 0
    from flowgrpo.rewards.preprocessing import read_tensor
    pairs = load_pairs(place / "out/pairs.jsonl")
    assert [pair.prompt for pair in pairs] == ["a one", "a two"]
    for pair in pairs:
        better, worse = (read_tensor(side).mean().item() for side in (pair.chosen, pair.rejected))
        assert pair.margins["overall"] == pytest.approx(better - worse, abs=1e-6) and better > worse


def test_a_judge_behind_an_endpoint_labels_aspects_and_principles(place):
    for folder, shade in (("a", 20), ("b", 200)):
        (place / folder).mkdir()
        Image.new("RGB", (8, 8), (shade,) * 3).save(place / folder / "cat.png")
    def reply(body, number):
        bright = level_of(body) > 100
        asked = "criteria" in " ".join(parts(body, "text"))
        return said(json.dumps({"1": "yes" if bright else "no"}) if asked else f"Score: {4 if bright else 10}")
    with endpoint(reply) as server:
        reached = {"url": server.url, "model": "m"}
        (place / "judges.yaml").write_text(json.dumps({
            "following": {"use": "judge", "weight": 2, "args": reached | {"scale": [0, 10]}},
            "bright": {"use": "judge_rubric", "args": reached | {"criteria": ["is bright"]}}}))
        assert main(["reward", "label", "a", "b", "--rewards", "judges.yaml"]) == 0
        assert len(server.seen) == 4
        assert main(["reward", "label", "a", "b", "--rewards", "judges.yaml"]) == 0 and len(server.seen) == 4
    [row] = rows(place / "pairs.jsonl")  # 2 * 1 + 0 against 2 * 0.4 + 1
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("cat", "a/cat.png", "b/cat.png")
    assert row["aspects"] == {"following": "chosen", "bright": "rejected"}
    assert row["margins"] == pytest.approx({"overall": 0.2, "following": 0.6, "bright": -1.0}, abs=1e-6)


def test_samples_of_a_model_are_drawn_once(place):
    (place / "sums.jsonl").write_text(json.dumps({"prompt": "12+34=", "metadata": {"answer": "46"}}))
    command = ["reward", "label", "starter_text", "--prompts", "sums.jsonl", "--count", "8", "--temperature", "1",
               "--rewards", "mine.py:right"]
    assert main(command) == 0
    before = (place / "pairs-samples" / "texts-0.jsonl").read_text()
    assert len(before.splitlines()) == 8
    assert main(command) == 0 and (place / "pairs-samples" / "texts-0.jsonl").read_text() == before
    [row] = rows(place / "pairs.jsonl")
    assert (row["prompt"], row["chosen"], row["margins"]) == ("12+34=", "46", {"overall": 1})
    assert row["rejected"] != "46"


@pytest.mark.parametrize("arguments, told", [
    (["texts", "--rewards", ""], "--rewards: expected the names of rewards"),
    (["texts", "--rewards", "mine.py:right,mine.py:length"], "'mine.py:right' cannot name an aspect"),
    (["nowhere", "--rewards", "text_length"], "no folder at nowhere: expected a folder of samples, or --prompts too"),
    (["texts", "--rewards", "mine.py:right", "--output", "x.json"], "--output x.json: expected a .jsonl file"),
    (["texts", "--rewards", "mine.py:right", "--output", "votes.jsonl"], "votes.jsonl holds pairs that this command"),
    (["texts", "--rewards", "mine.py:right", "--lora", "x"], "--lora: goes with --prompts"),
    (["texts", "texts", "--prompts", "a.txt", "--rewards", "mine.py:right"], "goes with one model or run, got 2"),
    (["texts", "--rewards", "mine.py:right", "--least", "9"], "no prompt has a pair: the samples of each score the"),
    (["single", "--rewards", "mine.py:right"], "no prompt in single has two different samples"),
    (["texts", "--rewards", "mine.py:bright"], "mine.py:bright")])
def test_mistakes_are_one_line(place, capsys, arguments, told):
    (place / "votes.jsonl").write_text("{}\n")
    write(place / "single", {"3=": SAMPLES["3="]})
    assert told in error_line(capsys, "reward", "label", *arguments)


def test_the_choice_of_pairs_by_hand():
    totals = torch.tensor([1.0, float("nan"), 3.0, 1.0, 2.0])
    assert Choice().pairs(totals) == [(2, 3)]
    assert Choice(every=True, least=1.0).pairs(totals) == [(2, 0), (2, 3)]
    assert Choice().pairs(torch.tensor([2.0, 2.0])) == [] and Choice().pairs(torch.full((2,), float("nan"))) == []
