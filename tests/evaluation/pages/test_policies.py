"""Every page's policy lets its own scripts run alone, by their hashes or the nonce of the answer, and loads nothing."""

import base64
import hashlib
import re
import threading
import urllib.request

import pytest
import torch

from flowgrpo.contrib.taste.votes import VoteLog
from flowgrpo.evaluation.columns import write_page
from flowgrpo.evaluation.pages.grid import Row
from flowgrpo.evaluation.report import comparison, report
from flowgrpo.tools.bench import page as bench
from flowgrpo.tools.vote import server
from flowgrpo.tools.vote.ballot import Ballot
from flowgrpo.tools.vote.live import LiveBallot
from flowgrpo.tools.vote.sources import pairs
from tests.evaluation.report.test_report import make_run
from tests.tools.vote.test_vote import folders

META = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.S)


def served(ballot) -> tuple[str, str]:
    """The page of a ballot, and the policy of its answer."""
    with server.server(ballot, 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        try:
            with urllib.request.urlopen(server.address(serving), timeout=30) as answer:
                return answer.read().decode(), answer.headers["Content-Security-Policy"]
        finally:
            serving.shutdown()


def written(text: str) -> tuple[str, str]:
    [policy] = META.findall(text)
    assert text.index(policy) < text.index("<title>")  # it holds for what follows
    return text, policy


def mark(head: str, script: str) -> str:
    """How a policy names a script."""
    if nonce := re.search(r'nonce="([\w-]+)"', head):
        return f"'nonce-{nonce[1]}'"
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


MADE = {
    "report": lambda folder: written(report.write(make_run(folder / "run")).read_text()),
    "report of a running run": lambda folder: written(report.page(report.data(make_run(folder / "run")), live=True)),
    "grid": lambda folder: written(write_page(folder / "p.html", "<t>", ["a"], [
        Row("x", [torch.rand(3, 8, 8)], [{"r": 0.5}])]).read_text()),
    "runs": lambda folder: written(comparison.write([make_run(folder / "a"), make_run(folder / "b")]).read_text()),
    "bench": lambda folder: written(bench.TEMPLATE.read_text()),
    "vote": lambda folder: served(Ballot(*pairs(folders(folder)), folder / "out" / "pairs.jsonl", 0)),
    "taste": lambda folder: served(LiveBallot(VoteLog(folder / "votes.jsonl"), seconds=600))}


@pytest.mark.parametrize("name", MADE)
def test_a_page_runs_its_own_scripts_alone(name, tmp_path):
    text, policy = MADE[name](tmp_path)
    rules = {key: values for key, *values in (rule.split() for rule in policy.split(";"))}
    allowed = rules.get("script-src", rules["default-src"])
    assert rules["default-src"] == ["'none'"] and not {"'unsafe-inline'", "'unsafe-eval'", "*", "data:"} & {*allowed}
    scripts = [(head, script) for head, script in SCRIPT.findall(text) if "application/json" not in head]
    assert text.count("<script") == len(SCRIPT.findall(text)) and not re.search(r"<[^>]+\son\w+=", text)
    known = {mark(head, script) for head, script in scripts}
    assert known == {*allowed} - {"'none'"}
    for key, values in rules.items():  # no other address gets anything
        assert {*values} <= {"'none'", "'self'", "data:", "blob:", *known, "'unsafe-inline'" * (key == "style-src")}
