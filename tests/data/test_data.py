"""Prompts: what files, hub datasets and sources hold, what is held out, and which prompts an epoch samples."""

import itertools
import json
import math
import runpy
import sys
from collections import Counter
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from starter_scenes import is_reserved

from flowgrpo.config import Config
from flowgrpo.data import hub, sets, sources
from flowgrpo.data.prompts import STARTER, Prompt, load_prompts, of_records
from flowgrpo.data.sets import draw, resolve, split
from flowgrpo.errors import slip
from flowgrpo.starter import scenes
from tests.helpers.refusals import message, refused

ROOT = Path(__file__).parents[2]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder / name


def named(*texts: str) -> list[Prompt]:
    return [Prompt(text) for text in texts]


# --- files -----------------------------------------------------------------------------------------------------------
def test_txt_jsonl_and_published_formats(tmp_path):
    file = write(tmp_path, "p.txt", "\ufeffa cat\r\n\r\n  a dog, running \n")
    assert load_prompts(file) == named("a cat", "a dog, running")
    lines = [{"question": "Ann has 3 pens and buys 1200 more. How many?",
              "answer": "3+1200=<<3+1200=1203>>\n#### 1,203"},
             {"question": "He owes $2.50 twice.", "answer": "It is #### or so\n#### -5"}]
    assert load_prompts(write(tmp_path, "gsm8k.jsonl", "\n".join(map(json.dumps, lines)))) == [
        Prompt(line["question"], metadata={"answer": answer}) for line, answer in zip(lines, ("1203", "-5"))]
    row = {"question": "3 and 4?", "answer": 7, "source": "own", "tag": "sums"}
    expected = [Prompt("3 and 4?", metadata={"answer": 7, "source": "own", "tag": "sums"})]
    assert load_prompts(write(tmp_path, "p.jsonl", json.dumps(row))) == expected
    assert load_prompts(table(tmp_path / "p.parquet", [row])) == expected
    assert load_prompts(write(tmp_path, "p.csv", "question,answer,source\n3 and 4?,7,own\n")) == [
        Prompt("3 and 4?", metadata={"answer": "7", "source": "own"})]
    facts = {"tag": "counting", "include": [{"class": "owl", "count": 2}], "exclude": [{"class": "owl", "count": 3}]}
    file = write(tmp_path, "evaluation_metadata.jsonl", json.dumps(facts | {"prompt": "a photo of two owls"}))
    assert load_prompts(file) == [Prompt("a photo of two owls", metadata=facts)]


def test_jsonl_and_csv_hold_the_same(tmp_path):
    write(tmp_path, "cat.png", b"")
    image = str(tmp_path / "cat.png")
    expected = [Prompt("a cat", "blurry", {"task": "one", "n": 2}, image, 2.5), Prompt("a dog, big")]
    lines = [json.dumps({"prompt": "a cat", "negative_prompt": "blurry", "metadata": {"task": "one", "n": 2},
                         "image": "cat.png", "weight": 2.5}), "", json.dumps({"prompt": "a dog, big"})]
    assert load_prompts(write(tmp_path, "p.jsonl", "\n".join(lines))) == expected
    table = ('prompt,negative_prompt,metadata,image,weight\n'
             'a cat,blurry,"{""task"": ""one"", ""n"": 2}",cat.png,2.5\n"a dog, big",,,,\n')
    assert load_prompts(write(tmp_path, "p.csv", table)) == expected
    table = 'prompt,task,metadata,kind\na cat,one,"{""n"": 2, ""kind"": null}",x\n"a dog, big",two,,\n'
    assert load_prompts(write(tmp_path, "p.csv", table)) == [
        Prompt("a cat", metadata={"task": "one", "n": 2, "kind": None}), Prompt("a dog, big", metadata={"task": "two"})]


def test_metadata_tell_the_full_path_of_a_prompts_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    write(tmp_path / "own", "cat.png", b"")
    lines = [{"prompt": "a", "image": "cat.png", "metadata": {"n": 2}},
             {"prompt": "b", "image": "cat.png", "metadata": {"image": "mine"}}, {"prompt": "c"}]
    write(tmp_path / "own", "p.jsonl", "\n".join(map(json.dumps, lines)))
    found = load_prompts("own/p.jsonl")
    assert [p.metadata for p in found] == [{"n": 2, "image": str(tmp_path / "own" / "cat.png")}, {"image": "mine"}, {}]
    assert found[0].key == "a\nown/cat.png"  # by which prompts are held out: the same on every machine


def table(path: Path, rows: list[dict]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


# The most usual files of language models' own data, as JSON lines and as Parquet.
USER = {"role": "user", "content": "3 and 4?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "3 and 4?"}]}
OWN = [{"prompt": "3 and 4?", "answer": "7"}, {"question": "3 and 4?", "answer": "7"},
       {"prompt": "3 and 4?", "answer": "3+4\n#### 7"}, {"problem": "3 and 4?", "solution": "7"},
       {"messages": [USER, {"role": "assistant", "content": "7"}]}, {"messages": [PARTS], "answer": "7"},
       {"prompt": [USER], "answer": "7"}, {"question": "3 and 4?", "metadata": {"answer": "7"}},
       {"messages": [USER, {"role": "assistant", "content": "so\n#### 7"}], "metadata": None}]


@pytest.mark.parametrize("row", OWN, ids=str)
def test_own_data_of_language_models(row, tmp_path):
    expected = Prompt("3 and 4?", metadata={next(iter({"solution"} & row.keys()), "answer"): "7"})
    assert load_prompts(write(tmp_path, "p.jsonl", json.dumps(row))) == [expected]
    assert load_prompts(table(tmp_path / "p.parquet", [row])) == [expected]
    given = json.dumps(row)
    assert of_records([row]) == [expected] and json.dumps(row) == given


def test_images_in_a_table_are_left_out_with_a_line(tmp_path, capsys):
    """A data set of captions is one of prompts; one of edits has to name files."""
    rows = [{"prompt": "a cat", "image": {"bytes": b"png", "path": "x"}, "embedding": b"bytes"}]
    for _ in range(2):
        assert load_prompts(table(tmp_path / "p.parquet", rows)) == [Prompt("a cat")]
    assert capsys.readouterr().err == (
        f"{tmp_path / 'p.parquet'}: the images in the column 'image' are not read, so that its prompts go without: to "
        "use them save each as a file, and give its path\n")


def test_parquet_is_read_with_dates_and_decimals(tmp_path):
    rows = [{"prompt": "a cat", "negative_prompt": "blurry", "metadata": {"task": "one", "n": 2}, "weight": 2.5,
             "level": "easy", "image": {"bytes": b"no path", "path": "x"}, "raw": b"bytes"},
            {"prompt": "a dog, big", "metadata": {"task": "two"}}]
    assert load_prompts(table(tmp_path / "p.parquet", rows)) == [
        Prompt("a cat", "blurry", {"level": "easy", "task": "one", "n": 2}, None, 2.5),
        Prompt("a dog, big", metadata={"task": "two"})]
    rows = [{"prompt": "a cat", "metadata": '{"n": 2}'}]
    assert load_prompts(table(tmp_path / "p.parquet", rows)) == [Prompt("a cat", metadata={"n": 2})]
    moment = datetime(2026, 5, 1, 12, 30)
    rows = [{"prompt": "a cat", "day": moment.date(), "at": moment, "hour": moment.time(), "weight": Decimal("2.5"),
             "count": Decimal("3.00"), "score": math.nan, "long": timedelta(hours=1), "fine": True,
             "metadata": {"seen": [{"on": moment.date(), "value": math.nan}]}},
            {"prompt": "a dog", "day": None, "score": 0.5, "weight": None}]
    cat, dog = load_prompts(table(tmp_path / "p.parquet", rows))
    told = {"day": "2026-05-01", "at": "2026-05-01T12:30:00", "hour": "12:30:00", "count": 3, "long": "1:00:00",
            "fine": True, "seen": [{"on": "2026-05-01", "value": None}]}
    assert json.loads(json.dumps(cat.metadata, allow_nan=False)) == told and cat.weight == 2.5
    assert dog == Prompt("a dog", metadata={"score": 0.5})


def test_parquet_files_that_are_wrong_or_harm(tmp_path):
    """Dates beyond Python's, which raise an error of no kind of pyarrow's, and rows without end in a few bytes."""
    file = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a"], "at": pyarrow.array([2**62], pyarrow.timestamp("us"))}), file)
    assert "p.parquet: not a .parquet file that can be read" in message(load_prompts, file)
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 2_000_000}), file)
    assert file.stat().st_size < 10_000
    assert "p.parquet: 2,000,000 rows, expected 1,048,576 at most: split it" in message(load_prompts, file)
    for rows, told in (([{"text": "a", "url": "b"}], "line 1: expected the column 'prompt', got text, url"),
                       ([{"prompt": "a"}, {"prompt": None}], "line 2: expected a text under 'prompt', got None"),
                       ([{"prompt": "a", "metadata": "{"}], "line 1: not valid JSON")):
        assert message(load_prompts, table(file, rows)).startswith(f"prompts {file}, {told}")
    assert "not a .parquet file that can be read" in message(load_prompts, write(tmp_path, "q.parquet", "prompt\n"))


def test_without_pyarrow_parquet_says_what_to_install(tmp_path, monkeypatch):
    file = table(tmp_path / "p.parquet", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(rf"^{file} needs pyarrow.parquet \(.*pip install 'flowgrpo\[parquet\]'$", load_prompts, file)


@pytest.mark.parametrize("name, text, told", [
    ("p.jsonl", '{"question": "a", "answer": "#### "}', "line 1: expected an answer behind '####'"),
    ("p.jsonl", '{"question": 3, "answer": "#### 4"}', "line 1: expected a text under 'prompt', got 3"),
    ("p.jsonl", '{"answer": "a"}', "line 1: expected a text under 'prompt', got None"),
    ("p.jsonl", '{"messages": []}', "line 1: expected messages of one user, and perhaps the assistant's answer, got "),
    ("p.jsonl", json.dumps({"messages": [USER, {"role": "assistant", "content": "b"}, USER]}),
     "got the roles user, assistant, user"),
    ("p.jsonl", json.dumps({"messages": [{"role": "system", "content": "a"}, USER]}),
     "line 1: a message of the system: leave it out, and set text.system, which all prompts share"),
    ("p.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "an image goes under 'image'"),
    ("p.txt", "\n \n", "the file holds no prompt"),
    ("p.csv", "", "the file holds no prompt"),
    ("p.csv", "prompt\n", "the file holds no prompt"),
    ("p.jsonl", "", "the file holds no prompt"),
    ("p.json", "[]", "expected a .txt, .jsonl, .csv or .parquet file, got '.json'"),
    ("p.txt", b"\xff\xfe", "not UTF-8 text"),
    ("p.jsonl", '{"prompt": "a"}\n{"prompt": }', "line 2: not valid JSON: Expecting value (column 12)"),
    ("p.jsonl", '\n"a cat"', "line 2: expected an object with the key 'prompt', got 'a cat'"),
    ("p.jsonl", '{"promt": "a"}', "line 1: unknown key 'promt': did you mean 'prompt'?"),
    ("p.jsonl", '{"weight": 1}', "line 1: expected a text under 'prompt', got None"),
    ("p.jsonl", '{"prompt": " "}', "line 1: expected a text under 'prompt', got ' '"),
    ("p.jsonl", '{"prompt": "a", "negative_prompt": 3}', "line 1: expected a text under 'negative_prompt', got 3"),
    ("p.jsonl", '{"prompt": "a", "metadata": "x"}', "line 1: expected an object under 'metadata', got 'x'"),
    ("p.jsonl", '{"prompt": "a", "image": "no.png"}', "line 1, 'image': no image at"),
    ("p.jsonl", '{"prompt": "a", "weight": 0}', "line 1: expected a positive number under 'weight', got 0"),
    ("p.jsonl", '{"prompt": "a", "weight": NaN}', "line 1: expected a positive number under 'weight', got nan"),
    ("p.jsonl", '{"prompt": "a", "weight": true}', "line 1: expected a positive number under 'weight', got True"),
    ("p.csv", "text\na cat\n", "line 1: expected the heading 'prompt' in the first line, got ['text']"),
    ("p.csv", "prompt,task,metadata\na,b,3\n", "line 2: expected an object under 'metadata', got 3"),
    ("p.csv", "prompt\na cat, big\n", "line 2: 2 cells under 1 headings"),
    ("p.csv", "prompt,weight\na,1\nb,heavy\n", "line 3: expected a positive number under 'weight', got 'heavy'"),
    ("p.csv", "prompt,metadata\na,{\n", "line 2: not valid JSON"),
    ("p.csv", 'prompt\n"a\n', "not valid CSV: unexpected end of data")])
def test_mistakes_are_told_with_file_and_line(name, text, told, tmp_path):
    file = write(tmp_path, name, text)
    assert told in message(load_prompts, file) and str(file) in message(load_prompts, file)


# Names of facts that files have, and slips of our keys, by what they are a slip of.
USUAL = ("prompt_id image_id image_url video_id meta negative image_path image_file image_size video_url video_path "
         "mask masks mask_path images_url prompt_en prompt_zh prompt_text prompt_type original_prompt source_image "
         "image_1 image1 image2 first_frame last_frame control control_type height width id weighting tag "
         "class caption idx positive_prompt prompt_weight control_images_dir metadata_file").split()
SLIPS = {"promt": "prompt", "prompts": "prompt", "pormpt": "prompt", "Prompt": "prompt", "metdata": "metadata",
         "meta_data": "metadata", "weigth": "weight", "weights": "weight", "imge": "image", "imgae": "image",
         "mask_imag": "mask_image", "negative-prompt": "negative_prompt", "negativePrompt": "negative_prompt",
         "vidoe": "video", "lastimage": "last_image", "controll_image": "control_image"}


def one_row(folder: Path, ending: str, row: dict[str, str]) -> Path:
    if ending == "parquet":
        return table(folder / "p.parquet", [row])
    return write(folder, f"p.{ending}", json.dumps(row) if ending == "jsonl" else
                 f"{','.join(row)}\n{','.join(row.values())}\n")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_other_keys_are_metadata_and_one_letter_off_a_key_is_a_slip(ending, tmp_path):
    facts = {name: "x" for name in USUAL}
    assert load_prompts(one_row(tmp_path, ending, {"prompt": "a"} | facts)) == [Prompt("a", metadata=facts)]
    for name, meant in SLIPS.items():
        file = one_row(tmp_path, ending, {"prompt": "a", name: "x"})
        assert message(load_prompts, file) == f"prompts {file}, line 1: unknown key {name!r}: did you mean " \
            f"{meant!r}? (as a fact it goes into `metadata`)"


def test_a_slip_is_one_letter_more_less_or_other_or_two_exchanged():
    words = ["", *map("".join, (each for length in range(1, 5) for each in itertools.product("ab", repeat=length)))]
    for word in words:
        near = {word[:at] + letter + word[at:] for at in range(len(word) + 1) for letter in "ab"}
        near |= {word[:at] + word[at + 1:] for at in range(len(word))}
        near |= {word[:at] + letter + word[at + 1:] for at in range(len(word)) for letter in "ab"}
        near |= {word[:at] + word[at + 1] + word[at] + word[at + 2:] for at in range(len(word) - 1)}
        assert {other for other in words if slip(word, [other]) == other} == near & {*words} | {word}


def test_missing_files_and_names_without_owner():
    assert message(load_prompts, "no.txt") == "prompts no.txt: no such file"
    assert "expected hub:OWNER/NAME or hub:OWNER/NAME:CONFIG, got 'captions'" in message(hub.parse, "hub:captions")
    assert hub.parse("hub:openai/gsm8k:main?split=test&revision=refs/convert/parquet") == hub.HubPrompts(
        "openai/gsm8k", "main", None, "test", "refs/convert/parquet")
    for one in sets.SETS.values():
        for side in (one.train, one.held_out):
            if hub.is_dataset(side):
                assert hub.parse(side).column and "/" in hub.parse(side).id


# --- the held-out split ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share, expected", [(0.1, 3), (0.5, 15), (0.001, 1), (0.96, 29)])
def test_a_share_of_the_texts_is_held_out(share, expected):
    prompts = named(*(f"p{i}" for i in range(30)), *(f"p{i}" for i in range(10)))  # ten texts come twice
    train, held = split(prompts, share, seed=3)
    assert len({p.text for p in held}) == expected and not {p.text for p in train} & {p.text for p in held}
    assert Counter(p.text for p in train + held) == Counter(p.text for p in prompts)


def test_held_out_files_leave_training_or_are_refused(tmp_path):
    prompts = named(*(f"p{i}" for i in range(40)))
    first = {p.text for p in split(prompts, 0.25, 0)[1]}
    assert first == {p.text for p in split(prompts[::-1] + prompts[:5], 0.25, 0)[1]}
    assert first != {p.text for p in split(prompts, 0.25, 1)[1]}
    file = write(tmp_path, "held.txt", "b\nc\n")
    train, held = split(named("a", "b", "a", "d"), str(file), 0)
    assert [p.text for p in train] == ["a", "a", "d"] and [p.text for p in held] == ["b", "c"]
    assert "leaves none to train on" in message(split, named("a"), str(write(tmp_path, "h.txt", "a\nb")), 0)


def test_a_text_with_another_image_is_another_prompt(tmp_path):
    for name in "abcd":
        write(tmp_path, f"{name}.png", b"")
    lines = [json.dumps({"prompt": "what is it?", "image": f"{name}.png"}) for name in "abcd"]
    train, held = split(load_prompts(write(tmp_path, "p.jsonl", "\n".join(lines))), 0.25, 0)
    assert len(train) == 3 and len(held) == 1 and held[0].image not in {prompt.image for prompt in train}
    file = write(tmp_path, "held.jsonl", "\n".join(lines[1:2]))
    train, held = split(load_prompts(tmp_path / "p.jsonl"), str(file), 0)
    assert [prompt.image for prompt in train] == [str(tmp_path / f"{name}.png") for name in "acd"]
    assert Prompt("a").key == "a" and len({prompt.key for prompt in train + held}) == 4


@pytest.mark.parametrize("texts, share, told", [
    (["a", "b"], 0.9, "holds out every prompt"),
    (["a", "a"], 0.5, "1 different prompts cannot be parted"),
    (["a", "b"], 0.0, "expected a share between 0 and 1"),
    (["a", "b"], 1.0, "expected a share between 0 and 1")])
def test_no_side_is_empty(texts, share, told):
    assert told in message(split, named(*texts), share, 0)


# --- drawing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n, count", [(7, 3), (5, 4), (6, 3), (10, 1), (9, 8), (30, 29), (4, 4), (3, 7), (1, 5)])
def test_equal_weights_walk_through_the_data(n, count):
    prompts = named(*map(str, range(n)))
    epochs = [[p.text for p in draw(prompts, count, epoch, seed=5)] for epoch in range(40)]
    assert all(len(epoch) == count for epoch in epochs)
    assert all(max(Counter(epoch).values()) <= -(-count // n) for epoch in epochs)
    if count < n:
        stream = [text for epoch in epochs for text in epoch]
        passes = [tuple(stream[i:i + n]) for i in range(0, len(stream) - n + 1, n)]
        assert all(sorted(one) == sorted(map(str, range(n))) for one in passes)
        assert len(set(passes)) > 1 or n == 1


def test_every_first_place_is_equally_likely_and_epochs_are_pure_functions():
    prompts = named(*map(str, range(4)))
    counts = Counter(draw(prompts, 3, 0, seed)[0].text for seed in range(4000))
    assert all(abs(counts[str(i)] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for i in range(4))
    for prompts in (named(*"abcdefgh"), [Prompt(text, weight=1 + i) for i, text in enumerate("abcdefgh")]):
        assert draw(prompts, 3, 11, 2) == draw(prompts, 3, 11, 2)
        assert draw(prompts, 3, 11, 2) != draw(prompts, 3, 12, 2)
        assert [draw(prompts, 3, e, 2) for e in range(5)] != [draw(prompts, 3, e, 3) for e in range(5)]


@pytest.mark.fast
def test_weights_are_probabilities_and_repeat_only_if_they_must():
    prompts = [Prompt("a", weight=1), Prompt("b", weight=2), Prompt("c", weight=5)]
    counts = Counter(draw(prompts, 1, epoch, 0)[0].text for epoch in range(8000))
    for text, share in (("a", 1 / 8), ("b", 2 / 8), ("c", 5 / 8)):
        assert abs(counts[text] - 8000 * share) < 5 * (8000 * share * (1 - share)) ** 0.5
    prompts = [Prompt(text, weight=10.0 ** i) for i, text in enumerate("abcd")]
    for epoch in range(50):
        assert max(Counter(p.text for p in draw(prompts, 3, epoch, 0)).values()) == 1
        assert sorted(Counter(p.text for p in draw(prompts, 6, epoch, 0)).values()) == [1, 1, 2, 2]
    for prompts in (named(*"abcdef"), [Prompt(text, weight=1 + i) for i, text in enumerate("abcdef")]):
        for wanted in (None, [0.55] * 6, [0] * 6):
            assert [draw(prompts, 4, e, 1, wanted) for e in range(9)] == [draw(prompts, 4, e, 1) for e in range(9)]


def test_wishes_times_weights():
    prompts = [Prompt("a", weight=1), Prompt("b", weight=2), Prompt("c", weight=4)]
    counts = Counter(draw(prompts, 1, epoch, 0, [4, 1, 0.5])[0].text for epoch in range(8000))
    for text, share in (("a", 4 / 8), ("b", 2 / 8), ("c", 2 / 8)):
        assert abs(counts[text] - 8000 * share) < 5 * (8000 * share * (1 - share)) ** 0.5
    assert draw(prompts, 2, 7, 3, [4, 1, 0.5]) == draw(prompts, 2, 7, 3, [4, 1, 0.5])
    prompts = named(*"abcd")
    for epoch in range(30):
        drawn = [prompt.text for prompt in draw(prompts, 3, epoch, 0, [0, 1, 0, 1])]
        assert {"b", "d"} < set(drawn) and len(set(drawn)) == 3


# --- the starter's prompts -------------------------------------------------------------------------------------------
def test_starter_prompts_are_what_the_script_builds():
    built = runpy.run_path(str(ROOT / "scripts" / "build" / "build_prompts.py"))["build"]()
    for name, records in built.items():
        assert [json.loads(line) for line in (STARTER / name).read_text().splitlines()] == records


def test_starter_prompts_are_different_on_their_side_and_of_each_task_equally_often():
    train, held = resolve(Config())
    assert len(train) == len({p.text for p in train}) == 600 and not {p.text for p in train} & {p.text for p in held}
    for prompts, side in ((train, False), (held, True)):
        for prompt in prompts:
            claims = scenes.parse(prompt.text)
            prefix = prompt.text[:len(prompt.text) - len(claims.caption())]
            assert claims.caption(prefix) == prompt.text and claims.task == prompt.metadata["task"]
            assert is_reserved(claims, prefix) == side
    weights = Counter()
    for prompt in train:
        weights[prompt.metadata["task"]] += prompt.weight
    assert weights == pytest.approx(dict.fromkeys(scenes.TASKS, 100), rel=1e-3)
    assert Counter(p.metadata["task"] for p in held) == dict.fromkeys(scenes.TASKS, 40)


def test_files_of_the_configuration(tmp_path):
    file = write(tmp_path, "p.txt", "\n".join(f"p{i}" for i in range(20)))
    train, held = resolve(Config(prompts=str(file), held_out=0.25, seed=1))
    assert (len(train), len(held)) == (15, 5)
    assert [p.text for p in held] == [p.text for p in resolve(Config(prompts=str(file), held_out=0.25, seed=2))[1]]
    other = write(tmp_path, "h.txt", "p0\nq\n")
    assert [p.text for p in resolve(Config(prompts=str(file), held_out=str(other)))[1]] == ["p0", "q"]
    assert [p.text for p in resolve(Config(held_out=str(other)))[1]] == ["p0", "q"]


@pytest.fixture
def prompts(tmp_path):
    """Three prompts with an image each, and the function that cuts one off in the middle."""
    for name in "abc":
        Image.effect_noise((64, 64), 50).convert("RGB").save(tmp_path / f"{name}.jpg")
    lines = [json.dumps({"prompt": name, "image": f"{name}.jpg"}) for name in "abc"]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    return load_prompts(tmp_path / "p.jsonl")


def cut(prompt) -> None:
    path = Path(prompt.image)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def test_a_cut_image_is_found_with_file_and_line(prompts, tmp_path):
    sources.require(prompts)
    cut(prompts[1])
    caught = message(sources.require, prompts)
    assert caught.startswith(f"prompts {tmp_path}/p.jsonl, line 2, 'image': {tmp_path}/b.jpg cannot be read")
    cut(prompts[2])
    refused(r"line 2, .*\(and 1 more of 3 prompts\)", sources.require, prompts)
    assert sources.count_lost(prompts) == 2


def test_what_was_found_is_kept_beside_the_runs(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MANY", 3)
    assert sources.decode(prompts, folder=tmp_path / "runs") == []
    kept = json.loads((tmp_path / "runs" / sources.FILE).read_text())
    assert [json.loads(state)[0] for state in kept if str(tmp_path) in state] == [
        str((tmp_path / f"{name}.jpg").resolve()) for name in "abc"]
    decoded = []
    monkeypatch.setattr(sources, "_known", {})
    monkeypatch.setattr(sources, "_verdict", decoded.append)
    sources.decode(prompts, folder=tmp_path / "runs")
    assert decoded == []
    cut(prompts[0])
    sources.decode(prompts, folder=tmp_path / "runs")
    assert [place[0] for place in decoded] == [prompts[0].image]


def test_another_prompt_stands_in_for_a_lost_one(prompts):
    cut(prompts[0])
    assert [sources.fault(prompt) is not None for prompt in prompts] == [True, False, False]
    assert sources.stand_ins(prompts[:2], [True, False], prompts) == [prompts[2], prompts[1]]
    assert sources.stand_ins(prompts[:1], [True], prompts) == [prompts[1]]
    cut(prompts[1])
    cut(prompts[2])
    assert "no other prompt's files can be read" in message(lambda: sources.stand_ins(prompts[:1], [True], prompts))


ROWS = [{"caption": "a red hat", "level": 3, "tags": ["hat"]}, {"caption": "two owls", "level": None, "tags": []},
        {"caption": "a bell", "level": 1, "tags": ["bell", "brass"]}]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A dataset `org/captions` in the working directory."""
    folder = tmp_path / "org" / "captions"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return "hub:org/captions"


@pytest.mark.parametrize("options", ["", "?streaming=true", "?column=caption"])
def test_rows_become_prompts_and_other_columns_metadata(dataset, options):
    assert [(prompt.text, prompt.metadata) for prompt in sets.load(dataset + options)] == [
        ("a red hat", {"level": 3, "tags": ["hat"]}), ("two owls", {"tags": []}),
        ("a bell", {"level": 1, "tags": ["bell", "brass"]})]


def test_each_text_once_splits_and_limits(dataset, tmp_path):
    assert len(hub.load(f"{dataset}?split=test")) == 1
    assert [prompt.text for prompt in hub.load(f"{dataset}?limit=2")] == ["a red hat", "two owls"]
    file = tmp_path / "org" / "captions" / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[1], *ROWS, {"caption": " a bell "}]))
    prompts = sets.load(f"{dataset}?column=caption&unique=true&limit=2")
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [("two owls", {}), ("a red hat", {})]
    assert len(sets.load(f"{dataset}?unique=true")) == 3


@pytest.mark.parametrize("source, told", [
    ("?column=prompt", "there is no column 'prompt'; there are caption, level, tags"),
    ("?split=nope", "the dataset does not load"),
    ("?limit=0", "limit is '0', expected a number of rows above 0"),
    ("?streaming=yes", "streaming is 'yes', expected true or false"),
    ("?colum=caption", "unknown option 'colum': did you mean 'column'?")])
def test_mistakes_name_the_option(dataset, source, told):
    assert told in message(hub.load, dataset + source)
