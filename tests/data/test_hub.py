"""Prompts of hub datasets, read by `datasets` from a folder."""

import json

import pytest

from flowgrpo.data import hub, sets
from flowgrpo.errors import UserError

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
    prompts = sets.load(dataset + options)
    assert [prompt.text for prompt in prompts] == ["a red hat", "two owls", "a bell"]
    assert [prompt.metadata for prompt in prompts] == [{"level": 3, "tags": ["hat"]}, {"tags": []},
                                                       {"level": 1, "tags": ["bell", "brass"]}]


def test_each_text_once(dataset, tmp_path):
    file = tmp_path / "org" / "captions" / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[1], *ROWS, {"caption": " a bell "}]))
    prompts = sets.load(f"{dataset}?column=caption&unique=true&limit=2")
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [("two owls", {}), ("a red hat", {})]
    assert len(sets.load(f"{dataset}?unique=true")) == 3


def test_split_and_limit(dataset):
    assert len(hub.load(f"{dataset}?split=test")) == 1
    assert [prompt.text for prompt in hub.load(f"{dataset}?limit=2")] == ["a red hat", "two owls"]


@pytest.mark.parametrize("source, message", [
    ("?column=prompt", "there is no column 'prompt'; there are caption, level, tags"),
    ("?split=nope", "the dataset does not load"),
    ("?limit=0", "limit is '0', expected a number of rows above 0"),
    ("?streaming=yes", "streaming is 'yes', expected true or false"),
    ("?colum=caption", "unknown option 'colum': did you mean 'column'?"),
])
def test_mistakes_name_the_option(dataset, source, message):
    with pytest.raises(UserError) as caught:
        hub.load(dataset + source)
    assert message in str(caught.value)


def test_a_name_has_an_owner():
    with pytest.raises(UserError, match="expected hub:OWNER/NAME or hub:OWNER/NAME:CONFIG, got 'captions'"):
        hub.parse("hub:captions")
    assert hub.parse("hub:openai/gsm8k:main?split=test&revision=refs/convert/parquet") == hub.HubPrompts(
        "openai/gsm8k", "main", None, "test", "refs/convert/parquet")


def test_named_sets_of_the_hub_parse():
    for one in sets.SETS.values():
        for side in (one.train, one.held_out):
            if hub.is_dataset(side):
                assert hub.parse(side).column and "/" in hub.parse(side).id
