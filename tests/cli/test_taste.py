"""`flowgrpo taste`: what it refuses, in one line each, and a session by the command that a user types."""

import json
import re
import threading
import urllib.request
from pathlib import Path

import pytest

from flowgrpo import loopback
from flowgrpo.cli import main
from flowgrpo.cli.train import UNTRAINED
from flowgrpo.storage.places import CONFIG
from tests.helpers import tiny
from tests.helpers.refusals import error_line


@pytest.mark.parametrize("arguments, line", [
    ([], "expected a model"),
    (["starter_consistency", "--prompts", "none.txt"], "none.txt"),
    (["starter_consistency", "--lora", "none"], "no weights at none"),
    (["starter_consistency", "--output", "used"], "--output used holds a session already: --resume goes on with it"),
    (["starter_consistency", "--output", "full"], "--output full exists and is no session"),
    (["starter_consistency", "--resume"], "--resume: no session in taste: leave --resume out"),
    (["starter_text"], "starter_text writes completions: expected a model of images"),
    (["starter_consistency", "--train.stepz=3"], "unknown option --train.stepz"),
    (["starter_consistency", "--method=diffusion_nft", "--parts={}"],
     "the samples are voted on, which does not go with"),
    (["starter_consistency", "--port", "{busy}"], "port {busy} cannot be used")])
def test_refusals(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / CONFIG).write_text("model: starter_consistency\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with loopback.listen(loopback.Handler, 0) as busy:
        given = [argument.replace("{busy}", str(busy.server_port)) for argument in arguments]
        port = [] if "--port" in given else ["--port", "0"]
        said = error_line(capsys, "taste", *given, *port)
        assert line.replace("{busy}", str(busy.server_port)) in said
    assert not (tmp_path / "taste" / CONFIG).exists()


def test_a_session_by_the_command(tmp_path, monkeypatch, capfd):
    """A person in a thread reads the address that the command prints, votes over HTTP and finishes."""
    model = tiny.save(tiny.sd3(), tmp_path / "pipe")
    (tmp_path / "p.txt").write_text("\n".join([*tiny.PROMPTS, "a star", "a ring"]) + "\n")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    ended = threading.Event()
    def person() -> None:
        while not (found := re.findall(r"http://\S+/(?= )", "".join(said))) and not ended.wait(0.05):
            said.append(capfd.readouterr().out)
        [address] = found
        def ask(path: str, content: object = None) -> dict:
            body = None if content is None else json.dumps(content).encode()
            request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
            return json.loads(urllib.request.urlopen(request, timeout=60).read())
        state = ask("state")
        while state["clicks"] < 5:
            if (question := state["question"]) is None:
                ended.wait(0.05)
                state = ask("state")
                continue
            state = ask("vote", {"question": question["name"], "shown": [*range(question["count"])], "choice": 0})
        ask("finish", {})
    thread = threading.Thread(target=person)
    thread.start()
    small = {"image.call": json.dumps(tiny.CALL), "train.prompts": 2, "train.updates": 1, "train.micro_batch": 4,
             "train.inner_epochs": 1, "train.steps": 3, "adapter.rank": 2, "precision": "fp32", "eval.steps": 3}
    code = main(["taste", str(model), "--prompts", "p.txt", "--port", "0", "--output", "mine", "--minutes", "5",
                 *(f"--{key}={value}" for key, value in small.items())])
    ended.set()
    thread.join()
    out, err = capfd.readouterr()
    assert code == UNTRAINED, err  # five votes predict no sixth
    assert "Nothing was trained in 8 epochs: taste gave every sample 0" in out
    assert "5 clicks, 2 batches learned: votes in" in out and f"--reward {Path('mine') / 'taste'}" in out
    for name in ("pytorch_lora_weights.safetensors", "pairs.jsonl", "taste/reward.json", "report.html"):
        assert (tmp_path / "mine" / name).is_file(), name
