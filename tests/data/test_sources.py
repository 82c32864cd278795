"""Sources of prompts and hub datasets."""

import json

import pytest
from PIL import Image

from flowgrpo.data import hub, sets, sources
from flowgrpo.data.prompts import load_prompts
from flowgrpo.errors import UserError
from tests.helpers.refusals import message


@pytest.fixture
def prompts(tmp_path):
    """Three prompts with an image each, and the function that cuts one off in the middle."""
    for name in "abc":
        Image.effect_noise((64, 64), 50).convert("RGB").save(tmp_path / f"{name}.jpg")
    lines = [json.dumps({"prompt": name, "image": f"{name}.jpg"}) for name in "abc"]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    return load_prompts(tmp_path / "p.jsonl")


def cut(prompt) -> None:
    from pathlib import Path
    path = Path(prompt.image)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def test_a_cut_image_is_found_with_file_and_line(prompts, tmp_path):
    sources.require(prompts)
    cut(prompts[1])
    caught = message(sources.require, prompts)
    assert caught.startswith(f"prompts {tmp_path}/p.jsonl, line 2, 'image': {tmp_path}/b.jpg cannot be read")
    cut(prompts[2])
    with pytest.raises(UserError, match=r"line 2, .*\(and 1 more of 3 prompts\)"):
        sources.require(prompts)
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
    lost = [sources.fault(prompt) is not None for prompt in prompts]
    assert lost == [True, False, False]
    assert sources.stand_ins(prompts[:2], lost[:2], prompts) == [prompts[2], prompts[1]]
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
    prompts = sets.load(dataset + options)
    assert [prompt.text for prompt in prompts] == ["a red hat", "two owls", "a bell"]
    assert [prompt.metadata for prompt in prompts] == [{"level": 3, "tags": ["hat"]}, {"tags": []},
                                                       {"level": 1, "tags": ["bell", "brass"]}]


def test_texts_of_a_dataset_once_with_split_and_limit(dataset, tmp_path):
    file = tmp_path / "org" / "captions" / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[1], *ROWS, {"caption": " a bell "}]))
    prompts = sets.load(f"{dataset}?column=caption&unique=true&limit=2")
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [("two owls", {}), ("a red hat", {})]
    assert len(sets.load(f"{dataset}?unique=true")) == 3
    assert len(hub.load(f"{dataset}?split=test")) == 1
    assert [prompt.text for prompt in hub.load(f"{dataset}?limit=2")] == ["a red hat", "two owls"]


@pytest.mark.parametrize("source, message", [
    ("?column=prompt", "there is no column 'prompt'; there are caption, level, tags"),
    ("?split=nope", "the dataset does not load"),
    ("?limit=0", "limit is '0', expected a number of rows above 0"),
    ("?streaming=yes", "streaming is 'yes', expected true or false"),
    ("?colum=caption", "unknown option 'colum': did you mean 'column'?")])
def test_mistakes_name_the_option(dataset, source, message):
    with pytest.raises(UserError) as caught:
        hub.load(dataset + source)
    assert message in str(caught.value)


def test_names_of_the_hub_have_an_owner():
    assert "expected hub:OWNER/NAME or hub:OWNER/NAME:CONFIG, got 'captions'" in message(hub.parse, "hub:captions")
    assert hub.parse("hub:openai/gsm8k:main?split=test&revision=refs/convert/parquet") == hub.HubPrompts(
        "openai/gsm8k", "main", None, "test", "refs/convert/parquet")
    for one in sets.SETS.values():
        for side in (one.train, one.held_out):
            if hub.is_dataset(side):
                assert hub.parse(side).column and "/" in hub.parse(side).id
