"""HTTP client with a limit on the total time of a request and on the size of its answer.

A request ends by its time-out whatever the other side does: the name's lookup, the connection, TLS, interim answers
(1xx), headers and body share one deadline. Redirects are not followed, and proxies of the environment are not used.
Only `Service` imports this module: it needs the extra `server`.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import httpcore

LONGEST_ANSWER = 2**24  # bytes, after decompression
CODINGS = ("gzip", "x-gzip", "deflate")
AUTOMATIC = zlib.MAX_WBITS | 32  # zlib's header or gzip's


class _Clock(threading.local):
    """Deadline of the request that this thread makes, on the monotonic clock."""

    until: float = 0.0

    def left(self) -> float:
        """Return the seconds left. Raises ReadTimeout if there are none."""
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise httpcore.ReadTimeout("the time is over")
        return seconds


class Stream(httpcore.NetworkStream):
    """Connection whose reads and writes end by the deadline of the thread that makes them."""

    def __init__(self, sock: socket.socket, clock: _Clock) -> None:
        self._socket, self._clock = sock, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._socket.settimeout(self._clock.left())
        try:
            return self._socket.recv(max_bytes)
        except TimeoutError:
            raise httpcore.ReadTimeout("no bytes in time") from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        rest = memoryview(buffer)
        while rest:
            self._socket.settimeout(self._clock.left())
            try:
                rest = rest[self._socket.send(rest):]
            except TimeoutError:
                raise httpcore.WriteTimeout("no bytes taken in time") from None
            except OSError as error:
                raise httpcore.WriteError(str(error)) from None

    def close(self) -> None:
        self._socket.close()

    def start_tls(self, ssl_context: ssl.SSLContext, server_hostname: str | None = None,
                  timeout: float | None = None) -> Stream:
        try:
            self._socket.settimeout(self._clock.left())
            return Stream(ssl_context.wrap_socket(self._socket, server_hostname=server_hostname), self._clock)
        except TimeoutError:
            self.close()
            raise httpcore.ConnectTimeout("no TLS in time") from None
        except OSError as error:
            self.close()
            raise httpcore.ConnectError(str(error)) from None

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # an idle connection that has ended
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                return bool(selector.select(0))
        return self._socket if info == "socket" else None


class _Backend(httpcore.NetworkBackend):
    """Connections under a deadline."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
                    socket_options: Iterable[Any] | None = None) -> Stream:
        until = time.monotonic() + min(self._clock.left(), timeout or self._clock.left())
        last: OSError = TimeoutError("the time is over")
        addresses = _resolved(host, port, until)
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            seconds = (until - time.monotonic()) / (len(addresses) - number)  # a silent address leaves time for others
            if seconds <= 0:
                break
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(seconds)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return Stream(sock, self._clock)
            except OSError as error:
                sock.close()
                last = error
        kind_of = httpcore.ConnectTimeout if isinstance(last, TimeoutError) else httpcore.ConnectError
        raise kind_of(str(last))


def _resolved(host: str, port: int, until: float) -> list[Any]:
    """Return a host's addresses. The lookup has no time-out of its own and runs in a thread, left behind if late."""
    results: list[Any] = []

    def look_up() -> None:
        try:
            results.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            results.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(max(until - time.monotonic(), 0))
    if not results:
        raise httpcore.ConnectTimeout("the name was not resolved in time")
    if isinstance(results[0], Exception):
        raise httpcore.ConnectError(str(results[0]))
    return results[0]


class Client:
    """HTTP connections that are kept and shared by threads. headers: of every request. connections: at most."""

    faults = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol)

    def __init__(self, headers: Mapping[str, str], connections: int) -> None:
        self._headers = [*{"Accept-Encoding": "identity", **headers}.items()]
        self._clock = _Clock()
        self._pool = httpcore.ConnectionPool(max_connections=connections, network_backend=_Backend(self._clock))

    def exchange(self, method: str, url: str, body: bytes | None, timeout: float, connect: float
                 ) -> tuple[int, dict[str, str], bytes]:
        """Return an answer's status, its headers by their names in small letters, and its unpacked body.

        timeout: seconds of all of it. connect: those of the connection.
        Raises an httpcore exception if no answer came in time; ValueError for one that is too long or has another
        encoding.
        """
        self._clock.until = time.monotonic() + timeout
        limits = {"connect": min(connect, timeout), "read": timeout, "write": timeout, "pool": timeout}
        with self._pool.stream(method, _ascii(url), headers=self._headers, content=body,
                               extensions={"timeout": limits}) as response:
            fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            content = unpacked(response.iter_stream(), fields.get("content-encoding", ""))
        return response.status, fields, content


def unpacked(pieces: Iterable[bytes], coding: str) -> bytes:
    """Return the body of an answer, of LONGEST_ANSWER bytes at most; no more is ever unpacked.

    coding: the Content-Encoding, "" for none. Raises ValueError for a longer body, a broken one and another coding.
    """
    coding, content = coding.strip().lower(), bytearray()
    if coding not in ("", "identity", *CODINGS):
        raise ValueError(f"its encoding is {coding[:40]!r}, expected one of identity, {', '.join(CODINGS)}")
    machine = zlib.decompressobj(AUTOMATIC) if coding in CODINGS else None
    try:
        for piece in pieces:
            content += machine.decompress(piece, LONGEST_ANSWER + 1 - len(content)) if machine else piece
            if len(content) > LONGEST_ANSWER:
                raise ValueError(f"it sent more than {LONGEST_ANSWER} bytes")
            if machine and machine.eof:
                break
    except zlib.error as error:
        raise ValueError(f"its {coding} is damaged ({error})") from None
    if machine and not machine.eof:
        raise ValueError(f"its {coding} is cut off")
    return bytes(content)


def _ascii(url: str) -> str:
    """Return a URL in ASCII: the host by IDNA, the rest in per cent."""
    parts = urlsplit(url)
    host = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode()
    return urlunsplit((parts.scheme, host, quote(parts.path, safe="/%:@!$&'()*+,;=~"), parts.query, ""))
