"""HTTP servers for browsers of this machine alone: `report --live` and `vote`."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flowgrpo.errors import UserError

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # accepted host names: any other belongs to a foreign page that resolves to this machine
CONNECTIONS = 512  # that are open at the same time
DROPPED = 2**20  # bytes of a refused body that are read, so that its sender sees the refusal
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::\d{1,5})?", re.IGNORECASE)


def host_name(header: str) -> str:
    """Name in a Host header, in small letters, without brackets and port; "" if it has another form."""
    match = _HOST.fullmatch(header)
    return match[1].strip("[]").lower() if match else ""


class Refused(Exception):
    """Error: a request answered with a status and one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Request handler that answers own pages only. A subclass defines `get` and `post`, which may raise Refused."""

    timeout = 30.0  # seconds for a whole request to arrive
    server: "Server"
    _late = False

    def handle(self) -> None:
        """Answer the connection's request; a request that takes longer than `timeout` to arrive is cut off."""
        self.server.deadlines[self] = time.monotonic() + self.timeout
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the client has gone
                super().handle()
        finally:
            self.server.deadlines.pop(self, None)

    def cut(self) -> None:
        """End the arrival of the request."""
        self._late = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def get(self) -> None:
        """Answer a GET request."""
        raise Refused(405, "nothing to read here")

    def post(self) -> None:
        """Answer a POST request."""
        raise Refused(405, "nothing to send here")

    def do_GET(self) -> None:
        self._answer(self.get)

    def do_POST(self) -> None:
        self._answer(self.post)

    def _answer(self, method: Callable[[], None]) -> None:
        try:
            self._require_whole()
            # A page of another site may come under another host name, or send from there.
            host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
            if host_name(host) not in NAMES:
                raise Refused(403, f"expected the host {' or '.join(NAMES)}")
            if origin is not None and origin != f"http://{host}":
                raise Refused(403, f"expected a request of this server's own page, got one of {origin[:80]!r}")
            method()
        except Refused as refused:
            self.send(str(refused).encode(), "text/plain; charset=utf-8", refused.status)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client has gone
        except Exception as error:  # one request's fault does not end the server, nor its connection without an answer
            self.send(f"internal error ({type(error).__name__})".encode(), "text/plain; charset=utf-8", 500)

    def _require_whole(self) -> None:
        if self._late:
            raise Refused(408, f"the request did not arrive within {self.timeout:g} s")

    def body(self, limit: int) -> bytes:
        """Body of a JSON request. Raises Refused for another content type, which pages of other sites may send, an
        unknown length, and more than `limit` bytes."""
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 20):
            raise Refused(411, "expected a Content-Length")
        if int(length) > limit:
            with contextlib.suppress(OSError):
                self.rfile.read(min(int(length), DROPPED))
            raise Refused(413, f"a request of more than {limit} bytes")
        try:
            content = self.rfile.read(int(length))
        except TimeoutError:
            self._late = True
        self._require_whole()
        if self.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "expected the content type application/json")
        return content

    def send(self, content: bytes, kind: str, status: int = 200, **headers: str) -> None:
        """Send an answer. headers: further ones by name, _ for -; `Cache_Control` is no-store unless given."""
        self.send_response(status)
        fields = {"Content_Type": kind, "Content_Length": str(len(content)), "Cache_Control": "no-store",
                  "X_Content_Type_Options": "nosniff", "Referrer_Policy": "no-referrer"} | headers
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: a page asks often."""


class Server(ThreadingHTTPServer):
    """Server of a thread per connection, at most CONNECTIONS at a time: further ones are closed.

    deadlines: of the connections, by time.monotonic().
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[Handler]) -> None:
        self.deadlines: dict[Handler, float] = {}
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def service_actions(self) -> None:
        """Cut the requests off that are late; `serve_forever` calls it twice a second."""
        now = time.monotonic()
        for handler, deadline in list(self.deadlines.items()):
            if now > deadline and self.deadlines.pop(handler, None) is not None:
                handler.cut()


def listen(handler: type[Handler], port: int) -> Server:
    """Server on the loopback address; port 0 takes a free one. Raises UserError for a taken one."""
    try:
        return Server((HOST, port), handler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error.strerror}): give another one with --port") from None
