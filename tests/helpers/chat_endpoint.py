"""Stand-in for a language model's chat endpoint, on a port of this machine; and what its requests show."""

import base64
import contextlib
import io
import json
import re
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from PIL import Image

from tests.helpers.servers import running

QUICK = {"model": "m", "wait": 0.001, "retries": 2, "timeout": 20}
ONE = torch.zeros(1, 3, 4, 4)


def said(text, reason: str = "stop", **more) -> tuple[int, dict, dict]:
    message = {"role": "assistant", "content": text} | more.pop("message", {})
    return 200, {}, {"choices": [{"index": 0, "message": message, "finish_reason": reason} | more]}


class Script(BaseHTTPRequestHandler):
    """Answers with what `server.reply(body, number of the request)` says: (status, headers, JSON, bytes or None); None
    closes the connection, and an Event is waited for before the answer."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(*self.server.models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.path, dict(self.headers), body))
            number = len(self.server.seen)
        self.answer(*self.server.reply(body, number))

    def answer(self, status, headers, content):
        if isinstance(content, threading.Event):
            content.wait(20)
            content = None
        if content is None:
            self.close_connection = True
            return
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def endpoint(reply):
    """A scripted endpoint -> it, with its address under `url` and what it was asked under `seen`. reply: a function of
    (body, number), or a list of answers, one after another, the last one for all that follow."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    server.reply = reply if callable(reply) else lambda _, number: reply[min(number, len(reply)) - 1]
    server.models = (200, {}, {"data": [{"id": "only-one", "owned_by": "vllm"}]})
    server.seen, server.lock, server.daemon_threads = [], threading.Lock(), True
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    with running(server):
        yield server


@contextlib.contextmanager
def served(answers: Iterable[str]) -> Iterator[str]:
    """URL of an endpoint that gives one of `answers` per request, in their order."""
    rest = iter(answers)
    with endpoint(lambda body, number: said(next(rest))) as server:
        yield server.url


def shades(*levels: int) -> torch.Tensor:
    """Grey images of these levels, of 255."""
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 4, 4) / 255


def parts(body: dict, kind: str) -> list:
    [question] = body["messages"]
    assert question["role"] == "user"
    content = question["content"]
    listed = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part[kind] for part in listed if part["type"] == kind]


def level_of(body: dict) -> int:
    """The red of the only image that a question shows."""
    [shown] = parts(body, "image_url")
    return opened(shown["url"]).getpixel((0, 0))[0]


def opened(url: str) -> Image.Image:
    found = re.fullmatch(r"data:image/(png|webp);base64,(.+)", url)
    picture = Image.open(io.BytesIO(base64.b64decode(found[2], validate=True)))
    assert picture.format.lower() == found[1]
    return picture
