"""`flowgrpo compare methods` as a user types it: an interrupted bench goes on, and ends with its tables and page."""

import contextlib
import html.parser
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from flowgrpo.cli import main

ARGUMENTS = ["--model", "starter_text", "--methods", "grpo,rloo", "--evaluations", "60000", "--seeds", "1",
             "--points", "1", "--prompts", "8", "--jobs", "1"]


@contextlib.contextmanager
def interrupted(output: Path) -> Iterator[None]:
    """Press Ctrl-C when the first run of a bench has finished."""
    ended = threading.Event()
    def press() -> None:
        while not ended.wait(0.05):
            if [*output.glob("runs/*/result.json")]:
                os.kill(os.getpid(), signal.SIGINT)
                return
    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore the signal
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


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


def test_an_interrupted_bench_goes_on_and_writes_its_results(tmp_path, capsys):
    output = tmp_path / "bench"
    arguments = [*ARGUMENTS, "--output", str(output)]
    with interrupted(output):
        assert main(["compare", "methods", *arguments]) == 130
    assert "interrupted: runs are saved; the same command goes on" in capsys.readouterr().out
    finished = {file: file.stat().st_mtime_ns for file in output.glob("runs/*/result.json")}
    assert main(["compare", "methods", *arguments]) == 0
    said = capsys.readouterr().out
    assert len(finished) == 1 and "1 more finished), 1 at a time" in said
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    results = json.loads((output / "results.json").read_text())
    assert [method["label"] for method in results["methods"]] == ["grpo", "rloo"] and results["unit"] == "tokens"
    for method in results["methods"]:
        assert [run["seed"] for run in method["runs"]] == [0]
        assert all(run["evaluations"] > 37_000 and len(run["scores"]) == 8 for run in method["runs"])
        assert method["kl"] > 0 and method["diversity"] > 0 and method["accuracy"] == sum(
            sum(run["scores"]) for run in method["runs"]) / 8
    assert results["methods"][0]["seconds_ratio"] == 1
    [pair] = results["differences"]
    assert (pair["one"], pair["other"]) == ("grpo", "rloo") and pair["low"] <= pair["mean"] <= pair["high"]
    assert "| grpo |" in (output / "results.md").read_text()
    page = Tags((output / "index.html").read_text())
    assert page.loaded == [] and any(label.startswith("rloo: accuracy from") for label in page.labels)
