"""HTTP client with a limit on the total time of a request and on the size of its answer.

A request ends by its time-out whatever the other side does: the name's lookup, the connection, TLS, interim answers
(1xx), headers and body share one deadline. httpx limits each read alone, so that requests run in an event loop, which
cancels them. Redirects are not followed, and proxies of the environment are not used.
"""

import asyncio
import functools
import ssl
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import certifi
import httpx

LONGEST_ANSWER = 2**24  # bytes, after decompression
CODINGS = ("gzip", "x-gzip", "deflate")
AUTOMATIC = zlib.MAX_WBITS | 32  # zlib's header or gzip's


_one = threading.Lock()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@functools.cache
def _authorities() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


class Client:
    """HTTP connections that are kept and shared by threads. headers: of every request. connections: at most."""

    faults = (httpx.TransportError, httpx.InvalidURL)

    def __init__(self, headers: Mapping[str, str], connections: int) -> None:
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **headers}, trust_env=False, verify=_authorities(), timeout=None,
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=None))

    def exchange(self, method: str, url: str, body: bytes | None, timeout: float, connect: float
                 ) -> tuple[int, dict[str, str], bytes]:
        """An answer's status, its headers by their names in small letters, and its unpacked body.

        timeout: seconds of all of it. connect: those of the connection.
        Raises an httpx exception if no answer came in time; ValueError for one that is too long or has another
        encoding.
        """
        with _one:  # else two threads that come first make two loops
            loop = _event_loop()
        return asyncio.run_coroutine_threadsafe(self._exchange(method, url, body, timeout, connect), loop).result()

    async def _exchange(self, method: str, url: str, body: bytes | None, timeout: float, connect: float
                        ) -> tuple[int, dict[str, str], bytes]:
        reached = ""

        async def trace(event: str, _: Any) -> None:
            nonlocal reached
            reached = event

        request = self._http.build_request(method, url, content=body, timeout=httpx.Timeout(None, connect=connect),
                                           extensions={"trace": trace})
        try:
            async with asyncio.timeout(timeout):
                response = await self._http.send(request, stream=True)
                try:
                    content = Body(response.headers.get("content-encoding", ""))
                    async for piece in response.aiter_raw():
                        if content.add(piece):
                            break
                finally:
                    await response.aclose()
        except TimeoutError:
            kind = httpx.ConnectTimeout if reached.startswith("connection.") else httpx.ReadTimeout
            raise kind("the time is over") from None
        return response.status_code, dict(response.headers), content.whole()


class Body:
    """Body of an answer, of LONGEST_ANSWER bytes at most; no more is ever unpacked.

    coding: the Content-Encoding, "" for none. Raises ValueError for another coding.
    """

    def __init__(self, coding: str) -> None:
        self._coding, self._content = coding.strip().lower(), bytearray()
        if self._coding not in ("", "identity", *CODINGS):
            raise ValueError(f"its encoding is {self._coding[:40]!r}, expected one of identity, {', '.join(CODINGS)}")
        self._machine = zlib.decompressobj(AUTOMATIC) if self._coding in CODINGS else None

    def add(self, piece: bytes) -> bool:
        """Add bytes; return True behind the end of a compressed body. Raises ValueError for a longer or broken one."""
        machine, content = self._machine, self._content
        try:
            content += machine.decompress(piece, LONGEST_ANSWER + 1 - len(content)) if machine else piece
        except zlib.error as error:
            raise ValueError(f"its {self._coding} is damaged ({error})") from None
        if len(content) > LONGEST_ANSWER:
            raise ValueError(f"it sent more than {LONGEST_ANSWER} bytes")
        return machine is not None and machine.eof

    def whole(self) -> bytes:
        """Bytes. Raises ValueError for a compressed body that is cut off."""
        if self._machine and not self._machine.eof:
            raise ValueError(f"its {self._coding} is cut off")
        return bytes(self._content)
