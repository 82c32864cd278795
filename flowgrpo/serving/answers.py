"""Answers of a reward server: an ASGI application."""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flowgrpo.data.open_image import closed
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.pairwise import sees_groups
from flowgrpo.rewards.reward import about
from flowgrpo.rewards.score import columns
from flowgrpo.serving import wire
from flowgrpo.serving.gate import Bounds, Gate, Receive, Refused, in_thread
from flowgrpo.serving.hosts import known
from flowgrpo.serving.metrics import KIND, Metrics

JSON = "application/json"
log = logging.getLogger("uvicorn.error")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def served(name: str) -> str:
    """Return the name in the URL: the reward's; for one in a file, that of its function or class."""
    return name.rpartition(":")[2] if ".py:" in name else name


class Application:
    """Server of a reward. One batch is scored at a time; waiting requests are not unpacked yet.

    token: None asks for none. hosts: accepted names in the Host header; with a token any request that bears it.
    """

    def __init__(self, name: str, reward: RewardFunction, limits: wire.Limits, token: str | None, hosts: frozenset[str],
                 bounds: Bounds = Bounds()) -> None:
        self.info = wire.Info(served(name), about(reward), sees_groups(reward), limits)
        self.metrics = Metrics()
        self.gate = Gate(limits.size, bounds, self.metrics)
        self._reward, self._token, self._hosts = reward, token, hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        kind, later, unread = JSON, None, False
        try:
            if scope["method"] == "POST":
                status, content = 200, await self._counted(scope["path"], headers, receive)
            else:
                status, (kind, content) = 200, self._fact(scope["method"], scope["path"], headers)
        except Refused as error:
            status, content, later, unread = error.status, _json({"error": str(error)}), error.later, error.unread
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
        """Return content type and body of a GET request."""
        self._require_allowed(headers, open_to_all=path == "/health")
        if method != "GET" or path not in ("/health", "/info", "/metrics"):
            status = 404 if method in ("GET", "HEAD") else 405
            raise Refused(status, f"expected POST /{self.info.name}, or GET /info, /health or /metrics")
        if path == "/metrics":
            return KIND, self.metrics.text().encode()
        if path == "/info":
            return JSON, _json(self.info.told())
        self.gate.require_running()
        return JSON, _json({"status": "ok"})

    async def _counted(self, path: str, headers: dict[str, str], receive: Receive) -> bytes:
        """Return the answer of a POST request, which the metrics count."""
        began, status = time.monotonic(), 500
        self.metrics.in_flight += 1
        try:
            content = await self._scores(path, headers, receive)
            status = 200
            return content
        except Refused as error:
            status = error.status
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.add(status, time.monotonic() - began)

    async def _scores(self, path: str, headers: dict[str, str], receive: Receive) -> bytes:
        self._require_allowed(headers)
        if path != f"/{self.info.name}":
            raise Refused(404, f"this server has the reward {self.info.name!r} alone")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Refused(415, f"expected the content type {JSON}")
        if (coding := headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            raise Refused(415, f"got the Content-Encoding {coding[:40]!r}, expected none: send the JSON itself")
        self.gate.require_running()
        self.gate.require_small(headers.get("content-length", ""))
        async with self.gate.body(receive) as body, self.gate.turn(receive):
            return _json(await in_thread(lambda: scored(self.info.name, self._reward, body, self.info.limits)))

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
        if not known(headers.get("host", ""), self._hosts):
            raise Refused(403, f"the Host {headers.get('host', '')[:80]!r} is not this server's: expected its address, "
                               "or start the server with a token")


def scored(name: str, reward: RewardFunction, body: bytes | bytearray, limits: wire.Limits) -> dict[str, Any]:
    """Return the answer to a request.
    Raises Refused: 400 for an invalid request or the user's mistake; 413 if too large; 422 if the reward fails on these
    samples; 500 for our own error."""
    try:
        batch = wire.unpacked(body, limits)
        with closed():
            return wire.answer(*columns({name: reward}, batch.outputs, batch.prompts, batch.metadata, batch.group))
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
