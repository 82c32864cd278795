"""Runs, pages, votes and LoRA files of others: damage is told in one line."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from flowgrpo.errors import UserError
from flowgrpo.evaluation import runs
from flowgrpo.evaluation.plan import entries
from flowgrpo.evaluation.report import report
from flowgrpo.export import run_lora
from flowgrpo.export.export import load_finished, lora
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.tools.vote.ballot import Ballot
from flowgrpo.tools.vote.sources import pairs
from tests.fuzz import CORPUS


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(CORPUS / "run", tmp_path / "mine"))


def test_the_run_of_the_corpus_is_whole(run):
    assert runs.read(run).state == "finished" and report.write(run).is_file()
    assert load_finished(run)[1]["unit"] == "denoiser evaluations"


@pytest.mark.parametrize("name, content", [
    ("summary.json", {"epochs": 3}), ("summary.json", {"epochs": "x", "before": {}, "after": {}}),
    ("summary.json", {"epochs": 3, "before": {"a": "x"}, "after": {}}), ("summary.json", "[" * 100_000),
    ("before.json", {"scores": {"scene": ["x", 1]}}), ("before.json", {"scores": []}), ("config.yaml", "train: [1]\n"),
])
def test_a_run_with_a_damaged_file_is_listed_as_damaged(run, name, content):
    if name == "before.json":
        (run / "summary.json").unlink()
    (run / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert runs.read(run).state == "damaged"


@pytest.mark.parametrize("name, content", [
    ("report/before.json", '{"name": "before", "epoch": 0, "scores": {"scene": "x"}, "cards": [3]}'),
    ("report/nouns.json", '{"colour": "red"}'), ("report/last.json", "[" * 100_000),
    ("report/ranges.json", '{"scene": [NaN, 1]}'), ("summary.json", '{"compared": 3}'),
    ("metrics.jsonl", '{"epoch": 1, "evaluations": 1, "seconds": 1, "seconds/rollout": "x"}\n'),
])
def test_a_report_of_damaged_files_is_refused(run, name, content):
    (run / name).write_text(content)
    assert "damaged" in refusal(report.write, run)


@pytest.mark.parametrize("content", ["[" * 50, "[" * 100_000, "3", "{}", '{"unit": 3}'])
def test_a_damaged_summary_is_refused_by_exports(run, content):
    (run / "summary.json").write_text(content)
    assert "damaged" in refusal(load_finished, run)


@pytest.mark.parametrize("tensors, adapter, message", [
    ({"transformer.to_q.weight": torch.ones(2, 2)}, {"transformer.lora_alpha": 4}, "expected matrices that end in"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2)}, {"transformer.lora_alpha": 4}, "expected matrices that end in"),
    ({"transformer.to_q.lora_A.weight": torch.ones(0, 2)}, {"transformer.lora_alpha": 4}, "expected matrices that end"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2, 2)}, {"transformer.lora_alpha": "x"}, "does not say its alpha"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2, 2)}, [1], "no readable lora_adapter_metadata"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2, 2)}, "[" * 5000, "no readable lora_adapter_metadata"),
])
def test_a_damaged_lora_is_refused_by_exports(run, tensors, adapter, message):
    text = adapter if isinstance(adapter, str) else json.dumps(adapter)
    save_file(tensors, run / LORA_FILE, {"lora_adapter_metadata": text})
    assert message in refusal(lora, run, run / "out.safetensors")


def test_a_file_that_is_no_safetensors_is_refused_by_exports(run):
    (run / LORA_FILE).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "expected a .safetensors file" in refusal(run_lora.read, run)


@pytest.mark.parametrize("facts", ['{"folders": 3}', '{"folders": ["0", "1"], "columns": {}}', "[" * 100_000,
                                   '{"folders": ["0", "a\\u0000b"], "columns": ["x", "y"]}', '{"folders": [[], 1]}',
                                   '{"folders": [null, "1", null], "columns": ["x", "y"], "prompts": ["a"]}'])
def test_a_page_of_others_is_refused(tmp_path, facts):
    info = PngImagePlugin.PngInfo()
    info.add_itxt("flowgrpo", facts)
    Image.new("RGB", (2, 2)).save(tmp_path / "page.png", pnginfo=info)
    assert "page.png" in refusal(pairs, [tmp_path / "page.png"])


def test_an_evaluation_skips_lines_that_nest_and_a_fifo(tmp_path):
    (tmp_path / "scores-0.jsonl").write_text("[" * 100_000 + '\n{"a": 1}\n')
    os.mkfifo(tmp_path / "scores-1.jsonl")
    assert list(entries(tmp_path, "scores-*.jsonl")) == [{"a": 1}]


def test_a_page_that_names_too_long_a_folder_is_refused(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_itxt("flowgrpo", json.dumps({"folders": ["0", "x" * 5000], "columns": ["x", "y"], "prompts": ["a"]}))
    Image.new("RGB", (2, 2)).save(tmp_path / "page.png", pnginfo=info)
    assert "names a folder that cannot be read (File name too long)" in refusal(pairs, [tmp_path / "page.png"])


def test_votes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "pairs.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert "not UTF-8 text" in refusal(Ballot, [], ("a", "b"), tmp_path / "pairs.jsonl")
