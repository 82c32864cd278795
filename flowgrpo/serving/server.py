"""Reward server over HTTP: POST /NAME scores a batch; GET /info describes the reward, /health and /metrics the server.

An ASGI application answers. The protocol is in wire.py, the client in client.py, queue and time-outs are in gate.py.
Only serving imports this module: it needs the extra `server`.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn

from flowgrpo.data.open_image import refuse_opening
from flowgrpo.distributed.signals import complete
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.pairwise import sees_groups
from flowgrpo.rewards.reward import about, is_privileged
from flowgrpo.rewards.score import of_batch
from flowgrpo.serving import wire
from flowgrpo.serving.client import TOKEN
from flowgrpo.serving.gate import KIND, Bounds, Gate, Metrics, Receive, Refused, is_allowed_host, names
from flowgrpo.trust import is_here

JSON = "application/json"
log = logging.getLogger("uvicorn.error")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def url_name(name: str) -> str:
    """Name in the URL: the reward's; for one in a file, that of its function or class."""
    return name.rpartition(":")[2] if ".py:" in name else name


class Application:
    """Server of a reward. One batch is scored at a time; waiting requests are not unpacked yet.

    token: None asks for none. hosts: accepted names in the Host header; with a token any request that bears it.
    """

    def __init__(self, name: str, reward: RewardFunction, limits: wire.Limits, token: str | None, hosts: frozenset[str],
                 bounds: Bounds = Bounds()) -> None:
        self.info = wire.Info(url_name(name), about(reward), sees_groups(reward), limits)
        self.metrics = Metrics()
        self.gate = Gate(limits.size, bounds, self.metrics)
        self._reward, self._token, self._hosts = reward, token, hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        kind, status, later, unread = JSON, 500, None, False
        began, counted = time.monotonic(), scope["method"] == "POST"
        self.metrics.in_flight += counted
        try:
            if counted:
                content = await self._scores(scope["path"], headers, receive)
            else:
                kind, content = self._fact(scope["method"], scope["path"], headers)
            status = 200
        except Refused as error:
            status, content, later, unread = error.status, _json({"error": str(error)}), error.later, error.unread
        finally:
            self.metrics.in_flight -= counted
            if counted:
                self.metrics.add(status, time.monotonic() - began)
        fields = {"content-type": kind, "content-length": str(len(content)), "cache-control": "no-store",
                  "x-content-type-options": "nosniff"} | ({"retry-after": str(later)} if later else {}) | (
                      {"connection": "close"} if unread else {})
        await send({"type": "http.response.start", "status": status,
                    "headers": [(name.encode(), value.encode()) for name, value in fields.items()]})
        await send({"type": "http.response.body", "body": content, "more_body": unread})
        if unread:  # most clients read an answer only when they have sent everything
            await self.gate.drop(receive)
            await send({"type": "http.response.body", "body": b""})

    def _fact(self, method: str, path: str, headers: dict[str, str]) -> tuple[str, bytes]:
        """Content type and body of a GET request."""
        self._require_allowed(headers, open_to_all=path == "/health")
        if method != "GET" or path not in ("/health", "/info", "/metrics"):
            status = 404 if method in ("GET", "HEAD") else 405
            raise Refused(status, f"expected POST /{self.info.name}, or GET /info, /health or /metrics")
        if path == "/metrics":
            return KIND, self.metrics.text().encode()
        if path == "/info":
            return JSON, _json(self.info.as_json())
        self.gate.require_running()
        return JSON, _json({"status": "ok"})

    async def _scores(self, path: str, headers: dict[str, str], receive: Receive) -> bytes:
        self._require_allowed(headers)
        if path != f"/{self.info.name}":
            raise Refused(404, f"this server has the reward {self.info.name!r} alone")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Refused(415, f"expected the content type {JSON}")
        if (coding := headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            raise Refused(415, f"got the Content-Encoding {coding[:40]!r}, expected none: send the JSON itself")
        self.gate.require_running()
        async with self.gate.body(receive, headers.get("content-length", "")) as body, self.gate.turn(receive):
            scoring: Future[dict[str, Any]] = Future()  # of a thread that does not keep the process from ending
            call = partial(score_request, self.info.name, self._reward, body, self.info.limits)
            threading.Thread(target=complete, args=(scoring, call), daemon=True).start()
            return _json(await asyncio.shield(asyncio.wrap_future(scoring)))

    def _require_allowed(self, headers: dict[str, str], open_to_all: bool = False) -> None:
        """Raise Refused for a web page's request, an unknown host name without the token, and a missing token."""
        if "origin" in headers:
            raise Refused(403, "expected a request of no web page, got one with an Origin")
        if self._token is not None:
            given = headers.get("authorization", "")
            if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                return
            if not open_to_all:
                raise Refused(401, "expected `Authorization: Bearer TOKEN` with the server's token")
        if not is_allowed_host(headers.get("host", ""), self._hosts):
            raise Refused(403, f"the Host {headers.get('host', '')[:80]!r} is not this server's: expected its address, "
                               "or start the server with a token")


def score_request(name: str, reward: RewardFunction, body: bytes | bytearray, limits: wire.Limits) -> dict[str, Any]:
    """Answer to a request. Raises Refused: 400 for an invalid request or the user's mistake; 413 if too large; 422 if
    the reward fails on these samples; 500 for our own error."""
    try:
        batch = wire.unpack(body, limits)
        with refuse_opening():
            return wire.answer(*of_batch({name: reward}, batch))
    except wire.TooLarge as error:
        refused = Refused(413, str(error))
    except Failed as error:
        refused = Refused(422, str(error))
    except ValueError as error:
        refused = Refused(400, str(error))
    except BaseException as error:  # also SystemExit: a reward must not end its server
        log.exception("internal error")
        refused = Refused(500, f"internal error ({type(error).__name__})")
    log.warning("%s", refused)
    raise refused


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode()


CUT = 1  # seconds for answers to be sent after `Bounds.drain`


def serve(name: str, reward: RewardFunction, host: str, port: int, limits: wire.Limits, token: str | None,
          log: Callable[[str], None] = print, bounds: Bounds = Bounds()) -> None:
    """Serve a reward until the process gets SIGTERM or SIGINT; `log` gets its address. port 0: any free one.

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
    fresh = secrets.token_urlsafe(32) if token is None and is_privileged(reward) else None
    asked = "asks for its token" if token is not None or fresh else \
        "open to everybody on this machine (no token)" if is_here(address[0]) else \
        "open to everybody who reaches this machine (no token: set --token-file)"
    log(f"reward {url_name(name)!r} at http://{place}:{listening.getsockname()[1]}/{quote(url_name(name), safe='')}, "
        f"{asked}")
    if fresh:
        log(f"This reward may run code, read files or use a key, so a token was made: {TOKEN}={fresh}")
    application = Application(name, reward, limits, token or fresh, names(host), bounds)
    config = uvicorn.Config(application, log_level="warning", access_log=False, server_header=False, lifespan="off",
                            ws="none", http="h11", timeout_graceful_shutdown=CUT)
    Server(config, application, bounds, log).run(sockets=[listening])


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
        """True if the server has to end. Called ten times a second."""
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
