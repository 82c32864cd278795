"""Prompt sets by name and suites: every packaged file loads, every format on a few lines of our own."""

import json
import re
from collections import Counter

import build_suites
import build_training_prompts
import build_word_problems
import pyarrow
import pytest
from pyarrow import parquet

from flowgrpo.config import parse
from flowgrpo.contrib.questions.questions import Question, of_list
from flowgrpo.data import prompts, sets
from flowgrpo.data.prompts import load_prompts
from flowgrpo.data.suites import SHIPPED, load_suite
from flowgrpo.rewards.find import names
from flowgrpo.rewards.geneval.colours import NAMES
from flowgrpo.rewards.geneval.rules import require_judgeable
from tests.helpers.refusals import message, refused

PACKAGED = [name for name, one in sets.SETS.items() if one.is_packaged]
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


def test_scenes_and_metadata_of_geneval():
    """A pair in the other order, and `a left of b` for `b right of a`, are the same scene."""
    lines = [json.loads(line) for line in sets.SETS["geneval"].train.read_text().splitlines()]
    held_out = [json.loads(line) for line in sets.SETS["geneval"].held_out.read_text().splitlines()]
    assert not {build_suites.scene(line) for line in lines} & {build_suites.scene(line) for line in held_out}
    left = {"tag": "position", "include": [{"class": "cat"}, {"class": "dog", "position": ["left of", 0]}]}
    right = {"tag": "position", "include": [{"class": "dog"}, {"class": "cat", "position": ["right of", 0]}]}
    assert build_suites.scene(left) == build_suites.scene(right) == ("position", "left of", "dog", "cat")
    assert lines == build_suites.train(held_out)
    for prompt in sets.load(sets.SETS["geneval"].train):
        require_judgeable(prompt.metadata, prompt.text)
    assert all(prompt.metadata["text"] in prompt.text for prompt in sets.load(sets.SETS["ocr"].train)
               if "text" in prompt.metadata)


@pytest.mark.parametrize("name, categories", [("geneval", 6), ("t2i_compbench", 8), ("partiprompts", 12),
                                              ("vbench", 16), ("unigenbench", 10)])
def test_a_packaged_set_is_a_suite_with_its_categories(name, categories):
    suite = load_suite(name.upper())
    assert suite.name == name and len(suite.categories) == categories


def test_shares_and_pairs_in_place_of_test_sets():
    assert "prompts: geneval brings held-out prompts of its own" in message(
        sets.require_suited, parse.validate({"prompts": "geneval", "held_out": 0.3}))
    sets.require_suited(parse.validate({"prompts": "general", "held_out": 0.3}))
    sets.require_suited(parse.validate({"prompts": "partiprompts", "preferences": "pairs.jsonl"}))


OWN = ("ocr_train", "general", "general_video")


@pytest.mark.parametrize("script", [build_training_prompts, build_word_problems])
def test_prompts_of_our_own_are_what_their_script_writes(script):
    for name, rows in script.build().items():
        lines = (sets.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows


@pytest.mark.fast
def test_no_training_prompt_is_in_a_test_set():
    """Neither as written, nor without case, spaces and punctuation; and no text that an image is asked to show."""
    test = [prompt for file in build_training_prompts.test_files() for prompt in load_prompts(file)]
    assert len(test) == 200 + 200 + 535 + 553 + 600 + 944 + 1018 + 1065 + 1632 + 2400
    for name in OWN:
        train = load_prompts(sets.FOLDER / f"{name}.jsonl")
        assert not {plain(prompt.text) for prompt in train} & {plain(prompt.text) for prompt in test}
        shown, asked = ({plain(prompt.metadata["text"]) for prompt in side if "text" in prompt.metadata}
                        for side in (train, test))
        assert len(asked) == 950 and not shown & asked
    assert plain("A  Sign, \"Stop\".") == plain("a sign stop") == build_training_prompts.plain("a SIGN: stop")


@pytest.mark.parametrize("name, kinds", [("word_problems", build_word_problems.KINDS),
                                         ("arithmetic", build_word_problems.BARE)])
def test_word_problems_are_solved_by_their_answers(name, kinds):
    """By the numbers of the text, in each kind's own formula; and no held-out problem is a training one with other
    names and things."""
    sides = [load_prompts(getattr(sets.SETS[name], side)) for side in ("train", "held_out")]
    seen = [set(), set()]
    for side, problems in enumerate(sides):
        for prompt in problems:
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


@pytest.mark.parametrize("prompts, name", [
    ("partiprompts", "partiprompts"), ("vbench", "vbench"), ("drawbench", "drawbench"),
    (str(sets.FOLDER / "ocr.jsonl"), "ocr"), (str(sets.SETS["drawbench"].train), "drawbench"),
    (str(sets.FOLDER / ".." / "packaged" / "geneval.jsonl"), "geneval")])
def test_a_test_set_is_not_trained_on(prompts, name):
    """By its name, by its file or by its place on the hub; the line names what to train on, and the option."""
    told = message(lambda: sets.require_suited(parse.validate({"prompts": prompts})))
    assert told.startswith(f"prompts: {prompts} is a test set") and f"eval --suite {name}" in told
    assert "general" in told and "train_on_test_set: true" in told and "\n" not in told
    sets.require_suited(parse.validate({"prompts": prompts, "train_on_test_set": True}))


@pytest.mark.parametrize("prompts", ["general", "ocr", "geneval", "mine.jsonl", str(sets.FOLDER / "ocr_train.jsonl")])
def test_other_prompts_are_trained_on(prompts):
    assert sets.test_set(prompts) is None
    sets.require_suited(parse.validate({"prompts": prompts}))


def test_prompts_are_a_set_a_file_or_a_dataset_in_every_command(tmp_path):
    (tmp_path / "own.txt").write_text("a red star\n")
    assert [prompt.text for prompt in sets.resolve_prompts(tmp_path / "own.txt")] == ["a red star"]
    assert sets.resolve_prompts("starter") == sets.load(sets.SETS["starter"].train)
    refused("^prompts 'startr': no such set: did you mean 'starter'", sets.resolve_prompts, "startr")


GENEVAL = '{"tag": "counting", "include": [{"class": "owl", "count": 2}], "exclude": [], "prompt": "two owls"}\n'
UNIGEN = ('index,prompt_en,sub_dims_en\n0,"A red, round hat.","{""Subjects"": ""Object"", ""Testpoints"": '
          '[""Attribute - Color"", ""Attribute - Shape"", ""Style""]}"\n')
DPG = ("item_id,text,proposition_id,dependency,category_broad,question_natural_language\n"
       "vrd3,A hat on a hen.,1,0,entity,Is there a hat?\nvrd3,A hat on a hen.,2,1,relation,Is it on a hen?\n"
       "12,A bell.,1,0,entity,Is there a bell?\n")


def loaded(folder, name: str, content: str | list[dict]):
    if isinstance(content, str):
        (folder / name).write_text(content)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(content), folder / name)
    suite = load_suite(str(folder / name))
    return suite, [(case.prompt.text, case.prompt.metadata, case.categories) for case in suite.cases]


@pytest.mark.parametrize("name, content, form, expected", [
    ("any.jsonl", GENEVAL, "geneval", [("two owls", {
        "tag": "counting", "include": [{"class": "owl", "count": 2}], "exclude": []}, ("counting",))]),
    ("any.tsv", 'Prompt\tCategory\tChallenge\tNote\nan owl says "hi\tAnimals\tBasic\t\n', "partiprompts",
     [('an owl says "hi', {"challenge": "Basic"}, ("Animals",))]),
    ("any.csv", 'Prompts,Category\n"Owls, two.",Counting\n', "drawbench", [("Owls, two.", {}, ("Counting",))]),
    ("any.csv", UNIGEN, "unigenbench", [("A red, round hat.", {
        "Subjects": "Object", "Testpoints": ["Attribute - Color", "Attribute - Shape", "Style"]},
        ("Attribute", "Style"))]),
    ("any.jsonl", '{"id": "vrd3", "prompt": "A hat."}\n{"id": "7", "prompt": "A bell."}\n', "dpg",
     [("A hat.", {"id": "vrd3"}, ("vrd",)), ("A bell.", {"id": "7"}, ("dpg",))]),
    ("any.csv", DPG, "dpg", [
        ("A hat on a hen.", {"id": "vrd3", "questions": [
            {"question": "Is there a hat?", "answer": "yes", "proposition_id": "1", "dependency": "0"},
            {"question": "Is it on a hen?", "answer": "yes", "proposition_id": "2", "dependency": "1"}]}, ("vrd",)),
        ("A bell.", {"id": "12", "questions": [
            {"question": "Is there a bell?", "answer": "yes", "proposition_id": "1", "dependency": "0"}]}, ("dpg",))]),
    ("test.txt", 'A sign with "Hello You" on it\n\nA mug, "Tea"\n', "ocr",
     [('A sign with "Hello You" on it', {"text": "Hello You"}, ()), ('A mug, "Tea"', {"text": "Tea"}, ())]),
    ("t2i_compbench_3d_spatial_val.txt", "an owl behind a hat\n", "t2i_compbench",
     [("an owl behind a hat", {}, ("3d_spatial",))]),
    ("non_spatial_val.txt", "an owl reads\n", "t2i_compbench", [("an owl reads", {}, ("non_spatial",))]),
    ("list.txt", 'An owl.\nA "quoted" hen.\n', "prompts", [("An owl.", {}, ()), ('A "quoted" hen.', {}, ())]),
    ("own.jsonl", '{"prompt": "an owl", "metadata": {"task": "birds"}}\n', "flowgrpo",
     [("an owl", {"task": "birds"}, ("birds",))]),
    ("geneval.parquet", [{"tag": "counting", "include": [{"class": "owl", "count": 2}], "prompt": "two owls"}],
     "geneval", [("two owls", {"tag": "counting", "include": [{"class": "owl", "count": 2}]}, ("counting",))]),
    ("questions.parquet", [{"question": "3 and 4?", "answer": "3+4\n#### 7"}], "questions",
     [("3 and 4?", {"answer": "7"}, ())]),
    ("own.parquet", [{"prompt": "an owl", "category": "birds", "n": 1}], "flowgrpo",
     [("an owl", {"category": "birds", "n": 1}, ("birds",))])])
def test_a_format_is_told_by_its_content(tmp_path, name, content, form, expected):
    suite, cases = loaded(tmp_path, name, content)
    assert (suite.form, cases) == (form, expected) and suite.name == name.rpartition(".")[0]


@pytest.mark.parametrize("files, texts, categories", [
    ({"color_train": "a red owl", "color_val": "a blue owl\na red hen", "shape_val": "a round hat"},
     ["a blue owl", "a red hen", "a round hat"], {"color": [0, 1], "shape": [2]}),
    ({"0": "An owl.", "whoops4": "A hat."}, ["An owl.", "A hat."], {"dpg": [0], "whoops": [1]})])
def test_a_folder_of_files_is_one_suite(tmp_path, files, texts, categories):
    """T2I-CompBench's, without those for training, and DPG's of one line each."""
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text + "\n")
    suite = load_suite(str(tmp_path))
    assert ([prompt.text for prompt in suite.prompts], suite.categories) == (texts, categories)
    assert suite.form == ("dpg" if "dpg" in categories else "t2i_compbench")


def test_the_questions_of_dpg_and_a_prompt_of_two_categories(tmp_path):
    suite, _ = loaded(tmp_path, "any.csv", DPG)
    assert [of_list(prompt.metadata["questions"]) for prompt in suite.prompts] == [
        [Question("Is there a hat?", "yes"), Question("Is it on a hen?", "yes")], [Question("Is there a bell?", "yes")]]
    suite, _ = loaded(tmp_path, "any.csv", UNIGEN + '1,Fog.,"{""Testpoints"": [""Style""]}"\n')
    assert suite.categories == {"Attribute": [0], "Style": [0, 1]}


@pytest.mark.parametrize("name, text, told", [
    ("any.jsonl", GENEVAL + '{"tag": "cou', r"any.jsonl, line 2: not valid JSON"),
    ("any.jsonl", GENEVAL + "3\n", r"any.jsonl, line 2: expected an object, got 3"),
    ("any.jsonl", GENEVAL + '{"prompt": "an owl"}\n', r"a record is not like the first one, .*KeyError: 'tag'"),
    ("any.jsonl", GENEVAL.replace('"two owls"', "3"), "any.jsonl, record 1: expected a text under 'prompt', got 3"),
    ("any.jsonl", GENEVAL + GENEVAL.replace('"counting"', "null"), "record 2: expected a text under 'tag', got None"),
    ("any.csv", "Prompts,Category\nAn owl.\n", "any.csv, record 1: expected a text under 'Category', got None"),
    ("any.jsonl", '{"question": ["a"], "answer": 3}', "record 1: expected a text under 'question', got .'a'.$"),
    ("any.jsonl", "", "holds no prompt"),
    ("any.txt", "\n \n", "holds no prompt"),
    ("any.png", "", "expected a file that ends in .jsonl, .csv")])
def test_a_broken_suite_is_told(tmp_path, name, text, told):
    refused(told, loaded, tmp_path, name, text)


def test_a_suite_that_is_not_there_is_told():
    for name, told in (("nothing", "one that `flowgrpo list prompts` lists, a file"), ("./no/such/file.csv", "one"),
                       ("some/birds/folder", ".* with or without one of its files behind it"), ("no/file.csv", "one")):
        refused(f"no suite '{name}': expected {told}", load_suite, name)


def test_a_hub_dataset_is_read_from_its_files(tmp_path, monkeypatch):
    """From the cache of huggingface_hub, as it lies there after a download."""
    from huggingface_hub import constants
    folder = tmp_path / "datasets--some--birds"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "data.csv").write_text("Prompts,Category\nAn owl.,Birds\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    suite = load_suite("some/birds")
    assert (suite.name, suite.form, suite.categories) == ("birds", "drawbench", {"Birds": [0]})
    refused("no suite 'some/fish': it is no path, and as a hub dataset it does not load", load_suite, "some/fish")
    (folder / "snapshots" / "abc" / "more").mkdir()
    (folder / "snapshots" / "abc" / "more" / "fish.csv").write_text("Prompts,Category\nA cod.,Fish\n")
    for name in ("some/birds/more/fish.csv", "some/birds:more/fish.csv"):
        suite = load_suite(name)
        assert (suite.name, suite.categories) == ("fish", {"Fish": [0]})
    refused("no suite 'some/birds:no.csv': the hub dataset some/birds has no file no.csv", load_suite,
            "some/birds:no.csv")


def test_a_folder_as_datasets_lie_on_the_hub(tmp_path):
    """Splits in parquet, with a licence and a README beside them."""
    (tmp_path / "data").mkdir()
    for split, text in (("train", "An owl."), ("test", "A hen."), ("train-a", "A cow.")):
        rows = pyarrow.Table.from_pylist([{"Prompts": text, "Category": "Birds", "picture": b"..."}])
        parquet.write_table(rows, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    for name in ("LICENSE.txt", "README.txt", "NOTICE-1.txt"):
        (tmp_path / name).write_text("Permission is granted.\nProvided that.\n")
    suite = load_suite(str(tmp_path))
    assert suite.form == "drawbench" and [prompt.text for prompt in suite.prompts] == ["A hen.", "A cow."]
    (tmp_path / "license_plates.csv").write_text("Prompts,Category\nA duck.,Birds\n")
    assert [prompt.text for prompt in load_suite(str(tmp_path)).prompts] == ["A duck."]


def test_suites_of_several_formats_and_the_starters(tmp_path):
    (tmp_path / "a.jsonl").write_text(GENEVAL)
    (tmp_path / "b.csv").write_text("Prompts,Category\nOwls.,x\n")
    assert "several formats (geneval, drawbench)" in message(lambda: load_suite(str(tmp_path)))
    suite = load_suite("starter")
    assert suite.prompts == prompts.load_prompts(prompts.STARTER / "held_out.jsonl")
    assert {name: len(rows) for name, rows in suite.categories.items()} == Counter(
        prompt.metadata["task"] for prompt in suite.prompts)
    assert [json.loads(line) for line in SHIPPED["geneval_coco"].read_text().splitlines()] == build_suites.build()


# --- the one over COCO's names ---------------------------------------------------------------------------------------
def test_the_shipped_suite_is_balanced_and_judged():
    suite = load_suite("geneval_coco")
    assert suite.form == "geneval" and len({prompt.text for prompt in suite.prompts}) == len(suite.prompts)
    for prompt in suite.prompts:
        require_judgeable(prompt.metadata, prompt.text)
        for clause in prompt.metadata["include"]:
            assert clause["class"] in build_suites.OBJECTS and clause.get("color", "") in prompt.text
            assert build_suites.many(clause["class"]) in prompt.text if clause["count"] > 1 else \
                clause["class"] in prompt.text
            assert clause.get("position", [""])[0] in prompt.text
    counts = {}
    assert {name: len(rows) for name, rows in suite.categories.items()} == {
        "single_object": 80, "two_object": 100, "counting": 76, "colors": 79, "position": 100, "color_attr": 100}
    for tag, rows in suite.categories.items():
        counts[tag] = Counter(clause["class"] for i in rows for clause in suite.cases[i].prompt.metadata["include"])
    assert set(counts["single_object"].values()) == set(counts["counting"].values()) == {1}
    assert all(1 <= min(found.values()) and max(found.values()) <= 5 for found in counts.values())
    colours = Counter(clause["color"] for prompt in suite.prompts for clause in prompt.metadata["include"]
                      if "color" in clause)
    assert set(colours) == set(NAMES) and max(colours.values()) - min(colours.values()) <= 6


@pytest.mark.parametrize("name, article, plural", [
    ("apple", "an apple", "apples"), ("bus", "a bus", "buses"), ("knife", "a knife", "knives"),
    ("sheep", "a sheep", "sheep"), ("toothbrush", "a toothbrush", "toothbrushes"), ("couch", "a couch", "couches"),
    ("computer mouse", "a computer mouse", "computer mice"), ("umbrella", "an umbrella", "umbrellas"),
    ("sandwich", "a sandwich", "sandwiches"), ("skis", "a pair of skis", "skises")])
def test_english(name, article, plural):
    assert build_suites.one(name) == article
    assert name in build_suites.UNCOUNTED or build_suites.many(name) == plural
