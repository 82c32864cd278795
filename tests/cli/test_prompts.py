"""`flowgrpo list prompts` and `flowgrpo prompts write`."""

import json

import pytest

from flowgrpo.cli import main
from flowgrpo.data.prompts import load_prompts
from flowgrpo.data.sets import SETS
from tests.helpers import chat_endpoint


def test_all_sets_are_listed(capsys):
    assert main(["list", "prompts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(SETS)
    assert main(["list", "prompts"]) == 0
    assert "CC-BY-4.0" in capsys.readouterr().out


def test_a_preview_is_spread_over_the_set(capsys):
    assert main(["list", "prompts", "t2i_compbench", "--count", "8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["training"] == 5557 and shown["held out"] == 2400
    assert len({line["metadata"]["category"] for line in shown["prompts"]}) == 8


def test_a_misspelt_set_is_one_line(capsys):
    assert main(["list", "prompts", "genevl"]) == 2
    assert "no such set: did you mean 'geneval'?" in capsys.readouterr().err


def test_templates_become_a_prompt_file_once(tmp_path, capsys):
    (tmp_path / "t.yaml").write_text("templates: ['a {colour} owl']\nslots: {colour: [red, blue]}\n")
    command = ["prompts", "write", str(tmp_path / "t.yaml"), "--output", str(tmp_path / "p.jsonl")]
    assert main(command) == 0
    assert {prompt.text for prompt in load_prompts(tmp_path / "p.jsonl")} == {"a red owl", "a blue owl"}
    assert "2 prompts, all that there are of the 200" in capsys.readouterr().out
    assert main(command) == 2
    assert "expected a .jsonl file that does not exist yet" in capsys.readouterr().err
    assert main(["prompts", "write", "--output", str(tmp_path / "q.jsonl")]) == 2


@pytest.fixture
def endpoint():
    """URL of an endpoint whose second answer repeats the first."""
    with chat_endpoint.served(["1. a red hat\n2. two owls", "two owls\na bell"]) as url:
        yield url


def test_a_language_model_is_asked_until_there_are_enough(tmp_path, endpoint):
    output = tmp_path / "p.jsonl"
    assert main(["prompts", "write", "--about", "things", "--url", endpoint, "--model", "m", "--count", "3",
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
