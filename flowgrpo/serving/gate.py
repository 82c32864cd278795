"""Admission of requests to a reward server: bodies arrive in a bounded time, and one batch is scored at a time.

A server answers under its own host names alone: a page of another site can make its name resolve to this machine (DNS
rebinding), and its requests then bear that name. Metrics are in Prometheus' text form.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from flowgrpo.escaped import one_line
from flowgrpo.loopback import NAMES, host_name

KIND = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds


class Metrics:
    """Counts of scoring requests.

    in_flight: begun and not answered yet. queue: complete ones that wait for their turn.
    """

    def __init__(self) -> None:
        self.in_flight = self.queue = 0
        self._statuses: Counter[int] = Counter()
        self._within = [0] * len(BOUNDS)
        self._seconds = 0.0

    def add(self, status: int, seconds: float) -> None:
        """Count an answered request. seconds: from its headers to its answer."""
        self._statuses[status] += 1
        self._seconds += seconds
        for place, bound in enumerate(BOUNDS):
            self._within[place] += seconds <= bound

    def text(self) -> str:
        count = sum(self._statuses.values())
        lines = ["# TYPE flowgrpo_reward_requests_total counter",
                 *(f'flowgrpo_reward_requests_total{{status="{status}"}} {number}'
                   for status, number in sorted(self._statuses.items())),
                 "# TYPE flowgrpo_reward_in_flight gauge", f"flowgrpo_reward_in_flight {self.in_flight}",
                 "# TYPE flowgrpo_reward_queue_length gauge", f"flowgrpo_reward_queue_length {self.queue}",
                 "# TYPE flowgrpo_reward_seconds histogram",
                 *(f'flowgrpo_reward_seconds_bucket{{le="{bound:g}"}} {number}'
                   for bound, number in zip(BOUNDS, self._within)),
                 f'flowgrpo_reward_seconds_bucket{{le="+Inf"}} {count}',
                 f"flowgrpo_reward_seconds_sum {self._seconds:.6f}", f"flowgrpo_reward_seconds_count {count}"]
        return "\n".join(lines) + "\n"


def names(host: str) -> frozenset[str]:
    """Names of a server that listens on `host`: that one, this machine's, and the loopback's."""
    return frozenset(name.lower() for name in (*NAMES, host, socket.gethostname()))


def is_allowed_host(header: str, accepted: frozenset[str]) -> bool:
    """True if a Host header has one of the names, or an IP address, which no name server can make another's."""
    name = host_name(header)
    with contextlib.suppress(ValueError):
        return name in accepted or ipaddress.ip_address(name) is not None
    return False


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

DRAINED = 4  # up to so many times the limit of a request is read and dropped, so that its sender sees the refusal
LATER = 5  # seconds of a Retry-After
GONE = "the client has gone"  # no client reads it


class Refused(Exception):
    """Error: a request answered with a status and one line. later: seconds after which to ask again; None for never.

    unread: its body is not read yet.
    """

    def __init__(self, status: int, line: str, later: int | None = None, unread: bool = False) -> None:
        super().__init__(one_line(line))
        self.status, self.later, self.unread = status, later, unread


@dataclass(frozen=True)
class Bounds:
    """Limits of a server for all requests together.

    read: seconds for one body to arrive. readers: bodies that arrive at the same time. queue: requests that wait for
    their turn. bodies: bytes of all bodies, in multiples of the limit of one. drain: seconds for what is being scored
    when the server stops.
    """

    read: float = 30.0
    readers: int = 256
    queue: int = 256
    bodies: int = 32
    drain: float = 25.0


class Gate:
    """Readers, queue and turn of a server. size: bytes of one body at most. Used inside one event loop."""

    def __init__(self, size: int, bounds: Bounds, metrics: Metrics) -> None:
        self._size, self._bounds, self._metrics = size, bounds, metrics
        self._readers = self._held = 0
        self._turn = asyncio.Lock()
        self._stopping: asyncio.Future[None] | None = None
        self.draining = False

    def drain(self) -> None:
        """Refuse new requests and those that arrive or wait; the one that is being scored goes on."""
        self.draining = True
        if not self._stop().done():
            self._stop().set_result(None)

    def _stop(self) -> asyncio.Future[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
        return self._stopping

    def require_running(self) -> None:
        if self.draining:
            raise Refused(503, "the server is stopping: ask another one, or come back later", LATER)

    def _too_large(self, unread: bool = False) -> Refused:
        return Refused(413, f"a request of more than {self._size / 2**20:g} MiB: send less at once, or start the "
                            "server with a larger --max-mb", unread=unread)

    async def drop(self, receive: Receive) -> None:
        """Read and drop the body of a request that is refused, up to a multiple of the limit."""
        with contextlib.suppress(Refused):
            await self._unless_stopped(self._read(receive, bytearray(), keep=False))

    @asynccontextmanager
    async def body(self, receive: Receive, announced: str = "") -> AsyncIterator[bytearray]:
        """Context manager: the whole body of a request. announced: its Content-Length, empty where it has none. Raises
        Refused if it does not arrive in time, is too large, or finds no room."""
        if announced.isdecimal() and int(announced[:20]) > self._size:
            raise self._too_large(unread=True)
        if self._readers >= self._bounds.readers:
            raise Refused(503, f"{self._readers} requests are arriving already: come back later", LATER)
        content = bytearray()
        self._readers += 1
        try:
            try:
                await self._unless_stopped(self._read(receive, content))
            finally:
                self._readers -= 1
            yield content
        finally:
            self._held -= len(content)

    async def _read(self, receive: Receive, content: bytearray, keep: bool = True) -> None:
        """Add a body to `content`, or drop one that is too large or not kept, up to a multiple of the limit."""
        size, more = 0, True
        while more and size <= DRAINED * self._size:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise Refused(499, GONE)
            some, more = event.get("body", b""), event.get("more_body", False)
            size += len(some)
            if size > self._size or not keep:
                continue
            if self._held + len(some) > self._bounds.bodies * self._size:
                raise Refused(503, "too many bytes are waiting already: come back later", LATER)
            content += some
            self._held += len(some)
        if size > self._size:
            raise self._too_large()

    @asynccontextmanager
    async def turn(self, receive: Receive) -> AsyncIterator[None]:
        """Context manager: the turn of a request whose body has arrived. Raises Refused if too many wait, the server
        stops, or the client has gone meanwhile."""
        if self._metrics.queue >= self._bounds.queue:
            raise Refused(503, f"{self._metrics.queue} requests are waiting already: come back later", LATER)
        self._metrics.queue += 1
        acquiring = asyncio.ensure_future(self._turn.acquire())
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        events: set[asyncio.Future[Any]] = {acquiring, gone, self._stop()}
        try:
            try:
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)  # lets a connection that has ended be seen
            finally:
                self._metrics.queue -= 1
            if gone.done():
                raise Refused(499, GONE)
            if not acquiring.done():
                self.require_running()
            yield
        finally:
            gone.cancel()
            if not acquiring.cancel():
                self._turn.release()

    async def _unless_stopped(self, reading: Any) -> None:
        """Await the reading of a body. Raises Refused if it takes too long, or if the server stops before."""
        task, seconds = asyncio.ensure_future(reading), self._bounds.read
        try:
            await asyncio.wait({task, self._stop()}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.require_running()
                raise Refused(408, f"the request did not arrive within {seconds:g} s")
            task.result()
        finally:
            task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
