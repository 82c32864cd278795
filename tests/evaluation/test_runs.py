"""`flowgrpo list runs` and `flowgrpo report A B`, and runs whose files are damaged."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import runs
from flowgrpo.evaluation.plan import entries
from flowgrpo.evaluation.report import comparison, report
from flowgrpo.evaluation.runs import Run, list_runs
from flowgrpo.export import run_lora
from flowgrpo.export.export import load_finished, lora
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import run
from flowgrpo.storage.places import lock_run
from flowgrpo.tools.vote.ballot import Ballot
from flowgrpo.tools.vote.sources import pairs
from tests.fuzz import CORPUS
from tests.helpers import tiny
from tests.helpers.refusals import error_line, message
from tests.helpers.refusals import only_line as told


def written(output, name: str, epochs: int, time: int, finished: bool = True, **options):
    """The folder of a run after so many epochs."""
    config = tiny.config(output, name=name, train__epochs=3, **options)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(config.yaml())
    lines = [{"epoch": epoch, "reward/red/mean": 0.1 * epoch} | ({"held_out/red": 0.5} if epoch == 2 else {})
             for epoch in range(1, epochs + 1)]
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (config.folder / "before.json").write_text(json.dumps({"scores": {"red": [0.1, None, 0.3]}}))
    if finished:
        summary = {"epochs": epochs, "before": {"red": 0.2}, "after": {"red": 0.7}}
        (config.folder / "summary.json").write_text(json.dumps(summary))
    for file in config.folder.iterdir():
        os.utime(file, (time, time))
    return config.folder


def test_runs_are_listed_the_newest_first_with_their_state(tmp_path, capsys):
    written(tmp_path, "whole", 3, time=100)
    written(tmp_path, "broken_off", 2, time=300, finished=False, method="flow_grpo")
    written(tmp_path, "begun", 0, time=400, finished=False)
    (written(tmp_path, "odd", 1, time=200) / "metrics.jsonl").write_text("nonsense\n")
    os.utime(tmp_path / "odd" / "metrics.jsonl", (200, 200))
    (tmp_path / "no_run").mkdir()
    with lock_run(tmp_path / "begun"):
        runs = list_runs(tmp_path)
    red = {"red": pytest.approx(0.2)}
    assert runs == [Run("begun", "running", "starter", "mix_grpo", 0, 3, red, {}, 400),
                    Run("broken_off", "stopped", "starter", "flow_grpo", 2, 3, red, {"red": 0.5}, 300),
                    Run("odd", "damaged", changed=200),
                    Run("whole", "finished", "starter", "mix_grpo", 3, 3, {"red": 0.2}, {"red": 0.7}, 100)]
    assert main(["list", "runs", str(tmp_path)]) == 0
    assert re.search(r"broken_off +starter +flow_grpo +2 of 3 +red +0.2 +0.5 +stopped", capsys.readouterr().out)
    assert main(["list", "runs", str(tmp_path / "whole"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["after"] == {"red": 0.7}


def test_a_run_that_an_error_ended_is_called_crashed(tmp_path, capsys):
    calls = []
    def red(images, prompts):
        calls.append(len(images))
        if len(calls) == 4:  # after the trial, the base and the first batch of the first epoch
            raise RuntimeError("the scorer\nis gone")
        return tiny.red(images, prompts)
    settings = tiny.config(tmp_path, train__micro_batch=2)
    given = dict(functions={"red": red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    assert "the scorer is gone" in message(lambda: run(settings, pipe=tiny.sd3(), **given))
    [found] = list_runs(tmp_path)
    assert found.state == "crashed"
    said = (settings.folder / "crash.txt").read_text()
    assert "RuntimeError: the scorer is gone" in said and said.count("\n") == 1
    assert main(["runs", str(tmp_path)]) == 0 and "crashed" in capsys.readouterr().out
    run(settings, pipe=tiny.sd3(), **given)
    assert [found.state for found in list_runs(tmp_path)] == ["finished"]
    assert not (settings.folder / "crash.txt").exists()


def test_runs_of_one_name_and_runs_that_went_on(tmp_path):
    (written(tmp_path, "longer", 2, time=100) / "metrics.jsonl").write_text('{"epoch": 3}\n')
    [run] = list_runs(tmp_path)
    assert (run.state, run.epochs) == ("stopped", 3)
    folders = [written(tmp_path / output, "run", 1, time=1) for output in ("x", "y")]
    text = comparison.write(folders, tmp_path / "page.html").read_text()
    assert """"Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""" in text
    assert f"{folders[0]} and {folders[1]}" in text and "<p>All settings are the same.</p>" in text


def test_a_folder_without_runs_is_told(tmp_path, capsys):
    assert f"no run in {tmp_path}: expected a folder that holds runs" in told(capsys, "list", "runs", tmp_path)


def test_several_runs_are_one_page(tmp_path, capsys):
    first = written(tmp_path, "a<b", 3, time=1, train__lr=1e-3)
    second = written(tmp_path, "other", 2, time=2, finished=False, train__lr=2e-3, parts={"plan": {"size": 2}})
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a<b-other.html")
    page = (tmp_path / "a<b-other.html").read_text()
    assert "<h1>a&lt;b and other</h1>" in page and "a<b" not in page
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["red, training samples", "red, held-out prompts",
                                                   "Settings that differ"]
    assert "<tr><th>train.lr</th><td>0.001</td><td>0.002</td></tr>" in page
    assert "<tr><th>parts.plan.size</th><td></td><td>2</td></tr>" in page and ">train.group<" not in page
    assert re.findall(r'points="(.*?)"', page) == [
        "64.0,232.0 348.0,122.0 632.0,12.0", "64.0,232.0 348.0,122.0",
        "64.0,232.0 442.7,100.0 632.0,12.0", "64.0,232.0 442.7,100.0"]  # 0.2 at epoch 0, 0.5 at 2, 0.7 after 3
    assert main(["report", str(first), str(second), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").read_text() == page


@pytest.mark.parametrize("options, line", [
    (["a", "a"], "one run is given twice, expected different ones"),
    (["a", "b", "--live"], "--live follows one run, got 2"),
    (["a", "--output", "x.html"], "--output: goes with several runs"),
    (["a", "nowhere"], "no run at nowhere: expected the folder")])
def test_mistakes_in_reports_are_told(options, line, here, capsys):
    for name in "ab":
        written(here, name, 1, time=1)
    assert line in told(capsys, "report", *options)


def test_names_of_others_do_not_command_the_terminal(tmp_path, capsys):
    evil = "\x1b[31m\x9b2J\u202eevil"
    folder = written(tmp_path, "ab", 1, time=100).rename(tmp_path / "a\x1b[2Jb")
    for file in ("config.yaml", "before.json", "summary.json"):
        if (folder / file).is_file():
            text = (folder / file).read_text()
            settings = text.replace("mix_grpo", r'"\x1b]0;x\x07"').replace("name: ab", r'name: "a\x1b[2Jb"')
            (folder / file).write_text(settings if file == "config.yaml" else text.replace('"red"', json.dumps(evil)))
    assert main(["list", "runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert not set(out) & set("\x1b\x07\x9b\u202e") and r"\x1b[2J" in out and r"\u202eevil" in out
    assert "\x1b" not in error_line(capsys, "list", "runs", str(tmp_path / "no\x1b[2Jsuch"))


def test_pages_of_several_runs_show_hostile_names_as_text_and_changes_of_direction_written_out(tmp_path, capsys):
    names = ["<script>alert(1)</script>".replace("/", ""), "x\"><img src=y onerror=z>"]
    folders = [written(tmp_path, name, 1, time=1) for name in names]
    assert main(["report", *map(str, folders), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page and "<img" not in page and "&lt;script&gt;" in page
    runs = [comparison.Compared(f"a\u202e{number}", {"prompts": f"x\u202e\x1b{number}"},
                                [{"epoch": 1, "reward/\u202er/mean": 0.5}]) for number in range(2)]
    text = comparison.page(runs)
    assert not {"\u202e", "\x1b"} & set(text)
    assert "a\\u202e0 and a\\u202e1" in text and "x\\u202e\\x1b0" in text and "\\u202er, training samples" in text


def refusal(call, *arguments) -> str:
    caught = message(call, *arguments)
    assert caught.isprintable()
    return caught


@pytest.fixture
def corpus_run(tmp_path):
    return Path(shutil.copytree(CORPUS / "run", tmp_path / "mine"))


def test_the_corpus_is_whole_and_other_files_are_refused(corpus_run):
    assert runs.read(corpus_run).state == "finished" and report.write(corpus_run).is_file()
    assert load_finished(corpus_run)[1]["unit"] == "denoiser evaluations"
    (corpus_run / LORA_FILE).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "expected a .safetensors file" in refusal(run_lora.read, corpus_run)


@pytest.mark.parametrize("name, content", [
    ("summary.json", {"epochs": 3}), ("summary.json", {"epochs": "x", "before": {}, "after": {}}),
    ("summary.json", {"epochs": 3, "before": {"a": "x"}, "after": {}}), ("summary.json", "[" * 100_000),
    ("before.json", {"scores": {"scene": ["x", 1]}}), ("before.json", {"scores": []}), ("config.yaml", "train: [1]\n")])
def test_a_run_with_a_damaged_file_is_listed_as_damaged(corpus_run, name, content):
    if name == "before.json":
        (corpus_run / "summary.json").unlink()
    (corpus_run / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert runs.read(corpus_run).state == "damaged"


@pytest.mark.parametrize("name, content", [
    ("report/before.json", '{"name": "before", "epoch": 0, "scores": {"scene": "x"}, "cards": [3]}'),
    ("report/nouns.json", '{"colour": "red"}'), ("report/last.json", "[" * 100_000),
    ("report/ranges.json", '{"scene": [NaN, 1]}'), ("summary.json", '{"compared": 3}'),
    ("metrics.jsonl", '{"epoch": 1, "evaluations": 1, "seconds": 1, "seconds/rollout": "x"}\n')])
def test_a_report_of_damaged_files_is_refused(corpus_run, name, content):
    (corpus_run / name).write_text(content)
    assert "damaged" in refusal(report.write, corpus_run)


@pytest.mark.parametrize("content", ["[" * 50, "[" * 100_000, "3", "{}", '{"unit": 3}'])
def test_a_damaged_summary_is_refused_by_exports(corpus_run, content):
    (corpus_run / "summary.json").write_text(content)
    assert "damaged" in refusal(load_finished, corpus_run)


@pytest.mark.parametrize("tensors, adapter, message", [
    ({"transformer.to_q.weight": torch.ones(2, 2)}, {"transformer.lora_alpha": 4}, "expected matrices that end in"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2)}, {"transformer.lora_alpha": 4}, "expected matrices that end in"),
    ({"transformer.to_q.lora_A.weight": torch.ones(0, 2)}, {"transformer.lora_alpha": 4}, "expected matrices that end"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2, 2)}, {"transformer.lora_alpha": "x"}, "does not say its alpha"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2, 2)}, [1], "no readable lora_adapter_metadata"),
    ({"transformer.to_q.lora_A.weight": torch.ones(2, 2)}, "[" * 5000, "no readable lora_adapter_metadata")])
def test_a_damaged_lora_is_refused_by_exports(corpus_run, tensors, adapter, message):
    text = adapter if isinstance(adapter, str) else json.dumps(adapter)
    save_file(tensors, corpus_run / LORA_FILE, {"lora_adapter_metadata": text})
    assert message in refusal(lora, corpus_run, corpus_run / "out.safetensors")


@pytest.mark.parametrize("facts", ['{"folders": 3}', '{"folders": ["0", "1"], "columns": {}}', "[" * 100_000,
                                   '{"folders": ["0", "a\\u0000b"], "columns": ["x", "y"]}', '{"folders": [[], 1]}',
                                   '{"folders": [null, "1", null], "columns": ["x", "y"], "prompts": ["a"]}'])
def test_a_page_of_others_is_refused(tmp_path, facts):
    info = PngImagePlugin.PngInfo()
    info.add_itxt("flowgrpo", facts)
    Image.new("RGB", (2, 2)).save(tmp_path / "page.png", pnginfo=info)
    assert "page.png" in refusal(pairs, [tmp_path / "page.png"])


def test_evaluations_pages_and_votes_that_are_damaged(tmp_path):
    (tmp_path / "scores-0.jsonl").write_text("[" * 100_000 + '\n{"a": 1}\n')
    os.mkfifo(tmp_path / "scores-1.jsonl")
    assert list(entries(tmp_path, "scores-*.jsonl")) == [{"a": 1}]
    info = PngImagePlugin.PngInfo()
    info.add_itxt("flowgrpo", json.dumps({"folders": ["0", "x" * 5000], "columns": ["x", "y"], "prompts": ["a"]}))
    Image.new("RGB", (2, 2)).save(tmp_path / "page.png", pnginfo=info)
    told = refusal(pairs, [tmp_path / "page.png"])
    assert "cannot be read (File name too long)" in told or "has 1 prompt, but 0 and 0 images" in told  # Python 3.13
    (tmp_path / "pairs.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert "not UTF-8 text" in refusal(Ballot, [], ("a", "b"), tmp_path / "pairs.jsonl")
