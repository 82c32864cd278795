"""Reward server over HTTP: POST /NAME scores a batch, GET /info describes the reward, GET /health reports that it is
up.

The protocol is in rewards/remote/wire.py, the client in rewards/remote/client.py. Only serving imports this module: it
needs the extra `server`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import Reward, about
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.pairwise import sees_groups
from flowgrpo.rewards.remote import wire
from flowgrpo.rewards.score import columns

WAITING = 32  # requests being read or waiting; a further one is asked to come back
DRAINED = 4  # up to so many times the limit of a request is read and dropped, so that its sender sees the refusal
GONE = "the client has gone"  # no client reads it
GRACE = 5  # seconds for a batch to finish when the server stops
log = logging.getLogger("uvicorn.error")


class Refused(Exception):
    """Error: a request answered with a status and one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(wire.one_line(line))
        self.status = status


def serve(name: str, reward: Reward, host: str, port: int, limits: wire.Limits, token: str | None,
          say: Callable[[str], None] = print) -> None:
    """Serve a reward until the process is stopped; `say` gets its address. port 0: any free one.

    Raises UserError if it cannot listen there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host} port {port} ({error}): choose another --host or --port") from None
    assert isinstance(address[0], str)  # the IP address
    place = f"[{host}]" if ":" in host else host
    say(f"reward {served(name)!r} at http://{place}:{listening.getsockname()[1]}/{quote(served(name), safe='')}, "
        f"{_openness(address[0], token)}")
    config = uvicorn.Config(application(name, reward, limits, token), log_level="warning", access_log=False,
                            server_header=False, timeout_graceful_shutdown=GRACE)
    uvicorn.Server(config).run(sockets=[listening])


def served(name: str) -> str:
    """Return the name in the URL: the reward's; for one in a file, that of its function or class."""
    return name.rpartition(":")[2] if ".py:" in name else name


def _openness(address: str, token: str | None) -> str:
    if token is not None:
        return "asks for its token"
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return "open to everybody on this machine (no token)"
    return "open to everybody who reaches this machine (no token: set --token-file)"


def application(name: str, reward: Reward, limits: wire.Limits, token: str | None) -> FastAPI:
    """Return the server as an ASGI application. One batch is scored at a time; waiting requests are not unpacked yet.
    """
    app = FastAPI(openapi_url=None)
    info = wire.Info(served(name), about(reward), sees_groups(reward), limits)
    turn, waiting = asyncio.Lock(), asyncio.Semaphore(WAITING)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": str(error)}, error.status)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/info")
    async def tell(request: Request) -> JSONResponse:
        _authorise(request, token)
        return JSONResponse(info.told())

    @app.post("/{path:path}")
    async def answer(path: str, request: Request) -> JSONResponse:
        _authorise(request, token)
        _require_sound(request, path, info.name, limits)
        if waiting.locked():
            raise Refused(503, f"{WAITING} requests are waiting already: come back later")
        async with waiting:
            body = await _body(request, limits.size)
            async with turn:
                if await request.is_disconnected():  # no one waits for the answer any more
                    raise Refused(499, GONE)
                return JSONResponse(await run_in_threadpool(_scored, info.name, reward, body, limits))

    return app


def _authorise(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Refused(401, "expected `Authorization: Bearer TOKEN` with the server's token")


def _require_sound(request: Request, path: str, name: str, limits: wire.Limits) -> None:
    """Raise Refused for bad requests before anything is read. The required content type blocks unsolicited requests of
    web pages: a browser asks the server before it sends JSON to another site."""
    if path != name:
        raise Refused(404, f"this server has the reward {name!r} alone")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refused(415, "expected the content type application/json")


async def _body(request: Request, limit: int) -> bytes:
    """Return the body of a request; a body that is too large is dropped."""
    body, size = bytearray(), 0
    try:
        async for some in request.stream():
            size += len(some)
            if size > DRAINED * limit:
                break
            if size <= limit:
                body += some
    except ClientDisconnect:
        raise Refused(499, GONE) from None
    if size > limit:
        raise Refused(413, f"a request of more than {limit / 2**20:g} MiB: send less at once, or start the server with "
                           "a larger --max-mb")
    return bytes(body)


def _scored(name: str, reward: Reward, body: bytes, limits: wire.Limits) -> dict[str, Any]:
    """Return the answer to a request.
    Raises Refused: 400 for an invalid request or the user's mistake; 413 if too large; 422 if the reward fails on these
    samples; 500 for our own error."""
    try:
        batch = wire.unpacked(body, limits)
        return wire.answer(*columns({name: reward}, batch.outputs, batch.prompts, batch.metadata, batch.group))
    except wire.TooLarge as error:
        refused = Refused(413, str(error))
    except Failed as error:
        refused = Refused(422, str(error))
    except ValueError as error:
        refused = Refused(400, str(error))
    except Exception as error:
        log.exception("internal error")
        refused = Refused(500, f"internal error ({type(error).__name__})")
    log.warning("%s", refused)
    raise refused
