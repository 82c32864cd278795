"""Our reward server in a thread, raw requests to it, and a reward that waits."""

import http.client
import socket
import threading
import time
from contextlib import contextmanager

import uvicorn

from flowgrpo.serving import wire
from flowgrpo.serving.gate import Bounds, names
from flowgrpo.serving.server import Application, Server

JSON = {"Content-Type": "application/json"}


def lengths(outputs, prompts):
    return [len(prompt) for prompt in prompts]


def request(text: str = "abc", metadata: dict | None = None) -> bytes:
    return wire.request([wire.pack("text", text, metadata or {})])


class Running:
    """Server in a thread. ask: send a request, return (status, headers, body)."""

    def __init__(self, reward, bounds: Bounds, token: str | None, limits: wire.Limits, name: str) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.application = Application(name, reward, limits, token, names("127.0.0.1"), bounds)
        config = uvicorn.Config(self.application, log_level="critical", lifespan="off", ws="none", http="h11",
                                timeout_graceful_shutdown=1)
        self.said: list[str] = []
        self.server = Server(config, self.application, bounds, self.said.append)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listening]})

    def ask(self, method: str = "POST", path: str = "/mine", body: bytes | None = None, **headers: str):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = request() if method == "POST" and body is None else body
        connection.request(method, path, body, JSON | {name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()

    def begin(self, sent: bytes) -> socket.socket:
        """Send bytes, and leave the connection open."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(sent)
        return connection

    def until(self, condition) -> None:
        while not condition():
            assert self.thread.is_alive()
            time.sleep(0.01)


@contextmanager
def running(reward=lengths, bounds: Bounds = Bounds(), token: str | None = None, limits: wire.Limits = wire.Limits(),
            name: str = "mine"):
    server = Running(reward, bounds, token, limits, name)
    server.thread.start()
    try:
        yield server
    finally:
        server.server.should_exit = True
        server.thread.join()


def raw(body: bytes, length: int | None = None, path: str = "/mine") -> bytes:
    return (b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(body) if length is None else length)) + body


def status_of(connection: socket.socket) -> int:
    with connection:
        return int(connection.recv(65536).split()[1])


@contextmanager
def held_reward():
    """A reward that waits for its second event after it has set its first."""
    begun, go_on = threading.Event(), threading.Event()

    def reward(outputs, prompts):
        begun.set()
        assert go_on.wait(60)
        return lengths(outputs, prompts)

    try:
        yield reward, begun, go_on
    finally:
        go_on.set()
