"""Prompt sets by name: every packaged file loads, and training prompts are no held-out ones."""

import json
import re
import sys
from pathlib import Path

import pytest

from flowgrpo.config import parse
from flowgrpo.data import sets
from flowgrpo.data.prompts import load_prompts
from flowgrpo.data.suites import load_suite
from flowgrpo.errors import UserError
from flowgrpo.rewards.find import names
from flowgrpo.rewards.geneval.rules import require_judgeable

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "build"))

import build_suites  # noqa: E402
import build_training_prompts  # noqa: E402
import build_word_problems  # noqa: E402

PACKAGED = [name for name, one in sets.SETS.items() if one.packaged]
COUNTS = {"geneval": (2150, 553), "t2i_compbench": (5557, 2400), "partiprompts": (1469, 163), "ocr": (3000, 1018),
          "word_problems": (800, 200), "arithmetic": (800, 200), "general": (540, 60), "general_video": (270, 30),
          "simple_animals": (41, 4), "dpg": (959, 106), "unigenbench": (540, 60), "vbench": (850, 94)}


@pytest.mark.parametrize("name", PACKAGED)
def test_a_set_splits_into_texts_that_are_on_one_side_alone(name):
    train, held_out = sets.resolve(parse.validate({"prompts": name}))
    assert not {prompt.key for prompt in train} & {prompt.key for prompt in held_out}
    if name in COUNTS:
        assert (len(train), len(held_out)) == COUNTS[name]
    assert set(sets.SETS[name].rewards) <= set(names())


def test_scenes_of_geneval_are_trained_on_in_no_order_of_words():
    """A pair in the other order, and `a left of b` for `b right of a`, are the same scene."""
    lines = [json.loads(line) for line in sets.SETS["geneval"].train.read_text().splitlines()]
    held_out = [json.loads(line) for line in sets.SETS["geneval"].held_out.read_text().splitlines()]
    assert not {build_suites.scene(line) for line in lines} & {build_suites.scene(line) for line in held_out}
    left = {"tag": "position", "include": [{"class": "cat"}, {"class": "dog", "position": ["left of", 0]}]}
    right = {"tag": "position", "include": [{"class": "dog"}, {"class": "cat", "position": ["right of", 0]}]}
    assert build_suites.scene(left) == build_suites.scene(right) == ("position", "left of", "dog", "cat")
    assert lines == build_suites.train(held_out)


def test_the_metadata_suit_their_rewards():
    for prompt in sets.load(sets.SETS["geneval"].train):
        require_judgeable(prompt.metadata, prompt.text)
    assert all(prompt.metadata["text"] in prompt.text for prompt in sets.load(sets.SETS["ocr"].train)
               if "text" in prompt.metadata)


@pytest.mark.parametrize("name, categories", [("geneval", 6), ("t2i_compbench", 8), ("partiprompts", 12),
                                              ("vbench", 16), ("unigenbench", 10)])
def test_a_packaged_set_is_a_suite_with_its_categories(name, categories):
    suite = load_suite(name.upper())
    assert suite.name == name and len(suite.categories) == categories


def test_a_share_of_a_set_with_held_out_prompts_is_refused():
    with pytest.raises(UserError, match="prompts: geneval brings held-out prompts of its own"):
        sets.require_suited(parse.validate({"prompts": "geneval", "held_out": 0.3}))
    sets.require_suited(parse.validate({"prompts": "general", "held_out": 0.3}))


OWN = ("ocr_train", "general", "general_video")


@pytest.mark.parametrize("script", [build_training_prompts, build_word_problems])
def test_prompts_of_our_own_are_what_their_script_writes(script):
    for name, rows in script.build().items():
        lines = (sets.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_no_training_prompt_of_our_own_is_in_a_test_set():
    """Neither as written, nor without case, spaces and punctuation; and no text that an image is asked to show."""
    test = [prompt for file in sets.test_files() for prompt in load_prompts(file)]
    assert len(test) == 200 + 200 + 535 + 553 + 600 + 944 + 1018 + 1065 + 1632 + 2400
    for name in OWN:
        train = load_prompts(sets.FOLDER / f"{name}.jsonl")
        assert not {plain(prompt.text) for prompt in train} & {plain(prompt.text) for prompt in test}
        shown, asked = ({plain(prompt.metadata["text"]) for prompt in side if "text" in prompt.metadata}
                        for side in (train, test))
        assert len(asked) == 950 and not shown & asked


@pytest.mark.parametrize("name, kinds", [("word_problems", build_word_problems.KINDS),
                                         ("arithmetic", build_word_problems.BARE)])
def test_word_problems_are_solved_by_their_answers(name, kinds):
    """By the numbers of the text, in each kind's own formula; and no held-out problem is a training one with other
    names and things."""
    sides = [load_prompts(getattr(sets.SETS[name], side)) for side in ("train", "held_out")]
    seen = [set(), set()]
    for side, prompts in enumerate(sides):
        for prompt in prompts:
            kind = prompt.metadata["category"]
            numbers = [int(number) for number in re.findall(r"\d+", prompt.text)]
            times = next((times for times, word in build_word_problems.MULTIPLES if f" {word} " in prompt.text), 0)
            solved = SOLVED[kind](*numbers, *([times] if kind == "together" else []))
            assert solved == int(prompt.metadata["answer"]) > 0 and max(numbers) < 100
            seen[side].add((kind, *numbers, times))
    assert not seen[0] & seen[1] and {kind for kind, *_ in seen[1]} == set(kinds)


SOLVED = {"gained": lambda a, b: a + b, "packed": lambda b, a: a * b, "bought": lambda b, c, a: a * b + c,
          "shared": lambda b, whole: whole // b, "read": lambda b, a: b - a,
          "sum": lambda a, b: a + b, "difference": lambda a, b: abs(a - b), "product": lambda a, b: a * b,
          "together": lambda a, times: a * (1 + times), "aged": lambda a, b: a + b, "paid": lambda a, b, c: c - a * b}


def plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def test_normalised_text_forgets_case_spaces_and_punctuation():
    assert plain("A  Sign, \"Stop\".") == plain("a sign stop") == build_training_prompts.plain("a SIGN: stop")


@pytest.mark.parametrize("prompts, name", [
    ("partiprompts", "partiprompts"), ("vbench", "vbench"), ("drawbench", "drawbench"),
    (str(sets.FOLDER / "ocr.jsonl"), "ocr"), (str(sets.SETS["drawbench"].train), "drawbench"),
    (str(sets.FOLDER / ".." / "packaged" / "geneval.jsonl"), "geneval")])
def test_a_test_set_is_not_trained_on(prompts, name):
    """By its name, by its file or by its place on the hub; the line names what to train on, and the option."""
    with pytest.raises(UserError) as caught:
        sets.require_suited(parse.validate({"prompts": prompts}))
    told = str(caught.value)
    assert told.startswith(f"prompts: {prompts} is a test set") and f"eval --suite {name}" in told
    assert "general" in told and "train_on_test_set: true" in told and "\n" not in told
    sets.require_suited(parse.validate({"prompts": prompts, "train_on_test_set": True}))


@pytest.mark.parametrize("prompts", ["general", "ocr", "geneval", "mine.jsonl", str(sets.FOLDER / "ocr_train.jsonl")])
def test_other_prompts_are_trained_on(prompts):
    assert sets.test_set(prompts) is None
    sets.require_suited(parse.validate({"prompts": prompts}))


def test_recorded_pairs_are_trained_on_in_place_of_a_test_set():
    with pytest.raises(UserError, match="partiprompts"):
        sets.require_suited(parse.validate({"prompts": "partiprompts"}))
    sets.require_suited(parse.validate({"prompts": "partiprompts", "preferences": "pairs.jsonl"}))


def test_prompts_are_a_set_a_file_or_a_dataset_in_every_command(tmp_path):
    (tmp_path / "own.txt").write_text("a red star\n")
    assert [prompt.text for prompt in sets.resolve_prompts(tmp_path / "own.txt")] == ["a red star"]
    assert sets.resolve_prompts("starter") == sets.load(sets.SETS["starter"].train)
    with pytest.raises(UserError, match="^prompts 'startr': no such set: did you mean 'starter'"):
        sets.resolve_prompts("startr")
