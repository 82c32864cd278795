"""Ask servers as judges, and print a table of servers and rewards: what works, and the line where it does not.

    python scripts/fuzz/try_judges.py NAME=http://127.0.0.1:8000/v1 ... [--model MODEL]
    python scripts/fuzz/try_judges.py --bodies FILE       writes the requests instead, one JSON a line

A reward works if the server takes its request: a score, or an answer without one, which a small model gives. The
bodies are for request models of servers, such as `ChatCompletionRequest` of vLLM and SGLang.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.rewards import Failed, find
from flowgrpo.rewards.remote.exchange import brief

IMAGE = torch.tensor([0.8, 0.1, 0.1])[:, None, None].expand(3, 64, 64)
QUESTION = {"template": "How well does it show {prompt}? End with `Score: N`, 0 to 10."}
CRITERIA = {"criteria": ["it shows a star"]}
# By reward: its kind of samples and its arguments.
REWARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "judge": ("image", QUESTION), "judge_pairs": ("pair", {}), "judge_rubric": ("image", CRITERIA),
    "deqa": ("image", {}), "unified_reward": ("image", QUESTION), "text_judge": ("text", {}),
    "text_judge_rubric": ("text", CRITERIA)}


def asked(name: str, url: str, model: str | None) -> str:
    """Return what a reward makes of a server, as a cell of the table."""
    kind, arguments = REWARDS[name]
    sample: Any = IMAGE[None] if kind != "text" else ["A star has five points."]
    try:
        with brief():
            reward: Any = find(name, arguments | {"url": url, "model": model, "retries": 0, "timeout": 120})
            [value] = reward(sample, sample, ["a red star"], [{}]) if kind == "pair" else \
                reward(sample, ["a red star"], [{}])
    except UserError as error:
        return f"refused: {error}"
    return f"works, no score ({value})" if isinstance(value, Failed) else f"works ({value:g})"


@contextmanager
def recording(bodies: list[dict[str, Any]]) -> Iterator[str]:
    """Context manager: the URL of a server that keeps the requests it gets and answers as vLLM does."""

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "m", "owned_by": "vllm"}]})

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer({"choices": [{"message": {"content": "Score: 5"}, "finish_reason": "stop"}]})

        def answer(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def main() -> int:
    """Print the table, or write the requests; return 1 where a server refused a reward."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("servers", nargs="*", metavar="NAME=URL")
    parser.add_argument("--model", help="the model asked for; without: the only one served")
    parser.add_argument("--bodies", type=Path, help="write the requests to this file instead")
    given = parser.parse_args()
    if given.bodies:
        lines = []
        for name in REWARDS:
            bodies: list[dict[str, Any]] = []
            with recording(bodies) as url:
                asked(name, url, None)
            lines.append(json.dumps({"reward": name} | bodies[0]))
        given.bodies.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    refused = False
    print("| server | reward | |\n|---|---|---|")
    for server in given.servers:
        label, _, url = server.partition("=")
        for name in REWARDS:
            cell = asked(name, url, given.model)
            refused |= cell.startswith("refused")
            print(f"| {label} | `{name}` | {cell.replace('|', '/')} |", flush=True)
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
