"""Measure the seconds from a signal to the checkpoint, and to the end of the process, while a reward hangs.

Each case is a run of the starter model on the CPU, whose reward hangs once an epoch is trained. The run gets one
signal. Prints a table, and writes the same as JSON with --json FILE.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LONGEST = 240.0  # seconds for a run to begin, and to end
REWARD = '''
import ctypes
import time
from pathlib import Path

here, calls = Path(__file__).parent, 0

def mean(images):
    return images.mean((1, 2, 3))

def trained():
    return (here / "run" / "metrics.jsonl").is_file() and (here / "run" / "metrics.jsonl").stat().st_size > 0

def hang():
    (here / "hanging").touch()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def stubborn(images, prompts):
    return hang() if trained() else mean(images)

def native(images, prompts):
    if trained():
        (here / "hanging").touch()
        ctypes.CDLL(None).sleep(600)
    return mean(images)

def measured(images, prompts):
    """Answer the trial and the base, and hang in the first evaluation on the way."""
    global calls
    calls += 1
    return hang() if calls > 2 else mean(images)

def last(images, prompts):
    return hang() if (here / "run" / "checkpoints" / "epoch-00002").is_dir() else mean(images)

def answers(images, prompts):
    return mean(images)

def never(images, prompts):
    return hang()
'''


@dataclass(frozen=True)
class Case:
    """Case of the table.

    reward: of training; watched: of evaluations, if another.
    options: of `flowgrpo train`. command: in place of it.
    """

    name: str
    reward: str
    watched: str = ""
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    number: int = signal.SIGTERM


@dataclass(frozen=True)
class Result:
    """Result of a case: seconds since the signal, None where no checkpoint is due, and the exit code."""

    name: str
    signal: str
    checkpoint: float | None
    end: float
    code: int


EVAL = ("eval", "starter", "--suite=starter", "--output={folder}/eval", "--rewards={folder}/reward.py:never",
        "--steps=1")
CASES = (
    Case("reward that swallows every exception", "{folder}/reward.py:stubborn"),
    Case("reward that waits in native code", "{folder}/reward.py:native"),
    Case("reward server, 3 retries of 60 s", "{server}/stubborn"),
    Case("judge, told to come again in 60 s", "judge"),
    Case("evaluation on the way", "{folder}/reward.py:answers", "{folder}/reward.py:measured", ("--eval.every=1",)),
    Case("evaluation after training", "{folder}/reward.py:answers", "{folder}/reward.py:last", ("--train.epochs=2",)),
    Case("evaluation after training", "{folder}/reward.py:answers", "{folder}/reward.py:last", ("--train.epochs=2",),
         number=signal.SIGINT),
    Case("flowgrpo eval", "", command=EVAL, number=signal.SIGINT),
    Case("flowgrpo eval", "", command=EVAL),
)


class Judge(BaseHTTPRequestHandler):
    """Endpoint that marks every sample until an epoch is trained, and then refuses for 60 s at a time."""

    folder: Path

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        metrics = self.folder / "run" / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_size:
            (self.folder / "hanging").touch()
            self._answer(503, {"error": {"message": "busy"}}, {"Retry-After": "60"})
        else:
            self._answer(200, {"choices": [{"message": {"content": f"Score: {time.time_ns() // 1000 % 10}"},
                                            "finish_reason": "stop"}]})

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "judge"}]})

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} |
                            (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def recipe(case: Case, folder: Path, addresses: dict[str, str]) -> None:
    """Write the recipe of a case: a short run, saved by its stop alone."""
    named = case.reward.format(**addresses)
    rule = {"args": {"url": addresses["judge"], "parse": "score in [0, 10]"}} if named == "judge" else 1.0
    content = {"model": "starter", "device": "cpu", "output": str(folder), "name": "run", "tracker": "none",
               "reward": {named: rule}, "train": {"epochs": 50, "prompts": 2, "group": 4, "steps": 6,
                                                  "save_every": 50},
               "eval": {"prompts": 2, "steps": 2, "every": 0}}
    if case.watched:
        content["eval"]["rewards"] = [case.watched.format(**addresses)]
    (folder / "recipe.yaml").write_text(json.dumps(content))


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> float:
    """Return the seconds until a condition holds."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > LONGEST:
            process.kill()
            raise SystemExit(f"nothing happened for {LONGEST:g} s: {log.read_text()[-2000:]}")
        time.sleep(0.02)
    return time.monotonic() - began


def measured(case: Case, folder: Path, addresses: dict[str, str]) -> Result:
    """Run a case."""
    recipe(case, folder, addresses)
    command = case.command or ("train", "{folder}/recipe.yaml", "--trust", *case.options)
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "flowgrpo", *(word.format(**addresses) for word in command)],
                                   stdout=file, stderr=subprocess.STDOUT)
    until(lambda: (folder / "hanging").exists() or process.poll() is not None, process, log)
    if process.poll() is not None:
        raise SystemExit(f"{case.name}: ended by itself: {log.read_text()[-2000:]}")
    time.sleep(1)
    process.send_signal(case.number)
    began, saved = time.monotonic(), folder / "run" / "checkpoints"
    due = not case.command
    at = until(lambda: any(saved.glob("epoch-*")), process, log) if due else None
    until(lambda: process.poll() is not None, process, log)
    return Result(case.name, signal.Signals(case.number).name, at and round(at, 2),
                  round(time.monotonic() - began, 2), process.wait())


def with_servers(case: Case) -> Result:
    """Run a case beside the servers that it asks."""
    with tempfile.TemporaryDirectory(prefix="stops") as name, socket.socket() as probe:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        judge = ThreadingHTTPServer(("127.0.0.1", 0), type("Judge", (Judge,), {"folder": folder}))
        threading.Thread(target=judge.serve_forever, daemon=True).start()
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        addresses = {"folder": name, "server": f"http://127.0.0.1:{port}",
                     "judge": f"http://127.0.0.1:{judge.server_address[1]}/v1"}
        server = None
        os.environ["FLOWGRPO_REWARD_TOKEN"] = "token"  # of a server that runs a file's code, and of its client
        if "{server}" in case.reward:
            server = subprocess.Popen([sys.executable, "-m", "flowgrpo", "reward", "serve",
                                       f"{name}/reward.py:stubborn", "--port", str(port)],
                                      stdout=subprocess.PIPE, start_new_session=True)
            assert server.stdout is not None
            server.stdout.readline()
            time.sleep(3)
        try:
            return measured(case, folder, addresses)
        finally:
            judge.shutdown()
            if server is not None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", help="Part of the names of the cases.")
    options = parser.parse_args()
    results = []
    print(f"{'case':40} {'signal':8} {'checkpoint':>10} {'end':>6} {'code':>5}")
    for case in CASES:
        if options.only in case.name:
            result = with_servers(case)
            results.append(asdict(result))
            at = "-" if result.checkpoint is None else f"{result.checkpoint:.1f} s"
            print(f"{result.name:40} {result.signal:8} {at:>10} {result.end:4.1f} s {result.code:>5}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
