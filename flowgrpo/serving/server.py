"""Reward server over HTTP: POST /NAME scores a batch; GET /info describes the reward, /health and /metrics the server.

The protocol is in wire.py, the client in client.py, queue and time-outs are in
serving/gate.py. Only serving imports this module: it needs the extra `server`.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.reward import privileged
from flowgrpo.serving import wire
from flowgrpo.serving.answers import Application, served
from flowgrpo.serving.client import TOKEN
from flowgrpo.serving.gate import Bounds
from flowgrpo.serving.hosts import is_loopback, names

CUT = 1  # seconds for answers to be sent after `Bounds.drain`


def serve(name: str, reward: RewardFunction, host: str, port: int, limits: wire.Limits, token: str | None,
          log: Callable[[str], None] = print, bounds: Bounds = Bounds()) -> None:
    """Serve a reward until the process gets SIGTERM or SIGINT; `say` gets its address. port 0: any free one.

    token: None asks for none, except of a privileged reward, for which one is made and printed.
    Raises UserError if it cannot listen there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host} port {port} ({error}): choose another --host or --port") from None
    assert isinstance(address[0], str)  # the IP address
    place = f"[{host}]" if ":" in host else host
    fresh = secrets.token_urlsafe(32) if token is None and privileged(reward) else None
    log(f"reward {served(name)!r} at http://{place}:{listening.getsockname()[1]}/{quote(served(name), safe='')}, "
        f"{_openness(address[0], token or fresh)}")
    if fresh:
        log(f"This reward may run code, read files or use a key, so a token was made: {TOKEN}={fresh}")
    application = Application(name, reward, limits, token or fresh, names(host), bounds)
    config = uvicorn.Config(application, log_level="warning", access_log=False, server_header=False, lifespan="off",
                            ws="none", http="h11", timeout_graceful_shutdown=CUT)
    Server(config, application, bounds, log).run(sockets=[listening])


def _openness(address: str, token: str | None) -> str:
    if token is not None:
        return "asks for its token"
    if is_loopback(address):
        return "open to everybody on this machine (no token)"
    return "open to everybody who reaches this machine (no token: set --token-file)"


class Server(uvicorn.Server):
    """Server that ends connections without a request, and drains on SIGTERM and SIGINT; a second signal ends it."""

    def __init__(self, config: uvicorn.Config, application: Application, bounds: Bounds, log: Callable[[str], None]
                 ) -> None:
        super().__init__(config)
        self._application, self._bounds, self._say = application, bounds, log
        self._until: float | None = None
        self._silent: dict[Any, float] = {}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; end at the second signal."""
        if self._until is None:
            self._until = time.monotonic() + self._bounds.drain
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server has to end. Called ten times a second."""
        gate = self._application.gate
        if self._until is not None:
            if not gate.draining:
                gate.drain()
                self._say(f"Stopping: what is being scored has {self._bounds.drain:g} s; a second signal ends it.")
            elif not self._application.metrics.in_flight or time.monotonic() > self._until:
                self.should_exit = True
        self._end_silent()
        return await super().on_tick(counter)

    def _end_silent(self) -> None:
        """Close connections whose request's headers take longer than a body may."""
        now, waiting = time.monotonic(), {}
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is None or cycle.response_complete:
                waiting[connection] = self._silent.get(connection, now)
                if now - waiting[connection] > self._bounds.read:
                    connection.transport.close()
        self._silent = waiting


def application(name: str, reward: RewardFunction, limits: wire.Limits, token: str | None) -> Application:
    """Return the server of this machine alone as an ASGI application."""
    return Application(name, reward, limits, token, names("127.0.0.1"))
