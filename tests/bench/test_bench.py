"""`flowgrpo bench` as a user types it: a killed bench goes on, and ends with its tables and its page."""

from __future__ import annotations

import html.parser
import json
import os
import signal
import subprocess
import sys
import time

from flowgrpo.cli import main

ARGUMENTS = ["--model", "starter_text", "--methods", "grpo,rloo", "--evaluations", "20000", "--seeds", "2",
             "--points", "1", "--prompts", "8", "--jobs", "1"]


def killed(arguments: list[str], output) -> None:
    """Run a bench in a process of its own; kill it when a run has finished."""
    with subprocess.Popen([sys.executable, "-m", "flowgrpo", "bench", *arguments], stdout=subprocess.DEVNULL) as bench:
        end = time.monotonic() + 120
        while not [*output.glob("runs/*/result.json")]:
            assert bench.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        os.kill(bench.pid, signal.SIGKILL)


class Tags(html.parser.HTMLParser):
    """Figures of a page, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.labels, self.loaded = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.labels += [values["aria-label"]] if tag == "svg" else []
        self.loaded += [value for key, value in attributes if key in ("src", "href") and value != "data:,"]


def test_a_killed_bench_goes_on_and_writes_its_results(tmp_path, capsys):
    output = tmp_path / "bench"
    arguments = [*ARGUMENTS, "--output", str(output)]
    killed(arguments, output)
    finished = {file: file.stat().st_mtime_ns for file in output.glob("runs/*/result.json")}
    assert main(["bench", *arguments]) == 0
    said = capsys.readouterr().out
    assert f"{len(finished)} more are finished), 1 at a time" in said
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    results = json.loads((output / "results.json").read_text())
    assert [method["label"] for method in results["methods"]] == ["grpo", "rloo"] and results["unit"] == "tokens"
    for method in results["methods"]:
        assert [run["seed"] for run in method["runs"]] == [0, 1]
        assert all(run["evaluations"] > 15_000 and len(run["scores"]) == 8 for run in method["runs"])
        assert method["kl"] > 0 and method["diversity"] > 0 and method["accuracy"] == sum(
            sum(run["scores"]) for run in method["runs"]) / 16
    assert results["methods"][0]["seconds_ratio"] == 1
    [pair] = results["differences"]
    assert (pair["one"], pair["other"]) == ("grpo", "rloo") and pair["low"] <= pair["mean"] <= pair["high"]
    assert "| grpo |" in (output / "results.md").read_text()
    page = Tags((output / "index.html").read_text())
    assert page.loaded == [] and any(label.startswith("rloo: accuracy from") for label in page.labels)
